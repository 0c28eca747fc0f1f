"""What does a drafter's training in a node's waits harvest, and what does it cost the node?

The trainer is the real one: a draft layer for a policy of width 256 learns from features in shared memory,
in a process that is let run in windows. What it learns is never published here, so that no faster decoding
could hide a delay. The faults are had by a smaller training in the same process.
"""

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import torch

from aedit.spec_rollout.idle import DrafterTraining
from aedit.spec_rollout.restarts import Restarts
from aedit.spec_rollout.trainer_keeper import IdleConfig
from benchmarks.idle_foreground import AA_WIDTH, Foreground, Pair, Race, Ratio
from benchmarks.idle_learner import learner
from benchmarks.idle_trainees import FAULTS, MENDED_BY, faulty, give, policy, weights
from benchmarks.table import Bar, Report, main, median, percent

HARVEST, SHARE_OUTSIDE = 0.85, 0.005
LEAVE_P50_S, LEAVE_P99_S = 0.001, 0.015
MIDDLE, HIGH = 1.01, 1.02
AT_ONCE = Restarts(limit=10**6, pause_s=0.0)
GIVE_UP_S = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    windows: int
    windows_s: tuple[float, float]
    preemptions: int
    pairs: int
    waits_s: tuple[float, float]
    faults: int


FULL = Size(30, (1.0, 4.0), 600, 200, (0.1, 0.5), 20)
QUICK = Size(2, (1.0, 1.2), 10, 3, (0.02, 0.05), 1)


@dataclass(frozen=True, slots=True)
class Harvest:
    """Of one window, seconds."""

    idle_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Leaving:
    """Of one window's end, seconds: the call, and until no thread of the trainer can run."""

    call_s: float
    stopped_s: float


@dataclass(frozen=True, slots=True)
class Suffered:
    """What came of the faults of one kind."""

    fault: str
    injected: int
    recovered: int
    bad_drafters: int
    pairs: tuple[Pair, ...]


def measure(quick: bool) -> Report | str:
    if not Path("/proc/self/stat").exists():
        return "needs /proc, to see from outside when the trainer is stopped"
    size = QUICK if quick else FULL
    torch.set_num_threads(2)
    foreground = Foreground(quick)
    with trainer(IdleConfig()) as work:
        harvests, outside = harvest(work, size)
        leavings = leave(work, size)
        race = Race(foreground, size.waits_s)
        same = Ratio.of([race.pair(no_window) for _ in range(size.pairs)])
        shadow = Ratio.of([race.pair(partial(work.window, "wait")) for _ in range(size.pairs)])
    with trainer(IdleConfig(niceness=0, threads=2)) as work:
        pairs = max(size.pairs // 4, 3)
        control = Ratio.of([race.pair(partial(work.window, "wait"), overlap=True) for _ in range(pairs)])
    suffered = [suffer(fault, foreground, size) for fault in FAULTS]
    ratios = {"nothing against nothing (A/A)": same, "trainer in the waits": shadow}
    ratios |= {"control: same priority, not stopped": control}
    ratios |= {"with faults": Ratio.of([pair for one in suffered for pair in one.pairs])}
    rows = [harvest_row(harvests, outside), *leaving_rows(leavings)]
    rows += [ratio_row(name, ratio) for name, ratio in ratios.items()]
    rows += [fault_row(one) for one in suffered]
    bars = [
        *harvest_bars(harvests, outside),
        *leaving_bars(leavings),
        *ratio_bars(ratios),
        fault_bar(suffered),
    ]
    return Report(
        "a drafter's training in a node's waits",
        (
            "A draft layer (d 256, V 512) learns in a process that runs in windows only; the foreground takes"
            " inner steps of a small Llama on 2 threads.",
            "Steps are paired: after a wait with the trainer in it, and after one of the same length without;"
            " median of the ratios, 95 % by bootstrap.",
        ),
        ("what", "n", "middle", "95 % / p99", "worst"),
        tuple(rows),
        tuple(replace(bar, passed=None) for bar in bars) if quick else tuple(bars),
        {
            "harvests": [asdict(one) for one in harvests],
            "leavings": [asdict(one) for one in leavings],
            "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
            "faults": [asdict(one) for one in suffered],
        },
    )


@contextmanager
def trainer(config: IdleConfig) -> Iterator[DrafterTraining]:
    """The real one, which has begun to learn."""
    with learner(config) as work:
        with work.window("start"):
            until(work, lambda: work.status()["steps"] > 0)
        yield work


@contextmanager
def no_window() -> Iterator[None]:
    yield


def until(work: DrafterTraining, is_so: Callable[[], bool], look_s: float = 0.01) -> None:
    give_up_s = time.monotonic() + GIVE_UP_S
    while not is_so():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"the trainer did not come to it within {GIVE_UP_S:g} s: {work.status()}")
        time.sleep(look_s)


