"""The measured table that the choice of an arm reads: costs of passes and drafts, accepted tokens.

A cost is processor time on a CPU and device time on CUDA: what other processes do must not decide. Each cell
(rows, drafted tokens) has the mean of its newest measurements, at their mean context; one slope says what a
cached token adds. A cell without measurements is taken from the nearest one that has some, in the proportion
of a prior. Costs are divided by the current slowdown of the machine (its clock, shared caches), which all
cells share, so that new measurements of one arm can be compared with old ones of another.

Accepted tokens are counted by drafter and position. A second table has the share of accepted nodes by the
drafter's probability of their path: it says how many nodes of a draft are worth their verification.

Shapes: B rows, N nodes of a draft.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aedit.spec_rollout.choose.arms import StepObservation
from aedit.spec_rollout.drafters import OFF, Arm, Draft

Floats = NDArray[np.float64]
Bins = NDArray[np.int64]
Key = tuple[int, ...]
"""Rows and size of a pass or draft."""

WINDOW = 16
"""Number of newest measurements of a cell that count."""
OUTLIER = 2.0
"""Measurements are clipped to this multiple of their cell's mean."""
FAR_SMALLER = 3.0
"""A measurement that is smaller than the mean by this factor shows that the mean is of outliers."""
MIN_S = 1e-9
DEFAULT_STEP_S = 3e-3
"""Seconds of a plain step of one row before anything is measured."""
SLOPE = 2e-4
"""Prior of what a cached token adds, relative to a plain step of one row."""
NOISE = 0.1
"""Relative deviation of the measurements of a cell."""
SLOWDOWN_RATE, SLOWDOWN_DECAY = 1 / 4, 1 / 128
"""Rates at which the slowdown follows measurements, and at which it moves into the cells."""
MIN_SLOWDOWN_STEPS = 16
"""Measurements of a cell before it contributes to the slowdown."""


@dataclass(slots=True)
class Cell:
    """Measurements of passes or drafts of one size."""

    seconds: float
    """Moving average over about the newest `WINDOW` measurements."""
    context: float
    """The same of their contexts."""
    count: int = 0

    def add(self, seconds: float, context: float) -> None:
        """Add a measurement. After one that is far smaller, the ones before are taken for outliers."""
        if seconds * FAR_SMALLER < self.seconds:
            self.seconds, self.count = seconds, min(self.count, 1)
        self.count += 1
        rate = 1 / min(self.count, WINDOW)
        self.seconds += rate * (min(seconds, OUTLIER * self.seconds) - self.seconds)
        self.context += rate * (context - self.context)


class CostTable:
    """Measured seconds by size, with one slope over the context."""

    def __init__(self, prior: Callable[[Key], float], unit_s: float, slope: float) -> None:
        """Make an empty table.

        Args:
            prior: Returns the cost of a size in units of `unit_s`. Only its proportions count once anything
                is measured.
            unit_s: Unit of the prior.
            slope: Prior of what a token of the context adds, in the same unit.
        """
        self._prior, self._unit_s, self._slope = prior, unit_s, slope
        self._cells: dict[Key, Cell] = {}
        self._near: dict[Key, tuple[Key, float]] = {}
        """For sizes without a cell: the nearest that has one, and their proportion."""
        self._cs = self._cc = 0.0
        self.slope_s = slope * unit_s
        """Seconds that one more token of the context adds."""

    def count(self, key: Key) -> int:
        """Return the number of measurements of this size so far."""
        cell = self._cells.get(key)
        return 0 if cell is None else cell.count

    def seconds(self, key: Key, context: float = 0.0) -> float:
        """Return the expected seconds of this size."""
        cell, mean_s = self._cells.get(key), 0.0
        if cell is not None:
            mean_s = cell.seconds
        elif not self._cells:
            return self._unit_s * (self._prior(key) + self._slope * context)
        else:
            near, factor = self._nearest(key)
            cell = self._cells[near]
            mean_s = factor * cell.seconds
        return max(mean_s + self.slope_s * (context - cell.context), 0.5 * mean_s)

    def learn(self, key: Key, seconds: float, context: float = 0.0) -> None:
        """Add a measurement."""
        seconds = max(seconds, MIN_S)
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = Cell(seconds, context)
            self._near.clear()
        elif self._slope:
            # Within cells: they differ in other respects, and are measured one after the other as texts grow.
            change = (context - cell.context) / cell.seconds
            self._cs += change * (min(seconds / cell.seconds, OUTLIER) - 1)
            self._cc += change * change
            prior_s = self._slope * self._unit_s
            weight = (NOISE / prior_s) ** 2
            self.slope_s = max((self._cs + weight * prior_s) / (self._cc + weight), 0.0)
        cell.add(seconds, context)

    def _nearest(self, key: Key) -> tuple[Key, float]:
        """Return the nearest measured size and the prior's proportion; of equally near ones the smaller."""
        found = self._near.get(key)
        if found is None:
            near = min(self._cells, key=lambda other: (_distance(key, other), other))
            found = self._near[key] = near, self._prior(key) / self._prior(near)
        return found


