"""Measure when the last rollout of a batch ends: four engines, answers of very unequal length.

    python -m benchmarks.tail [--quick] [--size 10m] [--batches 6] [--root DIRECTORY] [--json FILE]

Each batch is made in four ways: samples stay where they are or move (`Reallocator`, with their keys and
values), plainly or speculating (`Goodput`). What has been seen in earlier batches is known in later ones, as
in a run of reinforcement learning; the first batch is told apart, as nothing is known in it.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from transformers import PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    parse_arm,
)
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.remote import Reallocator
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.policies import ROOT, Policy, Size, load, prompts
from benchmarks.rollout_parts.same import Same
from benchmarks.tail_parts.nodes import NODES, Node, PacedTarget, Way, World
from benchmarks.tail_parts.times import ARMS, Times, measured

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
        reallocator = Reallocator(nodes, clock=lambda: world.now_s)
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
