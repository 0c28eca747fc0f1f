"""Measure how much of a node's waits a drafter's training uses, and what it costs the node.

The trainer is the real one: a draft layer for a policy of width 256 learns from features in shared memory, in
a process that runs in windows. Its result is never published here, so that faster decoding cannot hide a
delay. The faults are injected into a smaller training in the same process.
"""

import argparse
import ctypes
import math
import os
import queue
import random
import select
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from aedit.child import Restarts
from aedit.launch.data import batch
from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training import (
    DrafterTraining,
    FeatureRing,
    GateConfig,
    IdleConfig,
    LearningConfig,
    PolicyEmbeddings,
    Publication,
    RingShape,
    train_when_idle,
)
from aedit.system import end_with_parent
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import Interval, median, percent, quantile
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.trainer_waits import Trainer
from benchmarks.programs.trainees import FAULTS, MENDED_BY, faulty, give, policy, weights

# -- node that trains and waits in turn, to measure whether a trainer in its waits makes its steps longer


SEQ_LEN, BATCH_SIZE = 128, 4
THREADS = 2
LR = 1e-6
"""So small that all steps do the same arithmetic on the same numbers."""
WARM_UP_STEPS = 5

Window = Callable[[], AbstractContextManager[None]]


class Foreground:
    """Real inner steps of a small Llama, on two threads."""

    def __init__(self, quick: bool) -> None:
        size, layers = (64, 1) if quick else (256, 4)
        self._model = llama(size, layers, SEQ_LEN)
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=LR)
        self._train = corpus(SEQ_LEN).train
        for number in range(WARM_UP_STEPS):
            self.step(number)

    def step(self, number: int) -> None:
        """Take a step on the samples of this number."""
        first = BATCH_SIZE * number
        samples = batch(self._train, np.arange(first, first + BATCH_SIZE) % len(self._train))
        inner_step(self._model, self._inner, samples)


@dataclass(frozen=True, slots=True)
class Arm:
    """Use of a wait."""

    window: Window = nullcontext
    goes_on: bool = False
    """The window stays open during the step, which is what must not be done."""


OFF = Arm()


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds from the end of a wait to the end of the next step, with and without a trainer in the wait.

    The waits are of one length and the steps on the same samples.
    """

    on_s: float
    off_s: float

    @property
    def ratio(self) -> float:
        return self.on_s / self.off_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios, with its 95 % interval by bootstrap."""

    middle: float
    low: float
    high: float
    worst: float
    """The largest of single pairs."""
    num_pairs: int

    @staticmethod
    def of(pairs: Sequence[Pair]) -> "Ratio":
        ratios = [pair.ratio for pair in pairs]
        found = Interval.of(ratios, draws=2000)
        return Ratio(found.middle, found.low, found.high, max(ratios), len(ratios))


class Stepping(Protocol):
    """A node that takes steps."""

    def step(self, number: int) -> None:
        """Take the step of this number, which is the same work each time."""


class Race:
    """Waits and steps of several arms in turn, in a random order per turn."""

    def __init__(self, foreground: Stepping, waits_s: tuple[float, float], seed: int = 0) -> None:
        """Set up the race; waits_s: the shortest and the longest wait."""
        self._foreground, self._waits_s, self._chance = foreground, waits_s, random.Random(seed)
        self._number = 0

    def turn(self, arms: Mapping[str, Arm]) -> dict[str, float]:
        """Return the seconds of each arm, for one wait and one step that are the same for all."""
        wait_s, names = self._chance.uniform(*self._waits_s), list(arms)
        self._chance.shuffle(names)
        self._number += 1
        return {name: self._one(arms[name], wait_s) for name in names}

    def pair(self, on: Arm) -> Pair:
        seconds = self.turn({"on": on, "off": OFF})
        return Pair(seconds["on"], seconds["off"])

    def _one(self, arm: Arm, wait_s: float) -> float:
        with arm.window() if arm.goes_on else nullcontext():
            with nullcontext() if arm.goes_on else arm.window():
                time.sleep(wait_s)
                over_s = time.perf_counter()
            self._foreground.step(self._number)
            return time.perf_counter() - over_s


