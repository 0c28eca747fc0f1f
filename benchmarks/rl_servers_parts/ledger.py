"""Ledger of the samples that a trainer was given: each key once, and the same as in another run."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from aedit.spec_rollout.sampling import Prompt, Rollout

Key = tuple[int, int]
"""(rollout, sample)."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One finished sample."""

    tokens: tuple[int, ...]
    logprobs: bytes
    """Log-probabilities of the tokens as float32, which is what a trainer trains on."""
    versions: tuple[int, ...]
    """Policy version of each token."""
    finish_reason: str
    reward: float


@dataclass(slots=True)
class Ledger:
    """What was asked for, and what came."""

    asked: Counter[Key] = field(default_factory=Counter)
    came: Counter[Key] = field(default_factory=Counter)
    entries: dict[Key, Entry] = field(default_factory=dict)

    def ask(self, prompts: Iterable[Prompt]) -> None:
        """Note samples that are requested."""
        self.asked.update(prompt.key for prompt in prompts)

    def add(self, rollouts: Sequence[Rollout], rewards: Sequence[float]) -> None:
        """Note samples that have come."""
        for rollout, reward in zip(rollouts, rewards, strict=True):
            self.came[rollout.prompt.key] += 1
            self.entries[rollout.prompt.key] = Entry(
                tuple(rollout.tokens),
                np.asarray(rollout.logprobs, np.float32).tobytes(),
                tuple(rollout.versions),
                rollout.finish_reason,
                reward,
            )

    @property
    def num_lost(self) -> int:
        """Return the samples that were asked for and never came."""
        return (self.asked - self.came).total()

    @property
    def num_repeated(self) -> int:
        """Return the samples that came without being asked for, or once more."""
        return (self.came - self.asked).total()


@dataclass(frozen=True, slots=True)
class Difference:
    """Samples by which two runs differ."""

    compared: int
    missing: int
    """Samples of one run alone."""
    tokens: int
    """Samples with other tokens, or another end."""
    logprobs: int
    """With another log-probability, in any bit of float32."""
    versions: int
    rewards: int

    @property
    def any(self) -> int:
        """Return the sum."""
        return self.missing + self.tokens + self.logprobs + self.versions + self.rewards


def difference(ours: Mapping[Key, Entry], theirs: Mapping[Key, Entry]) -> Difference:
    """Return how the samples of two runs differ."""
    both = [(ours[key], theirs[key]) for key in ours.keys() & theirs.keys()]
    return Difference(
        compared=len(both),
        missing=len(ours.keys() ^ theirs.keys()),
        tokens=sum((a.tokens, a.finish_reason) != (b.tokens, b.finish_reason) for a, b in both),
        logprobs=sum(a.logprobs != b.logprobs for a, b in both),
        versions=sum(a.versions != b.versions for a, b in both),
        rewards=sum(a.reward != b.reward for a, b in both),
    )
