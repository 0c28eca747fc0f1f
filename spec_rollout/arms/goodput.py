"""The arm with the best expected tokens per second (RLHFSpec), never far below plain decoding.

Before a step: expected tokens of each arm (`Survival`) over its expected seconds (`StepCost`: the pass, the
drafting, and what the drafter has to catch up, spread over the steps it will probably stay), times how much
longer steps of the arm take than foreseen. The best arm is kept until another is clearly better; off is taken
as soon as it is better at all.

After the drafter has spoken: as many nodes as pay for themselves, at the calibrated chances (`Calibration`):
the n with the most E[tokens] - rate * seconds, which is where the rate cannot be improved (Dinkelbach; that
the drafting is paid already does not count).

What is not known is tried in short bursts when a hopeful estimate says that it may be better, and plain
decoding now and then so that its time stays known. What trying has cost, against the arm that would have been
played, is counted and stays below half a percent of all time.

An arm that has brought less than plain decoding, whatever was expected of it, is refused (`Bandit.refuses`).

Everything is a function of what was told, in order, so that a log replays it and ranks that are told the same
choose the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from aedit.spec_rollout.arms.arms import Observed, View, bucket, worth_verifying
from aedit.spec_rollout.arms.bandit import Bandit
from aedit.spec_rollout.arms.cost import StepCost
from aedit.spec_rollout.arms.drafter_stats import Known
from aedit.spec_rollout.arms.time_model import LEAST_S, WINDOW
from aedit.spec_rollout.drafters.drafts import OFF, Arm, Draft
from aedit.types import check

TRYING = 0.005
"""Share of all time that trying arms may cost."""

FIRST_TRIES = 4.0
"""Plain steps' time that it may cost ahead."""

PLAIN_STEPS = 12
"""Of a new engine, before anything is tried."""

EVERY = 8
"""Steps after which the arms are compared again, if the rows have not changed; sooner while the one that is
played is new."""

BETTER = 1.03
"""How much better another arm must look to be taken, unless it is off."""

LEAST_GAIN = 1.01
"""How much better than plain decoding an arm must look to be kept."""

KNOWN_ROWS = 6.0
"""Rows that must have been drafted for before an arm is taken on."""

STAY = 32
"""Steps that an arm is supposed to be kept, over which catching up is spread."""

BURST = 4
"""Steps of a trial with a drafter; two where there are more rows, which tell as much."""

TRY_AGAIN = 64
"""Steps after which an arm that has been tried is tried again, if it may still be better."""

PLAIN_AGAIN = 512
"""Steps after which plain decoding is timed again at as many rows; `TRY_AGAIN` while few of its times are
known there."""

SELDOM = 8
"""Of many plain steps one after the other, once there are as many times as are kept, only each so many-th is
timed, and arms are compared as much more seldom: where nothing is gained, choosing is to cost nothing."""

SETTLING = 8
"""Plain steps of one row after other ones whose time says nothing: they took up to a third longer than later
ones, on two CPU cores, and ten steps to come down. (Why was not found out; the clock may be lower after many
wide multiplications.) With 8 rows and more only the first one was longer."""

TELLING = 4
"""Plain steps after those, in a burst."""

SIZES = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Verified nodes of a row that a draft is cut to: each number is a shape of its own, to be timed and, on a
GPU, captured."""

CUTTING = 0.01
"""Share of a step's time that cutting a draft must save."""


@dataclass(slots=True)
class Trial:
    """A burst of steps with an arm that may be better."""

    arm: Arm
    first: int
    """The bucket it is tried in."""
    left: int


@dataclass(slots=True)
class Habit:
    """What an arm does in a bucket, relative to all its nodes being verified in the foreseen time."""

    time_share: float = 1.0
    token_share: float = 1.0
    """What is left of both when drafts are cut."""
    slip: float = 1.0
    """Measured over foreseen seconds."""
    played: int = 0
    """Steps in all."""
    steps: int = 0
    """Those that were timed."""
    last: int = 0
    """Step at which one was timed last."""

    def cut(self, time_share: float, token_share: float) -> None:
        self.time_share += (time_share - self.time_share) / 32
        self.token_share += (token_share - self.token_share) / 32

    def took(self, ratio: float | None, now: int) -> None:
        """ratio: None if nothing was to be foreseen."""
        self.steps += 1
        self.last = now
        if ratio is not None:
            self.slip += (min(ratio, 3.0) - self.slip) / min(self.steps + 8, 64)


