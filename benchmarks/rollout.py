"""Measure the speed of rollouts, and whether speculation ever slows them.

    python -m benchmarks.rollout [--task scratchpad|python] [--size 10m] [--batches 1,2,4] [--quick]

Policies and drafters are trained first if they do not exist (`benchmarks.policies`). Four parts, each a file
of rollout_parts/: stream (our arms on a stream of samples), theirs (beside `transformers`), drain (a batch to
its end), and bars (what is wanted of all that).
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch
import transformers
from rich.console import Console
from transformers import PreTrainedModel

from aedit.spec_rollout.drafters import DraftLayer
from benchmarks.kit import tables
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.tables import Bar, Report
from benchmarks.policies import ROOT, Kind, Policy, load, ready
from benchmarks.policies import Size as PolicySize
from benchmarks.rollout_parts import tables as rollout_tables
from benchmarks.rollout_parts.bars import bars, drain_bars
from benchmarks.rollout_parts.cells import Cell, Size, measure_cell
from benchmarks.rollout_parts.drain import Drain, drains
from benchmarks.rollout_parts.stream import Cast, random_layer
from benchmarks.rollout_parts.theirs import Theirs, without_stop

ABOUT = "Tokens per second of rollouts: plain, each arm, the choice among them, and transformers."
METHOD = (
    "All engines take turns at the same samples, in an order drawn for each repeat; ratios are taken within a"
    " repeat: median [95 % by bootstrap].",
    "A policy trained here; free rows take the next sample at once. The first repeat, in which the choice"
    " learns, counts for itself only.",
)
FULL = Size(repeats=9, turn_tokens=64, their_tokens=96, their_repeats=3, drains=3, drain_rows=64)
QUICK = Size(repeats=2, turn_tokens=16, their_tokens=16, their_repeats=1, drains=1, drain_rows=8)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    tasks: tuple[Kind, ...] = get_args(Kind)
    policy_size: PolicySize = "10m"
    batches: tuple[int, ...] = BATCHES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    root: Path = ROOT
    size: Size = FULL
    only: str | None = None
    """`batches` or `drain`; None is both."""
    quick: bool = False

    def policy(self, task: Kind) -> Policy:
        return (
            Policy(task=task, size="quick", minutes=0.3)
            if self.quick
            else Policy(task=task, size=self.policy_size)
        )

    def recipe(self, task: Kind) -> Recipe:
        policy = self.policy(task)
        return Recipe(policy=policy, num_tokens=40_000, minutes=0.1) if self.quick else Recipe(policy=policy)

    def assistant(self, task: Kind) -> Policy:
        """Return a smaller policy of the task, for assisted generation."""
        return Policy(task=task, size="quick", minutes=0.1 if self.quick else 2.0)


@dataclass(slots=True)
class Found:
    """Measurements so far."""

    cells: list[Cell] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    """Of scratchpad arithmetic: only its answers have ends."""

    @property
    def bars(self) -> list[Bar]:
        of_cells = [
            bar for task in dict.fromkeys(cell.task for cell in self.cells) for bar in bars(self.of(task))
        ]
        return of_cells + (drain_bars(self.drains) if self.drains else [])

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "cells": [cell.figures for cell in self.cells],
            "drains": [asdict(one) for one in self.drains],
        }

    def of(self, task: Kind) -> list[Cell]:
        return [cell for cell in self.cells if cell.task == task]

    def tables(self) -> Iterator[Report]:
        if self.cells:
            for make in (
                rollout_tables.speeds,
                rollout_tables.arms,
                rollout_tables.forecasts,
                rollout_tables.acceptance,
            ):
                yield make(self.cells)
        if self.drains:
            yield rollout_tables.drained(self.drains)

    def reports(self, quick: bool) -> list[Report]:
        """Return all tables, with the method before the first and the bars after the last."""
        bars = tuple(replace(bar, passed=None) if quick else bar for bar in self.bars)
        first, *rest = self.tables()
        end = Report("bars", (), (), (), bars, self.figures)
        return [replace(first, method=METHOD), *rest, end]


def measure(plan: Plan, say: Callable[[str], None]) -> Found:
    """Measure all cells and drains of a plan, one after the other. say: gets the progress messages."""
    found = Found()
    for task in plan.tasks:
        cast, assistant = _cast(plan, task, say)
        if plan.only != "drain":
            found.cells += _measured(plan, cast, assistant, say)
        if plan.only != "batches" and task == "scratchpad":
            found.drains = drains(cast, plan.size.drain_rows, 1 + plan.size.drains, max(plan.temperatures))
    return found


def _measured(
    plan: Plan, cast: Cast, assistant: PreTrainedModel, say: Callable[[str], None]
) -> Iterator[Cell]:
    """Yield all cells of one task."""
    num_tokens = plan.size.their_tokens
    for temperature in plan.temperatures:
        theirs = Theirs(cast.policy, without_stop(cast.model), assistant, num_tokens, temperature)
        for rows in plan.batches:
            cell = measure_cell(cast, theirs, rows, plan.size)
            say(rollout_tables.line(cell))
            yield cell


def _cast(plan: Plan, task: Kind, say: Callable[[str], None]) -> tuple[Cast, PreTrainedModel]:
    policy, recipe, smaller = plan.policy(task), plan.recipe(task), plan.assistant(task)
    for wanted in (policy, smaller):
        if not (plan.root / wanted.name).exists():
            say(f"training the policy {wanted.name}: {wanted.minutes:g} minutes")
        ready(wanted, plan.root)
    if not (plan.root / policy.name / recipe.name).exists():
        say(f"training a drafter of {policy.name}: {recipe.minutes:g} minutes and its rollouts")
    path, model = drafter_ready(recipe, plan.root), load(policy, plan.root)
    cast = Cast(policy, model, DraftLayer.load(path, model), random_layer(model))
    return cast, without_stop(load(smaller, plan.root))


def _plan(args: argparse.Namespace) -> Plan:
    usual = Plan(quick=args.quick, root=args.root)
    if args.quick:
        usual = replace(usual, size=QUICK, batches=(1, 4), temperatures=(1.0,), tasks=("scratchpad",))
    size = usual.size if args.seeds is None else replace(usual.size, repeats=args.seeds)
    return replace(
        usual,
        size=size,
        only=args.only,
        policy_size=args.size,
        tasks=usual.tasks if args.task is None else (args.task,),
        batches=args.batches or usual.batches,
        temperatures=args.temperatures or usual.temperatures,
    )


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse an option like 1,2,4. Raises ValueError if a number is below 1."""
    values = tuple(map(int, text.split(",")))
    if min(values) < 1:
        raise ValueError(text)
    return values


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(map(float, text.split(",")))
    if min(values) < 0:
        raise ValueError(text)
    return values


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=get_args(Kind), help="one of them instead of both")
    add("--size", choices=get_args(PolicySize), default="10m", help="of the policy")
    add("--only", choices=("batches", "drain"), help="one part of the measurement")
    add("--batches", type=whole_numbers, metavar="B,B,...", help=f"usually {','.join(map(str, BATCHES))}")
    add("--temperatures", type=_numbers, metavar="T,T,...", help="usually 0,1")
    add("--threads", type=int, default=1)
    add("--seeds", type=int, metavar="N", help="repeats of each cell, after the learning one")
    add("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report]:
    torch.set_num_threads(args.threads)
    logging: Any = transformers.logging  # it carries no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return measure(_plan(args), Console(stderr=True).print).reports(args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("rollout", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
