"""Measure rollouts on one GPU: decoding against its memory bandwidth, and the gain of speculation.

    python -m benchmarks.rollout_gpu [--size 100m] [--minutes M] [--batches 1,2,4] [--quick]

Three parts: decoding one sample with a model of the shape of Qwen3-0.6B (gpu_decode); what
`benchmarks.rollout` measures, for a policy and a drafter trained here, on the GPU; and the memory of the
recorded graphs. Needs a CUDA device.
"""

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rich.console import Console
from torch import nn

from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, parse_arm
from aedit.spec_rollout.model import Target
from benchmarks.kit import tables
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.tables import Report
from benchmarks.policies import ROOT, Kind, Policy, load
from benchmarks.policies import Size as PolicySize
from benchmarks.rollout import Found, whole_numbers
from benchmarks.rollout_parts import gpu_decode as decoding
from benchmarks.rollout_parts.cells import Size, measure_cell
from benchmarks.rollout_parts.stream import FIXED, Cast, Contestant, engine_of, random_layer, stream
from benchmarks.rollout_parts.tables import line
from benchmarks.rollout_parts.theirs import Theirs, without_stop

ABOUT = "Decoding and speculation on one GPU."
BATCHES = (1, 2, 4, 8, 16, 32, 64)
FULL = Size(repeats=5, turn_tokens=128, their_tokens=96, their_repeats=2, drains=1, drain_rows=64)
QUICK = Size(repeats=1, turn_tokens=16, their_tokens=16, their_repeats=1, drains=1, drain_rows=8)
FULL_LENGTH = decoding.Length()
QUICK_LENGTH = decoding.Length(prompt=16, new=24, repeats=2, copied_bytes=1 << 26)
MIB = decoding.MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement, with the device."""

    recipe: Recipe
    """Of the drafter, and so of its policy."""
    device: str = "cuda"
    root: Path = ROOT
    batches: tuple[int, ...] = BATCHES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    size: Size = FULL
    length: decoding.Length = FULL_LENGTH


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory of an engine's graphs after a turn with all arms."""

    rows: int
    num_policy: int
    num_drafter: int
    graph_bytes: int
    kv_bytes: int


def cast_on(plan: Plan) -> Cast:
    """Return policy and drafter on the plan's device, in fp32; train them if they do not exist."""
    path = drafter_ready(plan.recipe, plan.root)
    model = load(plan.recipe.policy, plan.root)
    module: nn.Module = model
    module.to(plan.device)
    return Cast(plan.recipe.policy, model, DraftLayer.load(path, model), random_layer(model))


def speculate(plan: Plan, cast: Cast, say: Callable[[str], None]) -> Found:
    """Measure each temperature and batch, without assisted generation, for lack of a smaller policy."""
    found = Found()
    for temperature in plan.temperatures:
        model = without_stop(cast.model)
        theirs = Theirs(cast.policy, model, None, plan.size.their_tokens, temperature)
        for rows in plan.batches:
            found.cells.append(measure_cell(cast, theirs, rows, plan.size))
            say(line(found.cells[-1]))
    return found


def pools(cast: Cast, batches: Sequence[int], turn_tokens: int) -> list[Pool]:
    """Return the graph memory of an engine that chooses among all arms, for each batch."""
    return [_pool(cast, rows, turn_tokens) for rows in batches]


def memory(found: Sequence[Pool]) -> Report:
    """Return the table of graph memory."""
    rows = [
        (
            str(one.rows),
            str(one.num_policy),
            str(one.num_drafter),
            f"{one.graph_bytes / MIB:.0f}",
            f"{one.kv_bytes / MIB:.0f}",
        )
        for one in found
    ]
    columns = ("batch", "graphs of the policy", "of the drafter", "their MiB", "KV cache, MiB")
    return Report(
        "memory of recorded graphs", (), columns, tuple(rows), (), {"pools": [asdict(one) for one in found]}
    )


def _pool(cast: Cast, rows: int, turn_tokens: int) -> Pool:
    gc.collect()
    engine = engine_of(cast, rows, cast.layer, Goodput([parse_arm(name) for name in FIXED]))
    Contestant("adaptive", engine, stream(cast.policy, 1.0, seed=2)).turn(turn_tokens * rows)
    drafter = engine.drafters["layer"]
    assert isinstance(drafter, LayerDrafter)
    assert isinstance(engine.target, Target)
    both = [graphs for graphs in (engine.target.graphs, drafter.graphs) if graphs is not None]
    sizes = [len(graphs) for graphs in both] or [0, 0]
    num_bytes = sum(graphs.num_bytes for graphs in both)
    return Pool(rows, sizes[0], sizes[1], num_bytes, engine.target.kv_bytes_reserved)


def measure(plan: Plan, sizes: dict[str, Any], quick: bool) -> list[Report]:
    """Run all three parts. sizes: of the model that only decodes."""
    decoded = decoding.decode(decoding.random_model(sizes, torch.device(plan.device)), plan.length)
    gc.collect()
    cast = cast_on(plan)
    found = speculate(plan, cast, Console(stderr=True).print)
    held = memory(pools(cast, plan.batches, plan.size.turn_tokens))
    return [decoding.report(decoded, quick), *found.reports(quick), held]


def _plan(args: argparse.Namespace) -> Plan:
    if args.quick:
        policy = Policy(task=args.task, size="quick", minutes=0.2)
        recipe = Recipe(policy=policy, num_tokens=40_000, minutes=0.1)
        batches = args.batches or (1, 4)
        return Plan(recipe=recipe, root=args.root, batches=batches, size=QUICK, length=QUICK_LENGTH)
    policy = Policy(task=args.task, size=args.size, minutes=args.minutes)
    recipe = Recipe(policy=policy, minutes=args.drafter_minutes)
    return Plan(recipe=recipe, root=args.root, batches=args.batches or BATCHES)


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=get_args(Kind), default="scratchpad", help="of the policy that is trained")
    add("--size", choices=get_args(PolicySize), default="100m", help="of the policy that is trained")
    add("--minutes", type=float, default=15.0, help="of its training")
    add("--drafter-minutes", type=float, default=4.0, help="of its drafter's")
    add("--batches", type=whole_numbers, metavar="B,B,...", help=f"usually {','.join(map(str, BATCHES))}")
    add("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report] | str:
    if not torch.cuda.is_available():
        return "needs a CUDA device: not run"
    return measure(_plan(args), decoding.QWEN3_600M, args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("rollout_gpu", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
