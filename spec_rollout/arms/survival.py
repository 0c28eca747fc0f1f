"""How far a drafter's lines are accepted, before the drafter has been asked.

Per depth j the chance that node j is accepted if node j - 1 was, over all rows, those without a draft
included; so a chain of 8 also tells what a chain of 4 would have brought. Trees have means of their own,
which start from the chain of their depth. All of it fades: what was long ago, or of another version of the
drafter, is doubted, and what is doubted is worth a try.
"""

import math

import numpy as np
from numpy.typing import NDArray

from aedit.spec_rollout.drafters.drafts import Arm

MEMORY_STEPS, MEMORY_ROWS = 150.0, 600.0
"""Steps and rows after which the weight of an old one is 1 / e, whichever come first."""

IDLE_MEMORY_STEPS = 3000.0
"""The same for steps in which the drafter was not asked."""

VERSION_DECAY = 0.1
"""Weight of what an older version of the drafter has shown."""

PRIOR_ROWS, PRIOR_CHANCE = 2.0, 0.5
"""Before anything is known; deeper nodes are supposed to be as good as the one before."""

OPTIMISTIC_ROWS = 4.0
"""Accepted rows that a hopeful estimate adds to what was seen."""

TREE_FACTOR = 1.1
"""What a tree is supposed to bring, of the chain of its depth."""


class Survival:
    """What one drafter's arms are expected to bring."""

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._trees: dict[Arm, tuple[float, float]] = {}
        self.version: int | None = None
        """Of the drafter; None before it is known."""

    @property
    def num_rows(self) -> float:
        """Rows that what is known rests on, by weight."""
        return self._reached[0] if self._reached else 0.0

    def set_version(self, version: int) -> None:
        """The drafter's version from now on."""
        if self.version is not None and version != self.version:
            self._fade(VERSION_DECAY)
        self.version = version

    def decay_idle(self, steps: int) -> None:
        """So many steps without this drafter."""
        self._fade(math.exp(-steps / IDLE_MEMORY_STEPS))

    def learn(self, arm: Arm, survived_BN: NDArray[np.float64], steps: int = 1) -> None:
        """So many steps: by row and node, whether the policy has accepted the path to it (or how likely it
        would have)."""
        rows = len(survived_BN)
        kept = math.exp(-max(steps / MEMORY_STEPS, rows / MEMORY_ROWS))
        sums = survived_BN.sum(axis=0).tolist()
        if arm.is_chain:
            self._fade_chain(kept)
            self._add([rows, *sums[:-1]], sums)
        else:
            accepted, seen = self._trees.get(arm, (0.0, 0.0))
            self._trees[arm] = (kept * accepted + sum(sums), kept * seen + rows)

    def expected(self, arm: Arm, *, optimistic: bool = False) -> float:
        """Tokens of a row and step, with the policy's own: 1 or more."""
        chain = 1.0 + self._expected_chain(arm.depth, optimistic)
        if arm.is_chain:
            return chain
        accepted, seen = self._trees.get(arm, (0.0, 0.0))
        weight = OPTIMISTIC_ROWS if optimistic else PRIOR_ROWS
        return 1.0 + (accepted + weight * TREE_FACTOR * (chain - 1.0)) / (seen + weight)

    def _expected_chain(self, depth: int, optimistic: bool) -> float:
        expected, path = 0.0, 1.0
        prior_rows, prior = (OPTIMISTIC_ROWS, 1.0) if optimistic else (PRIOR_ROWS, PRIOR_CHANCE)
        for j in range(depth):
            has_data = j < len(self._reached)
            reached, accepted = (self._reached[j], self._accepted[j]) if has_data else (0.0, 0.0)
            probability = (accepted + prior_rows * prior) / (reached + prior_rows)
            path *= probability
            expected += path
            if not optimistic:
                prior = probability
        return expected

    def _add(self, reached: list[float], accepted: list[float]) -> None:
        missing = len(accepted) - len(self._reached)
        self._reached += [0.0] * missing
        self._accepted += [0.0] * missing
        for j, (more, survived) in enumerate(zip(reached, accepted, strict=True)):
            self._reached[j] += more
            self._accepted[j] += survived

    def _fade_chain(self, kept: float) -> None:
        self._reached = [kept * reached for reached in self._reached]
        self._accepted = [kept * accepted for accepted in self._accepted]

    def _fade(self, kept: float) -> None:
        self._fade_chain(kept)
        self._trees = {arm: (kept * a, kept * n) for arm, (a, n) in self._trees.items()}