# -- measure a trainer's use of its node's waits and how fast it stops, from outside


STOPS_WITHIN_S = 10.0
MESSAGE_WITHIN_S = 10.0
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")


@dataclass(frozen=True, slots=True)
class Harvest:
    """Result of one window, seconds."""

    idle_s: float
    cpu_s: float
    queued_s: float
    """Time in which the trainer was ready to run but had no core."""
    outside_s: float
    """Processor time of the trainer from this window to the next."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Times of one window that a message ended, in seconds since the message was sent."""

    left_s: float
    """Until the foreground was out of the window and could go on."""
    stopped_s: float
    """Until no thread of the trainer could run."""
    call_s: float
    """Part of `left_s` that leaving the window took."""
    cpu_s: float
    """Processor time of the trainer in the window."""
    late_s: float
    """The same after the foreground had left. A stopped process that waits for a core uses none."""

    @property
    def closed_s(self) -> float:
        """Return the part of `stopped_s` from the moment at which the foreground began to leave."""
        return self.stopped_s - self.left_s + self.call_s


class Clocks:
    """Processor time and thread states of another process, as the kernel reports them."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")
        clock = ctypes.c_int()
        if ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)) != 0:
            raise ProcessLookupError(f"process {pid} has no clock")
        self._clock = clock.value

    @property
    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    @property
    def queued_s(self) -> float:
        stats = [task.joinpath("schedstat") for task in self._tasks.iterdir()]
        return sum(1e-9 * int(stat.read_text().split()[1]) for stat in stats if stat.exists())

    def all_stopped(self) -> bool:
        stats = [task.joinpath("stat").read_text() for task in self._tasks.iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def priority(pid: int) -> tuple[str, str, str]:
    """Return a process's class, its session's priority, and whether the kernel schedules by session first."""
    classes = {os.SCHED_IDLE: "SCHED_IDLE", os.SCHED_OTHER: f"nice {os.getpriority(os.PRIO_PROCESS, pid)}"}
    session = Path(f"/proc/{pid}/autogroup")
    text = session.read_text().partition(" ")[2].strip() if session.exists() else ""
    by_session = AUTOGROUP.exists() and AUTOGROUP.read_text().strip() == "1"
    scheduler = os.sched_getscheduler(pid)
    return (
        classes.get(scheduler, str(scheduler)),
        f"session {text or 'none'}",
        f"autogroup {'on' if by_session else 'off'}",
    )


def harvest(
    work: Trainer, step: Callable[[int], None], num_windows: int, windows_s: tuple[float, float]
) -> Iterator[Harvest]:
    """Run windows of random length with a step after each; yield the result of each."""
    clocks, chance = Clocks(work.status()["pid"]), random.Random(0)
    for number in range(num_windows):
        with work.window("round"):
            opened_s, before_s, queued_s = time.perf_counter(), clocks.cpu_s, clocks.queued_s
            time.sleep(chance.uniform(*windows_s))
            idle_s, ended_s = time.perf_counter() - opened_s, clocks.cpu_s
            queued_s = clocks.queued_s - queued_s
        step(number)
        yield Harvest(idle_s, ended_s - before_s, queued_s, clocks.cpu_s - ended_s)


def outside(harvests: Sequence[Harvest]) -> float:
    """Return the share of the trainer's processor time outside of the windows."""
    outside_s = sum(one.outside_s for one in harvests)
    whole_s = outside_s + sum(one.cpu_s for one in harvests)
    return outside_s / whole_s if whole_s else 0.0