# --- harvest and leaving


def harvest(work: DrafterTraining, size: Size) -> tuple[list[Harvest], float]:
    """Windows of random length, and the share of the trainer's time that it had outside of them."""
    process, chance = psutil.Process(work.status()["pid"]), random.Random(0)
    found, began_s = [], cpu_s(process)
    for _ in range(size.windows):
        with work.window("round"):
            opened_s, before_s = time.perf_counter(), cpu_s(process)
            time.sleep(chance.uniform(*size.windows_s))
            found.append(Harvest(time.perf_counter() - opened_s, cpu_s(process) - before_s))
        time.sleep(0.2)
    whole_s = cpu_s(process) - began_s
    return found, 1 - sum(one.cpu_s for one in found) / whole_s


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def leave(work: DrafterTraining, size: Size) -> list[Leaving]:
    """Windows that end at random moments of a microbatch."""
    states, chance = States(work.status()["pid"]), random.Random(1)
    found = []
    for _ in range(size.preemptions):
        window = work.window("round")
        window.__enter__()
        time.sleep(chance.uniform(0.002, 0.08))
        over_s = time.perf_counter()
        window.__exit__(None, None, None)
        left_s = time.perf_counter()
        while not states.all_stopped():
            pass
        found.append(Leaving(left_s - over_s, time.perf_counter() - over_s))
        time.sleep(0.002)
    return found


class States:
    """Of a process's threads, as the kernel has them."""

    def __init__(self, pid: int) -> None:
        self._tasks = Path(f"/proc/{pid}/task")

    def all_stopped(self) -> bool:
        stats = [task.joinpath("stat").read_text() for task in self._tasks.iterdir()]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


# --- faults


def suffer(fault: str, foreground: Foreground, size: Size) -> Suffered:
    """Steps go on in pairs while the trainer has `fault` and until it is well again."""
    with tempfile.TemporaryDirectory() as folder:
        orders = Path(folder, "orders")
        config = IdleConfig(
            checkpoint=Path(folder, "drafter.safetensors"),
            checkpoint_every_s=0.0,
            hung_after_s=1.0,
            memory_bytes=2**30,
            restarts=AT_ONCE,
        )
        make = faulty(orders)
        with DrafterTraining.of(make, drafter=weights(), policy=policy(), config=config) as work:
            race, node = Race(foreground, (0.2, 0.4)), Node(work)
            with work.window("start"):
                until(work, lambda: work.status()["checkpoints"] > 0 and node.look())
            recovered = sum(node.have(fault, orders, race) for _ in range(size.faults))
    return Suffered(fault, size.faults, recovered, node.bad_drafters, tuple(node.pairs))


