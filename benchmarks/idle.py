"""Measure how much of a node's waits a drafter's training uses, and what it costs the node.

The trainer is the real one: a draft layer for a policy of width 256 learns from features in shared memory, in
a process that runs in windows. Its result is never published here, so that faster decoding cannot hide a
delay. The faults are injected into a smaller training in the same process.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from aedit.spec_rollout.training import DrafterTraining, IdleConfig
from benchmarks.idle_parts.faults import Suffered, suffer
from benchmarks.idle_parts.foreground import OFF, THREADS, Arm, Foreground, Pair, Race, Ratio
from benchmarks.idle_parts.learner import begun, learner
from benchmarks.idle_parts.trainees import FAULTS
from benchmarks.idle_parts.windows import Harvest, Leaving, harvest, leave, leave_nothing, priority
from benchmarks.kit.statistics import median, percent, quantile
from benchmarks.kit.tables import Bar, Report, main

HARVEST, SHARE_OUTSIDE = 0.85, 0.005
LEAVE_P50_S, LEAVE_P99_S, PREEMPTIONS = 0.001, 0.015, 500
MIDDLE, HIGH, PAIRS = 1.01, 1.02, 60
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


@dataclass(frozen=True, slots=True)
class Windows:
    """Measurements of the trainer itself."""

    harvests: tuple[Harvest, ...]
    outside: float
    """Share of its processor time."""
    leavings: tuple[Leaving, ...]
    unhindered_s: tuple[float, ...]
    """From a message to where the foreground goes on, without a trainer."""
    priority: tuple[str, str, str]

    @property
    def harvest(self) -> float:
        return sum(one.cpu_s for one in self.harvests) / sum(one.idle_s for one in self.harvests)

    @property
    def preemptions(self) -> tuple[Leaving, ...]:
        """Return the ends of windows in which the trainer was running, and not waiting for a core."""
        return tuple(one for one in self.leavings if one.cpu_s > 0)


def measure(quick: bool) -> Report | str:
    if sys.platform != "linux":
        return "needs /proc, to see from outside when the trainer is stopped"
    size = QUICK if quick else FULL
    torch.set_num_threads(THREADS)
    foreground = Foreground(quick)
    try:
        with learner(IdleConfig()) as work:
            begun(work)
            windows = watch(work, foreground, size)
            ratios = shadow(work, foreground, size)
        with learner(IdleConfig(niceness=0, threads=THREADS)) as work:
            begun(work)
            ratios |= {"control": control(work, foreground, size)}
        suffered = [suffer(fault, foreground, size.faults, size.waits_s) for fault in FAULTS]
    except TimeoutError as error:
        return f"not measured: {error}"
    ratios |= {"faults": Ratio.of([pair for one in suffered for pair in one.pairs])}
    return report(windows, ratios, suffered, quick)


def watch(work: DrafterTraining, foreground: Foreground, size: Size) -> Windows:
    """Measure the trainer itself, in windows of random length."""
    harvests, outside = harvest(work, foreground.step, size.windows, size.windows_s)
    leavings = leave(work, size.preemptions, size.lengths_s)
    unhindered_s = leave_nothing(nullcontext, size.preemptions // 3)
    pid = work.status()["pid"]
    return Windows(tuple(harvests), outside, tuple(leavings), tuple(unhindered_s), priority(pid))


def shadow(work: DrafterTraining, foreground: Foreground, size: Size) -> dict[str, Ratio]:
    """Return ratios of steps after waits with and without the trainer, and of those without it."""
    race, window = Race(foreground, size.waits_s), partial(work.window, "wait")
    arms = {"off": OFF, "same": OFF, "shadow": Arm(window)}
    turns = [race.turn(arms) for _ in range(size.turns)]
    ratios = {
        name: Ratio.of([Pair(seconds[name], seconds["off"]) for seconds in turns])
        for name in ("same", "shadow")
    }
    nice = [race.pair(Arm(window, goes_on=True)) for _ in range(max(size.turns // 4, 3))]
    return ratios | {"nice": Ratio.of(nice)}


def control(work: DrafterTraining, foreground: Foreground, size: Size) -> Ratio:
    """Return the ratio for an ordinary process that goes on during the step, which must slow it."""
    race, arm = Race(foreground, size.waits_s), Arm(partial(work.window, "wait"), goes_on=True)
    return Ratio.of([race.pair(arm) for _ in range(max(size.turns // 3, 3))])


# --- the report

STEPS = {
    "same": "no trainer beside no trainer (A/A)",
    "shadow": "trainer in the waits",
    "nice": "lowest priority, but not stopped",
    "control": "control: same priority, not stopped",
    "faults": "trainer in the waits, with faults",
}


def report(windows: Windows, ratios: dict[str, Ratio], suffered: Sequence[Suffered], quick: bool) -> Report:
    bars = [*window_bars(windows), *ratio_bars(ratios), fault_bar(suffered)]
    rows = [*window_rows(windows), *(ratio_row(f"step: {STEPS[n]}", r) for n, r in ratios.items())]
    rows += [fault_row(one) for one in suffered]
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
        tuple(replace(bar, passed=None) for bar in bars) if quick else tuple(bars),
        {
            "windows": asdict(windows),
            "ratios": {name: asdict(ratio) for name, ratio in ratios.items()},
            "faults": [asdict(one) for one in suffered],
        },
    )


def window_rows(windows: Windows) -> Iterator[tuple[str, ...]]:
    shares = [one.cpu_s / one.idle_s for one in windows.harvests]
    queued = sum(one.queued_s for one in windows.harvests) / sum(one.idle_s for one in windows.harvests)
    yield "trainer's priority", "", *windows.priority
    yield (
        "trainer busy / idle, windows of 1 s and more",
        str(len(shares)),
        percent(windows.harvest),
        f"{percent(queued)} waiting for a core",
        percent(min(shares)),
    )
    yield "trainer's time outside of windows", str(len(shares)), percent(windows.outside, 2), "", ""
    for name, values in (
        ("message to foreground, no trainer, ms", windows.unhindered_s),
        ("message to foreground, ms", [one.left_s for one in windows.preemptions]),
        ("of that, leaving the window, ms", [one.call_s for one in windows.preemptions]),
        ("message to trainer cannot run, ms", [one.stopped_s for one in windows.preemptions]),
    ):
        if values:
            figures = (median(values), quantile(values, 0.99), max(values))
            yield name, str(len(values)), *(f"{1e3 * figure:.3f}" for figure in figures)


def ratio_row(name: str, ratio: Ratio) -> tuple[str, ...]:
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return name, str(ratio.num_pairs), f"{ratio.middle:.3f}", spread, f"{ratio.worst:.2f}"


def fault_row(one: Suffered) -> tuple[str, ...]:
    name = f"step: {one.fault}, {one.injected} times, {one.recovered} recovered"
    return ratio_row(name, Ratio.of(one.pairs))


def window_bars(windows: Windows) -> Iterator[Bar]:
    share, outside = windows.harvest, percent(windows.outside, 2)
    yield Bar(f"busy / idle {share:.3f} in windows of 1 s and more, bar {HARVEST}", share >= HARVEST)
    yield Bar(f"{outside} of its time outside of windows, bar 0.5 %", windows.outside <= SHARE_OUTSIDE)
    for what, values in (
        ("the trainer cannot run", [one.stopped_s for one in windows.preemptions]),
        ("the foreground goes on", [one.left_s for one in windows.preemptions]),
    ):
        yield leaving_bar(what, values)


def leaving_bar(what: str, values: Sequence[float]) -> Bar:
    if len(values) < PREEMPTIONS:
        return Bar(f"until {what}: {len(values)} preemptions of {PREEMPTIONS} that it takes", None)
    p50_s, p99_s = median(values), quantile(values, 0.99)
    text = f"until {what}: p50 {1e3 * p50_s:.2f} ms, p99 {1e3 * p99_s:.2f} ms, bars 1 and 15 ms"
    return Bar(f"{text}, over {len(values)}", p50_s <= LEAVE_P50_S and p99_s <= LEAVE_P99_S)


def ratio_bars(ratios: dict[str, Ratio]) -> Iterator[Bar]:
    same, harm = ratios["same"], ratios["control"]
    # A control without harm would mean that this cannot see any; and so would two like series that differ.
    can_tell = harm.low > HIGH and same.high - same.low <= 2 * AA_WIDTH
    text = f"the control shows the harm: {harm.middle:.2f}, {harm.low:.2f} at least, bar {HIGH}"
    yield Bar(text, harm.low > HIGH)
    text = f"A/A {same.middle:.3f}, {same.low:.3f} to {same.high:.3f}, may be {2 * AA_WIDTH:g} wide"
    yield Bar(text, same.high - same.low <= 2 * AA_WIDTH)
    for name in ("shadow", "faults"):
        ratio = ratios[name]
        passed = ratio.middle <= MIDDLE and ratio.high <= HIGH
        text = f"{ratio.middle:.3f}, {ratio.high:.3f} at most, bars {MIDDLE} and {HIGH}"
        enough = can_tell and ratio.num_pairs >= PAIRS
        yield Bar(f"step, {STEPS[name]}: {text}, over {ratio.num_pairs}", passed if enough else None)


def fault_bar(suffered: Sequence[Suffered]) -> Bar:
    injected, recovered = sum(one.injected for one in suffered), sum(one.recovered for one in suffered)
    kept, bad = sum(one.kept for one in suffered), sum(one.bad_drafters for one in suffered)
    text = f"{recovered} of {injected} faults recovered from, the last good drafter kept in {kept}, {bad} bad"
    each = all(one.injected >= NUM_FAULTS for one in suffered)
    return Bar(f"{text} adopted", each and recovered == kept == injected and bad == 0)


if __name__ == "__main__":
    main("idle", "A drafter's training in a node's waits: harvest, leaving, delay, faults.", measure)
