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

from aedit.spec_rollout.choose.arms import StepObservation
from aedit.spec_rollout.choose.time_model import MIN_S, FeatureVector, MeasurementKey, TimeModel
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

DRAFTER_PRIORS = {"layer": (0.03, 0.08, 0.004, 0.0, 0.002), "suffix": (0.003, 0.0, 4e-4, 1e-4, 0.0)}
"""Prior coefficients of drafters, of: constant, depth, depth * rows, nodes * rows, missing tokens."""


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
