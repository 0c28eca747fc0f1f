"""Measure the share of bf16 weights that differ from one policy version to the next.

    python -m benchmarks.rl_patches [--steps 16] [--size 10m] [--minutes M] [--quick]

GRPO steps on scratchpad arithmetic, as in `benchmarks.rl_speed`, at three learning rates. A run that sends
policies to servers sends the weights that changed, from whatever version a server has.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from aedit.spec_rollout.sampling.samples import Rollout
from benchmarks.drift_parts.policy import Mover, policy_gradient
from benchmarks.drift_parts.policy import reward as letters
from benchmarks.kit.statistics import median, percent
from benchmarks.kit.tables import Report, main
from benchmarks.policies import ROOT, Policy, load
from benchmarks.policies import Size as PolicySize
from benchmarks.rl_speed import FULL, QUICK
from benchmarks.rl_speed_parts.dealing import Size, deal, rewarded
from benchmarks.rl_speed_parts.steps import Node, Spent

ABOUT = "Share of bf16 weights that change per policy version, by learning rate."
RATES = (1e-6, 1e-5, 1e-4)
Reward = Callable[[Rollout], float]
MOST_BATCHES = 8
"""Batches per version, beyond which a policy that learns nothing is an error."""
APART = (1, 2, 4, 8)
"""Versions between the two that are compared."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Versions of a run with one learning rate."""

    lr: float
    changed: Mapping[int, tuple[float, ...]]
    """Shares of the weights that differ, by the number of versions between."""
    bits: float
    """Mean of the share in fp32 from one version to the next."""


def move(size: Size, lr: float, steps: int, root: Path, reward: Reward = rewarded) -> Moved:
    """Take steps of reinforcement learning; compare the versions before and after each."""
    model = load(size.policy, root)
    node, mover, number = Node(model, size, None), Mover(model, lr), 0
    fp32, versions = [_weights(model)], [_weights(model).bfloat16()]
    while len(versions) <= steps:
        lessons = policy_gradient(node.generate(deal(size, 0, number, 0), Spent()), reward)
        number += 1
        if number > MOST_BATCHES * steps:
            raise RuntimeError(f"{number} batches gave {len(versions) - 1} of {steps} policy versions")
        if not lessons:
            continue  # all groups were without signal: no step, and no version
        mover.learn(lessons)
        node.follow(number, Spent())
        fp32 = [*fp32[-1:], _weights(model)]
        versions.append(fp32[-1].bfloat16())
    return Moved(lr, changed(versions), _differ(*fp32))


def changed(versions: Sequence[Tensor]) -> dict[int, tuple[float, ...]]:
    """Return the shares of values that differ between two versions, by their distance."""
    return {
        apart: tuple(_differ(a, b) for a, b in zip(versions, versions[apart:], strict=False))
        for apart in APART
        if apart < len(versions)
    }


def _differ(before: Tensor, after: Tensor) -> float:
    return float((before != after).double().mean())


def _weights(model: torch.nn.Module) -> Tensor:
    """Return a copy of all parameters in one row; tied ones once."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def report(size: Size, found: Sequence[Moved], steps: int) -> Report:
    return Report(
        name=f"Share of bf16 weights that differ between policy versions, median over {steps} versions",
        method=(
            f"GRPO with AdamW, {size.groups} prompts x {size.samples} samples per step, {size.policy.size}"
            " policy of scratchpad arithmetic; fp32 weights, cast to bf16.",
            "Lowest and highest in brackets; the last column: fp32 weights that differ after one step.",
        ),
        columns=("learning rate", *(f"{n} apart" for n in APART), "fp32"),
        rows=tuple(_row(one) for one in found),
        bars=(),
        figures={f"{one.lr:g}": {str(n): shares for n, shares in one.changed.items()} for one in found},
    )


def _row(one: Moved) -> tuple[str, ...]:
    shares = [one.changed.get(apart) for apart in APART]
    texts = [
        f"{percent(median(s), 2)} [{percent(min(s), 2)}, {percent(max(s), 2)}]" if s else "" for s in shares
    ]
    return f"{one.lr:g}", *texts, percent(one.bits)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=16, help="versions after the first")
    parser.add_argument("--size", choices=get_args(PolicySize), default=FULL.size.policy.size)
    parser.add_argument(
        "--minutes", type=float, default=FULL.size.policy.minutes, help="of the policy's training"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> Report:
    torch.set_num_threads(1)
    size, steps = QUICK.size, 2
    reward: Reward = letters
    if not args.quick:
        size = replace(FULL.size, policy=Policy(size=args.size, minutes=args.minutes))
        steps, reward = args.steps, rewarded
    found = []
    for lr in RATES[-1:] if args.quick else RATES:
        found.append(move(size, lr, steps, args.root, reward))
        print(f"lr {lr:g}: {percent(median(found[-1].changed[1]), 2)} per version", file=sys.stderr)
    return report(size, found, steps)


if __name__ == "__main__":
    main("rl_patches", ABOUT, _asked, options=_options)
