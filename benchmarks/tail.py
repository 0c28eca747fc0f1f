"""Measure when the last rollout of a batch ends: four engines, answers of very unequal length.

    python -m benchmarks.tail [--quick] [--size 10m] [--batches 6] [--root DIRECTORY] [--json FILE]

Each batch is made in four ways: samples stay where they are or move (`Reallocator`, with their keys and
values), plainly or speculating (`Goodput`). What has been seen in earlier batches is known in later ones, as
in a run of reinforcement learning; the first batch is told apart, as nothing is known in it.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    OFF,
    Arm,
    Draft,
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    Noise,
    RowStart,
    StepUpdate,
    SuffixDrafter,
    parse_arm,
)
from aedit.spec_rollout.engine import Engine, Step
from aedit.spec_rollout.model import Segment, Target
from aedit.spec_rollout.remote import LocalEngine, Reallocator
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey, Sampling
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import ROOT, Policy, Size, load, prompts
from benchmarks.rollout import Same

# -- step times of an engine on this machine, measured once: the pace of nodes in virtual time


ARMS = ("layer:1", "layer:2", "layer:4", "layer:8", "suffix:4", "suffix:8")
ROWS = (1, 2, 4, 8, 16)
CONTEXT = 256
"""Tokens of a sample when steps are measured, all of them alike: in virtual time a step does not take longer
because a text is long."""
WARM, STEPS, ROUNDS = 2, 8, 2
"""Steps of an arm that do not count, steps that do, and repeats over all arms."""
PREFILLS = (32, 512)


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of an engine's operations, interpolated linearly between the measured points."""

    rows: tuple[int, ...]
    nodes: tuple[int, ...]
    pass_s: tuple[tuple[float, ...], ...]
    """Seconds of a step without the drafting, by rows and by drafted nodes of each."""
    draft_s: Mapping[str, tuple[float, ...]]
    """Seconds of a draft, by arm and rows."""
    prefill_s: tuple[float, float]
    """Seconds to prefill PREFILLS tokens."""
    copy_s: float
    """Seconds to copy the keys and values of a token from one engine to another."""

    def step(self, rows: int, nodes: int) -> float:
        """Return the seconds of a step of `rows` rows, without the drafting."""
        by_rows = [float(np.interp(nodes, self.nodes, times)) for times in self.pass_s]
        return float(np.interp(rows, self.rows, by_rows))

    def draft(self, arm: Arm, rows: int) -> float:
        """Return the seconds of a draft; at the end of a text chains are shorter than those measured."""
        known = {parse_arm(name): times for name, times in self.draft_s.items()}
        same = sorted((one.depth, times) for one, times in known.items() if one.drafter == arm.drafter)
        by_depth = [float(np.interp(rows, self.rows, times)) for _, times in same]
        return float(np.interp(arm.depth, [depth for depth, _ in same], by_depth))

    def prefill(self, tokens: int) -> float:
        short, long = PREFILLS
        slope = (self.prefill_s[1] - self.prefill_s[0]) / (long - short)
        return max(0.0, self.prefill_s[0] + (tokens - short) * slope)


def measured(target: Target, drafters: Mapping[DrafterKind, Drafter]) -> Times:
    """Return the shortest of several measurements each, in this thread's processor time.

    Load of the machine only makes them longer, and torch must compute on one thread. The drafters must follow
    no other engine; nothing of it stays in the target.
    """
    engine = Engine(target, drafters=drafters)
    engine.clock = engine.cost_clock = time.thread_time
    arms = [OFF, *(arm for arm in map(parse_arm, ARMS) if arm.drafter in drafters)]
    rows = tuple(count for count in ROWS if count <= target.rows)
    found = {count: dict(_steps(engine, arms, count)) for count in rows}
    nodes = sorted({arm.nodes for arm in arms})
    of_nodes = {arm.nodes: arm for arm in reversed(arms)}
    return Times(
        rows=rows,
        nodes=tuple(nodes),
        pass_s=tuple(tuple(found[count][of_nodes[n]][0] for n in nodes) for count in rows),
        draft_s={str(arm): tuple(found[count][arm][1] for count in rows) for arm in arms[1:]},
        prefill_s=(_prefill(target, PREFILLS[0]), _prefill(target, PREFILLS[1])),
        copy_s=_least(lambda: target.write_kv(0, target.read_kv(0, CONTEXT))) / CONTEXT,
    )


