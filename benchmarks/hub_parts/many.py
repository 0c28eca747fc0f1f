"""Measure what a hub does per call with many members. Part of `benchmarks.hub`.

The hub's own functions run in this process, from the request of a member to the reply, with a journal on the
disk and without a network. All members have pushed and are paced by the fastest (`dylu`).
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np

from aedit.async_sgd.hub import Hub, Joiner
from aedit.async_sgd.journal import Journal, Ledger, Payload, Store
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import (
    Accepted,
    HubConfig,
    HubPlan,
    Joined,
    LimitConfig,
    Merged,
    MergePart,
    OuterConfig,
    PenaltyConfig,
    Push,
)
from aedit.async_sgd.service import (
    Driver,
    HelloResponder,
    HubWorker,
    RequestGuard,
    ServerDirectory,
    fingerprint,
)
from aedit.launch.hub import overview
from aedit.proto.rpc import PROTOCOL
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import Layout, TensorLayout, UnitLayout

RUN, UNITS, NUMEL, EVERY = "bench", 4, 4096, 64


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
        self.guard = RequestGuard(self.ledger, self.engine, RUN, self.leadership)
        self.directory = ServerDirectory(self.guard, lambda *_, **__: None)
        hello = HelloResponder(
            protocol=PROTOCOL,
            method={},
            difference=lambda settings: None,
            version="",
            run=RUN,
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
        who = pb.Who(run=RUN, node=node, session=node + 1)
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
