"""Bucketed epsilon-greedy bandit, Algorithm 1 of TLT (arXiv:2511.16665), with off among the arms.

Arms are grouped by the number of tokens that they verify, most first, and the groups are assigned to buckets
of running rows, fewest first: with few rows, verification is cheap. Each bucket also has the arm off. The
reward of a step is its number of emitted tokens over its seconds, with drafting and switching. The value of
an arm is the median of its newest rewards in the bucket. With probability epsilon any of the bucket's arms is
chosen.

As a guard, it vetoes arms that another chooser overestimates.
"""

import random
from collections import deque
from collections.abc import Sequence
from statistics import median

from aedit.spec_rollout.choose.arms import BUCKETS, EngineView, StepObservation, bucket, num_real_nodes
from aedit.spec_rollout.choose.cost import MIN_S
from aedit.spec_rollout.drafters import OFF, Arm, Draft
from aedit.types import check

EPSILON = 0.1
"""Probability of a random arm."""
WINDOW = 300
"""Number of newest rewards of an arm that count."""

REJECT_RATIO = 0.95
"""A guard rejects an arm whose value is below this share of plain decoding's."""

MIN_REWARDS = 32
"""Number of rewards that an arm must have before it can be rejected."""


class Bandit:
    """Chooses by rewards alone. With the same observations and seed, all ranks choose the same arms."""

    def __init__(
        self, arms: Sequence[Arm], *, epsilon: float = EPSILON, window: int = WINDOW, seed: int = 0
    ) -> None:
        """Make a bandit.

        Args:
            arms: Arms of any number and kind; off is added.
            epsilon: Probability of a random arm.
            window: Number of newest rewards of an arm that count.
            seed: Seed of the random choices.

        Raises:
            ValueError: No arm is given, or epsilon or window is out of range.
        """
        check(any(not arm.is_off for arm in arms), "arms", "must have one that is not off", len(arms))
        check(0 <= epsilon <= 1, "epsilon", "must be from 0 to 1", epsilon)
        check(window > 0, "window", "must be above 0", window)
        self.arms = by_bucket(arms)
        """Arms of each bucket, off last."""
        self._epsilon, self._window, self._random = epsilon, window, random.Random(seed)
        self._rewards: dict[tuple[int, Arm], deque[float]] = {}

    def choose(self, view: EngineView) -> Arm:
        """Return the arm of the next step."""
        first = bucket(view.rows)
        arms = [arm for arm in self.arms[first] if view.has(arm)]
        if len(arms) == 1:
            return arms[0]
        if self._random.random() < self._epsilon:
            return self._random.choice(arms)
        return max(arms, key=lambda arm: self.median_reward(first, arm))

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        """Return the number of real nodes: a bandit does not trim drafts."""
        return num_real_nodes(draft)

    def learn(self, observed: StepObservation) -> None:
        """Add the reward of a step."""
        self.add(bucket(observed.view.rows), observed.arm, observed.emitted / max(observed.total_s, MIN_S))

    def add(self, first: int, arm: Arm, reward: float) -> None:
        """Add a reward of the arm in the bucket `first`."""
        self._rewards.setdefault((first, arm), deque(maxlen=self._window)).append(reward)

    def median_reward(self, first: int, arm: Arm) -> float:
        """Return the median reward of the arm in the bucket, in tokens per second.

        It is infinite for an arm that was never chosen there.
        """
        rewards = self._rewards.get((first, arm))
        return median(rewards) if rewards else float("inf")

    def rejects(self, first: int, arm: Arm) -> bool:
        """Return true if the arm was clearly worse than off in this bucket.

        Each rejection drops the arm's oldest reward, so that it is tried again later.
        """
        rewards = self._rewards.get((first, arm), ())
        if arm.is_off or len(rewards) < MIN_REWARDS or (first, OFF) not in self._rewards:
            return False
        rejected = self.median_reward(first, arm) < REJECT_RATIO * self.median_reward(first, OFF)
        if rejected:
            self._rewards[first, arm].popleft()
        return rejected

    def forget_drafter(self, kind: str) -> None:
        """Drop all rewards of a drafter's arms."""
        self._rewards = {key: rewards for key, rewards in self._rewards.items() if key[1].drafter != kind}


def by_bucket(arms: Sequence[Arm]) -> dict[int, list[Arm]]:
    """Return the arms of each of `BUCKETS`, off last.

    Groups of arms with equal numbers of verified tokens, most first, go to the buckets in order. The last
    group serves the remaining buckets, and the last bucket takes the remaining groups.
    """
    sizes = sorted({arm.nodes for arm in arms if not arm.is_off}, reverse=True)
    groups = [[arm for arm in arms if arm.nodes == size and not arm.is_off] for size in sizes]
    found = {}
    for i, first in enumerate(BUCKETS):
        bucket_arms = groups[min(i, len(groups) - 1)]
        if i == len(BUCKETS) - 1:
            bucket_arms = [arm for group in groups[min(i, len(groups) - 1) :] for arm in group]
        found[first] = [*bucket_arms, OFF]
    return found
