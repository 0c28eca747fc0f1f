"""Expected accepted length of a drafter's arms, before drafting.

Per depth j, the probability that node j is accepted if node j - 1 was, over all rows, including rows without
a draft. So a chain of 8 also tells what a chain of 4 would have brought. Trees have means of their own, with
the chain of their depth as prior. Observations decay with time and with a new version of the drafter; an
uncertain estimate is worth a trial.
"""

import math

import numpy as np
from numpy.typing import NDArray

from aedit.spec_rollout.drafters import Arm

MEMORY_STEPS, MEMORY_ROWS = 150.0, 600.0
"""Steps and rows after which the weight of an old one is 1 / e, whichever come first."""

IDLE_MEMORY_STEPS = 3000.0
"""The same for steps in which the drafter was not used."""

VERSION_DECAY = 0.1
"""Weight of observations of older versions of the drafter."""

PRIOR_ROWS, PRIOR_CHANCE = 2.0, 0.5
"""Prior of the first node; deeper nodes have the estimate of the node before as prior."""

OPTIMISTIC_ROWS = 4.0
"""Accepted rows that an optimistic estimate adds to the observations."""

TREE_FACTOR = 1.1
"""Prior of a tree's accepted nodes, relative to the chain of its depth."""


class Survival:
    """Expected tokens of one drafter's arms."""

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._trees: dict[Arm, tuple[float, float]] = {}
        self.version: int | None = None
        """Version of the drafter; None before it is known."""

    @property
    def num_rows(self) -> float:
        """Return the weighted number of observed rows."""
        return self._reached[0] if self._reached else 0.0

    def set_version(self, version: int) -> None:
        """Set the drafter's version. Observations of another version decay."""
        if self.version is not None and version != self.version:
            self._fade(VERSION_DECAY)
        self.version = version

    def decay_idle(self, steps: int) -> None:
        """Decay the observations after this many steps without the drafter."""
        self._fade(math.exp(-steps / IDLE_MEMORY_STEPS))

    def learn(self, arm: Arm, survived_BN: NDArray[np.float64], steps: int = 1) -> None:
        """Add the outcome of some steps.

        Args:
            arm: Arm of the steps.
            survived_BN: For each row and node, 1 if the path to it was accepted, or the probability that it
                would have been.
            steps: Number of steps.
        """
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
        """Return the expected tokens per row and step, including the policy's own token: 1 or more."""
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
