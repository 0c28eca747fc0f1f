"""Prediction of step times from measured steps.

Each time is a sum of features with non-negative coefficients: for the policy's pass (RLHFSpec) c0 + c1 B + c2
Ntok + c3 Nctx + c4 max(0, Ntok - 32) + c5 max(0, Ntok - 128); for a drafter its depth, its rows, and its
missing tokens. Each measured combination (B, verified tokens) corrects the sum by its own median. So the jump
on a CPU where one token per row becomes two (a matrix-vector product becomes a matrix-matrix product) needs
no feature; features for it predict unmeasured combinations worse.

Old measurements are replaced only by new ones of the same combination, so that a thousand steps of one arm do
not erase the others. Times are divided by the current slowdown of the machine, which all arms share: load of
other processes affects all arms alike.

Letters: B running rows, Ntok = B (1 + nodes) verified tokens, Nctx cached tokens. Times are in seconds.
"""

import math
from collections import deque
from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from aedit.spec_rollout.choose.arms import StepObservation
from aedit.spec_rollout.drafters import Arm

DEFAULT_STEP_S = 3e-3
"""Seconds of a plain step of one row before anything is measured."""
SLOWDOWN_RATE = 1 / 4
"""Rate at which the slowdown follows measurements: changes of a few steps are attributed to the machine,
lasting ones to the arm."""
SLOWDOWN_DECAY = 1 / 128
"""Rate at which the slowdown returns to 1 and its effect moves into the measurements."""
MIN_KEY_STEPS = 2
"""Number of steps of a combination before its own times correct the prediction."""
MIN_SLOWDOWN_STEPS = 16
"""Number of steps of a combination before it contributes to the slowdown."""
POLICY_PRIOR = (0.92, 0.05, 0.03, 2e-4, 0.0, 0.0)
"""Prior coefficients relative to a plain step of one row: small models on a few CPU cores."""

DRAFTER_PRIORS = {
    "layer": (0.03, 0.08, 0.004, 0.0, 0.002),
    "suffix": (0.003, 0.0, 4e-4, 1e-4, 0.0),
    "custom": (0.03, 0.08, 0.004, 0.0, 0.002),  # unknown before it is measured: as expensive as a layer
}
"""Prior coefficients of drafters, of: constant, depth, depth * rows, nodes * rows, missing tokens."""
FeatureVector = tuple[float, ...]
Floats = NDArray[np.float64]
MeasurementKey = tuple[int, int, int, int]
"""Measurements with the same key share a window and a correction."""