class Goodput:
    """Chooses by predicted goodput.

    arms: those to choose among; off is always one of them. cost: what is known of this machine already.
    ValueError if no arm is given.
    """

    def __init__(self, arms: Sequence[Arm], *, cost: StepCost | None = None) -> None:
        check(any(not arm.is_off for arm in arms), "arms", "must have one that is not off", len(arms))
        self.arms = (OFF, *dict.fromkeys(arm for arm in arms if not arm.is_off))
        self.cost = cost or StepCost()
        self.drafters: dict[str, Known] = {arm.by: Known() for arm in self.arms if not arm.is_off}
        self.arm = OFF
        """The one that is played when nothing is tried."""
        self.rate = 0.0
        """Tokens per second that are expected of it."""
        self.credit_s = 0.0
        """What trying may still cost."""
        self.guard = Bandit(arms)
        """Of what has come, whatever was expected; times are in plain steps of so many rows."""
        self._trial: Trial | None = None
        self._habits: dict[tuple[int, Arm], Habit] = {}
        self._slip = 1.0
        self._sizes: dict[tuple[int, Arm], tuple[list[int], list[float]]] = {}
        self._steps = 0
        self._plain_run = 0
        self._compared: View | None = None
        """For which view arms were compared last."""
        self._due = 0
        """Step at which they are compared again, if nothing has changed."""

    def choose(self, view: View) -> Arm:
        if self._steps < PLAIN_STEPS:
            return OFF
        last, trial = self._compared, self._trial
        same = last is not None and last.rows == view.rows and last.versions == view.versions
        if same and trial is None and self._steps < self._due:
            return self.arm
        for by, known in self.drafters.items():
            if known.see(view.versions.get(by), self._steps):
                self.guard.forget(by)
        if trial is not None and view.has(trial.arm) and trial.first == bucket(view.rows) and trial.left:
            return trial.arm
        self._trial, self._compared = None, view
        self._sizes.clear()
        self._compare(view)
        self._due = self._steps + self._every(view)
        return self.arm if self._trial is None else self._trial.arm

    def _every(self, view: View) -> int:
        """Steps until the arms are compared again."""
        every = EVERY if self._habit(view, self.arm).played >= TRY_AGAIN else 2
        return every * SELDOM if self._is_timed_enough(view.rows) else every

    def trim(self, view: View, arm: Arm, draft: Draft) -> int:
        if draft.logq_BNV is not None or draft.scores_BN.is_cuda or self._trial is not None:
            return worth_verifying(draft)
        by_node = self.drafters[arm.by].calibration.gains(draft)
        gains = [0.0, *accumulate(by_node)]
        most = sum(gain > 0 for gain in by_node)
        if not most:
            return 0
        sizes, seconds = self._times_of(view, arm)
        whole = next(i for i, size in enumerate(sizes) if size >= most)
        worth = [
            gains[min(n, most)] - self.rate * s for n, s in zip(sizes[: whole + 1], seconds, strict=False)
        ]
        best = max(range(whole + 1), key=worth.__getitem__)
        if worth[best] <= worth[whole] + CUTTING * self.rate * seconds[whole]:
            best = whole
        tokens, all_tokens = view.rows + gains[min(sizes[best], most)], view.rows + gains[-1]
        self._habit(view, arm).cut(seconds[best] / seconds[-1], tokens / all_tokens)
        return min(sizes[best], most)

    def _times_of(self, view: View, arm: Arm) -> tuple[list[int], list[float]]:
        """What the arm's drafts may be cut to, and the seconds of a pass with so many nodes; more nodes never
        take less."""
        found = self._sizes.get((view.rows, arm))
        if found is None:
            sizes = [size for size in SIZES if size < arm.nodes] + [arm.nodes]
            seconds = [self.cost.verify_s(view.rows, size, view.context) for size in sizes]
            found = self._sizes[view.rows, arm] = sizes, list(accumulate(seconds, max))
        return found

    def learn(self, observed: Observed) -> None:
        known = self.drafters.get(observed.arm.by)
        self._steps += 1
        self._plain_run = self._plain_run + 1 if observed.arm.is_off else 0
        self._habit(observed.view, observed.arm).played += 1
        if self._tells(observed.view.rows):
            self._time(observed, 0 if known is None else min(known.behind, observed.view.context))
        for each in self.drafters.values():
            each.behind += observed.emitted
        if known is not None:
            known.add(observed, self._steps, now=self._trial is not None)
        self._charge(observed)

    def _tells(self, rows: int) -> bool:
        """Whether the time of the step that was just made is looked at."""
        run = self._plain_run
        if self._is_timed_enough(rows):
            return run % SELDOM == 0
        return not 0 < run <= _settling(rows)

    def _is_timed_enough(self, rows: int) -> bool:
        """Whether plain steps one after the other have told all that more of them could."""
        return self._plain_run > _settling(rows) + WINDOW

    def _time(self, observed: Observed, behind: int) -> None:
        """What the step's time says of its arm, and of all."""
        view, arm = observed.view, observed.arm
        ratio = self.cost.learn(observed, behind)
        if ratio is not None:
            self._slip += (min(ratio, 3.0) - self._slip) / 64
        self._habit(view, arm).took(ratio, self._steps)
        plain_s = self.cost.verify_s(view.rows, 0, view.context) * self.cost.pace
        self.guard.add(bucket(view.rows), arm, observed.emitted / max(observed.total_s, LEAST_S) * plain_s)

    def value(self, view: View, arm: Arm, *, hopeful: bool = False) -> float:
        """Tokens per second that are expected of the arm, at the machine's usual pace."""
        tokens, seconds = self._outlook(view, arm, hopeful)
        return tokens / seconds

    def _outlook(self, view: View, arm: Arm, hopeful: bool = False) -> tuple[float, float]:
        """Expected tokens and seconds of one step among many."""
        habit = self._habit(view, arm)
        seconds = self.cost.verify_s(view.rows, arm.nodes, view.context) * habit.time_share
        if arm.is_off:
            return float(view.rows), seconds * habit.slip
        known = self.drafters[arm.by]
        seconds += self.cost.draft_s(arm, view.rows) + self._catching_up_s(view, arm) / STAY
        tokens = view.rows * known.survival.expected(arm, hopeful=hopeful) * habit.token_share
        return tokens, seconds * habit.slip

    def _catching_up_s(self, view: View, arm: Arm) -> float:
        behind = min(self.drafters[arm.by].behind, view.context)
        if behind <= 4 * arm.depth * view.rows:
            return 0.0
        return self.cost.draft_s(arm, view.rows, behind) - self.cost.draft_s(arm, view.rows)

    def _compare(self, view: View) -> None:
        """The arm to play from now on, and whether to try another first."""
        values = {arm: self.value(view, arm) for arm in self.arms if view.has(arm)}
        if self.arm not in values:
            self.arm = OFF
        for arm, value in values.items():
            known = arm.is_off or self.drafters[arm.by].survival.num_rows >= KNOWN_ROWS
            margin = 1 / LEAST_GAIN if arm.is_off else BETTER
            if known and arm != self.arm and value > margin * values[self.arm]:
                self.arm = arm
        if self.guard.refuses(bucket(view.rows), self.arm):
            self.arm = OFF
        self.rate = values[self.arm]
        self._try_another(view, values)

    def _try_another(self, view: View, values: dict[Arm, float]) -> None:
        """Begins a burst with the cheapest of the arms that may be better, if what it may cost is there."""
        hopeful = [arm for arm in values if arm != self.arm and self._may_be_better(view, arm)]
        losses_s = {arm: self._loss_s(view, arm, _burst(view, arm)) for arm in hopeful}
        arm = min(losses_s, key=losses_s.__getitem__, default=OFF)
        if hopeful and losses_s[arm] <= self.credit_s:
            self._trial = Trial(arm, bucket(view.rows), _burst(view, arm))

    def _loss_s(self, view: View, arm: Arm, length: int) -> float:
        """What so many steps with it will probably cost, against the arm that is played."""
        tokens, seconds = self._outlook(view, arm)
        catching_up_s = 0.0 if arm.is_off else self._catching_up_s(view, arm)
        return length * (seconds - tokens / self.rate) + catching_up_s

    def _may_be_better(self, view: View, arm: Arm) -> bool:
        """At best; plain decoding is worth a look when it was not seen for long."""
        habit = self._habit(view, arm)
        unseen = self._steps - habit.last
        if arm.is_off:
            return unseen >= (PLAIN_AGAIN if habit.steps > PLAIN_STEPS else TRY_AGAIN)
        if habit.steps >= 2 * BURST and unseen < TRY_AGAIN:
            return False
        unknown = 1.0 if habit.steps else 1.1
        return unknown * self.value(view, arm, hopeful=True) > BETTER * self.rate

    def _charge(self, observed: Observed) -> None:
        """What trying may cost grows with time, and shrinks by what it has cost."""
        if self._steps == PLAIN_STEPS:
            self.credit_s = FIRST_TRIES * observed.total_s
        self.credit_s += TRYING * observed.total_s
        trial = self._trial
        if trial is not None and trial.arm == observed.arm:
            trial.left -= 1
            self.credit_s -= observed.total_s - self.cost.pace * observed.emitted / self.rate
            if self.credit_s < 0:
                trial.left = 0

    def _habit(self, view: View, arm: Arm) -> Habit:
        key = (bucket(view.rows), arm)
        habit = self._habits.get(key)
        if habit is None:
            habit = self._habits[key] = Habit(slip=self._slip)
        return habit


def _burst(view: View, arm: Arm) -> int:
    """Steps of a trial."""
    if arm.is_off:
        return _settling(view.rows) + TELLING
    return BURST if view.rows <= BURST else 2


def _settling(rows: int) -> int:
    """`SETTLING` of so many rows."""
    return max(SETTLING // rows, 2)
