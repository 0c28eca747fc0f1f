"""Chooser of the arm with the most expected tokens per second (RLHFSpec), bounded below by plain decoding.

Before a step: expected tokens of each arm (`Survival`) over its expected seconds (`StepCost`: the pass,
drafting, and missing tokens of the drafter, spread over the steps that it will probably be used), corrected
by the measured over predicted time of the arm. The current arm is kept until another is clearly better; off
is chosen as soon as it is better at all.

After drafting: the number of nodes n with the largest E[tokens] - rate * seconds, at calibrated probabilities
(`AcceptanceCalibration`). There the rate cannot be improved (Dinkelbach; the time of drafting is spent
already).

Uncertain arms are tried in short trials if an optimistic estimate says that they may be better; plain
decoding is timed again now and then. The cost of trials, compared with the arm that would have been used, is
limited to half a percent of all time.

An arm that brought less than plain decoding, whatever was expected of it, is rejected (`Bandit.rejects`).

All decisions are functions of the observations in order, so that a log replays them and all ranks agree.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from aedit.spec_rollout.choose.arms import BUCKETS, EngineView, StepObservation, bucket, num_real_nodes
from aedit.spec_rollout.choose.calibration import DrafterStats
from aedit.spec_rollout.choose.cost import MIN_S, WINDOW, StepCost
from aedit.spec_rollout.drafters import OFF, Arm, Draft, parse_arm
from aedit.types import check, checked

EXPLORATION_SHARE = 0.005
"""Share of all time that trials may cost."""
INITIAL_BUDGET_STEPS = 4.0
"""Initial budget of trials, in plain steps."""
PLAIN_STEPS = 12
"""Plain steps of a new engine before any trial."""
COMPARE_STEPS = 8
"""Steps between comparisons of the arms while the rows do not change; fewer while the current arm is new."""
SWITCH_MARGIN = 1.03
"""Factor by which another arm must look better to be chosen, unless it is off."""
KEEP_MARGIN = 1.01
"""Factor by which an arm must look better than plain decoding to be kept."""
MIN_DRAFTED_ROWS = 6.0
"""Number of drafted rows before a drafter's arms can be chosen."""
CATCH_UP_STEPS = 32
"""Number of steps over which the cost of missing tokens is spread."""
TRIAL_STEPS = 4
"""Steps of a trial with a drafter; two where there are more rows, which are as informative."""
RETRY_STEPS = 64
"""Steps before an arm is tried again, if it may still be better."""
RETIME_PLAIN_STEPS = 512
"""Steps before plain decoding is timed again at as many rows; `RETRY_STEPS` while few of its times are known
there."""
SPARSE_FACTOR = 8
"""In a long run of plain steps with a full window of times, only each so many-th step is timed, and
comparisons are as much rarer: where nothing is gained, choosing must cost nothing."""
LEARNING_SHARE = 0.01
"""Share of all time that timing and comparing may take while decoding is plain: where steps are short, both
are rarer."""
SETTLING_STEPS = 8
"""Plain steps of one row after other ones that are not timed: they took up to a third longer than later ones
on two CPU cores and needed ten steps to settle. The cause is unknown (perhaps a lower clock after wide
multiplications). With 8 rows and more only the first step took longer."""
MEASURED_STEPS = 4
"""Timed plain steps after those, in a trial."""
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of verified nodes per row that a draft is cut to. Each is a shape of its own that must be timed
and, on a GPU, captured."""
MIN_TRIM_SAVING = 0.01
"""Share of a step's time that trimming a draft must save."""


@dataclass(slots=True)
class Trial:
    """A short series of steps with an arm that may be better."""

    arm: Arm
    first: int
    """Bucket of the trial."""
    num_left: int


@dataclass(slots=True)
class ArmStats:
    """Statistics of an arm in a bucket, relative to verifying all its nodes in the predicted time."""

    time_share: float = 1.0
    token_share: float = 1.0
    """Moving averages of the shares of time and tokens that remain when drafts are trimmed."""
    time_ratio: float = 1.0
    """Measured over predicted seconds."""
    num_played: int = 0
    """Number of steps."""
    steps: int = 0
    """Number of timed steps."""
    last: int = 0
    """Last timed step."""

    def add_trim(self, time_share: float, token_share: float) -> None:
        """Add the shares of one trimmed draft."""
        self.time_share += (time_share - self.time_share) / 32
        self.token_share += (token_share - self.token_share) / 32

    def add_time(self, ratio: float | None, now: int) -> None:
        """Add the measured over predicted time of a step; None if nothing could be predicted."""
        self.steps += 1
        self.last = now
        if ratio is not None:
            self.time_ratio += (min(ratio, 3.0) - self.time_ratio) / min(self.steps + 8, 64)