def _steps(engine: Engine, arms: Sequence[Arm], rows: int) -> Iterator[tuple[Arm, tuple[float, float]]]:
    """Yield by arm the least seconds of a step without its drafting, and of the drafting."""
    rng = torch.Generator().manual_seed(rows)
    for i in range(rows):
        tokens = torch.randint(32, 96, (CONTEXT - 64,), generator=rng).tolist()
        sampling = Sampling(max_new_tokens=engine.target.max_tokens - len(tokens))
        engine.add(Prompt(tokens=tuple(tokens), sample=i, group=0, sampling=sampling))
    seen: dict[Arm, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm in arms:
            engine.chooser = Fixed(arm)
            steps = [engine.step() for _ in range(WARM + STEPS)][WARM:]
            seen[arm] += [(step.total_s - step.draft_s, step.draft_s) for step in steps]
    engine.close()
    for arm, times in seen.items():
        yield arm, (min(rest for rest, _ in times), min(draft for _, draft in times))


def _prefill(target: Target, tokens: int) -> float:
    return _least(lambda: target.prefill([Segment(0, 0, [64] * tokens)]))


def _least(act: Callable[[], object], times: int = 5) -> float:
    found = []
    for _ in range(times):
        began_s = time.thread_time()
        act()
        found.append(time.thread_time() - began_s)
    return min(found)


# -- engines in virtual time: each computes for real and takes the time that `Times` declares
#
# One engine computes at a time, the one whose clock is furthest behind. So four of them fit on one core, and
# the same samples give the same figures whatever the load of the machine.


LOOK_S = 0.05
"""Virtual time between looks for what should move. One takes 0.3 ms, 4 ms if much moves (measured, for 128
samples), on one core for all engines: it is not counted.
"""
NODES = 8
"""Most that are drafted."""


@dataclass(slots=True)
class Clock:
    """Clock of one node."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class PacedTarget(Target):
    """Target whose computations take declared times on a clock."""

    def __init__(self, model: PreTrainedModel, *, rows: int, max_tokens: int, times: Times) -> None:
        super().__init__(model, rows, max_tokens, NODES, ())
        self.times, self.clock = times, Clock()
        self.copies_s: list[float] = []
        """Copy times of samples that came with their keys and values."""

    @property
    def has_logits(self) -> bool:
        """Return false: each token takes a step of declared time."""
        return False

    def step(
        self,
        tokens_Bq: Tensor,
        lengths_B: Sequence[int] | Tensor,
        parents_BN: Tensor | None = None,
        counts_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_rows, q = tokens_Bq.shape
        self.clock.now_s += self.times.step(num_rows, q - 1)
        return super().step(tokens_Bq, lengths_B, parents_BN, counts_B)

    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        self.clock.now_s += sum(self.times.prefill(len(segment.tokens)) for segment in segments)
        return super().prefill(segments)

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        super().write_kv(row, kv, start)
        self.copies_s.append(kv.shape[3] * self.times.copy_s)
        self.clock.now_s += self.copies_s[-1]


@dataclass(frozen=True, slots=True)
class PacedDrafter:
    """Drafter whose guesses take declared times on its engine's clock."""

    inner: Drafter
    times: Times
    clock: Clock

    @property
    def version(self) -> int:
        return int(getattr(self.inner, "version", 0))

    def begin(self, rows: Sequence[RowStart]) -> None:
        self.inner.begin(rows)

    def update(self, taken: StepUpdate) -> None:
        self.inner.update(taken)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)

    def end(self, row: int) -> None:
        self.inner.end(row)

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        self.clock.now_s += self.times.draft(arm, rows)
        return self.inner.propose(arm, rows, noise, temperature_B)


class Node(LocalEngine):
    """One engine of the four."""

    def __init__(
        self, target: PacedTarget, drafters: Mapping[DrafterKind, Drafter], chooser: ArmChooser | None
    ):
        self.clock, self.target = target.clock, target
        self.clock.now_s, self.busy_s, self.num_emptied = 0.0, 0.0, 0
        self.target.copies_s.clear()
        paced: dict[DrafterKind, Drafter] = {
            by: PacedDrafter(drafter, target.times, self.clock) for by, drafter in drafters.items()
        }
        super().__init__(Engine(target, drafters=paced, chooser=chooser))
        self.engine.clock = self.engine.cost_clock = self.clock

    @property
    def has_work(self) -> bool:
        return bool(self.engine.running or self.engine.waiting)

    def step(self) -> Step:
        began_s = self.clock.now_s
        step = super().step()
        self.busy_s += self.clock.now_s - began_s
        return step

    def remove(self, key: SampleKey) -> Prompt | None:
        prompt = super().remove(key)
        self.num_emptied += prompt is not None and not self.has_work
        return prompt