class Messenger:
    """Thread that sends a message at a given time, as a peer would. Also a context manager."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self._orders: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="messenger", daemon=True)
        self._thread.start()

    def order(self, after_s: float) -> None:
        """Send a message in `after_s` seconds."""
        self._orders.put(after_s)

    def receive(self) -> float:
        """Wait for the message as on a socket; return when it was sent, by `time.perf_counter`."""
        if not select.select([self._read], [], [], MESSAGE_WITHIN_S)[0]:
            raise TimeoutError(f"no message came within {MESSAGE_WITHIN_S:g} s")
        (sent_s,) = struct.unpack("d", os.read(self._read, 8))
        return float(sent_s)

    def __enter__(self) -> "Messenger":
        return self

    def __exit__(self, *error: object) -> None:
        self._orders.put(None)
        self._thread.join(MESSAGE_WITHIN_S)
        os.close(self._read)
        os.close(self._write)

    def _run(self) -> None:
        while (after_s := self._orders.get()) is not None:
            time.sleep(after_s)
            os.write(self._write, struct.pack("d", time.perf_counter()))


def leave(work: Trainer, count: int, lengths_s: tuple[float, float]) -> Iterator[Leaving]:
    """End windows by messages at random moments of a microbatch; yield the times of each."""
    clocks, chance = Clocks(work.status()["pid"]), random.Random(1)
    with Messenger() as messenger:
        for _ in range(count):
            before_s = clocks.cpu_s
            sent_s, left_s, call_s = _left(messenger, work.window("round"), chance.uniform(*lengths_s))
            ended_s = clocks.cpu_s
            stopped_s = _stopped(clocks) - sent_s
            late_s = clocks.cpu_s - ended_s
            yield Leaving(left_s - sent_s, stopped_s, call_s, ended_s - before_s, late_s)
            time.sleep(0.002)


def leave_nothing(window: Callable[[], AbstractContextManager[None]], count: int) -> list[float]:
    """Return the seconds from a message to the foreground's next instruction, without a trainer."""
    chance, found = random.Random(1), []
    with Messenger() as messenger:
        for _ in range(count):
            sent_s, left_s, _ = _left(messenger, window(), chance.uniform(0.002, 0.05))
            found.append(left_s - sent_s)
    return found


def _left(
    messenger: Messenger, window: AbstractContextManager[None], after_s: float
) -> tuple[float, float, float]:
    """Return when the message was sent, when the window had been left, and how long leaving took."""
    messenger.order(after_s)
    with window:
        sent_s = messenger.receive()
        began_s = time.perf_counter()
    left_s = time.perf_counter()
    return sent_s, left_s, left_s - began_s


def _stopped(clocks: Clocks) -> float:
    give_up_s = time.perf_counter() + STOPS_WITHIN_S
    while not clocks.all_stopped():
        if time.perf_counter() > give_up_s:
            raise TimeoutError(f"the trainer could still run {STOPS_WITHIN_S:g} s after its window")
    return time.perf_counter()


# -- real training of a draft layer, as a benchmark's trainer


HIDDEN_SIZE, VOCABULARY = 256, 512
BEGINS_WITHIN_S = 120.0
NUM_SAMPLES, SAMPLE_TOKENS = 64, 256


def learner(config: IdleConfig) -> DrafterTraining:
    """Return the training of a draft layer for a policy of about ten million parameters, on random features.

    It never converges and never publishes.
    """
    sizes = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=3 * HIDDEN_SIZE,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    embedding = torch.randn(VOCABULARY, HIDDEN_SIZE) / 50
    ring = RingShape.within(32 * 2**20, HIDDEN_SIZE, torch.float32)
    never = LearningConfig(gate=GateConfig(gain=2.0, harm=2.0, patience=10**9))
    work = train_when_idle(
        DraftLayer.of(sizes), PolicyEmbeddings(embedding, embedding, 1), ring, learning=never, idle=config
    )
    features = FeatureRing(work.features, ring)
    for _ in range(NUM_SAMPLES):
        sample = features.begin(0, 8, 1)
        assert sample is not None, "the ring is large enough"
        tokens = torch.randint(VOCABULARY, (SAMPLE_TOKENS,))
        features.append(sample, tokens, torch.randn(SAMPLE_TOKENS, HIDDEN_SIZE))
        features.end(sample, True)
    return work


