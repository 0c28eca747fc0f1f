"""The arm by trial: bucketed epsilon-greedy, Algorithm 1 of TLT (arXiv:2511.16665), with off among the arms.

Arms are grouped by the tokens they verify, most first, and the groups go to buckets of live rows, fewest
first: few rows leave room to verify much. Each bucket also has the arm off. The reward of a step is what it
emitted over all its seconds, with drafting and switching; an arm is worth the median of its newest rewards in
the bucket; with probability epsilon any of the bucket's arms is tried.

As a guard it chooses nothing, and refuses what another chooser expects too much of.
"""

import random
from collections import deque
from collections.abc import Sequence
from statistics import median

from aedit.spec_rollout.arms.arms import BUCKETS, EngineView, StepObservation, bucket, num_real_nodes
from aedit.spec_rollout.arms.time_model import MIN_S
from aedit.spec_rollout.drafters.drafts import OFF, Arm, Draft
from aedit.types import check

EPSILON = 0.1
WINDOW = 300
"""Newest rewards of an arm that count."""

REJECT_RATIO = 0.95
"""Of plain decoding's worth: an arm below is refused by a guard."""

MIN_REWARDS = 32
"""Rewards that an arm must have got before it can be refused."""


class Bandit:
    """Chooses by rewards alone. All ranks that are told the same, with the same seed, choose the same.

    arms: of any number and kind; off is added. ValueError if there is none, or epsilon or window is out of
    range.
    """

    def __init__(
        self, arms: Sequence[Arm], *, epsilon: float = EPSILON, window: int = WINDOW, seed: int = 0
    ) -> None:
        check(any(not arm.is_off for arm in arms), "arms", "must have one that is not off", len(arms))
        check(0 <= epsilon <= 1, "epsilon", "must be from 0 to 1", epsilon)
        check(window > 0, "window", "must be above 0", window)
        self.arms = by_bucket(arms)
        """Of each bucket, off last."""
        self._epsilon, self._window, self._random = epsilon, window, random.Random(seed)
        self._rewards: dict[tuple[int, Arm], deque[float]] = {}

    def choose(self, view: EngineView) -> Arm:
        first = bucket(view.rows)
        arms = [arm for arm in self.arms[first] if view.has(arm)]
        if len(arms) == 1:
            return arms[0]
        if self._random.random() < self._epsilon:
            return self._random.choice(arms)
        return max(arms, key=lambda arm: self.median_reward(first, arm))

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        """A bandit's arm is verified as it is, but for nodes that no row has."""
        return num_real_nodes(draft)

    def learn(self, observed: StepObservation) -> None:
        self.add(bucket(observed.view.rows), observed.arm, observed.emitted / max(observed.total_s, MIN_S))

    def add(self, first: int, arm: Arm, reward: float) -> None:
        """What a step of the arm has brought in the bucket."""
        self._rewards.setdefault((first, arm), deque(maxlen=self._window)).append(reward)

    def median_reward(self, first: int, arm: Arm) -> float:
        """Tokens per second in the bucket of so many rows; infinite for an arm that was never played."""
        rewards = self._rewards.get((first, arm))
        return median(rewards) if rewards else float("inf")

    def rejects(self, first: int, arm: Arm) -> bool:
        """As a guard of another chooser: whether the arm was clearly worse than off here. With each time that
        it is refused its oldest reward is forgotten, so that it is played again one day."""
        rewards = self._rewards.get((first, arm), ())
        if arm.is_off or len(rewards) < MIN_REWARDS or (first, OFF) not in self._rewards:
            return False
        rejected = self.median_reward(first, arm) < REJECT_RATIO * self.median_reward(first, OFF)
        if rejected:
            self._rewards[first, arm].popleft()
        return rejected

    def forget_drafter(self, kind: str) -> None:
        """Rewards of a drafter's arms."""
        self._rewards = {key: rewards for key, rewards in self._rewards.items() if key[1].drafter != kind}


def by_bucket(arms: Sequence[Arm]) -> dict[int, list[Arm]]:
    """Which arms each of `BUCKETS` has: groups of equal verified tokens, most first, one bucket after the
    other; the last group has the rest of the buckets, and the last bucket the rest of the groups. Off is
    last."""
    sizes = sorted({arm.nodes for arm in arms if not arm.is_off}, reverse=True)
    groups = [[arm for arm in arms if arm.nodes == size and not arm.is_off] for size in sizes]
    found = {}
    for i, first in enumerate(BUCKETS):
        bucket_arms = groups[min(i, len(groups) - 1)]
        if i == len(BUCKETS) - 1:
            bucket_arms = [arm for group in groups[min(i, len(groups) - 1) :] for arm in group]
        found[first] = [*bucket_arms, OFF]
    return found
