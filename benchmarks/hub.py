"""Measure the cost of a hub.

Bars: from a push to the next anchor >= 0.3 GB/s of fp32 per core; a push >= 60 % as fast as over a bare
socket, and at 20 or 80 Mbit/s and 80 ms >= 85 % of the wire (needs root); 64 nodes on 2 cores: 99 % of
control calls within 50 ms; memory <= 3x the fp32 parameters + 150 MB; a heartbeat <= 0.3 ms of CPU time with
10,000 members, without the network; 10,000 members over gRPC on one core; while another host floods it with
frames of HTTP/2, 99 % of heartbeats within 2 s and at most 256 MiB.

The merge is timed in this process by CPU time; the rest is real processes over the loopback interface: a hub
as `aedit hub` starts it, with its journal on the disk, and nodes that do all that a hub sees of a node. Calls
of many members are timed in this process, too.
"""

import argparse
import json
import os
import subprocess
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.hub import Hub, Joiner
from aedit.async_sgd.journal import Journal, Ledger, Payload, Store
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import (
    Accepted,
    Codec,
    HubConfig,
    HubPlan,
    Joined,
    LimitConfig,
    Merged,
    MergePart,
    OuterConfig,
    PenaltyConfig,
    Push,
    Record,
    Vector,
)
from aedit.async_sgd.service import (
    Driver,
    HelloResponder,
    HubWorker,
    RequestGuard,
    ServerDirectory,
    fingerprint,
    tensor_norms,
)
from aedit.launch.hub import overview
from aedit.proto.codecs import codec, codecs
from aedit.proto.rpc import PROTOCOL
from aedit.proto.rpc import hub_pb2 as pb
from aedit.system import give_back_what_is_freed
from aedit.types import Layout, TensorLayout, UnitLayout
from benchmarks.kit import tun_link
from benchmarks.kit.processes import STARTS_WITHIN_S, HubProcess, end, hub, run_jobs
from benchmarks.kit.processes import start as start_process
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.flooder import KINDS as FLOODS
from benchmarks.programs.flooder import Flood, Flooded
from benchmarks.programs.hub_members import RUN, Crew, Seen
from benchmarks.programs.light_members import Beats, Light
from benchmarks.programs.push_rates import PushTimes, Way, filled, push_times

# -- the hub that `benchmarks.hub` measures


TOML = """
name = "{run}"
dir = "{directory}"
[train]
steps = 1000000000
[edit]
every = 64
landing = "arrival"
[hub]
address = "127.0.0.1:0"
{settings}
"""


@contextmanager
def hub_process(settings: str) -> Iterator[HubProcess]:
    """Start a hub with an empty journal; it is gone afterwards. settings: what `[hub]` has besides, and the
    tables after it."""
    with (
        TemporaryDirectory(prefix="aedit-") as name,
        hub(Path(name), TOML.format(run=RUN, directory=name, settings=settings)) as process,
    ):
        yield process


def memory_bytes(pid: int, name: str) -> int:
    """Return a line of a process's status file: `VmHWM`, the most it has ever had, `RssAnon`, ..."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


# -- measure how fast a hub checks, decodes and merges pushes and takes the outer step


STEPS, TOKENS = 64, 64 * 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Configuration of a hub."""

    text: str
    codec: Codec
    quorum: int = 1
    codec_down: Codec = "fp32"

    @property
    def plan(self) -> HubPlan:
        """Return the preset `async`, or a quorum with all of EDiT's penalty."""
        alone = self.quorum == 1
        outer = OuterConfig(kind="delayed-nesterov" if alone else "nesterov")
        hub = HubConfig(
            quorum=self.quorum,
            grace=0.0,
            weights="uniform" if alone else "penalty",
            codec=self.codec,
            codec_down=self.codec_down,
        )
        penalty = PenaltyConfig(clip=None) if alone else PenaltyConfig()
        return HubPlan(hub=hub, outer=outer, penalty=penalty, every=STEPS, steps=10**9)


@dataclass(frozen=True, slots=True)
class Speeds:
    """GB of fp32 per second of one core; the whole path is the last two in sequence."""

    encode_gb_s: float
    decode_gb_s: float
    check_gb_s: float
    """Check of form and norms of a push."""
    merge_gb_s: float
    """From the decision on the pushes to the next anchor."""

    @property
    def path_gb_s(self) -> float:
        return 1 / (1 / self.check_gb_s + 1 / self.merge_gb_s)


def speeds(kind: Kind, numel: int, rounds: int) -> Speeds:
    """Return the speeds for a unit of `numel` parameters, as the median over `rounds` versions."""
    layout = _layout(numel)
    with TemporaryDirectory() as folder:
        journal = Journal(Path(folder), 1, fsync=False)
        arrived = [_stored(journal, kind.codec, x) for x in _gradients(numel, max(1, kind.quorum))]
        hub = _founded(kind, layout)
        taken = [_round(hub, kind, layout, arrived) for _ in range(1 + rounds)][1:]
    check_s, merge_s = np.median(np.array(taken), axis=0) / len(arrived)
    encode_s, decode_s = _codec_seconds(kind.codec, next(_gradients(numel, 1)), rounds)
    return Speeds(*(4e-9 * numel / seconds for seconds in (encode_s, decode_s, check_s, merge_s)))


def _layout(numel: int) -> UnitLayout:
    """Return a unit like a transformer block: mostly a few matrices, and small vectors."""
    width = 256
    rows = numel // width // 4
    shapes = [(rows, width)] * 3 + [(width,)]
    shapes.append((numel - 3 * rows * width - width,))
    return UnitLayout("blocks.0", tuple(TensorLayout(f"p{i}", shape) for i, shape in enumerate(shapes)))


def _gradients(numel: int, count: int) -> Iterator[codecs.Floats]:
    """Yield pseudo-gradients that partly agree, as those of correct nodes do."""
    rng = np.random.default_rng(0)
    common = rng.standard_normal(numel, np.float32)
    for _ in range(count):
        yield (common + rng.standard_normal(numel, np.float32)) * np.float32(1e-4)


