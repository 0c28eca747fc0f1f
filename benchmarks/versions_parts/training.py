"""Versions of a policy that learns by reinforcement, as bit patterns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from aedit.proto.versions import Patterns, patterns
from aedit.spec_rollout.sampling import Rollout
from benchmarks.drift import Mover, policy_gradient
from benchmarks.policies import load
from benchmarks.rl_speed import Node, Size, Spent, deal, rewarded

Reward = Callable[[Rollout], float]
MOST_BATCHES = 8
"""Batches per version, beyond which a policy that learns nothing is an error."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Consecutive versions of a run with one learning rate, each with all parameters in one row."""

    lr: float
    versions: Sequence[Patterns]


def train(size: Size, lr: float, steps: int, root: Path, reward: Reward = rewarded) -> Trained:
    """Take steps of reinforcement learning and return the versions before and after each, in bf16."""
    model = load(size.policy, root)
    node, mover, number = Node(model, size, None), Mover(model, lr), 0
    versions = [weights(model)]
    while len(versions) <= steps:
        lessons = policy_gradient(node.generate(deal(size, 0, number, 0), Spent()), reward)
        number += 1
        if number > MOST_BATCHES * steps:
            raise RuntimeError(f"{number} batches gave {len(versions) - 1} of {steps} policy versions")
        if not lessons:
            continue  # all groups were without signal: no step, and no version
        mover.learn(lessons)
        node.follow(number, Spent())
        versions.append(weights(model))
    return Trained(lr, versions)


def weights(model: torch.nn.Module) -> Patterns:
    """Return all parameters in one row, in bf16; tied ones once."""
    return patterns(np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters()]), "bf16")