class Node:
    """Takes steps in pairs, and takes what is published after each."""

    def __init__(self, work: DrafterTraining) -> None:
        self._work = work
        self.pairs: list[Pair] = []
        self.bad_drafters = 0
        self._number = 1

    def have(self, fault: str, orders: Path, race: Race) -> bool:
        """Whether the trainer publishes and saves again after the fault."""
        seen = _mark(fault, self._work)
        give(orders, fault)
        self._until(race, lambda: _mark(fault, self._work) > seen)
        if fault in MENDED_BY:
            give(orders, MENDED_BY[fault])
        number, saved = self._number, self._work.status()["checkpoints"]
        self._until(race, lambda: self._number > number and self._work.status()["checkpoints"] > saved)
        return self._number > number

    def look(self) -> bool:
        """Adopt what is new; whether there is anything."""
        found = self._work.newest(self._number)
        if found is not None:
            self._number = found.number
            weight = found.tensors["fc.weight"]
            self.bad_drafters += not (bool(weight.isfinite().all()) and float(weight.abs().max()) < 100)
        return self._number > 1

    def _until(self, race: Race, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up_s:
            self.pairs.append(race.pair(partial(self._work.window, "wait")))
            self.look()
            if is_so():
                return


def _mark(fault: str, work: DrafterTraining) -> int:
    """Grows when the fault has been had."""
    counters = {"disk full": "checkpoints_failed", "corrupt publish": "corrupt"}
    return int(work.status()[counters.get(fault, "deaths")])


# --- rows and bars


def harvest_row(harvests: Sequence[Harvest], outside: float) -> tuple[str, ...]:
    shares = [one.cpu_s / one.idle_s for one in harvests]
    middle, worst = percent(total(harvests)), percent(min(shares))
    return (
        "busy / idle, windows of 1 s and more",
        str(len(shares)),
        middle,
        f"{percent(outside, 2)} outside",
        worst,
    )


def total(harvests: Sequence[Harvest]) -> float:
    return sum(one.cpu_s for one in harvests) / sum(one.idle_s for one in harvests)


def harvest_bars(harvests: Sequence[Harvest], outside: float) -> list[Bar]:
    share = total(harvests)
    return [
        Bar(f"busy / idle {share:.3f} in windows of 1 s and more, bar {HARVEST}", share >= HARVEST),
        Bar(f"{percent(outside, 2)} of its time outside of windows, bar 0.5 %", outside <= SHARE_OUTSIDE),
    ]


def leaving_rows(leavings: Sequence[Leaving]) -> list[tuple[str, ...]]:
    rows = []
    for name, values in (
        ("leaving: the call, ms", [one.call_s for one in leavings]),
        ("leaving: until it cannot run, ms", [one.stopped_s for one in leavings]),
    ):
        figures = (median(values), quantile(values, 0.99), max(values))
        rows.append((name, str(len(values)), *(f"{1e3 * figure:.3f}" for figure in figures)))
    return rows


def leaving_bars(leavings: Sequence[Leaving]) -> list[Bar]:
    values = [one.stopped_s for one in leavings]
    p50_s, p99_s = median(values), quantile(values, 0.99)
    text = f"leaving p50 {1e3 * p50_s:.2f} ms and p99 {1e3 * p99_s:.2f} ms, bars 1 and 15 ms"
    return [Bar(f"{text}, over {len(values)}", p50_s <= LEAVE_P50_S and p99_s <= LEAVE_P99_S)]


def quantile(values: Sequence[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def ratio_row(name: str, ratio: Ratio) -> tuple[str, ...]:
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"step time: {name}", str(ratio.num_pairs), f"{ratio.middle:.3f}", spread, f"{ratio.worst:.2f}"


def ratio_bars(ratios: dict[str, Ratio]) -> list[Bar]:
    same, *tried, control, with_faults = ratios.values()
    can_tell = same.high - same.low <= 2 * AA_WIDTH and control.low > HIGH
    bars = [
        Bar(
            f"the control shows the harm: {control.middle:.2f}, {control.low:.2f} at least",
            control.low > HIGH,
        )
    ]
    for name, ratio in (("trainer in the waits", tried[0]), ("with faults", with_faults)):
        text = f"step time, {name}: {ratio.middle:.3f}, {ratio.high:.3f} at most, bars {MIDDLE} and {HIGH}"
        bars.append(Bar(text, (ratio.middle <= MIDDLE and ratio.high <= HIGH) if can_tell else None))
    return bars


def fault_row(one: Suffered) -> tuple[str, ...]:
    told = f"{one.recovered} recovered"
    return (
        f"trainer {one.fault}",
        str(one.injected),
        told,
        f"{len(one.pairs)} pairs of steps",
        f"{one.bad_drafters} bad",
    )


def fault_bar(suffered: Sequence[Suffered]) -> Bar:
    injected, recovered = sum(one.injected for one in suffered), sum(one.recovered for one in suffered)
    bad = sum(one.bad_drafters for one in suffered)
    text = f"{recovered} of {injected} faults recovered from, {bad} bad drafters adopted"
    return Bar(text, recovered == injected and bad == 0)


if __name__ == "__main__":
    main("idle", "A drafter's training in a node's waits: harvest, leaving, delay, faults.", measure)
