"""Chooser of the arm with the most expected tokens per second (RLHFSpec), bounded below by plain decoding.

Before a step: one argmax over all arms, off included, of expected tokens (`Acceptance`) per expected second.
What a step of an arm costs beside a plain one is measured where they follow each other (`RelativeCosts`); for
an arm that was never used, the table says what it should take (`StepCost`). Missing tokens of the drafter are
added, spread over the steps that it will probably be used. The arm in use is kept until another is clearly
better, its uncertainty taken off, but not if it gains hardly anything over off. Of equal arms the one in use
is kept, else off is chosen, else the one with the fewest verified tokens. A measured factor of each arm
corrects accepted tokens beyond the end of a sample.

After drafting: the nodes of all rows are ranked by their chance of being accepted, and the best n of them are
verified, however many of each row that is: the n with the largest E[tokens] - rate * seconds. There the rate
cannot be improved (Dinkelbach; the time of drafting is spent already).

Uncertain arms are tried in short trials if an optimistic estimate says that they may be better; plain
decoding is timed again now and then. What is known of an arm that rests is doubted after a while, each time
after twice as many steps, and it is tried again: texts change, and first steps may mislead. The cost of
trials, compared with the arm that would have been used, is limited to half a percent of all time, but for the
first pass over drafts of each size, and the next trials of a drafter that was in use before plain decoding.

All decisions are functions of the observations in order, so that a log replays them and all ranks agree.
"""

import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf
from statistics import median

import numpy as np

from aedit.spec_rollout.choose.arms import (
    BUCKETS,
    EngineView,
    SkippedSteps,
    StepObservation,
    bucket,
    real_nodes,
)
from aedit.spec_rollout.choose.table import (
    MIN_S,
    RETRY_STEPS,
    WINDOW,
    Acceptance,
    Bins,
    Floats,
    RelativeCosts,
    StepCost,
    retry_steps,
    rounded_rows,
    score_bins,
)
from aedit.spec_rollout.drafters import OFF, Arm, Draft, parse_arm
from aedit.types import check, checked

EXPLORATION_SHARE = 0.005
"""Share of all time that trials may cost; a third of it once plain decoding is settled."""
INITIAL_BUDGET_STEPS = 4.0
"""Initial budget of trials, in plain steps."""
PLAIN_STEPS = 12
"""Plain steps of a new engine before any trial."""
COMPARE_STEPS = 16
"""Steps between comparisons of the arms while the rows do not change; fewer while the current arm is new."""
KNOWN_ROWS, LEARN_STEPS = 128.0, 4
"""Drafted rows after which the outcome of only each so many-th draft of a drafter is counted."""
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
RETIME_STEPS, MAX_RETIME_STEPS = 32, 128
"""Steps with an arm before plain decoding is timed again at as many rows, if the budget of trials allows it;
if the arm's advantage is not certain, in any case, but each time after twice as many steps, up to a limit."""
CERTAIN_DEVIATIONS = 2.0
"""Standard deviations by which an arm must be better than plain decoding for that to be certain."""
SPARSE_FACTOR = 8
"""In a long run of plain steps with a full window of times, only each so many-th step is timed, and
comparisons are as much rarer: where nothing is gained, choosing must cost nothing."""
LEARNING_SHARE = 0.01
"""Share of all time that this chooser may take outside of trials: where steps are short, it times, counts,
trims and compares more rarely. A third of it once plain decoding is settled."""
SETTLED_STEPS, SETTLED_FACTOR = 1024, 3
"""Steps since an arm was last chosen after which plain decoding is settled: what an arm would gain is known,
and only what is new in the text can change that."""
STARVED_STEPS = 32
"""Steps of which at least one is learned from where that share is used up: the calls alone may take it in the
short steps of a small policy, and what an arm was worth long ago would decide for ever."""
MAX_FACTOR_RATE = 0.25
"""Largest share of one step in `ArmStats.token_factor`: that of an ending sample is far from the mean."""
SETTLING_STEPS = 8
"""Plain steps of one row after other ones that are not timed: they took up to a third longer than later ones
on two CPU cores and needed ten steps to settle. The cause is unknown (perhaps a lower clock after wide
multiplications). With 8 rows and more only the first step took longer."""
MEASURED_STEPS = 4
"""Timed plain steps after those, in a trial."""
SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Mean numbers of verified nodes per row that a draft is cut to. Each must be timed."""
MIN_TRIM_SAVING = 0.01
"""Share of a step's time that trimming a draft must save."""