@dataclass(slots=True)
class Way:
    """Method and result of one batch."""

    seconds: float = 0.0
    """Seconds until the last engine had finished."""
    rollouts: dict[SampleKey, Rollout] = field(default_factory=dict)
    moves: Counter[SampleKey] = field(default_factory=Counter)
    num_emptied: int = 0
    """Engines that were idle after they had given a sample away."""
    busy_share: float = 0.0
    copies_s: list[float] = field(default_factory=list)
    arms: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class World:
    """Nodes, and the time of the one that is furthest behind."""

    nodes: Sequence[Node]
    now_s: float = 0.0
    way: Way = field(default_factory=Way)

    def run(self, reallocator: Reallocator | None) -> Way:
        """Run until all have finished their samples. reallocator: over these nodes, on this world's time."""
        look_s = LOOK_S
        while busy := [node for node in self.nodes if node.has_work]:
            node = min(busy, key=lambda node: node.clock.now_s)
            self.now_s = max(self.now_s, node.clock.now_s)
            if reallocator is not None and self.now_s >= look_s:
                self._look(reallocator)
                look_s = self.now_s + LOOK_S
                continue
            for rollout in node.step().finished:
                self._ended(rollout, reallocator)
        return self._told()

    def _look(self, reallocator: Reallocator) -> None:
        for move in reallocator.rebalance():
            self.way.moves[move.key] += 1
            # A sample that left in the middle of a step arrives when the step has ended.
            source, target = self.nodes[move.source].clock, self.nodes[move.target].clock
            target.now_s = max(target.now_s, source.now_s, self.now_s)

    def _ended(self, rollout: Rollout, reallocator: Reallocator | None) -> None:
        key = rollout.prompt.rollout, rollout.prompt.sample
        if key in self.way.rollouts:
            raise RuntimeError(f"sample {key} was made twice")
        self.way.rollouts[key] = rollout
        if reallocator is not None:
            reallocator.record_finished(rollout)

    def _told(self) -> Way:
        way, nodes = self.way, self.nodes
        way.seconds = max(node.clock.now_s for node in nodes)
        way.num_emptied = sum(node.num_emptied for node in nodes)
        way.busy_share = sum(node.busy_s for node in nodes) / (len(nodes) * way.seconds)
        way.copies_s = [copy_s for node in nodes for copy_s in node.target.copies_s]
        for node in nodes:
            way.arms += node.engine.meters.arms
        return way


# -- measurements, tables and bars


ABOUT = "The last of a batch's rollouts over four engines, with and without moving and speculation."
METHOD = (
    "Four engines with a real policy in virtual time: each computation takes what it was measured to take"
    " here (one thread); moved samples bring their keys and values.",
    "Every batch is made in all ways; ratios to the plain engines that keep their samples, median over"
    " batches [95 % by bootstrap].",
)
ENGINES = 4
MAX_TOKENS = 1024
MOVED, SPECULATED, MOST_MOVES = 0.85, 1.25, 2
WAYS = {"plain": (False, False), "plain, moving": (True, False)}
WAYS |= {"speculating": (False, True), "speculating, moving": (True, True)}
"""Whether samples move; whether drafters are asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings. An engine is dealt `groups` prompts with `group_size` samples each."""

    size: Size = "10m"
    root: Path = ROOT
    batches: int = 6
    """After the first one."""
    rows: int = 16
    groups: int = 4
    group_size: int = 8
    quick: bool = False

    @property
    def recipe(self) -> Recipe:
        if self.quick:
            return Recipe(policy=Policy(size="quick", minutes=0.3), num_tokens=40_000, minutes=0.1)
        return Recipe(policy=Policy(size=self.size))