def _stored(journal: Journal, name: str, x: codecs.Floats) -> Payload:
    data = codec(name).encode(x)
    return Payload(name, x.size, zlib.crc32(data), *journal.store(data), len(data))


class _Whole:
    """Numbers in memory."""

    def __init__(self, x: codecs.Floats) -> None:
        self._x = x

    def read(self, start: int, stop: int) -> NDArray[np.float32]:
        return self._x[start:stop].copy()


def _founded(kind: Kind, layout: UnitLayout) -> Hub:
    """Return a hub with as many nodes as it merges at a time, and a first anchor."""
    quantiser = None if kind.codec_down == "fp32" else codec(kind.codec_down)
    hub = Hub(kind.plan, quantiser)
    for node in range(kind.quorum):
        joiner = Joiner(name=f"node{node}", layout=Layout((layout,)), facts=(), num_samples=10**6)
        _apply(hub, hub.join(joiner, 0.0))
    first = np.random.default_rng(1).standard_normal(layout.numel, np.float32) * np.float32(0.02)
    lengths = tuple(float(np.linalg.norm(piece)) for piece in _pieces(first, layout))
    push = Push(node=0, unit=0, seq=1, base=0, steps=0, tokens=0, values=_Whole(first), norms=lengths)
    _apply(hub, hub.offer(push, 0.0))
    _apply(hub, hub.tick(0.0))
    return hub


def _pieces(x: codecs.Floats, layout: UnitLayout) -> list[codecs.Floats]:
    return np.split(x, np.cumsum([tensor.numel for tensor in layout.tensors])[:-1])


def _apply(hub: Hub, decided: Sequence[Record]) -> list[Record]:
    for record in decided:
        hub.apply(record, hub.compute(record))
    return list(decided)


def _round(hub: Hub, kind: Kind, layout: UnitLayout, arrived: Sequence[Payload]) -> tuple[float, float]:
    """Let every node push once; return the CPU seconds to check the pushes and to make the next version."""
    check_s = merge_s = 0.0
    version, how = hub.state.units[0].version, codec(kind.codec)
    for node, payload in enumerate(arrived):
        began = time.process_time()
        data = payload.view()
        how.is_valid(data, layout.numel)
        lengths = tensor_norms(data, how, layout)
        check_s += time.process_time() - began
        began = time.process_time()
        seq = hub.state.members[node].received.get(0, 0) + 1
        push = Push(
            node=node,
            unit=0,
            seq=seq,
            base=version,
            steps=STEPS,
            tokens=TOKENS,
            values=payload,
            norms=lengths,
        )
        _apply(hub, hub.offer(push, float(version)))
        merge_s += time.process_time() - began
    began = time.process_time()
    decided = _apply(hub, hub.tick(float(version)))
    merge_s += time.process_time() - began
    assert any(isinstance(record, Merged) for record in decided), f"version {version} was the last"
    return check_s, merge_s


def _codec_seconds(name: str, x: codecs.Floats, rounds: int) -> tuple[float, float]:
    """Return the CPU seconds to encode x, and to decode it slice by slice as a merge does."""
    how, room = codec(name), np.empty(codecs.SLICE, np.float32)
    payload = how.encode(x)

    def decode() -> None:
        for start, stop in codecs.slices(x.size):
            how.decode(payload, x.size, start, stop, room)

    times = []
    for _ in range(rounds):
        began = time.process_time()
        how.encode(x, payload)
        middle = time.process_time()
        decode()
        times.append((middle - began, time.process_time() - middle))
    encode_s, decode_s = np.median(np.array(times), axis=0)
    return float(encode_s), float(decode_s)


# -- measure merges on several threads, and while snapshots are written