@dataclass(slots=True)
class Trial:
    """A short series of steps with an arm that may be better."""

    arm: Arm
    first: int
    """Bucket of the trial."""
    num_left: int
    is_free: bool = False
    """The budget of trials does not pay for it."""


@dataclass(slots=True)
class ArmStats:
    """Statistics of an arm in a bucket."""

    token_factor: float = 1.0
    """Emitted tokens over those that would be accepted of uncut drafts."""
    num_played: int = 0
    """Number of steps."""
    num_timed: int = 0
    last: int = 0
    """Last timed step."""
    last_gain: int = 0
    """Step at which the arm was last in use outside of trials."""


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
        drafting = sorted({arm for arm in arms if not arm.is_off}, key=lambda arm: (arm.nodes, str(arm)))
        self.arms = (OFF, *drafting)
        """Candidates in the order in which ties are decided."""
        self.cost = cost or StepCost()
        self.drafters = {arm.drafter: Acceptance() for arm in drafting}
        self.arm = OFF
        """Arm in use outside of trials."""
        self.rate = 0.0
        """Its expected tokens per second."""
        self._table_rate = 0.0
        """The same with the costs of the table, which also knows those of cut drafts."""
        self.exploration_budget_s = 0.0
        """Seconds that trials may still cost."""
        self._trial: Trial | None = None
        self._is_confirmed = False
        """Plain decoding has been timed beside the arm in use."""
        self._retime_steps = RETIME_STEPS
        """Steps until it is timed again while the advantage of that arm is not certain."""
        self._was_trial = False
        """The last step belonged to a trial."""
        self._learning_budget_s = 0.0
        """Seconds that this chooser may still take."""
        self._allowance_s = 0.0
        """Seconds that each step adds to them."""
        self._learned = 0
        """Last step that was learned from."""
        self._rests = False
        """Steps without a choice lie before the next one."""
        self._stats: dict[tuple[int, Arm], ArmStats] = {}
        self._sizes: dict[tuple[int, Arm], tuple[list[int], list[float]]] = {}
        self._bins: tuple[Draft, Bins] | None = None
        """Scores of the last draft that was trimmed."""
        self._sizes_passed: set[tuple[int, int]] = set()
        """Rows and nodes per row of the passes with drafts so far."""
        self._spent: dict[int, tuple[float, int]] = {}
        """Cost of the steps and newest context by rounded rows."""
        self._costs: dict[int, RelativeCosts] = {}
        """By rounded rows."""
        self._rows = 0
        """Rounded rows of the last measured step."""
        self._steps = 0
        self._num_plain_steps = 0
        self._last_gain = 0
        """Step at which an arm was last in use, outside of trials, or a drafter got new weights."""
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
        is_due = self._steps >= self._next_compare or (self._may_learn and not same)
        if trial is None and not is_due and view.has(self.arm):
            return self.arm
        again = [
            kind
            for kind, version in view.versions.items()
            if kind in self.drafters
            and self.drafters[kind].begin_step(version, self._steps, is_off=self.arm.is_off)
        ]
        if trial is not None and view.has(trial.arm) and trial.first == bucket(view.rows) and trial.num_left:
            return trial.arm
        if last is not None and last.versions != view.versions:
            self._last_gain = self._steps
        self._trial, self._compared = None, view
        self._sizes.clear()
        self._compare(view, again)
        if self._trial is not None and self.arm.is_off:
            self.drafters[self._trial.arm.drafter].doubt()
        interval = COMPARE_STEPS if self._stats_of(view, self.arm).num_played >= RETRY_STEPS else 2
        if self._is_timed_enough(view.rows):
            interval *= SPARSE_FACTOR
        self._next_compare = self._steps + interval
        if self.arm.is_off:
            retries = [
                each.next_retry
                for kind, each in self.drafters.items()
                if kind in view.versions and each.last_gain
            ]
            self._next_compare = max(self._steps + 1, min([self._next_compare, *retries]))
        return self.arm if self._trial is None else self._trial.arm

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int | list[int]:
        """Return the number of each row's drafted nodes that pay for their verification."""
        self._bins = None
        never = draft.logq_BNV is not None or draft.scores_BN.is_cuda
        if never or self._trial is not None or self._rests or self._learning_budget_s < 0:
            return real_nodes(draft)  # one trimmed draft of many saves less than trimming takes
        bins = score_bins(draft)
        self._bins = draft, bins
        ranking, gains = ranked_nodes(self.drafters[arm.drafter].chances(arm, bins))
        rows, most = len(bins), len(ranking)
        if not most:
            return 0
        sizes, seconds = self._size_times(view, arm)
        whole = next(i for i, size in enumerate(sizes) if size * rows >= most)
        rate = self._table_rate
        worth = [gains[min(sizes[i] * rows, most)] - rate * seconds[i] for i in range(whole + 1)]
        best = worth.index(max(worth))
        if worth[best] <= worth[whole] + MIN_TRIM_SAVING * rate * seconds[whole]:
            best = whole
        kept: list[int] = np.bincount(ranking[: sizes[best] * rows], minlength=rows).tolist()
        return kept

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
        arm, view, skipped = observed.arm, observed.view, observed.skipped
        if skipped.num_steps:
            self._skip(skipped)
        stats = self._stats_of(view, arm)
        self._steps += 1
        self._num_plain_steps = self._num_plain_steps + 1 if arm.is_off else 0
        stats.num_played += 1
        rows = rounded_rows(view.rows)
        self._spent[rows] = self._spent.get(rows, (0.0, 0))[0] + observed.total_s, view.context
        self._learning_budget_s += self._share * LEARNING_SHARE * observed.total_s
        spent_s = (skipped.total_s + observed.total_s) / (skipped.num_steps + 1)
        self._allowance_s = self._share * LEARNING_SHARE * spent_s
        if not self._was_trial:  # the budget of trials pays for theirs
            least_s = -INITIAL_BUDGET_STEPS * observed.total_s  # so that it recovers when steps are longer
            self._learning_budget_s = max(self._learning_budget_s - observed.learning_s, least_s)
        if self._steps == PLAIN_STEPS:
            self._learning_budget_s = INITIAL_BUDGET_STEPS * observed.total_s
        may_learn = self._may_learn or self._trial is not None
        is_new = self._is_new(observed)
        if not is_new and self._is_timed(view.rows, may_learn=may_learn):
            self._learn_time(observed, stats)
        for kind, each in self.drafters.items():
            if kind in view.versions:
                each.missing_tokens += observed.emitted
            elif each.version is None:  # when it comes, it begins with the tokens after that
                each.missing_tokens = 0
        if not arm.is_off:
            self.drafters[arm.drafter].missing_tokens = 0
            if may_learn:
                self._learn_draft(observed, stats)
        if may_learn:
            self._learned = self._steps
        self._update_budget(observed, is_new=is_new)

    def rest(self, view: EngineView) -> tuple[Arm, int]:
        """Return the arm in use, and the number of steps that follow with it without a choice.

        These are plain ones where plain decoding is settled, and those with an arm until this chooser has
        time to learn again.
        """
        self._rests = False
        if self._trial is not None or self._steps < PLAIN_STEPS:
            return OFF, 0
        if self.arm.is_off:
            is_settled = self._is_timed_enough(view.rows)
            return OFF, SPARSE_FACTOR - 1 - self._num_plain_steps % SPARSE_FACTOR if is_settled else 0
        if self._learning_budget_s >= 0 or not view.has(self.arm):
            return self.arm, 0
        self._rests = True
        return self.arm, min(math.ceil(-self._learning_budget_s / self._allowance_s), STARVED_STEPS - 1)

    @property
    def _share(self) -> float:
        """Return the part of its usual budgets that this chooser has."""
        return 1.0 if self._steps - self._last_gain < SETTLED_STEPS else 1 / SETTLED_FACTOR

    def _skip(self, skipped: SkippedSteps) -> None:
        """Count steps that were not observed one by one."""
        self._steps += skipped.num_steps
        self._num_plain_steps = self._num_plain_steps + skipped.num_steps if skipped.arm.is_off else 0
        self._stats_of(EngineView(skipped.rows, 0), skipped.arm).num_played += skipped.num_steps
        rows = rounded_rows(skipped.rows)
        spent_s, context = self._spent.get(rows, (0.0, 0))
        self._spent[rows] = spent_s + skipped.total_s, context
        self._learning_budget_s += self._share * LEARNING_SHARE * skipped.total_s
        self.exploration_budget_s += self._share * EXPLORATION_SHARE * skipped.total_s
        for kind, each in self.drafters.items():
            each.missing_tokens += skipped.emitted if each.version is not None else 0
            if kind == skipped.arm.drafter:
                each.missing_tokens, each.last_used = 0, self._steps

    def _learn_time(self, observed: StepObservation, stats: ArmStats) -> None:
        """Add the step's cost to the table and to the costs beside other arms."""
        view, arm = observed.view, observed.arm
        missing = 0 if arm.is_off else self.missing_tokens(view, arm)
        stats.num_timed += 1
        stats.last = self._steps
        if not missing:
            rows = rounded_rows(view.rows)
            costs = self._costs_at(view)
            if rows != self._rows:
                costs.forget_speed()
                self._rows = rows
            prior = 0.0 if costs.knows(arm) else self._log_ratio(view, arm)
            costs.learn(arm, observed.total_s, self._steps, prior)
        self.cost.learn(observed, missing)

    def _costs_at(self, view: EngineView) -> RelativeCosts:
        """Return the costs of arms beside each other at about as many rows.

        Those of the nearest number of rows are taken over at first, changed as the table says.
        """
        rows = rounded_rows(view.rows)
        found = self._costs.get(rows)
        if found is None:
            near = min(self._costs, key=lambda other: abs(math.log(other / rows)), default=None)
            if near is None:
                found = RelativeCosts()
            else:
                there = EngineView(near, view.context * near // view.rows)
                change = {arm: self._log_ratio(view, arm) - self._log_ratio(there, arm) for arm in self.arms}
                found = RelativeCosts(self._costs[near], change)
            self._costs[rows] = found
        return found

    def _log_ratio(self, view: EngineView, arm: Arm) -> float:
        """Return the logarithm of the cost of a step of the arm over that of a plain one, by the table."""
        return math.log(self._table_s(view, arm) / self._table_s(view, OFF))

    def _table_s(self, view: EngineView, arm: Arm) -> float:
        """Return the seconds of a step by the table, without missing tokens."""
        return self.cost.verify_s(view.rows, arm.nodes, view.context) + self.cost.draft_s(arm, view.rows)

    def _learn_draft(self, observed: StepObservation, stats: ArmStats) -> None:
        """Count the accepted tokens of a draft."""
        acceptance, draft = self.drafters[observed.arm.drafter], observed.draft
        acceptance.last_used = self._steps
        if draft is None or draft.tokens_BN.shape[1] == 0:
            return
        steps = 1 if self._trial is not None else min(self._steps - self._learned, STARVED_STEPS)
        if steps == 1 and self._trial is None and acceptance.num_rows > KNOWN_ROWS:
            steps = LEARN_STEPS
            if self._steps % LEARN_STEPS:
                return
        bins = self._bins[1] if self._bins is not None and self._bins[0] is draft else score_bins(draft)
        arm, verified = observed.arm, observed.verified_B or [observed.nodes] * len(bins)
        accepted = acceptance.learn(arm, bins, verified, observed.accepted_B, observed.path_Bm, steps)
        ratio = observed.emitted / (observed.view.rows + accepted)
        rate = min(steps / min(stats.num_played + 8, 32), MAX_FACTOR_RATE)
        stats.token_factor += (ratio - stats.token_factor) * rate

    def _is_new(self, observed: StepObservation) -> bool:
        """Return true for the first pass over drafts of a size: it may have one-time work of several steps.

        oneDNN prepares products of each number of tokens once. That says nothing about later steps.
        """
        size = observed.view.rows, observed.nodes
        if observed.arm.is_off or size in self._sizes_passed:
            return False
        self._sizes_passed.add(size)
        return True

    def _is_timed(self, rows: int, *, may_learn: bool) -> bool:
        """Return true if the time of the last step is used."""
        run = self._num_plain_steps
        if self._is_timed_enough(rows):
            return run % SPARSE_FACTOR == 0
        if run <= PLAIN_STEPS and 0 < run <= _settling_steps(rows):
            return False
        return may_learn or self._steps < PLAIN_STEPS

    @property
    def _may_learn(self) -> bool:
        """Return true if this chooser has time left, or has not learned for long."""
        return self._learning_budget_s >= 0 or self._steps - self._learned >= STARVED_STEPS

    def _is_timed_enough(self, rows: int) -> bool:
        """Return true if a series of plain steps has filled the window of times."""
        return self._num_plain_steps > _settling_steps(rows) + WINDOW

    def value(self, view: EngineView, arm: Arm) -> float:
        """Return the expected tokens per second of the arm, at the machine's usual speed."""
        tokens, seconds = self._predict(view, arm)
        return tokens / seconds

    def _predict(self, view: EngineView, arm: Arm) -> tuple[float, float]:
        """Return the expected tokens and seconds of one step in a long series.

        A step with drafts takes at least as long as a plain one and its drafting. Where other programs use
        the machine, measured steps seem shorter than that at times; drafts that nothing is accepted of would
        then be chosen.
        """
        plain_s = self.cost.verify_s(view.rows, 0, view.context)
        if arm.is_off:
            return float(view.rows), plain_s
        costs = self._costs_at(view)
        if costs.knows(arm) and costs.knows(OFF):
            seconds = plain_s * math.exp(costs.difference(arm, OFF)[0])
        else:
            seconds = self._table_s(view, arm)
        seconds = max(seconds, plain_s + self.cost.draft_s(arm, view.rows))
        seconds += self._catching_up_s(view, arm) / CATCH_UP_STEPS
        tokens = view.rows * self.drafters[arm.drafter].expected(arm)
        return tokens * self._stats_of(view, arm).token_factor, seconds

    def _deviation(self, view: EngineView, arm: Arm, other: Arm) -> float:
        """Return the relative standard deviation of one arm's cost beside that of another."""
        costs = self._costs_at(view)
        return costs.difference(arm, other)[1] if costs.knows(arm) and costs.knows(other) else 0.0

    def bounds(self) -> dict[str, float]:
        """Return by drafter the speed-up over plain decoding if each draft of its best arm were accepted.

        It is a mean over the numbers of rows at which time was spent lately, and infinite where no pass with
        drafts has been measured. Spent time counts half after each call.
        """
        found: dict[str, float] = {}
        for kind in self.drafters:
            arms = [arm for arm in self.arms if arm.drafter == kind]
            perfect_s = sum(
                spent_s / max(self._bound(rows, context, arm) for arm in arms)
                for rows, (spent_s, context) in self._spent.items()
            )
            total_s = sum(spent_s for spent_s, _ in self._spent.values())
            found[kind] = total_s / perfect_s if perfect_s > 0 else inf
        self._spent = {rows: (s / 2, context) for rows, (s, context) in self._spent.items()}
        return found

    @property
    def busiest_rows(self) -> int:
        """Return the number of rows at which most time was spent lately, rounded."""
        return max(self._spent, key=lambda rows: self._spent[rows][0], default=0)

    def _bound(self, rows: int, context: int, arm: Arm) -> float:
        """Return the speed-up of the arm over plain decoding if all its drafts were accepted."""
        if not (self.cost.is_measured(rows, 0) and self.cost.is_measured(rows, arm.nodes)):
            return inf
        seconds = self.cost.verify_s(rows, arm.nodes, context) + self.cost.draft_s(arm, rows)
        return (1 + arm.depth) * self.cost.verify_s(rows, 0, context) / seconds

    def missing_tokens(self, view: EngineView, arm: Arm) -> int:
        """Return the tokens that the arm's drafter has to compute first, beyond those of the last step."""
        missing = min(self.drafters[arm.drafter].missing_tokens, view.context)
        return missing if missing > 4 * arm.depth * view.rows else 0

    def _catching_up_s(self, view: EngineView, arm: Arm) -> float:
        missing = self.missing_tokens(view, arm)
        if not missing:
            return 0.0
        return self.cost.draft_s(arm, view.rows, missing) - self.cost.draft_s(arm, view.rows)

    def _compare(self, view: EngineView, again: Sequence[str] = ()) -> None:
        """Choose the arm to use from now on, and perhaps start a trial of another.

        again: Drafters whose old observations have been dropped, which are to be tried again.
        """
        expected = {arm: self._predict(view, arm) for arm in self.arms if view.has(arm)}
        values = {arm: tokens / seconds for arm, (tokens, seconds) in expected.items()}
        if self.arm not in values:
            self.arm = OFF
        known = {
            arm: values[arm] * (1.0 if arm.is_off else math.exp(-self._deviation(view, arm, self.arm)))
            for arm in values
            if arm == self.arm or self._is_known(arm)
        }
        best = best_arm(known, self.arm)
        if self.arm.is_off and not best.is_off:
            # Of many comparisons the ones that chance favours would end plain decoding.
            surely = known[best] * math.exp(-self.drafters[best.drafter].deviation(best))
            best = OFF if surely < KEEP_MARGIN * known[OFF] else best
        self.arm = best
        if not best.is_off:
            self._last_gain = self.drafters[best.drafter].last_gain = self._steps
            self._stats_of(view, best).last_gain = self._steps
        self.rate = values[self.arm]
        self._table_rate = expected[self.arm][0] / self._table_s(view, self.arm)
        if self.arm.is_off:
            self._is_confirmed, self._retime_steps = False, RETIME_STEPS
        elif self._must_retime(view, values):
            self._is_confirmed, self._retime_steps = True, min(2 * self._retime_steps, MAX_RETIME_STEPS)
            self._trial = Trial(OFF, bucket(view.rows), _trial_length(view, OFF), is_free=True)
            return
        gained = [arm for arm in values if arm.drafter in again and self.drafters[arm.drafter].last_gain]
        if self.arm.is_off and gained:  # the text may be such again: no budget may be in the way
            cheapest = min(gained, key=lambda arm: self._trial_cost_s(view, arm, *expected[arm]))
            self._trial = Trial(cheapest, bucket(view.rows), _trial_length(view, cheapest), is_free=True)
            return
        if self.exploration_budget_s < 0:
            return
        others = [arm for arm in values if arm != self.arm]
        retried = [arm for arm in others if self._must_retry(view, arm)]
        likely = [arm for arm in others if self._may_be_better(view, arm, values[arm])]
        costs_s = {arm: self._trial_cost_s(view, arm, *expected[arm]) for arm in likely or retried}
        cheapest = min(costs_s, key=costs_s.__getitem__, default=OFF)
        if costs_s and costs_s[cheapest] <= self.exploration_budget_s:
            if cheapest in retried:
                self._costs_at(view).doubt(cheapest)
            self._trial = Trial(cheapest, bucket(view.rows), _trial_length(view, cheapest))

    def _must_retime(self, view: EngineView, values: Mapping[Arm, float]) -> bool:
        """Return true if plain decoding is to be timed beside an arm whose advantage is not certain.

        Once after each change from plain decoding to an arm it is timed in any case: a few steps of a trial
        may have been taken while the machine was fast.
        """
        if self._steps - self._stats_of(view, OFF).last < self._retime_steps:
            return False
        if not self._is_confirmed:
            return True
        deviation = self._deviation(view, self.arm, OFF)
        return math.log(values[self.arm] / values[OFF]) < CERTAIN_DEVIATIONS * deviation

    def _is_known(self, arm: Arm) -> bool:
        """Return true if the arm's drafter has drafted enough for the arm to be chosen."""
        return arm.is_off or self.drafters[arm.drafter].num_rows >= MIN_DRAFTED_ROWS

    def _trial_cost_s(self, view: EngineView, arm: Arm, tokens: float, seconds: float) -> float:
        """Return the expected cost of a trial in seconds, compared with the arm in use.

        tokens, seconds: Expected of one step with the arm.
        """
        catching_up_s = 0.0 if arm.is_off else self._catching_up_s(view, arm)
        return _trial_length(view, arm) * (seconds - tokens / self.rate) + catching_up_s

    def _may_be_better(self, view: EngineView, arm: Arm, value: float) -> bool:
        """Return true if the optimistic value of the arm is better than the current rate.

        Plain decoding is timed again after a while.
        """
        stats = self._stats_of(view, arm)
        unseen = self._steps - stats.last
        if arm.is_off:
            return unseen >= RETIME_STEPS
        if stats.num_timed >= 2 * TRIAL_STEPS and unseen < RETRY_STEPS:
            return False
        acceptance = self.drafters[arm.drafter]
        more = acceptance.expected(arm, optimistic=True) / acceptance.expected(arm)
        return (more if stats.num_timed else 1.1 * more) * value > SWITCH_MARGIN * self.rate

    def _must_retry(self, view: EngineView, arm: Arm) -> bool:
        """Return true if an arm is to be tried again whatever is known of it."""
        stats = self._stats_of(view, arm)
        least = retry_steps(self._steps, stats.last_gain, is_off=self.arm.is_off)
        return not arm.is_off and stats.num_timed > 0 and self._steps - stats.last >= least

    def _update_budget(self, observed: StepObservation, *, is_new: bool) -> None:
        """Add a share of the step's time to the budget and subtract what a trial has cost.

        A trial does not pay for a step of one-time work, which says nothing.
        """
        if self._steps == PLAIN_STEPS:
            self.exploration_budget_s = INITIAL_BUDGET_STEPS * observed.total_s
        self.exploration_budget_s += self._share * EXPLORATION_SHARE * observed.total_s
        if self._was_trial:
            self.exploration_budget_s -= observed.learning_s
        trial = self._trial
        self._was_trial = trial is not None and trial.arm == observed.arm
        if trial is not None and trial.arm == observed.arm and not is_new:
            trial.num_left -= 1
            if not trial.is_free:
                usual_s = self.cost.slowdown * observed.emitted / self.rate
                self.exploration_budget_s -= observed.total_s - usual_s
            if self.exploration_budget_s < 0 and not trial.is_free:
                trial.num_left = 0

    def _stats_of(self, view: EngineView, arm: Arm) -> ArmStats:
        key = (bucket(view.rows), arm)
        stats = self._stats.get(key)
        if stats is None:
            stats = self._stats[key] = ArmStats()
        return stats


def best_arm(values: Mapping[Arm, float], current: Arm) -> Arm:
    """Return the arm with the most tokens per second.

    Another arm must be better than `current` by `SWITCH_MARGIN`; off must be as good but for `KEEP_MARGIN`.
    Of arms with equal values the first one of `values` is returned, but `current` before all.

    Args:
        values: Tokens per second by arm, `current` and off among them.
        current: The arm in use.
    """
    if not current.is_off and KEEP_MARGIN * values[OFF] > values[current]:
        current = OFF
    best = max(values, key=values.__getitem__)
    return best if values[best] > SWITCH_MARGIN * values[current] else current


def ranked_nodes(chances_BN: Floats) -> tuple[Bins, list[float]]:
    """Return the rows of the nodes, the best node first, and the sums of the chances of the first n.

    Nodes without a chance are left out. A node is ranked below those of its row before it, its parent among
    them.
    """
    sure_BN = np.minimum.accumulate(chances_BN, axis=1)
    order = np.argsort(-sure_BN, axis=None, kind="stable")[: np.count_nonzero(sure_BN)]
    gains: list[float] = chances_BN.ravel()[order].cumsum().tolist()
    return order // chances_BN.shape[1], [0.0, *gains]


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

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int | list[int]:
        """Return the number of real nodes of each row: a bandit does not trim drafts."""
        return real_nodes(draft)

    def learn(self, observed: StepObservation) -> None:
        """Add the reward of a step."""
        key = bucket(observed.view.rows), observed.arm
        rewards = self._rewards.setdefault(key, deque(maxlen=self._window))
        rewards.append(observed.emitted / max(observed.total_s, MIN_S))

    def median_reward(self, first: int, arm: Arm) -> float:
        """Return the median reward of the arm in the bucket, in tokens per second.

        It is infinite for an arm that was never chosen there.
        """
        rewards = self._rewards.get((first, arm))
        return median(rewards) if rewards else float("inf")


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