class Field:
    """Policy, memory and drafter of the four engines, and what each way has learned so far."""

    def __init__(self, plan: Plan) -> None:
        path = drafter_ready(plan.recipe, plan.root)
        self.plan, self.model = plan, load(plan.recipe.policy, plan.root)
        self.layer = DraftLayer.load(path, self.model)
        self.times = self._measured()
        sizes = {"rows": plan.rows, "max_tokens": MAX_TOKENS}
        self.targets = [PacedTarget(self.model, **sizes, times=self.times) for _ in range(ENGINES)]
        arms = [parse_arm(arm) for arm in ARMS]
        self.choosers = {way: [Goodput(arms) for _ in range(ENGINES)] for way in WAYS}
        self.past: list[Rollout] = []

    def _measured(self) -> Times:
        target = Target.of(self.model, rows=self.plan.rows, max_tokens=MAX_TOKENS, nodes=NODES)
        return measured(target, self._drafters(target))

    def _drafters(self, target: Target) -> dict[DrafterKind, Drafter]:
        return {"layer": LayerDrafter.of(self.layer, target), "suffix": SuffixDrafter()}

    def make(self, name: str, dealt: Sequence[Sequence[Prompt]]) -> Way:
        """Make one batch in one way."""
        moves, speculates = WAYS[name]
        nodes = []
        for target, chooser in zip(self.targets, self.choosers[name], strict=True):
            asked = (self._drafters(target), chooser) if speculates else ({}, None)
            nodes.append(Node(target, *asked))
        for node, mine in zip(nodes, dealt, strict=True):
            for prompt in mine:
                node.add(prompt)
        world = World(nodes)
        if not moves:
            return world.run(None)
        reallocator = Reallocator(dict(enumerate(nodes)), clock=lambda: world.now_s)
        for rollout in self.past:
            reallocator.record_finished(rollout)
        return world.run(reallocator)


