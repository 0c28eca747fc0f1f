"""Advantages of the rollouts of a group from their rewards, and the penalty for answers that are too long."""

import math
from collections.abc import Sequence
from typing import Literal

from aedit.types import check

Advantage = Literal["std", "mean", "leave-one-out"]

EQUAL = 1e-6
"""Rewards that differ by less, relative to the largest (at least 1), are equal: a weighted sum of rewards has
rounding errors, which division by the standard deviation would make as large as real differences."""


def has_signal(rewards: Sequence[float | None]) -> bool:
    """Return whether rewards of a group differ. With equal ones all advantages are 0: nothing is learned."""
    known = [reward for reward in rewards if reward is not None]
    return bool(known) and max(known) - min(known) > EQUAL * max(1.0, max(map(abs, known)))


def advantages(rewards: Sequence[Sequence[float | None]], kind: Advantage = "mean") -> list[list[float]]:
    """Return the advantage of each rollout of each group.

    `mean`: R - mean of the group (Dr. GRPO, arXiv:2503.20783). `std`: that over the sample standard deviation
    of the group (GRPO, arXiv:2402.03300). `leave-one-out`: R - mean of the others (RLOO, arXiv:2402.14740),
    which is n / (n - 1) times `mean`. A rollout whose reward is None has advantage 0 and no part in mean and
    standard deviation. A group without signal has advantages 0.

    Raises ValueError for an unknown kind or a reward that is not finite.
    """
    if kind not in ("std", "mean", "leave-one-out"):
        raise ValueError(f"advantage must be std, mean or leave-one-out, got {kind}")
    return [_of_group(group, number, kind) for number, group in enumerate(rewards)]


def _of_group(rewards: Sequence[float | None], number: int, kind: Advantage) -> list[float]:
    known = [reward for reward in rewards if reward is not None]
    if not all(map(math.isfinite, known)):
        raise ValueError(f"rewards of group {number} must be finite or None, got {list(rewards)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    n, mean = len(known), math.fsum(known) / len(known)
    scale = 1.0
    if kind == "std":
        scale = 1 / math.sqrt(math.fsum((reward - mean) ** 2 for reward in known) / (n - 1))
    elif kind == "leave-one-out":
        scale = n / (n - 1)
    return [0.0 if reward is None else scale * (reward - mean) for reward in rewards]


def overlong_penalty(num_tokens: int, max_tokens: int, window: int) -> float:
    """Return what is added to the reward of an answer of `num_tokens` tokens: 0 to -1.

    0 up to max_tokens - window, then falling linearly, -1 from max_tokens on (DAPO,
    arXiv:2503.14476). window 0: no penalty.
    """
    check(0 <= window <= max_tokens, "overlong", f"must be 0 to {max_tokens}, the longest answer", window)
    if window == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - window)) / window))