class TimeModel:
    """Predicts a time from features and key.

    Shapes: P keys, W their window, F features.
    """

    def __init__(self, prior: FeatureVector, unit_s: float, inner: int) -> None:
        """Make a model.

        Args:
            prior: Prior coefficients in units of `unit_s` seconds. Measurements rescale it first and soon
                outweigh it.
            unit_s: Scale of the prior.
            inner: Index of the feature that changes within keys. Its coefficient is fitted within keys only:
                keys differ in other respects and are measured one after the other while this feature grows,
                so that a fit across keys would attribute their differences to it.
        """
        self._prior, self._inner = np.array(prior), inner
        self._indices: dict[MeasurementKey, int] = {}
        self._counts: list[int] = []
        """Number of measurements of each key so far."""
        self._ratios: list[list[float]] = []
        """Measured over fitted times in each key's window."""
        self._medians: list[float | None] = []
        """Medians of the ratios, shrunk towards 1; None if outdated."""
        self._features_PWF: Floats = np.zeros((4, WINDOW, len(prior)))
        self._seconds_PW: Floats = np.zeros((4, WINDOW))
        self._unmerged: list[tuple[int, int, FeatureVector, float]] = []
        """Measurements that are not in the arrays yet: key index, index in its window, features, seconds."""
        self._measured = 0
        self.unit_s = unit_s
        """Scale of the prior that fits the measurements."""
        self._coefficients: FeatureVector = tuple(c * unit_s for c in prior)

    def num_measurements(self, key: MeasurementKey) -> int:
        """Return the number of measurements of this key that count, at most `WINDOW`."""
        index = self._indices.get(key)
        return 0 if index is None else min(self._counts[index], WINDOW)

    def predict(self, key: MeasurementKey, features: FeatureVector) -> float:
        """Return the predicted seconds."""
        fitted_s = self._fitted_s(features)
        index = self._indices.get(key)
        if index is None:
            return fitted_s
        median = self._medians[index]
        if median is None:
            median = self._medians[index] = _shrunk_median(self._ratios[index])
        return fitted_s * median

    def learn(self, key: MeasurementKey, features: FeatureVector, seconds: float) -> None:
        """Add one measurement."""
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._indices)
            self._counts.append(0)
            self._ratios.append([])
            self._medians.append(None)
        seconds, at = max(seconds, MIN_S), self._counts[index] % WINDOW
        self._unmerged.append((index, at, features, seconds))
        self._ratios[index][at : at + 1] = [seconds / self._fitted_s(features)]
        self._medians[index] = None
        self._counts[index] += 1
        self._measured += 1
        if self._measured % REFIT == 0 or self._measured in (1, 2, 4, 8, 16, 32):
            self._fit()

    def _fitted_s(self, features: FeatureVector) -> float:
        return max(float(sum(map(mul, self._coefficients, features))), MIN_S)

    def _fit(self) -> None:
        """Fit the coefficients by least squares of relative errors over all keys, with outliers clipped."""
        self._merge_new()
        counts = np.minimum(self._counts, WINDOW)
        features_PWF, seconds_PW = self._features_PWF[: len(counts)], self._seconds_PW[: len(counts)]
        is_valid_PW = np.arange(WINDOW) < counts[:, None]
        fitted_PW = np.maximum(features_PWF @ np.array(self._coefficients), MIN_S)
        ratios_PW = np.where(is_valid_PW, seconds_PW / fitted_PW, np.inf)
        median_P1 = np.take_along_axis(np.sort(ratios_PW, axis=1), counts[:, None] // 2, axis=1)
        typical_PW = fitted_PW * median_P1
        clipped_PW = np.clip(ratios_PW / median_P1, 1 / OUTLIER, OUTLIER)
        inner = self._inner_coefficient(features_PWF[..., self._inner], clipped_PW * typical_PW, is_valid_PW)
        relative_SF = (features_PWF / typical_PW[:, :, None])[is_valid_PW]
        gram, moment = relative_SF.T @ relative_SF, clipped_PW[is_valid_PW] @ relative_SF
        self.unit_s = _scale(gram, moment, self._prior)
        weight = np.maximum(np.diagonal(gram) / is_valid_PW.sum(), self.unit_s**-2) * PRIOR_WEIGHT
        gram, moment = gram + np.diag(weight), moment + weight * self._prior * self.unit_s
        rest = np.arange(len(moment)) != self._inner
        solution = np.full(len(moment), inner)
        solution[rest] = nonnegative(gram[np.ix_(rest, rest)], (moment - gram[:, self._inner] * inner)[rest])
        self._coefficients = tuple(solution.tolist())
        ratios = (seconds_PW / np.maximum(features_PWF @ solution, MIN_S)).tolist()
        self._ratios = [row[:count] for row, count in zip(ratios, counts.tolist(), strict=True)]
        self._medians = [None] * len(counts)

    def _inner_coefficient(
        self, inner_PW: Floats, seconds_PW: Floats, is_valid_PW: NDArray[np.bool_]
    ) -> float:
        """Fit the inner coefficient from deviations from the mean of each key.

        The prior's uncertainty equals its size.
        """
        count_P1 = np.maximum(is_valid_PW.sum(axis=1, keepdims=True), 1)
        seconds_PW, inner_PW = np.where(is_valid_PW, seconds_PW, 0.0), np.where(is_valid_PW, inner_PW, 0.0)
        mean_P1, median_P1 = (x.sum(axis=1, keepdims=True) / count_P1 for x in (seconds_PW, inner_PW))
        by_seconds = np.where(is_valid_PW, seconds_PW / mean_P1 - 1, 0.0)
        by_inner = np.where(is_valid_PW, (inner_PW - median_P1) / mean_P1, 0.0)
        prior = float(self._prior[self._inner]) * self.unit_s
        weight = (TIMING_NOISE / max(prior, MIN_S)) ** 2
        estimate = float((by_inner * by_seconds).sum()) + weight * prior
        return max(estimate / (float((by_inner**2).sum()) + weight), 0.0)

    def _merge_new(self) -> None:
        """Write new measurements to the arrays.

        They are written in order, as a key may have been measured more often than its window is long.
        """
        if len(self._indices) > len(self._seconds_PW):
            padding = ((0, len(self._indices)), (0, 0))
            self._features_PWF = np.pad(self._features_PWF, (*padding, (0, 0)))
            self._seconds_PW = np.pad(self._seconds_PW, padding)
        for index, at, features, seconds in self._unmerged:
            self._features_PWF[index, at] = features
            self._seconds_PW[index, at] = seconds
        self._unmerged = []


class StepCost:
    """Predicts the time of a step and learns from each. The same observations give the same predictions."""

    def __init__(self) -> None:
        self._policy = TimeModel(POLICY_PRIOR, DEFAULT_STEP_S, inner=3)
        self._drafters: dict[str, TimeModel] = {}
        self._log_slowdown = 0.0
        self._log_ratios: deque[float] = deque((0.0, 0.0), maxlen=3)

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
        return self._policy.predict(_verify_key(rows, nodes), _policy_features(rows, nodes, context))

    def draft_s(self, arm: Arm, rows: int, missing_tokens: int = 0) -> float:
        """Return the seconds of drafting, at the usual speed.

        Args:
            arm: Speculation setting.
            rows: Running rows.
            missing_tokens: Tokens that the drafter has not computed yet.
        """
        if arm.is_off:
            return 0.0
        return self._drafter_model(arm).predict(
            _draft_key(arm, rows), _draft_features(arm, rows, missing_tokens)
        )

    def learn(self, observed: StepObservation, missing_tokens: int = 0) -> float | None:
        """Learn from a step.

        Args:
            observed: Observation of the step.
            missing_tokens: Tokens that its drafter had to compute first.

        Returns:
            Measured over predicted seconds at the machine's current speed, or None while the combination is
            new.
        """
        rows, arm = observed.view.rows, observed.arm
        rest_s = max(observed.total_s - observed.draft_s, MIN_S)
        context = observed.view.context
        predicted_s = self.verify_s(rows, observed.nodes, context) + self.draft_s(arm, rows, missing_tokens)
        is_new = self._policy.num_measurements(_verify_key(rows, observed.nodes)) < MIN_KEY_STEPS
        self._update_slowdown(observed, predicted_s)
        features = _policy_features(rows, observed.nodes, context)
        self._policy.learn(_verify_key(rows, observed.nodes), features, rest_s / self.slowdown)
        draft = observed.draft
        whole = (
            draft is None or draft.tokens_BN.shape[1] >= arm.nodes
        )  # near the length limit fewer tokens are drafted
        if observed.draft_s > 0 and whole:
            model, features = self._drafter_model(arm), _draft_features(arm, rows, missing_tokens)
            model.learn(_draft_key(arm, rows), features, observed.draft_s / self.slowdown)
        return None if is_new else observed.total_s / (self.slowdown * predicted_s)

    def _drafter_model(self, arm: Arm) -> TimeModel:
        if arm.drafter not in self._drafters:
            self._drafters[arm.drafter] = TimeModel(DRAFTER_PRIORS[arm.drafter], self._policy.unit_s, inner=4)
        return self._drafters[arm.drafter]

    def _update_slowdown(self, observed: StepObservation, predicted_s: float) -> None:
        """Move the slowdown towards the median of the last three ratios of well-known combinations."""
        measured_s = max(observed.total_s, MIN_S)
        if (
            self._policy.num_measurements(_verify_key(observed.view.rows, observed.nodes))
            >= MIN_SLOWDOWN_STEPS
        ):
            self._log_ratios.append(math.log(measured_s / predicted_s))
            self._log_slowdown += SLOWDOWN_RATE * (
                sorted(self._log_ratios)[len(self._log_ratios) // 2] - self._log_slowdown
            )
        self._log_slowdown *= 1 - SLOWDOWN_DECAY


def _policy_features(rows: int, nodes: int, context: int) -> FeatureVector:
    tokens = rows * (1 + nodes)
    return (1.0, rows, tokens, context, max(0, tokens - 32), max(0, tokens - 128))


def _draft_features(arm: Arm, rows: int, missing_tokens: int) -> FeatureVector:
    depth = arm.depth
    return (1.0, depth, depth * rows, arm.nodes * rows, missing_tokens)


def _verify_key(rows: int, nodes: int) -> MeasurementKey:
    return (_rounded_rows(rows), nodes, 0, 0)


def _draft_key(arm: Arm, rows: int) -> MeasurementKey:
    return (_rounded_rows(rows), arm.depth, arm.width, arm.nodes)


def _rounded_rows(rows: int) -> int:
    """Return the rows rounded up so that similar numbers share measurements.

    1 to 4 rows are exact; above, there are about four steps per doubling.
    """
    if rows <= 4:
        return rows
    half = 1 << (rows.bit_length() - 3)
    return -(-rows // half) * half


WINDOW = 16
"""Number of newest times of a key that count."""
OUTLIER = 1.5
"""Times beyond this factor from the typical time of their key are clipped to it before coefficients are
fitted."""
PRIOR_WEIGHT = 0.1
"""Weight of the prior of each coefficient, in measurements."""
REFIT = 64
"""Measurements between fits; the first fits are after 1, 2, 4, 8, 16 and 32."""
TIMING_NOISE = 0.1
"""Relative deviation of times with the same key and features."""
MIN_S = 1e-9


def nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimizes x'gram x / 2 - moment'x. gram: positive definite.

    With gram = L L', this is the non-negative least-squares problem |L'x - L^-1 moment|. Coordinates are
    scaled to a unit diagonal first, as features differ by many powers of ten.
    """
    scale = 1 / np.sqrt(np.diagonal(gram))
    lower = np.linalg.cholesky(gram * np.outer(scale, scale))
    x: Floats = nnls(lower.T, np.linalg.solve(lower, moment * scale))[0] * scale
    return x


def _scale(gram: Floats, moment: Floats, prior: Floats) -> float:
    """Return the multiple of the prior that fits best."""
    return max(float(moment @ prior), 1e-12) / max(float(prior @ gram @ prior), 1e-12)


def _shrunk_median(ratios: Sequence[float]) -> float:
    """Return the median, shrunk towards 1 as if by two more measurements."""
    ordered = sorted(ratios)
    half = len(ordered) // 2
    median = math.sqrt(ordered[half] * ordered[~half])
    share = len(ordered) / (len(ordered) + 2)
    return math.exp(share * math.log(median))