def deal(plan: Plan, batch: int) -> list[list[Prompt]]:
    """Return the samples of each engine: every prompt goes to the next one with all of its group."""
    dealt: list[list[Prompt]] = [[] for _ in range(ENGINES)]
    texts = prompts(plan.recipe.policy, ENGINES * plan.groups, seed=7000 + batch)
    for i, tokens in enumerate(texts):
        group = batch * len(texts) + i
        stop = (ByteTokenizer().eos_id,)
        sampling = Sampling(max_new_tokens=MAX_TOKENS - len(tokens), stop_tokens=stop)
        dealt[i % ENGINES] += [
            Prompt(tokens=tokens, rollout=group, sample=sample, group=group, sampling=sampling)
            for sample in range(plan.group_size)
        ]
    return dealt


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch in all ways."""

    ways: dict[str, Way]
    same: Same
    """Tokens of the other ways against plain ones that stay."""

    def ratio(self, name: str, to: str = "plain") -> float:
        return self.ways[name].seconds / self.ways[to].seconds


def measure(plan: Plan, say: Callable[[str], None]) -> Report:
    field = Field(plan)
    found = []
    for number in range(1 + plan.batches):
        dealt = deal(plan, number)
        ways = {name: field.make(name, dealt) for name in WAYS}
        found.append(Batch(ways, _same(field.model, ways)))
        field.past += ways["plain"].rollouts.values()
        ratios = ", ".join(f"{name} {found[-1].ratio(name):.2f}" for name in list(WAYS)[1:])
        say(f"batch {number}: plain {ways['plain'].seconds:.2f} s; {ratios}")
    return report(found, field.times, plan)


def _same(model: PreTrainedModel, ways: dict[str, Way]) -> Same:
    first, *others = ways.values()
    pairs = [(first.rollouts[key], way.rollouts[key]) for way in others for key in first.rollouts]
    return Same.of(model, [a for a, _ in pairs], [b for _, b in pairs])


def report(found: Sequence[Batch], times: Times, plan: Plan) -> Report:
    learned = found[1:] or found
    lengths = [len(one.tokens) for batch in found for one in batch.ways["plain"].rollouts.values()]
    quantiles = torch.tensor(lengths, dtype=torch.float64).quantile(
        torch.tensor([0.5, 0.99], dtype=torch.float64)
    )
    bars = [*_bars(learned), *_pauses(learned, times), _same_bar(found)]
    return Report(
        name=f"{ENGINES} engines, each {plan.rows} rows, {plan.groups} prompts x {plan.group_size} samples;"
        f" lengths p50 {quantiles[0]:.0f}, p99 {quantiles[1]:.0f}",
        method=METHOD,
        columns=("way", "seconds", "of plain", "first batch", "busy", "moves", "most", "copy ms", "arms"),
        rows=tuple(_row(name, found[0], learned) for name in WAYS),
        bars=tuple(Bar(bar.text, None) for bar in bars) if plan.quick else tuple(bars),
        figures=_figures(found, times, lengths),
    )


def _row(name: str, first: Batch, batches: Sequence[Batch]) -> tuple[str, ...]:
    ways = [batch.ways[name] for batch in batches]
    copies_s = [copy_s for way in ways for copy_s in way.copies_s]
    arms = sum((way.arms for way in ways[1:]), ways[0].arms.copy())
    often = ", ".join(f"{arm} {percent(n / arms.total(), 0)}" for arm, n in arms.most_common(3))
    return (
        name,
        f"{median([way.seconds for way in ways]):.2f}",
        str(Interval.of([batch.ratio(name) for batch in batches])),
        f"{first.ratio(name):.2f}",
        percent(median([way.busy_share for way in ways]), 0),
        f"{median([way.moves.total() for way in ways]):.0f}",
        str(max(max(way.moves.values(), default=0) for way in ways)),
        f"{1e3 * median(copies_s):.2f}" if copies_s else "",
        often,
    )


def _bars(batches: Sequence[Batch]) -> list[Bar]:
    moving = Interval.of([batch.ratio("plain, moving") for batch in batches])
    both = Interval.of([batch.ratio("speculating, moving", "speculating") for batch in batches])
    faster = Interval.of([1 / batch.ratio("speculating") for batch in batches])
    ways = [way for batch in batches for way in batch.ways.values()]
    emptied = sum(way.num_emptied for way in ways)
    most = max(max(way.moves.values(), default=0) for way in ways)
    return [
        Bar(f"moving over staying: {moving}, bar {MOVED}", moving.middle <= MOVED),
        Bar(f"moving over staying, speculating: {both}, bar {MOVED}", both.middle <= MOVED),
        Bar(f"speculating: {faster} x sooner, bar {SPECULATED}", faster.middle >= SPECULATED),
        Bar(f"engines that gave their last sample away: {emptied}, bar 0", emptied == 0),
        Bar(f"moves of a sample: at most {most}, bar {MOST_MOVES}", most <= MOST_MOVES),
    ]


def _pauses(batches: Sequence[Batch], times: Times) -> list[Bar]:
    """Return the bars for pauses: a receiver stops for the copy only, between two steps."""
    copies_s = [copy_s for batch in batches for way in batch.ways.values() for copy_s in way.copies_s]
    if not copies_s:
        return []
    longest_ms, step_ms = 1e3 * max(copies_s), 1e3 * times.step(1, 0)
    return [Bar(f"longest copy: {longest_ms:.2f} ms, bar a step of {step_ms:.2f} ms", longest_ms <= step_ms)]


def _same_bar(found: Sequence[Batch]) -> Bar:
    same = sum((batch.same for batch in found), Same())
    text = f"{same.tokens} tokens are equal in all ways, {same.ties} near ties of fp32 apart"
    return Bar(f"{text}; other differences: {same.differences}, bar 0", same.differences == 0)


def _figures(found: Sequence[Batch], times: Times, lengths: Sequence[int]) -> dict[str, Any]:
    def told(way: Way) -> dict[str, Any]:
        moves = {"moves": way.moves.total(), "emptied": way.num_emptied, "copies_s": way.copies_s}
        return {"seconds": way.seconds, "busy": way.busy_share, "arms": dict(way.arms), **moves}

    return {
        "batches": [{name: told(way) for name, way in batch.ways.items()} for batch in found],
        "pass_s": {"rows": times.rows, "nodes": times.nodes, "seconds": times.pass_s},
        "draft_s": dict(times.draft_s),
        "prefill_s": times.prefill_s,
        "copy_s": times.copy_s,
        "lengths": list(lengths),
    }


def _options(parser: argparse.ArgumentParser) -> None:
    usual = Plan()
    parser.add_argument("--size", choices=get_args(Size), default=usual.size)
    parser.add_argument("--batches", type=int, default=usual.batches, help="after the first one")
    parser.add_argument("--root", type=Path, default=usual.root, help="where policies are kept")


def _asked(args: argparse.Namespace) -> Report:
    small: dict[str, Any] = {"batches": 1, "rows": 4, "groups": 2, "group_size": 3}
    plan = Plan(size=args.size, root=args.root, quick=args.quick, batches=args.batches)
    torch.set_num_threads(1)
    return measure(replace(plan, **small) if args.quick else plan, Console(stderr=True).print)


if __name__ == "__main__":
    main("tail", ABOUT, _asked, options=_options)