def begun(work: DrafterTraining) -> None:
    """Wait until it has begun to learn. Raises TimeoutError if it gets no core on a busy machine."""
    give_up_s = time.monotonic() + BEGINS_WITHIN_S
    with work.window("start"):
        while work.status()["steps"] == 0:
            if time.monotonic() > give_up_s:
                state, error = work.status()["state"], work.status()["error"]
                load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
                raise TimeoutError(
                    f"after {BEGINS_WITHIN_S:g} s the trainer is still {state}; {error or load}"
                )
            time.sleep(0.01)


# -- trainer that dies, hangs or publishes invalid weights repeatedly while its node takes steps


AT_ONCE = Restarts(limit=10**6, pause_s=0.0)
GIVE_UP_S = 60.0
PAIRS_AFTER = 2
"""Steps beside the start of the next trainer."""
COUNTERS = {"disk full": "checkpoints_failed", "corrupt publish": "corrupt"}
"""Counter that grows with each fault; for faults not listed it is the number of deaths."""
LARGEST = 100.0
"""Bound far above the published values and far below the largest values of noise."""


@dataclass(frozen=True, slots=True)
class Suffered:
    """Results of the faults of one kind."""

    fault: str
    injected: int
    kept: int
    """Number of faults after which the node had a whole drafter, and a second read found it or nothing."""
    recovered: int
    """Number of faults after which the trainer published and saved again."""
    bad_drafters: int
    pairs: tuple[Pair, ...]


def suffer(fault: str, foreground: Foreground, count: int, waits_s: tuple[float, float]) -> Suffered:
    """Take steps in pairs while the trainer has `fault` and while the next trainer starts."""
    with tempfile.TemporaryDirectory() as folder:
        orders = Path(folder, "orders")
        config = IdleConfig(
            checkpoint=Path(folder, "drafter.safetensors"),
            checkpoint_every_s=0.0,
            hung_after_s=0.5,
            memory_bytes=2**30,
            restarts=AT_ONCE,
        )
        work = DrafterTraining.of(faulty(orders), drafter=weights(), policy=policy(), config=config)
        with work:
            node = Node(work, Race(foreground, waits_s))
            if not node.recovers():
                state = work.status()["state"]
                raise TimeoutError(f"after {GIVE_UP_S:g} s the trainer of the faults is still {state}")
            injected, recovered = 0, 0
            # One that is not recovered from is enough to know.
            while injected < count and recovered == injected:
                injected += 1
                recovered += node.recovers_from(fault, orders)
    return Suffered(fault, injected, node.kept, recovered, node.bad_drafters, tuple(node.pairs))