STEPS_BETWEEN = 64
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model, and for how long it is merged."""

    units: int
    numel: int
    seconds: float

    @property
    def params_bytes(self) -> int:
        return 4 * self.units * self.numel


@dataclass(frozen=True, slots=True)
class Merging:
    """Figures of a hub that merges."""

    threads: int
    gb_s: float
    """GB of fp32 parameters per second, of all units together."""
    snapshots: int
    """Written meanwhile, one after the other."""
    peak_bytes: int
    """The most memory of the process, files left out, above that before the first merge."""
    snapshot_s: float
    """Mean time to write one; 0 without any."""


class BusyHub:
    """A hub with one member whose pushes never end."""

    def __init__(self, folder: Path, load: Load, threads: int) -> None:
        plan = HubPlan(
            hub=HubConfig(address="h:1", weights="uniform", grace=0.0, codec="bf16"),
            outer=OuterConfig(kind="nesterov"),
            penalty=PenaltyConfig(clip=None),
            every=STEPS_BETWEEN,
            steps=10**9,
        )
        self.load = load
        self.ledger = Ledger(Hub(plan), Journal(folder, 1, fsync=False), Store(folder, fsync=False))
        self.worker = HubWorker(self.ledger, lambda *_, **__: None, snapshot_bytes=2**50, mergers=threads)
        rng = np.random.default_rng(0)
        first = rng.standard_normal(load.numel, np.float32) * np.float32(0.02)
        self._first = self._stored("fp32", first)
        self._step = self._stored("bf16", rng.standard_normal(load.numel, np.float32) * np.float32(1e-4))
        units = tuple(UnitLayout(f"u{i}", (TensorLayout("w", (load.numel,)),)) for i in range(load.units))
        joiner = Joiner(name="node", layout=Layout(units), facts=(), num_samples=10**6)
        self.ledger.commit(self.ledger.hub.join(joiner, self.ledger.clock()))
        for unit in range(load.units):
            self._push(unit)
        self._merge_here()
        for unit in range(load.units):
            self._push(unit)

    def _stored(self, name: str, x: Vector) -> tuple[Payload, float]:
        payload = self.ledger.store_payload(name, x.size, 0, codec(name).encode(x))
        return payload, float(np.linalg.norm(x))

    def _push(self, unit: int) -> None:
        hub = self.ledger.hub
        base = hub.state.units[unit].version
        values, length = self._step if base else self._first
        push = Push(
            node=0,
            unit=unit,
            seq=hub.state.members[0].received.get(unit, 0) + 1,
            base=base,
            steps=STEPS_BETWEEN if base else 0,
            tokens=0,
            values=values,
            norms=(length,),
        )
        self.ledger.commit(hub.offer(push, self.ledger.clock()))

    def _merge_here(self) -> None:
        for record in self.ledger.hub.tick(self.ledger.clock()):
            self.ledger.commit([record], self.ledger.hub.compute(record))

    def feed(self) -> None:
        """Push every unit again whose last push is merged."""
        with self.ledger.lock:
            free = [i for i, unit in self.ledger.hub.state.units.items() if not unit.pending]
            for unit in free:
                self._push(unit)
        if free:
            self.worker.wake()


def merging(load: Load, threads: int, *, snapshots: bool) -> Merging:
    """Return what a hub merges on so many threads. snapshots: write one after the other meanwhile."""
    give_back_what_is_freed()  # as a hub does, for the rest of this process
    with TemporaryDirectory(prefix="aedit-") as name:
        busy = BusyHub(Path(name), load, threads)
        before = memory_bytes(os.getpid(), "RssAnon")
        with _peak_watched() as peak:
            busy.worker.start()
            began, merges = time.perf_counter(), busy.worker.merges
            end, written = began + load.seconds, 0
            saver = None
            while time.perf_counter() < end:
                if snapshots and (saver is None or not saver.is_alive()):
                    written += saver is not None
                    saver = threading.Thread(target=busy.ledger.snapshot, args=(busy.worker.wake,))
                    saver.start()
                busy.feed()
                time.sleep(_LOOK_S)
            took_s, merged = time.perf_counter() - began, busy.worker.merges - merges
            if saver is not None:
                saver.join()
            busy.worker.stop()
        if busy.worker.failure:
            raise RuntimeError(busy.worker.failure)
    gb_s = 4e-9 * merged * load.numel / took_s
    return Merging(threads, gb_s, written, max(peak) - before, took_s / written if written else 0.0)


@contextmanager
def _peak_watched() -> Iterator[list[int]]:
    """Yield a list that fills with the bytes of this process's own memory."""
    own, over = [memory_bytes(os.getpid(), "RssAnon")], threading.Event()

    def watch() -> None:
        while not over.wait(0.01):
            own.append(memory_bytes(os.getpid(), "RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield own
    finally:
        over.set()
        thread.join()


# -- measure what a hub does per call with many members


MANY_RUN, UNITS, NUMEL, EVERY = "bench", 4, 4096, 64


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a hub with so many members, in seconds."""

    members: int
    beat_s: float
    """CPU time from the request of a heartbeat to its reply, median."""
    slowest_beat_s: float
    """The 99th percentile."""
    idle_tick_s: float
    """CPU time to look whether something is due, when nothing is."""
    push_s: float
    """CPU time to decide on a push and on its merge, and to apply both; without the arrays."""
    status_s: float
    """The longest time that a status held the lock."""
    snapshot_s: float
    """The longest time that a snapshot held the lock."""


class TimedLock:
    """A lock that can be taken again by its holder and measures how long it was held."""

    def __init__(self) -> None:
        self._lock, self._depth, self._since_s = threading.RLock(), 0, 0.0
        self.longest_s = 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        if not self._depth:
            self._since_s = time.thread_time()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.longest_s = max(self.longest_s, time.thread_time() - self._since_s)
        self._lock.release()


class CrowdedHub:
    """A hub that leads, whose members have joined and pushed."""

    def __init__(self, folder: Path, members: int) -> None:
        self.now = 1000.0
        limits = LimitConfig(nodes=members)
        config = HubConfig(address="h:1", weights="uniform", grace=0.0, limits=limits, expire_s=1e6)
        plan = HubPlan(
            hub=config,
            outer=OuterConfig(kind="delayed-nesterov"),
            penalty=PenaltyConfig(clip=None),
            every=EVERY,
            steps=10**9,
        )
        journal, store = Journal(folder, 1, fsync=False), Store(folder, fsync=False)
        self.ledger = Ledger(Hub(plan), journal, store, clock=lambda: self.now)
        self.ledger.lock = self.lock = TimedLock()  # type: ignore[assignment]
        self.leadership = Leadership(folder / "votes.json", 0)
        self.engine = HubWorker(self.ledger, lambda *_, **__: None, snapshot_bytes=2**40)
        self.guard = RequestGuard(self.ledger, self.engine, MANY_RUN, self.leadership)
        self.directory = ServerDirectory(self.guard, lambda *_, **__: None)
        hello = HelloResponder(
            protocol=PROTOCOL,
            method={},
            difference=lambda settings: None,
            version="",
            run=MANY_RUN,
            config="",
            addresses=tuple,
            standby=str,
        )
        self.driver = Driver(self.guard, hello, lambda after: "")
        self._values = self._stored()
        self._join(members)
        self._push_all(members)

    @property
    def hub(self) -> Hub:
        return self.ledger.hub

    def _stored(self) -> Payload:
        data = np.full(NUMEL, 1e-4, np.float32).data.cast("B")
        return self.ledger.store_payload("fp32", NUMEL, 0, data)

    def _join(self, members: int) -> None:
        layout = Layout(tuple(UnitLayout(f"u{i}", (TensorLayout("w", (NUMEL,)),)) for i in range(UNITS)))
        first = Joiner(name="node-0", layout=layout, facts=(), num_samples=10**6)
        self.ledger.commit(self.hub.join(first, self.now)[:-1])
        for node in range(members):
            self.ledger.commit([Joined(f"node-{node}", node, fingerprint(node + 1), "", 0.0)])

    def push(self, node: int, unit: int, steps: int = EVERY) -> Push:
        """Return the next push of a member."""
        state = self.hub.state
        seq = state.members[node].received.get(unit, 0) + 1
        base = state.units[unit].version
        return Push(
            node=node,
            unit=unit,
            seq=seq,
            base=base,
            steps=steps if base else 0,
            tokens=0,
            values=self._values,
            norms=(1e-4 * NUMEL**0.5,),
        )

    def _push_all(self, members: int) -> None:
        """Let everybody push two times, a second apart, each in a version of its own."""
        hub = self.hub
        for turn in range(3):
            self.now += 1.0
            for node in range(members if turn else 1):
                for unit in range(UNITS):
                    push = self.push(node, unit)
                    version = hub.state.units[unit].version + 1
                    hub.apply(Accepted(push))
                    hub.apply(
                        Merged(unit, version, (MergePart(node, push.seq, 1.0),), float(turn), 0.5 / members)
                    )
        for node in range(members):
            self.beat(node)

    def beat(self, node: int) -> pb.News:
        """Return the reply to a member's heartbeat."""
        who = pb.Who(run=MANY_RUN, node=node, session=node + 1)
        return self.driver.heartbeat(
            pb.HeartbeatRequest(who=who, steps_per_s=50.0 + node % 7, state="training")
        )

    def push_and_merge(self, node: int) -> None:
        """Take a push of a member and merge it."""
        with self.lock:
            self.ledger.commit(self.hub.offer(self.push(node, 0), self.now))
            for record in self.hub.tick(self.now):
                self.ledger.commit([record], self.hub.compute(record))

    def status(self) -> object:
        """Return what the views and the metrics are made of."""
        return overview(self.ledger, self.engine, self.directory, self.leadership)


def costs(members: int, repeats: int) -> Costs:
    """Return the costs of a hub with so many members."""
    with TemporaryDirectory(prefix="aedit-") as name:
        crowded = CrowdedHub(Path(name), members)
        crowded.status()  # the first one loads what it needs
        nodes = np.random.default_rng(0).integers(members, size=repeats).tolist()
        few = list(dict.fromkeys(nodes[: max(3, repeats // 20)]))
        beats = sorted(_seconds(partial(crowded.beat, node)) for node in nodes)
        ticks = [_seconds(partial(crowded.hub.tick, crowded.now)) for _ in few]
        pushes = []
        for node in few:
            crowded.now += 1.0
            pushes.append(_seconds(partial(crowded.push_and_merge, node)))
        return Costs(
            members,
            beat_s=median(beats),
            slowest_beat_s=beats[int(0.99 * len(beats))],
            idle_tick_s=median(ticks),
            push_s=median(pushes),
            status_s=_held(crowded.lock, crowded.status),
            snapshot_s=_held(crowded.lock, crowded.ledger.snapshot),
        )


def _seconds(act: Callable[[], object]) -> float:
    began = time.thread_time()
    act()
    return time.thread_time() - began


def _held(lock: TimedLock, act: Callable[[], object]) -> float:
    lock.longest_s = 0.0
    act()
    return lock.longest_s


# -- measure what members cost that only report, over gRPC


CLOCK_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Reporting:
    """A hub whose members send heartbeats over connections of their own, at the interval that it asks for."""

    members: int
    joined_s: float
    """Until all had joined."""
    join_cpu_s: float
    """CPU time of the hub for each of them."""
    share: float
    """Of a core, of the hub's process while all report."""
    beats_per_s: float
    asked_s: float
    """Interval that the hub asked for at the end."""
    answer_s: list[float]
    """Time until the hub answered each heartbeat, ascending."""
    refused: int
    pings_per_s: float
    memory_bytes: int


def reporting(members: int, seconds: float) -> Reporting:
    """Return what members cost, with the default configuration but for their number."""
    with hub_process(f"[hub.limits]\nnodes = {members}\n") as hub:
        began_s, cpu_s, found = time.monotonic(), _cpu_s(hub.pid), dict[str, Any]()

        def meanwhile(_: object) -> None:
            found["joined_s"] = time.monotonic() - began_s
            found["join_cpu_s"] = (_cpu_s(hub.pid) - cpu_s) / members
            since_s, before_s = time.monotonic(), _cpu_s(hub.pid)
            time.sleep(max(0.5, seconds - 1.0))
            found["share"] = (_cpu_s(hub.pid) - before_s) / (time.monotonic() - since_s)
            found["memory_bytes"] = memory_bytes(hub.pid, "VmRSS")

        job = Light(hub=hub.address, run=RUN, count=members, seconds=seconds, units=UNITS, numel=NUMEL)
        beats = Beats(**run_jobs("benchmarks.programs.light_members", [job], meanwhile=meanwhile)[0])
        return Reporting(
            members=members,
            beats_per_s=len(beats.beat_s) / seconds,
            asked_s=beats.asked_s,
            answer_s=sorted(beats.beat_s),
            refused=beats.refused,
            pings_per_s=beats.pings / seconds,
            **found,
        )


def _cpu_s(pid: int) -> float:
    """Return the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICK


# -- measure how soon a hub answers its members while another host floods it


FLOODED = 32
"""Members that report meanwhile."""
WANTED_FLOODED_S, WANTED_FLOODED_BYTES = 2.0, 2**28


@dataclass(frozen=True, slots=True)
class Flooding:
    """A hub whose members report while connections send frames that become no message."""

    kind: str
    """Of the frames; empty: none are sent."""
    answer_s: list[float]
    """Time until the hub answered each heartbeat, or the end of the flood, ascending."""
    peak_bytes: int
    flooded: Flooded

    @property
    def late_s(self) -> float:
        """Return the 99th percentile of the answers."""
        return self.answer_s[int(0.99 * len(self.answer_s))]


def flooding(kind: str, seconds: float) -> Flooding:
    """Return what a flood of this kind does to a hub with the default configuration."""
    with hub_process("") as hub:
        flooded = Flooded()

        def meanwhile(_: object) -> None:
            nonlocal flooded
            if not kind:
                return
            job = json.dumps(asdict(Flood(hub=hub.address, kind=kind, seconds=seconds)))
            process = start_process("benchmarks.programs.flooder", job, stdout=subprocess.PIPE)
            try:
                flooded = Flooded(**json.loads(process.communicate(timeout=seconds + STARTS_WITHIN_S)[0]))
            finally:
                end([process])

        job = Light(hub=hub.address, run=RUN, count=FLOODED, seconds=seconds, units=UNITS, numel=NUMEL)
        beats = Beats(**run_jobs("benchmarks.programs.light_members", [job], meanwhile=meanwhile)[0])
        answer_s = sorted([*beats.beat_s, *beats.open_s])
        return Flooding(kind, answer_s, memory_bytes(hub.pid, "VmHWM"), flooded)


# -- measure how soon a busy hub answers and how much memory it takes


ASYNC = """
weights = "uniform"
[hub.staleness]
cutoff = 100_000
[edit.penalty]
clip = "none"
[outer]
kind = "delayed-nesterov"
lr = 0.7
momentum = 0.9
"""
"""The preset `async`, made for any number of nodes."""

QUORUM = """
quorum = {nodes}
[outer]
kind = "nesterov"
lr = 0.8
momentum = 0.85
"""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Number of nodes, their speed and what they send."""

    nodes: int
    processes: int
    units: int
    numel: int
    interval_s: float
    """Between two rounds of a node of middling speed; the others take half to one and a half times it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Results of all nodes together."""

    heartbeat_s: list[float]
    merged: int
    refused: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a hub, in bytes."""

    idle: int
    """Before anybody has joined."""
    peak: int
    """The most it has ever had, pages of its journal's file that it had mapped included."""
    own: int
    """The most without those, as far as looking at it every 20 ms has shown."""
    params: int
    """Parameters of the model, in fp32."""
    merged: int

    @property
    def allowed(self) -> int:
        return 3 * self.params + 150 * MIB


def crowd(size: Size) -> Crowd:
    """Run many nodes at one hub."""
    with hub_process(ASYNC) as hub:
        return _together(run_jobs("benchmarks.programs.hub_members", _crews(size, hub.address)))


def memory(size: Size, settings: str) -> Memory:
    """Run a hub that receives pushes as fast as it can take them; return its memory."""
    with hub_process(settings) as hub:
        idle = memory_bytes(hub.pid, "VmRSS")
        with _watched(hub) as own:
            seen = _together(run_jobs("benchmarks.programs.hub_members", _crews(size, hub.address)))
        peak = memory_bytes(hub.pid, "VmHWM")
    params = 4 * size.units * size.numel
    return Memory(idle=idle, peak=peak, own=max(own), params=params, merged=seen.merged)


@contextmanager
def _watched(hub: HubProcess) -> Iterator[list[int]]:
    """Yield a list that fills with the bytes of the hub's own memory."""
    own, over = [memory_bytes(hub.pid, "RssAnon")], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            own.append(memory_bytes(hub.pid, "RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield own
    finally:
        over.set()
        thread.join()


def _crews(size: Size, address: str) -> list[Crew]:
    """Return the nodes, divided among the processes."""
    every = 64
    share = [0.5 + node / max(1, size.nodes - 1) for node in range(size.nodes)]
    return [
        Crew(
            hub=address,
            names=[f"node-{node}" for node in range(process, size.nodes, size.processes)],
            step_s=[size.interval_s / every * share[n] for n in range(process, size.nodes, size.processes)],
            every=every,
            units=size.units,
            numel=size.numel,
            codec="bf16",
            seconds=size.seconds,
        )
        for process in range(size.processes)
    ]


def _together(told: list[dict[str, Any]]) -> Crowd:
    seen = [Seen(**one) for one in told]
    return Crowd(
        sorted(heartbeat_s for one in seen for heartbeat_s in one.heartbeat_s),
        sum(one.merged for one in seen),
        sum(one.refused for one in seen),
        sum(one.late for one in seen),
    )


# -- what the hubs of a model of 70 B parameters need, from measured rates


BLOCKS, WIDTH, HIDDEN, VOCABULARY, KEYS = 80, 8192, 28_672, 128_256, 1024
"""Of Llama 3 70B (arXiv:2407.21783): blocks, width, width of the feed-forward layer, tokens, keys' width."""

BYTES_UP, BYTES_DOWN, BYTES_KEPT, BYTES_MERGED = 2, 4, 8, 12
"""Per parameter: a push in bf16; an anchor; anchor and momentum; the new arrays of a merge."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of one core."""

    path_gb_s: float
    """GB of fp32 from a push to the anchor: check and merge."""
    wire_gb_s: float
    """GB over gRPC to or from the hub."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Load of the hub with the most work, in a round in which each node pushes and pulls each unit once."""

    hubs: int
    params: int
    memory_gb: float
    push_s: float
    merge_s: float
    pull_s: float

    @property
    def core_s(self) -> float:
        """Return the time of a round on one core."""
        return self.push_s + self.merge_s + self.pull_s


def unit_sizes() -> list[int]:
    """Return the parameters of each unit: the blocks, and the unit `rest` with embedding and head."""
    attention = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS
    block = attention + 3 * WIDTH * HIDDEN + 2 * WIDTH
    return [block] * BLOCKS + [2 * VOCABULARY * WIDTH + WIDTH]


def largest(hubs: int, nodes: int, rates: Rates) -> Shard:
    """Return what the hub with the most parameters of so many hubs needs."""
    sizes = unit_sizes()
    own = max((sizes[k::hubs] for k in range(hubs)), key=sum)
    params = sum(own)
    return Shard(
        hubs,
        params,
        memory_gb=1e-9 * (BYTES_KEPT * params + BYTES_MERGED * max(own)),
        push_s=1e-9 * BYTES_UP * params * nodes / rates.wire_gb_s,
        merge_s=1e-9 * BYTES_DOWN * params * nodes / rates.path_gb_s,
        pull_s=1e-9 * BYTES_DOWN * params * nodes / rates.wire_gb_s,
    )


def hubs_for(round_s: float, nodes: int, rates: Rates) -> int | None:
    """Return the least number of hubs of one core each for a round in `round_s`; None if none is enough."""
    counts = range(1, len(unit_sizes()) + 1)
    return next((n for n in counts if largest(n, nodes, rates).core_s <= round_s), None)


# -- the benchmark


WANTED_GB_S, WANTED_SHARE, WANTED_FILLED, WANTED_BEAT_S, WANTED_CALL_S = 0.3, 0.6, 0.85, 0.05, 3e-4
MEMBERS = (100, 1_000, 10_000)
THREADS = (1, 2)
HUBS, NODES_OF_70B, ROUND_MIN = (1, 2, 4, 8, 16, 27, 81), 8, (60, 30, 10)
CODECS: tuple[Codec, ...] = ("fp32", "bf16", "int8", "e3m0", "ternary", "topk")
KINDS = (
    *(Kind(text=name, codec=name) for name in CODECS),
    Kind(text="bf16, quorum of 4", codec="bf16", quorum=4),
    Kind(text="e3m0 both ways", codec="e3m0", codec_down="e3m0"),
)
MEMORY_NODES = 4
SETTINGS = {"async": ASYNC, f"quorum of {MEMORY_NODES}": QUORUM.format(nodes=MEMORY_NODES)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    numel: int = 4_000_000
    rounds: int = 9
    push_bytes: int = 128 * MIB
    repeats: int = 15
    thin_mbit: tuple[float, ...] = (20.0, 80.0)
    thin_bytes: int = 16 * MIB
    crowd: Size = field(
        default_factory=lambda: Size(
            nodes=64, processes=4, units=4, numel=100_000, interval_s=3.2, seconds=30.0
        )
    )
    memory: Size = field(
        default_factory=lambda: Size(
            nodes=MEMORY_NODES, processes=1, units=12, numel=6_000_000, interval_s=0.5, seconds=20.0
        )
    )


QUICK = Sizes(
    numel=2**18,
    rounds=2,
    push_bytes=4 * MIB,
    repeats=2,
    thin_mbit=(),
    crowd=Size(nodes=4, processes=2, units=2, numel=10_000, interval_s=0.5, seconds=2.0),
    memory=Size(nodes=MEMORY_NODES, processes=1, units=2, numel=100_000, interval_s=0.2, seconds=1.0),
)


def measure(args: argparse.Namespace) -> Sequence[Report]:
    reports = []
    if args.only in (None, "hub"):
        reports.append(measure_hub(args.quick))
    if args.only in (None, "push"):
        reports.append(measure_pushes(args.quick))
    if args.only in (None, "members"):
        reports.append(measure_members(args.quick))
    if args.only in (None, "heartbeats"):
        reports.append(measure_heartbeats(args.quick))
    if args.only in (None, "floods"):
        reports.append(measure_floods(args.quick))
    if args.only in (None, "merges"):
        reports.append(measure_merges(args.quick))
    if args.only in (None, "shards"):
        reports.append(calculate_shards(args.quick))
    return reports


def calculate_shards(quick: bool) -> Report:
    """Calculate the hubs of a model of 70 B parameters from rates that are measured here."""
    sizes = QUICK if quick else Sizes()
    pushed = push_times(sizes.push_bytes, sizes.repeats)
    path = speeds(Kind(text="", codec="bf16", quorum=4), sizes.numel, sizes.rounds).path_gb_s
    rates = Rates(path, 1e-9 * sizes.push_bytes / median(pushed.grpc.seconds))
    found = [largest(hubs, NODES_OF_70B, rates) for hubs in HUBS]
    needed = {minutes: hubs_for(60 * minutes, NODES_OF_70B, rates) for minutes in ROUND_MIN}
    texts = [f"a round in {minutes} min: {hubs or 'no number of'} hubs" for minutes, hubs in needed.items()]
    return Report(
        "hub: 70 B parameters, calculated",
        (
            f"Measured: push to anchor {rates.path_gb_s:.2f} GB/s of fp32, gRPC {rates.wire_gb_s:.2f} GB/s."
            f" A round: {NODES_OF_70B} nodes push bf16 and pull fp32.",
            f"Seconds of one core of the largest hub. With a core per hub: {'; '.join(texts)}.",
        ),
        ("hubs", "parameters", "memory, GB", "pushes, s", "merges, s", "pulls, s", "round, s"),
        tuple(_shard_row(one) for one in found),
        (),
        {"rates": asdict(rates), "shards": [asdict(one) for one in found], "needed": needed},
    )


def _shard_row(one: Shard) -> tuple[str, ...]:
    times = (one.push_s, one.merge_s, one.pull_s, one.core_s)
    return str(one.hubs), f"{1e-9 * one.params:.1f} B", f"{one.memory_gb:.0f}", *(f"{s:,.0f}" for s in times)


def measure_merges(quick: bool) -> Report:
    """Measure merges on several threads, alone and while snapshots are written; the best of some runs."""
    load = Load(units=4, numel=2**18, seconds=0.5) if quick else Load(units=16, numel=2_000_000, seconds=4.0)
    rows = []
    for snapshots in (False, True):
        runs = [merging(load, n, snapshots=snapshots) for _ in range(1 if quick else 3) for n in THREADS]
        rows += [max((one for one in runs if one.threads == n), key=lambda one: one.gb_s) for n in THREADS]
    beside = min(one.gb_s for one in rows[len(THREADS) :])
    return Report(
        "hub: merges at once",
        (
            f"GB/s of fp32 by wall time, bf16 pushes, {load.units} units of {load.numel:,} parameters"
            f" ({load.params_bytes / MIB:.0f} MiB), Nesterov; best of {1 if quick else 3}.",
            "Snapshots: one after the other meanwhile. Memory: the most above that of the idle hub.",
        ),
        ("threads", "snapshots", "merges, GB/s", "a snapshot, s", "memory, MiB"),
        tuple(_merging_row(one) for one in rows),
        (Bar(f"merges go on beside snapshots: {beside:.2f} GB/s", None if quick else beside > 0),),
        {"merging": [asdict(one) for one in rows]},
    )


def _merging_row(one: Merging) -> tuple[str, ...]:
    took = f"{one.snapshot_s:.2f}" if one.snapshots else ""
    return str(one.threads), str(one.snapshots), f"{one.gb_s:.2f}", took, f"{one.peak_bytes / MIB:.0f}"


def measure_pushes(quick: bool) -> Report:
    """Measure pushes over loopback and over thin wires."""
    sizes = QUICK if quick else Sizes()
    pushed = push_times(sizes.push_bytes, sizes.repeats)
    rates = () if tun_link.why_not() else sizes.thin_mbit
    thin = {rate: filled(rate, sizes.thin_bytes) for rate in rates}
    bars = (_push_bar(pushed), *(_thin_bar(rate, share) for rate, share in thin.items()))
    return Report(
        "hub: pushes",
        (
            f"{sizes.push_bytes // MIB} MiB over loopback, median of {sizes.repeats} by turns with a bare"
            f" socket; {sizes.thin_bytes // MIB} MiB over thin wires with a round trip of 80 ms.",
        ),
        ("what", "share", "in detail"),
        (*_push_rows(sizes.push_bytes, pushed), *(_thin_row(rate, share) for rate, share in thin.items())),
        tuple(Bar(bar.text, None) for bar in bars) if quick else bars,
        {"push": asdict(pushed), "thin wires": thin},
    )


def measure_members(quick: bool) -> Report:
    """Measure what calls cost with many members."""
    found = [costs(members, 40 if quick else 400) for members in (MEMBERS[:2] if quick else MEMBERS)]
    most = found[-1]
    text = f"a heartbeat with {most.members:,} members, without gRPC: {1e3 * most.beat_s:.3f} ms, bar 0.3 ms"
    return Report(
        "hub: many members",
        (
            "CPU time of a thread at the hub, without gRPC (`--only heartbeats`); members push and are paced"
            " (`dylu`).",
            "Lock: the longest time for which other calls wait.",
        ),
        (
            "members",
            "heartbeat, ms",
            "99th percentile",
            "look what is due",
            "push and merge",
            "lock, status",
            "lock, snapshot",
        ),
        tuple(_members_row(one) for one in found),
        (Bar(text, None if quick else most.beat_s <= WANTED_CALL_S),),
        {"costs": [asdict(one) for one in found]},
    )


def _members_row(one: Costs) -> tuple[str, ...]:
    times = (one.beat_s, one.slowest_beat_s, one.idle_tick_s, one.push_s, one.status_s, one.snapshot_s)
    return f"{one.members:,}", *(f"{1e3 * seconds:.3g}" for seconds in times)


def measure_heartbeats(quick: bool) -> Report:
    """Measure what members cost that only report, over gRPC."""
    found = [reporting(members, 3.0 if quick else 60.0) for members in (MEMBERS[:1] if quick else MEMBERS)]
    most = found[-1]
    text = (
        f"{most.members:,} members over gRPC take {most.share:.2f} of a core, bar 1; {most.refused} refused"
    )
    return Report(
        "hub: heartbeats over gRPC",
        (
            "CPU time of the hub's process; each member has a connection, reports at the interval that the",
            "hub asks for, and pings as a node does. Default configuration but for `hub.limits.nodes`.",
        ),
        (
            "members",
            "asked interval, s",
            "heartbeats/s",
            "of a core",
            "ms of CPU each",
            "median, ms",
            "p99, ms",
            "pings/s",
            "join, ms of CPU",
            "memory, MiB",
        ),
        tuple(_reporting_row(one) for one in found),
        (Bar(text, None if quick else most.share <= 1.0 and not most.refused),),
        {"reporting": [asdict(one) for one in found]},
    )


def _reporting_row(one: Reporting) -> tuple[str, ...]:
    answers = one.answer_s or [0.0]
    middle, late = median(answers), answers[int(0.99 * len(answers))]
    each = one.share / one.beats_per_s if one.beats_per_s else 0.0
    times = (each, middle, late)
    return (
        f"{one.members:,}",
        f"{one.asked_s:.2g}",
        f"{one.beats_per_s:.0f}",
        f"{one.share:.2f}",
        *(f"{1e3 * seconds:.2g}" for seconds in times),
        f"{one.pings_per_s:.0f}",
        f"{1e3 * one.join_cpu_s:.2g}",
        f"{one.memory_bytes / MIB:.0f}",
    )


def measure_floods(quick: bool) -> Report:
    """Measure how soon a hub answers its members while another host floods it."""
    kinds = ["", *list(FLOODS)[: 1 if quick else None]]
    found = [flooding(kind, 3.0 if quick else 15.0) for kind in kinds]
    late_s, most_bytes = max(one.late_s for one in found), max(one.peak_bytes for one in found)
    bars = (
        Bar(f"99 % of heartbeats answered within {late_s:.2f} s, bar {WANTED_FLOODED_S:g}",
            late_s <= WANTED_FLOODED_S),
        Bar(f"memory {most_bytes / MIB:.0f} MiB at most, bar {WANTED_FLOODED_BYTES / MIB:.0f} MiB",
            most_bytes <= WANTED_FLOODED_BYTES),
    )  # fmt: skip
    return Report(
        "hub: floods",
        (
            f"Heartbeats of {FLOODED} members, while 16 connections of another host send header blocks",
            "without an end, and no token. One that is ended is made again. No answer: until the end.",
        ),
        ("frames", "heartbeats", "median, ms", "p99, ms", "longest, ms", "memory, MiB", "sent, MB", "ended"),
        tuple(_flooding_row(one) for one in found),
        tuple(Bar(bar.text, None) for bar in bars) if quick else bars,
        {"floods": [asdict(one) for one in found]},
    )


def _flooding_row(one: Flooding) -> tuple[str, ...]:
    times = (median(one.answer_s), one.late_s, one.answer_s[-1])
    return (
        one.kind or "none",
        str(len(one.answer_s)),
        *(f"{1e3 * seconds:.3g}" for seconds in times),
        f"{one.peak_bytes / MIB:.0f}",
        f"{1e-6 * one.flooded.sent_bytes:.0f}",
        str(one.flooded.ended),
    )


def measure_hub(quick: bool) -> Report:
    """Measure merges, a crowd and the memory."""
    sizes = QUICK if quick else Sizes()
    merges = {kind.text: speeds(kind, sizes.numel, sizes.rounds) for kind in KINDS}
    seen = crowd(sizes.crowd)
    memories = {name: memory(sizes.memory, settings) for name, settings in SETTINGS.items()}
    bars = (
        *(_merge_bar(name, found) for name, found in merges.items()),
        _crowd_bar(sizes.crowd, seen),
        *(_memory_bar(name, found) for name, found in memories.items()),
    )
    return Report(
        "hub",
        (
            f"Merge: GB/s of fp32 from push to anchor, {sizes.numel:,} parameters, by CPU time.",
            f"{sizes.crowd.nodes} nodes for {sizes.crowd.seconds:g} s; memory:"
            f" {sizes.memory.units * sizes.memory.numel:,} parameters, {MEMORY_NODES} nodes that push bf16.",
        ),
        ("what", "measured", "in detail"),
        (
            *(_merge_row(name, found) for name, found in merges.items()),
            _crowd_row(sizes.crowd, seen),
            *(_memory_row(name, found) for name, found in memories.items()),
        ),
        tuple(Bar(bar.text, None) for bar in bars) if quick else bars,
        {
            "merges": {name: asdict(found) for name, found in merges.items()},
            "crowd": asdict(seen),
            "memory": {name: asdict(found) for name, found in memories.items()},
        },
    )


def _merge_row(name: str, found: Speeds) -> tuple[str, ...]:
    parts = (
        ("encode", found.encode_gb_s),
        ("decode", found.decode_gb_s),
        ("check", found.check_gb_s),
        ("merge", found.merge_gb_s),
    )
    detail = ", ".join(f"{part} {speed:.2g}" for part, speed in parts)
    return f"merge, {name}", f"{found.path_gb_s:.2f} GB/s", detail


def _merge_bar(name: str, found: Speeds) -> Bar:
    text = f"{name}: {found.path_gb_s:.2f} GB/s per core from push to anchor, bar {WANTED_GB_S}"
    return Bar(text, found.path_gb_s >= WANTED_GB_S)


def _push_rows(num_bytes: int, times: PushTimes) -> Iterator[tuple[str, ...]]:
    ways = {
        "push over gRPC": times.grpc,
        "gRPC alone, threads": times.bare_threads,
        "gRPC alone, asyncio": times.bare_asyncio,
        "push over a TCP connection that gRPC opens": times.channel,
        "bare socket": times.bare,
    }
    gb = 1e-9 * num_bytes
    for name, way in ways.items():
        detail = (
            f"{gb / median(way.seconds):.2f} GB/s, {sum(way.cpu_s) / len(way.cpu_s) / gb:.2f} s of CPU/GB"
        )
        yield name, percent(_share(way, times.bare), 0), detail


def _share(way: Way, bare: Way) -> float:
    return median([theirs / ours for ours, theirs in zip(way.seconds, bare.seconds, strict=True)])


def _push_bar(times: PushTimes) -> Bar:
    share = _share(times.grpc, times.bare)
    text = f"a push is {percent(share, 0)} as fast as a bare socket, bar {percent(WANTED_SHARE, 0)}"
    return Bar(text, share >= WANTED_SHARE)


def _thin_row(rate_mbit: float, share: float) -> tuple[str, ...]:
    return (
        f"push over {rate_mbit:g} Mbit/s, 80 ms",
        percent(share, 0),
        "share of the wire, one push at a time",
    )


def _thin_bar(rate_mbit: float, share: float) -> Bar:
    text = f"a push fills {percent(share, 0)} of {rate_mbit:g} Mbit/s, 80 ms, bar {percent(WANTED_FILLED, 0)}"
    return Bar(text, share >= WANTED_FILLED)


def _crowd_row(size: Size, seen: Crowd) -> tuple[str, ...]:
    detail = (
        f"median {1e3 * _quantile(seen, 0.5):.1f} ms, {len(seen.heartbeat_s) / size.seconds:.0f} a second,"
        f" {seen.merged / size.seconds:.0f} pushes/s, {seen.refused} refused, {seen.late} late"
    )
    return f"heartbeat, {size.nodes} nodes, p99", f"{1e3 * _quantile(seen, 0.99):.1f} ms", detail


def _crowd_bar(size: Size, seen: Crowd) -> Bar:
    most_s = _quantile(seen, 0.99)
    text = f"99 % of the control calls of {size.nodes} nodes within {1e3 * most_s:.1f} ms, bar 50 ms"
    return Bar(text, most_s <= WANTED_BEAT_S)


def _quantile(seen: Crowd, share: float) -> float:
    return seen.heartbeat_s[min(len(seen.heartbeat_s) - 1, int(share * len(seen.heartbeat_s)))]


def _memory_row(name: str, found: Memory) -> tuple[str, ...]:
    detail = (
        f"{found.own / MIB:.0f} MiB without files, {found.idle / MIB:.0f} MiB idle, parameters"
        f" {found.params / MIB:.0f} MiB"
    )
    return f"memory, {name}", f"{found.peak / MIB:.0f} MiB", detail


def _memory_bar(name: str, found: Memory) -> Bar:
    text = f"{name}: {found.peak / MIB:.0f} MiB at most, bar {found.allowed / MIB:.0f} MiB"
    return Bar(text, found.peak <= found.allowed)


def _options(parser: argparse.ArgumentParser) -> None:
    tables = ("hub", "push", "members", "heartbeats", "floods", "merges", "shards")
    parser.add_argument("--only", choices=tables, help="measure only one of the tables")


if __name__ == "__main__":
    main("hub", "Merge speed, push speed, response and memory of a hub.", measure, options=_options)