@checked()
class Goodput:
    """Chooses the arm with the highest predicted goodput."""

    def __init__(self, arms: Sequence[Arm], *, cost: StepCost | None = None) -> None:
        """Make a chooser.

        Args:
            arms: Candidates; off is always added.
            cost: Step times of this machine, if known.

        Raises:
            ValueError: No arm is given.
        """
        check(any(not arm.is_off for arm in arms), "arms", "must have one that is not off", len(arms))
        self.arms = (OFF, *dict.fromkeys(arm for arm in arms if not arm.is_off))
        self.cost = cost or StepCost()
        self.drafters: dict[str, DrafterStats] = {
            arm.drafter: DrafterStats() for arm in self.arms if not arm.is_off
        }
        self.arm = OFF
        """Arm in use outside of trials."""
        self.rate = 0.0
        """Its expected tokens per second."""
        self.exploration_budget_s = 0.0
        """Seconds that trials may still cost."""
        self.guard = Bandit(arms)
        """Rewards per arm, whatever was expected. Times are in plain steps of as many rows."""
        self._trial: Trial | None = None
        self._was_trial = False
        """The last step belonged to a trial."""
        self._learning_budget_s = 0.0
        """Seconds that timing plain steps and comparing may still take."""
        self._has_learned = self._has_compared = False
        """The last step was timed or compared before; the arms have been compared since the last step."""
        self._stats: dict[tuple[int, Arm], ArmStats] = {}
        self._time_ratio = 1.0
        self._sizes: dict[tuple[int, Arm], tuple[list[int], list[float]]] = {}
        self._steps = 0
        self._num_plain_steps = 0
        self._compared: EngineView | None = None
        """View of the last comparison."""
        self._next_compare = 0
        """Step of the next comparison if nothing changes."""

    @classmethod
    def of(cls, *arms: str) -> "Goodput":
        """Return a chooser among these arms and off, such as `Goodput.of("suffix:8", "layer:4x2x8")`.

        Raises:
            ValueError: A text is not an arm, or there is none.
        """
        return cls([parse_arm(arm) for arm in arms])

    def choose(self, view: EngineView) -> Arm:
        """Return the arm of the next step."""
        if self._steps < PLAIN_STEPS:
            return OFF
        last, trial = self._compared, self._trial
        same = last is not None and last.rows == view.rows and last.versions == view.versions
        waits = self._steps < self._next_compare or (self.arm.is_off and self._learning_budget_s < 0)
        if same and trial is None and waits:
            return self.arm
        for kind, drafter_stats in self.drafters.items():
            if drafter_stats.begin_step(view.versions.get(kind), self._steps):
                self.guard.forget_drafter(kind)
        if trial is not None and view.has(trial.arm) and trial.first == bucket(view.rows) and trial.num_left:
            return trial.arm
        self._trial, self._compared = None, view
        self._sizes.clear()
        self._compare(view)
        interval = COMPARE_STEPS if self._stats_of(view, self.arm).num_played >= RETRY_STEPS else 2
        if self._is_timed_enough(view.rows):
            interval *= SPARSE_FACTOR
        self._next_compare = self._steps + interval
        self._has_compared = True
        return self.arm if self._trial is None else self._trial.arm

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        """Return the number of drafted nodes that pay for their verification."""
        if draft.logq_BNV is not None or draft.scores_BN.is_cuda or self._trial is not None:
            return num_real_nodes(draft)
        by_node = self.drafters[arm.drafter].calibration.expected_accepted(draft)
        gains = [0.0, *accumulate(by_node)]
        most = sum(gain > 0 for gain in by_node)
        if not most:
            return 0
        sizes, seconds = self._size_times(view, arm)
        whole = next(i for i, size in enumerate(sizes) if size >= most)
        worth = [
            gains[min(n, most)] - self.rate * s for n, s in zip(sizes[: whole + 1], seconds, strict=False)
        ]
        best = max(range(whole + 1), key=worth.__getitem__)
        if worth[best] <= worth[whole] + MIN_TRIM_SAVING * self.rate * seconds[whole]:
            best = whole
        tokens, all_tokens = view.rows + gains[min(sizes[best], most)], view.rows + gains[-1]
        self._stats_of(view, arm).add_trim(seconds[best] / seconds[-1], tokens / all_tokens)
        return min(sizes[best], most)

    def _size_times(self, view: EngineView, arm: Arm) -> tuple[list[int], list[float]]:
        """Return the sizes that the arm's drafts may be cut to, and the seconds of such passes.

        The seconds never decrease with the size.
        """
        found = self._sizes.get((view.rows, arm))
        if found is None:
            sizes = [size for size in SIZES if size < arm.nodes] + [arm.nodes]
            seconds = [self.cost.verify_s(view.rows, size, view.context) for size in sizes]
            found = self._sizes[view.rows, arm] = sizes, list(accumulate(seconds, max))
        return found

    def learn(self, observed: StepObservation) -> None:
        """Update all statistics with the observation of a step."""
        drafter_stats = self.drafters.get(observed.arm.drafter)
        self._steps += 1
        self._num_plain_steps = self._num_plain_steps + 1 if observed.arm.is_off else 0
        self._stats_of(observed.view, observed.arm).num_played += 1
        self._learning_budget_s += LEARNING_SHARE * observed.total_s
        if self._has_learned:
            self._learning_budget_s -= observed.learning_s
        is_timed = self._is_timed(observed.view.rows)
        self._has_learned = is_timed or self._has_compared
        self._has_compared = False
        if is_timed:
            self._learn_time(
                observed,
                0 if drafter_stats is None else min(drafter_stats.missing_tokens, observed.view.context),
            )
        for each in self.drafters.values():
            each.missing_tokens += observed.emitted
        if drafter_stats is not None:
            drafter_stats.add(observed, self._steps, immediately=self._trial is not None)
        self._update_budget(observed)

    def _is_timed(self, rows: int) -> bool:
        """Return true if the time of the last step is used."""
        run = self._num_plain_steps
        if self._is_timed_enough(rows):
            return run % SPARSE_FACTOR == 0
        if run <= PLAIN_STEPS:
            return not 0 < run <= _settling_steps(rows)
        return self._learning_budget_s >= 0

    def _is_timed_enough(self, rows: int) -> bool:
        """Return true if a series of plain steps has filled the window of times."""
        return self._num_plain_steps > _settling_steps(rows) + WINDOW

    def _learn_time(self, observed: StepObservation, missing_tokens: int) -> None:
        """Update step times, the arm's time ratio and the guard."""
        view, arm = observed.view, observed.arm
        ratio = self.cost.learn(observed, missing_tokens)
        if ratio is not None:
            self._time_ratio += (min(ratio, 3.0) - self._time_ratio) / 64
        self._stats_of(view, arm).add_time(ratio, self._steps)
        plain_s = self.cost.verify_s(view.rows, 0, view.context) * self.cost.slowdown
        self.guard.add(bucket(view.rows), arm, observed.emitted / max(observed.total_s, MIN_S) * plain_s)

    def value(self, view: EngineView, arm: Arm, *, optimistic: bool = False) -> float:
        """Return the expected tokens per second of the arm, at the machine's usual speed."""
        tokens, seconds = self._predict(view, arm, optimistic)
        return tokens / seconds

    def _predict(self, view: EngineView, arm: Arm, optimistic: bool = False) -> tuple[float, float]:
        """Return the expected tokens and seconds of one step in a long series."""
        stats = self._stats_of(view, arm)
        seconds = self.cost.verify_s(view.rows, arm.nodes, view.context) * stats.time_share
        if arm.is_off:
            return float(view.rows), seconds * stats.time_ratio
        drafter_stats = self.drafters[arm.drafter]
        seconds += self.cost.draft_s(arm, view.rows) + self._catching_up_s(view, arm) / CATCH_UP_STEPS
        tokens = view.rows * drafter_stats.survival.expected(arm, optimistic=optimistic) * stats.token_share
        return tokens, seconds * stats.time_ratio

    def _catching_up_s(self, view: EngineView, arm: Arm) -> float:
        missing_tokens = min(self.drafters[arm.drafter].missing_tokens, view.context)
        if missing_tokens <= 4 * arm.depth * view.rows:
            return 0.0
        return self.cost.draft_s(arm, view.rows, missing_tokens) - self.cost.draft_s(arm, view.rows)

    def _compare(self, view: EngineView) -> None:
        """Choose the arm to use from now on, and perhaps start a trial of another."""
        values = {arm: self.value(view, arm) for arm in self.arms if view.has(arm)}
        if self.arm not in values:
            self.arm = OFF
        for arm, value in values.items():
            is_known = arm.is_off or self.drafters[arm.drafter].survival.num_rows >= MIN_DRAFTED_ROWS
            margin = 1 / KEEP_MARGIN if arm.is_off else SWITCH_MARGIN
            if is_known and arm != self.arm and value > margin * values[self.arm]:
                self.arm = arm
        if self.guard.rejects(bucket(view.rows), self.arm):
            self.arm = OFF
        self.rate = values[self.arm]
        self._start_trial(view, values)

    def _start_trial(self, view: EngineView, values: dict[Arm, float]) -> None:
        """Start a trial with the cheapest arm that may be better, if the budget allows it."""
        optimistic = [arm for arm in values if arm != self.arm and self._may_be_better(view, arm)]
        costs_s = {arm: self._trial_cost_s(view, arm, _trial_length(view, arm)) for arm in optimistic}
        arm = min(costs_s, key=costs_s.__getitem__, default=OFF)
        if optimistic and costs_s[arm] <= self.exploration_budget_s:
            self._trial = Trial(arm, bucket(view.rows), _trial_length(view, arm))

    def _trial_cost_s(self, view: EngineView, arm: Arm, length: int) -> float:
        """Return the expected cost of a trial in seconds, compared with the arm in use."""
        tokens, seconds = self._predict(view, arm)
        catching_up_s = 0.0 if arm.is_off else self._catching_up_s(view, arm)
        return length * (seconds - tokens / self.rate) + catching_up_s

    def _may_be_better(self, view: EngineView, arm: Arm) -> bool:
        """Return true if the optimistic value of the arm is better than the current rate.

        Plain decoding is timed again after a while.
        """
        stats = self._stats_of(view, arm)
        unseen = self._steps - stats.last
        if arm.is_off:
            return unseen >= (RETIME_PLAIN_STEPS if stats.steps > PLAIN_STEPS else RETRY_STEPS)
        if stats.steps >= 2 * TRIAL_STEPS and unseen < RETRY_STEPS:
            return False
        unknown = 1.0 if stats.steps else 1.1
        return unknown * self.value(view, arm, optimistic=True) > SWITCH_MARGIN * self.rate

    def _update_budget(self, observed: StepObservation) -> None:
        """Add a share of the step's time to the budget and subtract what a trial has cost."""
        if self._steps == PLAIN_STEPS:
            self.exploration_budget_s = INITIAL_BUDGET_STEPS * observed.total_s
        self.exploration_budget_s += EXPLORATION_SHARE * observed.total_s
        if self._was_trial:
            self.exploration_budget_s -= observed.learning_s
        trial = self._trial
        self._was_trial = trial is not None and trial.arm == observed.arm
        if trial is not None and trial.arm == observed.arm:
            trial.num_left -= 1
            self.exploration_budget_s -= observed.total_s - self.cost.slowdown * observed.emitted / self.rate
            if self.exploration_budget_s < 0:
                trial.num_left = 0

    def _stats_of(self, view: EngineView, arm: Arm) -> ArmStats:
        key = (bucket(view.rows), arm)
        stats = self._stats.get(key)
        if stats is None:
            stats = self._stats[key] = ArmStats(time_ratio=self._time_ratio)
        return stats


def _trial_length(view: EngineView, arm: Arm) -> int:
    """Return the number of steps of a trial."""
    if arm.is_off:
        return _settling_steps(view.rows) + MEASURED_STEPS
    return TRIAL_STEPS if view.rows <= TRIAL_STEPS else 2


def _settling_steps(rows: int) -> int:
    """Return the number of plain steps that are not timed; see `SETTLING_STEPS`."""
    return max(SETTLING_STEPS // rows, 2)


EPSILON = 0.1
"""Probability of a random arm."""
BANDIT_WINDOW = 300
"""Number of newest rewards of an arm that count."""
REJECT_RATIO = 0.95
"""A guard rejects an arm whose value is below this share of plain decoding's."""
MIN_REWARDS = 32
"""Number of rewards that an arm must have before it can be rejected."""


class Bandit:
    """Chooses by rewards alone. With the same observations and seed, all ranks choose the same arms."""

    def __init__(
        self, arms: Sequence[Arm], *, epsilon: float = EPSILON, window: int = BANDIT_WINDOW, seed: int = 0
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