class Node:
    """Takes steps in pairs, and adopts what is published after each."""

    def __init__(self, work: DrafterTraining, race: Race) -> None:
        self._work, self._race = work, race
        self.pairs: list[Pair] = []
        self.kept, self.bad_drafters = 0, 0
        self._drafter: Publication | None = None

    def recovers_from(self, fault: str, orders: Path) -> bool:
        counter = COUNTERS.get(fault, "deaths")
        seen = self._work.status()[counter]
        give(orders, fault)
        self._steps_until(lambda: self._work.status()[counter] > seen)
        self.kept += self._has_the_last_good(fault)
        for _ in range(PAIRS_AFTER):
            self._step()
        if fault in MENDED_BY:
            give(orders, MENDED_BY[fault])
        return self.recovers()

    def recovers(self) -> bool:
        """Return whether a new drafter and a new checkpoint appear within a long wait."""
        number, saved = self._number, self._work.status()["checkpoints"]
        give_up_s = time.monotonic() + GIVE_UP_S
        with self._work.window("recovery"):
            while self._number == number or self._work.status()["checkpoints"] == saved:
                if time.monotonic() > give_up_s:
                    return False
                time.sleep(0.01)
                self._look()
        return True

    @property
    def _number(self) -> int:
        return self._drafter.number if self._drafter else 1

    def _step(self) -> None:
        self.pairs.append(self._race.pair(Arm(partial(self._work.window, "wait"))))
        self._look()

    def _look(self) -> None:
        """Take over the newest drafter, as an engine does between two of its steps."""
        found = self._work.newest(self._number)
        if found is not None:
            self._drafter = found
            self.bad_drafters += not all(map(_is_whole, found.tensors.values()))

    def _has_the_last_good(self, fault: str) -> bool:
        """Return whether a second read finds the node's drafter, or nothing that is whole."""
        found = self._work.newest(0)
        if fault == "corrupt publish":
            return found is None and self._drafter is not None
        return found is not None and found.number == self._number and _same(found, self._drafter)

    def _steps_until(self, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not is_so() and time.monotonic() < give_up_s:
            self._step()


def _is_whole(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all()) and float(tensor.abs().max()) < LARGEST


def _same(found: Publication, held: Publication | None) -> bool:
    return held is not None and all(tensor.equal(held.tensors[n]) for n, tensor in found.tensors.items())


# -- the benchmark


HARVEST, SHARE_OUTSIDE = 0.85, 0.005
LEAVE_P50_S, LEAVE_P99_S, PREEMPTIONS = 0.001, 0.015, 500
MIDDLE, HIGH, PAIRS = 1.01, 1.02, 60
CROWDED, CROWDED_STEP, CLOSED_S = 0.4, 0.98, 0.005
CROWDED_PAIRS_S = 150.0
"""Longest time of its paired steps, which take several times as long there."""
AA_WIDTH = 0.03
"""Two like series must agree so closely, or the machine is too busy to tell."""
NUM_FAULTS = 20


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of measurement."""

    windows: int
    windows_s: tuple[float, float]
    preemptions: int
    lengths_s: tuple[float, float]
    """Of the windows that a message ends: shorter and longer than a microbatch."""
    turns: int
    waits_s: tuple[float, float]
    faults: int


FULL = Size(30, (1.0, 4.0), 600, (0.002, 0.1), 100, (0.05, 0.3), NUM_FAULTS)
QUICK = Size(2, (1.0, 1.2), 20, (0.002, 0.1), 4, (0.05, 0.1), 1)


@dataclass(slots=True)
class Windows:
    """Measurements of the trainer itself, so far."""

    harvests: list[Harvest] = field(default_factory=list)
    leavings: list[Leaving] = field(default_factory=list)
    unhindered_s: list[float] = field(default_factory=list)
    """From a message to where the foreground goes on, without a trainer."""
    priority: tuple[str, ...] = ()

    @property
    def harvest(self) -> float:
        return sum(one.cpu_s for one in self.harvests) / sum(one.idle_s for one in self.harvests)

    @property
    def preemptions(self) -> tuple[Leaving, ...]:
        """Return the ends of windows in which the trainer was running, and not waiting for a core."""
        return tuple(one for one in self.leavings if one.cpu_s > 0)


@dataclass(slots=True)
class Measured:
    """Measurements so far. What fails leaves a line, and the measurements before it."""

    windows: Windows = field(default_factory=Windows)
    crowded: Windows = field(default_factory=Windows)
    pairs: dict[str, list[Pair]] = field(default_factory=dict)
    """By name of the row."""
    suffered: list[Suffered] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, name: str, pair: Pair) -> None:
        self.pairs.setdefault(name, []).append(pair)

    @contextmanager
    def failure_of(self, part: str) -> Iterator[None]:
        """Note that a deadline passed, or that a process is gone, and go on after the block."""
        try:
            yield
        except OSError as error:  # TimeoutError is one, ProcessLookupError another
            self.failures.append(f"{part}: {error}")

    @property
    def ratios(self) -> dict[str, Ratio]:
        pairs = self.pairs | {"faults": [pair for one in self.suffered for pair in one.pairs]}
        return {name: Ratio.of(pairs[name]) for name in STEPS if pairs.get(name)}


def measure(args: argparse.Namespace) -> Report | str:
    if sys.platform != "linux":
        return "needs /proc, to see from outside when the trainer is stopped"
    size = QUICK if args.quick else FULL
    torch.set_num_threads(THREADS)
    foreground, found = Foreground(args.quick), Measured()
    for name in args.only or PARTS:
        with found.failure_of(name):
            PARTS[name](found, foreground, size)
    return report(found, found.ratios, args.quick)


def alone(found: Measured, foreground: Foreground, size: Size) -> None:
    """Measure the trainer at its lowest priority."""
    with learner(IdleConfig()) as work:
        begun(work)
        with found.failure_of("windows"):
            watch(work, foreground, size, found.windows)
        shadow(work, foreground, size, found)
        window, race = partial(work.window, "wait"), Race(foreground, size.waits_s)
        for _ in range(max(size.turns // 4, 3)):
            found.add("nice", race.pair(Arm(window, goes_on=True)))


def control(found: Measured, foreground: Foreground, size: Size) -> None:
    """Measure an ordinary process that goes on during the step, which must slow it."""
    with learner(IdleConfig(niceness=0, threads=THREADS)) as work:
        begun(work)
        race, arm = Race(foreground, size.waits_s), Arm(partial(work.window, "wait"), goes_on=True)
        for _ in range(max(size.turns // 3, 3)):
            found.add("control", race.pair(arm))


def crowded(found: Measured, foreground: Foreground, size: Size) -> None:
    """Measure the trainer at normal priority, beside a busy process per core."""
    size = replace(size, windows=size.windows // 2, preemptions=size.preemptions // 3)
    with learner(IdleConfig(niceness=0)) as work, crowd():
        begun(work)
        with found.failure_of("windows beside busy processes"):
            watch(work, foreground, size, found.crowded)
        shadow(work, foreground, size, found, "crowded ", CROWDED_PAIRS_S)


def faults(found: Measured, foreground: Foreground, size: Size) -> None:
    """Measure steps beside a trainer with faults."""
    for fault in FAULTS:
        with found.failure_of(fault):
            found.suffered.append(suffer(fault, foreground, size.faults, size.waits_s))


PARTS: dict[str, Callable[[Measured, Foreground, Size], None]] = {
    "alone": alone,
    "control": control,
    "crowded": crowded,
    "faults": faults,
}


@contextmanager
def crowd() -> Iterator[None]:
    """Keep each core busy with a process of a session of its own, as another user's would be."""
    busy, dies = (
        [sys.executable, "-c", "while True: pass"],
        partial(end_with_parent, os.getpid(), signal.SIGKILL),
    )
    processes = [
        subprocess.Popen(busy, start_new_session=True, preexec_fn=dies) for _ in range(os.cpu_count() or 1)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def watch(work: DrafterTraining, foreground: Foreground, size: Size, found: Windows) -> None:
    """Measure the trainer itself, in windows of random length."""
    found.priority = priority(work.status()["pid"])
    # Each is added as soon as it is known: an error later on loses none.
    for harvested in harvest(work, foreground.step, size.windows, size.windows_s):
        found.harvests.append(harvested)
    for left in leave(work, size.preemptions, size.lengths_s):
        found.leavings.append(left)
    found.unhindered_s = leave_nothing(nullcontext, size.preemptions // 3)


def shadow(
    work: DrafterTraining,
    foreground: Foreground,
    size: Size,
    found: Measured,
    prefix: str = "",
    limit_s: float = math.inf,
) -> None:
    """Measure steps after waits with and without the trainer, and without it again, for up to `limit_s`."""
    race, until_s = Race(foreground, size.waits_s), time.monotonic() + limit_s
    arms = {"off": OFF, "same": OFF, "shadow": Arm(partial(work.window, "wait"))}
    for _ in range(size.turns):
        if time.monotonic() > until_s:
            break
        seconds = race.turn(arms)
        for name in ("same", "shadow"):
            found.add(prefix + name, Pair(seconds[name], seconds["off"]))


# --- the report

STEPS = {
    "same": "no trainer beside no trainer (A/A)",
    "shadow": "trainer in the waits",
    "nice": "lowest priority, but not stopped",
    "control": "control: same priority, not stopped",
    "crowded same": "beside a busy process per core, A/A",
    "crowded shadow": "beside a busy process per core, trainer in the waits",
    "faults": "trainer in the waits, with faults",
}


def report(found: Measured, ratios: Mapping[str, Ratio], quick: bool) -> Report:
    """Return the report of what was measured. ratios: those of its pairs."""
    bars = [*window_bars(found.windows), *ratio_bars(ratios)]
    bars += [*crowded_bars(found.crowded, ratios), *fault_bars(found.suffered)]
    rows = [*window_rows(found.windows), *(ratio_row(f"step: {STEPS[n]}", r) for n, r in ratios.items())]
    rows += [fault_row(one) for one in found.suffered if one.pairs]
    rows += [(f"beside a busy process per core: {row[0]}", *row[1:]) for row in window_rows(found.crowded)]
    bars = [replace(bar, passed=None) for bar in bars] if quick else bars
    return Report(
        "a drafter's training in a node's waits",
        (
            "A draft layer (d 256, V 512) learns on 1 thread in a process that runs in windows only; the node"
            f" takes inner steps of a small Llama on {THREADS} threads.",
            "Ratios are of steps on the same samples after waits of one length, with the trainer in the wait"
            " and without, in random order; 95 % by bootstrap.",
        ),
        ("what", "n", "middle", "p99 or 95 %", "worst"),
        tuple(rows),
        (*bars, *(Bar(f"not measured: {failure}", False) for failure in found.failures)),
        {
            "windows": asdict(found.windows),
            "crowded": asdict(found.crowded),
            "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
            "faults": [asdict(one) for one in found.suffered],
            "failures": found.failures,
        },
    )


def window_rows(windows: Windows) -> Iterator[tuple[str, ...]]:
    if windows.priority:
        yield "trainer's priority", "", *windows.priority
    if windows.harvests:
        yield from harvest_rows(windows)
    for name, values in (
        ("message to foreground, no trainer, ms", windows.unhindered_s),
        ("message to foreground, ms", [one.left_s for one in windows.preemptions]),
        ("of that, leaving the window, ms", [one.call_s for one in windows.preemptions]),
        ("message to trainer cannot run, ms", [one.stopped_s for one in windows.preemptions]),
        ("of that, from the end of the window, ms", [one.closed_s for one in windows.preemptions]),
        ("processor time used in that, ms", [one.late_s for one in windows.preemptions]),
    ):
        if values:
            figures = (median(values), quantile(values, 0.99), max(values))
            yield name, str(len(values)), *(f"{1e3 * figure:.3f}" for figure in figures)


def harvest_rows(windows: Windows) -> Iterator[tuple[str, ...]]:
    shares = [one.cpu_s / one.idle_s for one in windows.harvests]
    queued = sum(one.queued_s for one in windows.harvests) / sum(one.idle_s for one in windows.harvests)
    yield (
        "trainer busy / idle, windows of 1 s and more",
        str(len(shares)),
        percent(windows.harvest),
        f"{percent(queued)} waiting for a core",
        percent(min(shares)),
    )
    yield "trainer's time outside of windows", str(len(shares)), percent(outside(windows.harvests), 2), "", ""


def ratio_row(name: str, ratio: Ratio) -> tuple[str, ...]:
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return name, str(ratio.num_pairs), f"{ratio.middle:.3f}", spread, f"{ratio.worst:.2f}"


def fault_row(one: Suffered) -> tuple[str, ...]:
    name = f"step: {one.fault}, {one.injected} times, {one.recovered} recovered"
    return ratio_row(name, Ratio.of(one.pairs))


def window_bars(windows: Windows) -> Iterator[Bar]:
    if windows.harvests:
        share, rest = windows.harvest, outside(windows.harvests)
        yield Bar(f"busy / idle {share:.3f} in windows of 1 s and more, bar {HARVEST}", share >= HARVEST)
        text = f"{percent(rest, 2)} of its time outside of windows, bar 0.5 %"
        yield Bar(text, rest <= SHARE_OUTSIDE)
    for what, values in (
        ("the trainer cannot run", [one.stopped_s for one in windows.preemptions]),
        ("the foreground goes on", [one.left_s for one in windows.preemptions]),
    ):
        if windows.leavings:
            yield leaving_bar(what, values)


def crowded_bars(windows: Windows, ratios: Mapping[str, Ratio]) -> Iterator[Bar]:
    """Yield the bars of a trainer of normal priority beside a busy process of another user per core."""
    if windows.harvests:
        share = windows.harvest
        yield Bar(f"crowded: {share:.2f} of a core in windows, bar {CROWDED}", share >= CROWDED)
    if "crowded shadow" in ratios:
        same, step = ratios["crowded same"], ratios["crowded shadow"]
        text = f"{1 / step.middle:.3f} of those without it, {1 / step.high:.3f} to {1 / step.low:.3f}"
        can_tell = same.high - same.low <= 2 * AA_WIDTH
        passed = 1 / step.middle >= CROWDED_STEP if can_tell else None
        yield Bar(f"crowded: steps at {text}, bar {CROWDED_STEP}", passed)
    if closed_s := [one.closed_s for one in windows.preemptions]:
        p99_s = quantile(closed_s, 0.99)
        text = f"p50 {1e3 * median(closed_s):.2f} ms, p99 {1e3 * p99_s:.2f} ms, bar {1e3 * CLOSED_S:g} ms"
        yield Bar(f"crowded: from the end of a window until the trainer cannot run {text}", p99_s <= CLOSED_S)


def leaving_bar(what: str, values: Sequence[float]) -> Bar:
    if len(values) < PREEMPTIONS:
        return Bar(f"until {what}: {len(values)} preemptions of {PREEMPTIONS} that it takes", None)
    p50_s, p99_s = median(values), quantile(values, 0.99)
    text = f"until {what}: p50 {1e3 * p50_s:.2f} ms, p99 {1e3 * p99_s:.2f} ms, bars 1 and 15 ms"
    return Bar(f"{text}, over {len(values)}", p50_s <= LEAVE_P50_S and p99_s <= LEAVE_P99_S)


def ratio_bars(ratios: Mapping[str, Ratio]) -> Iterator[Bar]:
    same, harm = ratios.get("same"), ratios.get("control")
    # A control without harm would mean that this cannot see any; and so would two like series that differ.
    shows_harm = harm is not None and harm.low > HIGH
    is_quiet = same is not None and same.high - same.low <= 2 * AA_WIDTH
    can_tell = shows_harm and is_quiet
    if harm is not None:
        text = f"the control shows the harm: {harm.middle:.2f}, {harm.low:.2f} at least, bar {HIGH}"
        yield Bar(text, shows_harm)
    if same is not None:
        text = f"A/A {same.middle:.3f}, {same.low:.3f} to {same.high:.3f}, may be {2 * AA_WIDTH:g} wide"
        yield Bar(text, is_quiet)
    for name, ratio in ratios.items():
        if name not in ("shadow", "faults"):
            continue
        passed = ratio.middle <= MIDDLE and ratio.high <= HIGH
        text = f"{ratio.middle:.3f}, {ratio.high:.3f} at most, bars {MIDDLE} and {HIGH}"
        enough = can_tell and ratio.num_pairs >= PAIRS
        yield Bar(f"step, {STEPS[name]}: {text}, over {ratio.num_pairs}", passed if enough else None)


def fault_bars(suffered: Sequence[Suffered]) -> Iterator[Bar]:
    if not suffered:
        return
    injected, recovered = sum(one.injected for one in suffered), sum(one.recovered for one in suffered)
    kept, bad = sum(one.kept for one in suffered), sum(one.bad_drafters for one in suffered)
    text = f"{recovered} of {injected} faults recovered from, the last good drafter kept in {kept}, {bad} bad"
    each = len(suffered) == len(FAULTS) and all(one.injected >= NUM_FAULTS for one in suffered)
    yield Bar(f"{text} adopted", each and recovered == kept == injected and bad == 0)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to measure; default: all")


if __name__ == "__main__":
    about = "A drafter's training in a node's waits: harvest, leaving, delay, busy machine, faults."
    main("idle", about, measure, options=_options)