def _distance(a: Key, b: Key) -> float:
    return sum(abs(math.log((1 + x) / (1 + y))) for x, y in zip(a, b, strict=True))


def rounded_rows(rows: int) -> int:
    """Return the rows rounded up so that similar numbers share measurements.

    1 to 4 rows are exact; above, there are about four steps per doubling.
    """
    if rows <= 4:
        return rows
    half = 1 << (rows.bit_length() - 3)
    return -(-rows // half) * half


def _pass_prior(key: Key) -> float:
    """Return the cost of a pass relative to that of one row: a small model on a few CPU cores."""
    rows, nodes = key
    return 0.92 + 0.05 * rows + 0.03 * rows * (1 + nodes)


def _layer_prior(key: Key) -> float:
    rows, depth, _ = key
    return 0.03 + 0.08 * depth + 0.004 * depth * rows


def _suffix_prior(key: Key) -> float:
    rows, depth, nodes = key
    return 0.003 + 4e-4 * depth * rows + 1e-4 * nodes * rows


class StepCost:
    """Expected cost of a step's parts. The same measurements in the same order give the same costs."""

    def __init__(self) -> None:
        self._passes = CostTable(_pass_prior, DEFAULT_STEP_S, SLOPE)
        self._drafts: dict[str, CostTable] = {}
        self._missing_token_s: dict[str, float] = {}
        self._log_slowdown = 0.0

    @property
    def slowdown(self) -> float:
        """Return the factor by which steps currently take longer than usual."""
        return math.exp(self._log_slowdown)

    def verify_s(self, rows: int, nodes: int, context: int) -> float:
        """Return the seconds of a step without drafting, at the usual speed.

        Args:
            rows: Running rows.
            nodes: Verified drafted nodes per row.
            context: Cached tokens of all rows together.
        """
        return self._passes.seconds((rounded_rows(rows), nodes), context)

    def is_measured(self, rows: int, nodes: int) -> bool:
        """Return true if passes of this size have been measured."""
        return self._passes.count((rounded_rows(rows), nodes)) >= 2

    def draft_s(self, arm: Arm, rows: int, missing_tokens: int = 0) -> float:
        """Return the seconds of drafting, at the usual speed.

        Args:
            arm: Speculation setting.
            rows: Running rows.
            missing_tokens: Tokens that the drafter has to compute first, beyond those of the last step.
        """
        if arm.is_off:
            return 0.0
        seconds = self._drafts_of(arm).seconds((rounded_rows(rows), arm.depth, arm.nodes))
        if missing_tokens:
            prior_s = 0.0 if arm.drafter == "suffix" else 2e-3 * self.verify_s(1, 0, 0)
            seconds += missing_tokens * self._missing_token_s.get(arm.drafter, prior_s)
        return seconds

    def learn(self, observed: StepObservation, missing_tokens: int = 0) -> None:
        """Add the measurements of a step.

        Args:
            observed: Observation of the step.
            missing_tokens: See `draft_s`.
        """
        view, arm, draft = observed.view, observed.arm, observed.draft
        rows = rounded_rows(view.rows)
        key, rest_s = (rows, observed.nodes), max(observed.total_s - observed.draft_s, MIN_S)
        if self._passes.count(key) >= MIN_SLOWDOWN_STEPS:
            ratio = rest_s / (self.slowdown * self._passes.seconds(key, view.context))
            # Clipped as in the cells, whose mean then stays that of the ratio: 1.
            self._log_slowdown += SLOWDOWN_RATE * (min(ratio, OUTLIER) - 1)
        self._log_slowdown *= 1 - SLOWDOWN_DECAY
        self._passes.learn(key, rest_s / self.slowdown, view.context)
        # Near the length limit fewer tokens are drafted.
        if observed.draft_s <= 0 or (draft is not None and draft.tokens_BN.shape[1] < arm.nodes):
            return
        draft_s = observed.draft_s / self.slowdown
        if not missing_tokens:
            self._drafts_of(arm).learn((rows, arm.depth, arm.nodes), draft_s)
            return
        each_s = max(draft_s - self.draft_s(arm, view.rows), 0.0) / missing_tokens
        self._missing_token_s[arm.drafter] = (self._missing_token_s.get(arm.drafter, each_s) + each_s) / 2

    def _drafts_of(self, arm: Arm) -> CostTable:
        table = self._drafts.get(arm.drafter)
        if table is None:
            # A drafter of one's own is as expensive as a layer before it is measured.
            prior = _suffix_prior if arm.drafter == "suffix" else _layer_prior
            table = self._drafts[arm.drafter] = CostTable(prior, self._passes.seconds((1, 0)), 0.0)
        return table


SPEED_DEVIATION = 0.03
"""Relative change of the machine's speed from one step to the next."""
STEP_DEVIATION = 0.1
"""Relative deviation of the cost of a step at the same speed."""
COST_DEVIATION = 1e-3
"""Relative change of what an arm costs beside others, from one step to the next."""
UNKNOWN_DEVIATION, NEAR_DEVIATION = 0.5, 0.15
"""Relative deviation of the prior cost of an arm, and of one that was measured at other numbers of rows."""
MAX_SPEED_VARIANCE = 1.0
COUNTED_STEPS = 8
"""Steps that count at the begin and at the end of a series with one arm."""
SCALE_STEPS, MIN_SCALE, MAX_SCALE = 16, 0.05, 20.0
"""Steps over which the variances follow those of the machine, and their limits beside the constants."""
OUTLIER_DEVIATIONS = 3.0
"""Measurements are clipped to so many standard deviations."""


class RelativeCosts:
    """Kalman filter of the cost of a step of each arm beside those of others, at one number of rows.

    The speed of a processor that others use changes by half within seconds. So the logarithm of a measured
    cost is the sum of three unknowns: the machine's slowness, which walks at random and is the same for all
    arms; the arm's own cost, which hardly changes; and noise. Steps of two arms that follow each other say
    how their costs differ; steps that were measured far apart say little about it.

    The state is the slowness, then the cost of each arm. Of a long series of steps with one arm only the
    first and the last ones count: the others say nothing about other arms, and cost next to nothing.
    """

    def __init__(
        self, near: "RelativeCosts | None" = None, change: Mapping[Arm, float] | None = None
    ) -> None:
        """Make a filter.

        Args:
            near: Another one, of another number of rows, whose costs it begins with.
            change: What is added to the logarithms of these costs, by arm.
        """
        self._index: dict[Arm, int] = {} if near is None else dict(near._index)
        size = 1 + len(self._index)
        self._mean: list[float] = [0.0] * size if near is None else list(near._mean)
        self._variance: list[list[float]] = (
            [[0.0] * size for _ in range(size)] if near is None else [list(row) for row in near._variance]
        )
        for at in range(1, size):
            self._variance[at][at] += NEAR_DEVIATION**2
        for arm, more in (change or {}).items():
            if arm in self._index:
                self._mean[self._index[arm]] += more
        self._scale: float = 1.0 if near is None else near._scale
        """Variance of measurements over what the constants say."""
        self._step = 0
        self._last = OFF
        self._run = 0
        """Steps of the last arm in a row."""
        self._waiting: deque[tuple[float, int]] = deque(maxlen=COUNTED_STEPS)
        """Costs and numbers of its newest steps that are not in the state yet."""
        self.forget_speed()

    def forget_speed(self) -> None:
        """Take the slowness for unknown: steps at other numbers of rows lie between."""
        self._count_waiting()
        self._run = 0
        self._variance[0] = [0.0] * len(self._mean)
        for row in self._variance:
            row[0] = 0.0
        self._variance[0][0] = MAX_SPEED_VARIANCE
        self._mean[0] = math.nan

    def knows(self, arm: Arm) -> bool:
        """Return true if steps of the arm have been measured."""
        return arm in self._index

    def learn(self, arm: Arm, cost_s: float, step: int, prior: float) -> None:
        """Add the cost of a step.

        Args:
            arm: Its arm.
            cost_s: Its cost.
            step: Its number.
            prior: Logarithm of the arm's expected cost over that of a plain step, if nothing is known of it.
        """
        if arm != self._last:
            self._count_waiting()
            self._last, self._run = arm, 0
        self._run += 1
        if self._run > COUNTED_STEPS and arm in self._index:
            self._waiting.append((cost_s, step))
            return
        if arm not in self._index:
            self._index[arm] = len(self._mean)
            self._mean.append(prior)
            for row in self._variance:
                row.append(0.0)
            # The first cost is the unit of all others.
            own = UNKNOWN_DEVIATION**2 if len(self._index) > 1 else 0.0
            self._variance.append([0.0] * len(self._variance) + [own])
        self._count(arm, cost_s, step)

    def _count_waiting(self) -> None:
        while self._waiting:
            self._count(self._last, *self._waiting.popleft())

    def _count(self, arm: Arm, cost_s: float, step: int) -> None:
        """Update the state with the cost of a step.

        These are lists, as calls of numpy take longer for so few arms.
        """
        at, elapsed, mean, variance = self._index[arm], step - self._step, self._mean, self._variance
        self._step = step
        log_cost = math.log(max(cost_s, MIN_S))
        if math.isnan(mean[0]):
            mean[0] = log_cost - mean[at]
        walked = elapsed * self._scale * SPEED_DEVIATION**2
        variance[0][0] = min(variance[0][0] + walked, MAX_SPEED_VARIANCE)
        variance[at][at] += elapsed * COST_DEVIATION**2
        shared = [slowness + own for slowness, own in zip(variance[0], variance[at], strict=True)]
        total = shared[0] + shared[at] + self._scale * STEP_DEVIATION**2
        limit = OUTLIER_DEVIATIONS * math.sqrt(total)
        surprise = log_cost - (mean[0] + mean[at])
        surprise = min(max(surprise, -limit), limit)
        scale = self._scale + (surprise**2 / total - 1) * self._scale / SCALE_STEPS
        self._scale = min(max(scale, MIN_SCALE), MAX_SCALE)
        for i, gain in enumerate(shared):
            gain /= total
            mean[i] += gain * surprise
            variance[i] = [old - gain * more for old, more in zip(variance[i], shared, strict=True)]

    def doubt(self, arm: Arm) -> None:
        """Take what is known of an arm for uncertain: its next steps say more than all before."""
        if arm in self._index:
            self._variance[self._index[arm]][self._index[arm]] += UNKNOWN_DEVIATION**2

    def difference(self, arm: Arm, other: Arm) -> tuple[float, float]:
        """Return the logarithm of the cost of an arm over that of another, and its standard deviation."""
        a, b, variance = self._index[arm], self._index[other], self._variance
        spread = variance[a][a] + variance[b][b] - 2 * variance[a][b]
        return self._mean[a] - self._mean[b], math.sqrt(max(spread, 0.0))


NUM_BINS = 16
CENTRES = tuple((i + 0.5) / NUM_BINS for i in range(NUM_BINS))
BIN_EDGES: Floats = np.log(np.arange(1, NUM_BINS) / NUM_BINS)
PRIOR_NODES = 2.0
"""Prior nodes of each bin, accepted as often as the drafter's probability times its usual bias."""
MEMORY_NODES = 4000.0
"""Number of observed nodes after which the weight of an old one is 1 / e."""
VERSION_DECAY = 0.1
"""Weight of observations of older versions of the drafter."""
MEMORY_STEPS, MEMORY_ROWS = 150.0, 600.0
"""Steps and rows after which the weight of an old one is 1 / e, whichever come first."""
RETRY_STEPS, RETRY_SHARE = 64, 0.5
"""Steps without an arm, or without all of a drafter, after which what is known of it is doubted, and their
share of the steps since it was last in use: it is tried again each time after twice as many steps."""
RETRY_BESIDE = 1024
"""The same while another arm is in use, which gains something."""
DOUBTED_ROWS = 64.0
"""Rows that the observations of a drafter count at most when it is tried while plain decoding is in use: the
text has changed since, and a trial is of some 30 rows."""


def retry_steps(step: int, last_gain: int, *, is_off: bool) -> float:
    """Return the steps without an arm or a drafter after which it is tried again.

    Args:
        step: Number of the step.
        last_gain: Step at which it was last in use outside of trials.
        is_off: Plain decoding is in use.
    """
    return max(RETRY_STEPS if is_off else RETRY_BESIDE, RETRY_SHARE * (step - last_gain))


PRIOR_ROWS, PRIOR_CHANCE = 2.0, 0.5
"""Prior of the first node; deeper nodes have the estimate of the node before as prior."""
OPTIMISTIC_ROWS = 4.0
"""Accepted rows that an optimistic estimate adds to the observations."""
TREE_FACTOR = 1.1
"""Prior of a tree's accepted nodes, relative to the chain of its depth."""


def score_bins(draft: Draft) -> Bins:
    """Return the bin of the drafter's probability of the path to each node, (B, N); `NUM_BINS` is padding.

    It is read at once: the draft's tensors may be reused.
    """
    bins: Bins = BIN_EDGES.searchsorted(draft.scores_BN.numpy(force=True), side="right")
    if draft.counts_B is not None:
        bins[np.arange(bins.shape[1]) >= draft.counts_B.numpy(force=True)[:, None]] = NUM_BINS
    return bins


def accepted_nodes(
    shape: tuple[int, int], accepted_B: Sequence[int], path_Bm: Sequence[Sequence[int]] | None
) -> NDArray[np.bool_]:
    """Return the accepted nodes, (B, N), from `StepObservation.accepted_B` and `StepObservation.path_Bm`."""
    if path_Bm is None:
        return np.arange(shape[1]) < np.asarray(accepted_B)[:, None]
    accepted = np.zeros(shape, dtype=bool)
    for row, (path, count) in enumerate(zip(path_Bm, accepted_B, strict=True)):
        accepted[row, [token - 1 for token in path[1 : count + 1]]] = True
    return accepted


class PathChances:
    """Share of accepted nodes by the drafter's probability of their path."""

    def __init__(self) -> None:
        self.num_observed = [0.0] * NUM_BINS
        self.num_accepted = [0.0] * NUM_BINS
        self.table = [*CENTRES, 0.0]
        """Chance of each bin; of padding 0."""
        self._num_updates = 0

    def learn(self, observed: Sequence[int], accepted: Sequence[int], steps: int = 1) -> None:
        """Add the numbers of verified and of accepted nodes by bin, of a step that stands for `steps`."""
        kept = math.exp(-steps * max(sum(observed) / MEMORY_NODES, 1 / MEMORY_STEPS))
        for sums, new in ((self.num_observed, observed), (self.num_accepted, accepted)):
            sums[:] = [kept * old + steps * count for old, count in zip(sums, new, strict=True)]
        self._num_updates += 1
        if self._num_updates % 4 == 0 or self._num_updates < 4:
            self._fit()

    def _fit(self) -> None:
        promised = sum(seen * centre for seen, centre in zip(self.num_observed, CENTRES, strict=True))
        bias = (sum(self.num_accepted) + 1) / (promised + 1)
        for i, centre in enumerate(CENTRES):
            prior = PRIOR_NODES * min(bias * centre, 1.0)
            self.table[i] = (self.num_accepted[i] + prior) / (self.num_observed[i] + PRIOR_NODES)

    def fade(self, kept: float) -> None:
        """Multiply the weight of all observations."""
        self.num_observed = [kept * old for old in self.num_observed]
        self.num_accepted = [kept * old for old in self.num_accepted]


class Acceptance:
    """Accepted tokens of one drafter's arms."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the drafter; None before it is known."""
        self.missing_tokens = 1 << 30
        """Tokens emitted since its last draft. It may have to compute all cached tokens."""
        self.last_used = self.last_gain = 0
        """Steps of its last draft, and at which one of its arms was last in use outside of trials."""
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._trees: dict[Arm, tuple[float, float]] = {}
        self._chances: dict[Arm, PathChances] = {OFF: PathChances()}

    @property
    def num_rows(self) -> float:
        """Return the weighted number of observed rows."""
        return self._reached[0] if self._reached else 0.0

    def begin_step(self, version: int, step: int, *, is_off: bool) -> bool:
        """Prepare for a step. Observations of older versions weigh less, and those of long ago nothing.

        Args:
            version: Version of the drafter's weights.
            step: Number of the step.
            is_off: Plain decoding is in use.

        Returns:
            Whether those of long ago have been dropped: the drafter is to be tried again.
        """
        if self.version is not None and version != self.version:
            self._fade(VERSION_DECAY)
        self.version = version
        is_old = step - self.last_used >= retry_steps(step, self.last_gain, is_off=is_off)
        if is_old:
            self._fade(0.0)
            self.last_used = step
        return is_old

    def doubt(self) -> None:
        """Let new observations weigh more than those before, which are of other text."""
        self._fade(min(DOUBTED_ROWS / max(self.num_rows, DOUBTED_ROWS), 1.0))

    @property
    def next_retry(self) -> int:
        """Return the step at which the drafter is to be tried again if plain decoding goes on."""
        share = (self.last_used - RETRY_SHARE * self.last_gain) / (1 - RETRY_SHARE)
        return max(self.last_used + RETRY_STEPS, math.ceil(share))

    def chances(self, arm: Arm, bins: Bins) -> Floats:
        """Return the chance that the path to each node is accepted, (B, N)."""
        chances: Floats = np.array(self._chances_of(arm).table)[bins]
        return chances

    def learn(
        self,
        arm: Arm,
        bins: Bins,
        verified_B: Sequence[int],
        accepted_B: Sequence[int],
        path_Bm: Sequence[Sequence[int]] | None = None,
        steps: int = 1,
    ) -> float:
        """Add the outcome of a draft.

        Nodes that were not verified count with their chance: otherwise deep nodes, which are verified only
        after promising drafts, would be overestimated.

        Args:
            arm: Arm of the draft.
            bins: See `score_bins`.
            verified_B: Nodes of each row that were verified.
            accepted_B: Accepted nodes of each row.
            path_Bm: See `StepObservation.path_Bm`.
            steps: See `count`.

        Returns:
            The accepted tokens of all rows, as if all nodes had been verified.
        """
        chances = self._chances_of(arm)
        num_nodes = bins.shape[1]
        sums, observed, hits = [0.0] * num_nodes, [0] * (NUM_BINS + 1), [0] * (NUM_BINS + 1)
        accepted_BN = accepted_nodes((len(bins), num_nodes), accepted_B, path_Bm).tolist()
        # Most drafts are of a few nodes, for which calls of numpy take longer than this.
        for row_bins, row_accepted, verified in zip(bins.tolist(), accepted_BN, verified_B, strict=True):
            for j, at in enumerate(row_bins):
                if j < verified:
                    observed[at] += 1
                    hits[at] += row_accepted[j]
                    sums[j] += row_accepted[j]
                else:
                    sums[j] += chances.table[at]
        self.count(arm, len(bins), sums, steps)
        if any(observed[:NUM_BINS]):
            chances.learn(observed[:NUM_BINS], hits[:NUM_BINS], steps)
        return sum(sums)

    def count(self, arm: Arm, rows: int, sums: Sequence[float], steps: int = 1) -> None:
        """Count the outcome of a draft.

        Args:
            arm: Arm of the draft.
            rows: Number of rows.
            sums: For each node, the rows in which its path was accepted, or the sum of the chances that it
                would have been.
            steps: Number of steps that it stands for, and counts as often.
        """
        kept = math.exp(-steps * max(1 / MEMORY_STEPS, rows / MEMORY_ROWS))
        if not arm.is_chain:
            accepted, seen = self._trees.get(arm, (0.0, 0.0))
            self._trees[arm] = (kept * accepted + steps * sum(sums), kept * seen + steps * rows)
            return
        missing = len(sums) - len(self._reached)
        if missing > 0:
            self._reached += [0.0] * missing
            self._accepted += [0.0] * missing
        before = float(rows)
        for j, survived in enumerate(sums):
            self._reached[j] = kept * self._reached[j] + steps * before
            self._accepted[j] = kept * self._accepted[j] + steps * survived
            before = survived
        for j in range(len(sums), len(self._reached)):
            self._reached[j] *= kept
            self._accepted[j] *= kept

    def expected(self, arm: Arm, *, optimistic: bool = False) -> float:
        """Return the expected tokens per row and step, including the policy's own token: 1 or more."""
        chain = 1.0 + sum(self._reaches(arm.depth, optimistic=optimistic))
        if arm.is_chain:
            return chain
        accepted, seen = self._trees.get(arm, (0.0, 0.0))
        prior_rows = OPTIMISTIC_ROWS if optimistic else PRIOR_ROWS
        return 1.0 + (accepted + prior_rows * TREE_FACTOR * (chain - 1.0)) / (seen + prior_rows)

    def deviation(self, arm: Arm) -> float:
        """Return the relative standard error of `expected`; that of the chain of its depth for a tree."""
        reaches = list(self._reaches(arm.depth, optimistic=False))
        mean = sum(reaches)
        squares = sum((2 * j + 1) * reach for j, reach in enumerate(reaches))
        return math.sqrt((squares - mean * mean) / (self.num_rows + PRIOR_ROWS)) / (1.0 + mean)

    def _reaches(self, depth: int, *, optimistic: bool) -> Iterator[float]:
        """Yield the chance that a chain's node at each depth is accepted with all before it."""
        path = 1.0
        prior_rows, prior = (OPTIMISTIC_ROWS, 1.0) if optimistic else (PRIOR_ROWS, PRIOR_CHANCE)
        for j in range(depth):
            has_data = j < len(self._reached)
            reached, accepted = (self._reached[j], self._accepted[j]) if has_data else (0.0, 0.0)
            chance = (accepted + prior_rows * prior) / (reached + prior_rows)
            path *= chance
            yield path
            if not optimistic:
                prior = chance

    def _chances_of(self, arm: Arm) -> PathChances:
        """Return the table of all chains or of one tree, in which later siblings are accepted more rarely."""
        key = OFF if arm.is_chain else arm
        found = self._chances.get(key)
        if found is None:
            found = self._chances[key] = PathChances()
        return found

    def _fade(self, kept: float) -> None:
        self._reached = [kept * reached for reached in self._reached]
        self._accepted = [kept * accepted for accepted in self._accepted]
        self._trees = {arm: (kept * a, kept * n) for arm, (a, n) in self._trees.items()}
        for chances in self._chances.values():
            chances.fade(kept)
