"""How long a step takes, from what steps have taken.

Each time is a sum of features with coefficients that are not negative: for the policy's pass (RLHFSpec)
c0 + c1 B + c2 Ntok + c3 Nctx + c4 max(0, Ntok - 32) + c5 max(0, Ntok - 128), for a drafter its depth, its
rows, and what it has to catch up. On top of that, each (B, verified tokens) that has been seen corrects the
sum by its own median: so the jump on CPU where one token of a row becomes two (a matrix times a vector
becomes a matrix times a matrix) needs no term, and terms for it foresee unseen places worse.

Only what is measured again replaces what was measured: a window per place, so that a thousand steps of one
arm do not wash out what is known of the others. Times are divided by the machine's pace of the moment, which
all arms share: a minute of somebody else's load says nothing about one of them.

Letters: B live rows, Ntok = B (1 + nodes) verified tokens, Nctx tokens in the cache. Times in seconds.
"""

import math
from collections import deque

from aedit.spec_rollout.arms.arms import StepObservation
from aedit.spec_rollout.arms.time_model import MIN_S, FeatureVector, MeasurementKey, TimeModel
from aedit.spec_rollout.drafters.drafts import Arm

DEFAULT_STEP_S = 3e-3
"""Of one row, before anything is known."""

SLOWDOWN_RATE = 1 / 4
"""How fast the pace follows: what lasts some steps is the machine's; what lasts, the arm's."""

SLOWDOWN_DECAY = 1 / 128
"""How fast the pace goes back to 1, and what it said becomes the places' own."""

MIN_KEY_STEPS = 2
"""Steps of a place before its times are foreseen by its own."""

MIN_SLOWDOWN_STEPS = 16
"""Steps of a place after which it can say something about the machine's pace."""

POLICY_PRIOR = (0.92, 0.05, 0.03, 2e-4, 0.0, 0.0)
"""Coefficients relative to a plain step of one row: small models on a few CPU cores."""

DRAFTER_PRIORS = {"layer": (0.03, 0.08, 0.004, 0.0, 0.002), "suffix": (0.003, 0.0, 4e-4, 1e-4, 0.0)}
"""The same for drafters: of depth, rows, nodes, and tokens to catch up."""


class StepCost:
    """Predicts the time of a step and learns from each. The same observations give the same predictions."""

    def __init__(self) -> None:
        self._policy = TimeModel(POLICY_PRIOR, DEFAULT_STEP_S, inner=3)
        self._drafters: dict[str, TimeModel] = {}
        self._log_slowdown = 0.0
        self._log_ratios: deque[float] = deque((0.0, 0.0), maxlen=3)

    @property
    def slowdown(self) -> float:
        """How much longer than usual everything takes at the moment."""
        return math.exp(self._log_slowdown)

    def verify_s(self, rows: int, nodes: int, context: int) -> float:
        """All of a step but the drafting, at the usual pace: `nodes` drafted nodes of each row verified."""
        return self._policy.predict(_verify_key(rows, nodes), _policy_features(rows, nodes, context))

    def draft_s(self, arm: Arm, rows: int, missing_tokens: int = 0) -> float:
        """The drafting, at the usual pace. behind: tokens that the drafter has not seen."""
        if arm.is_off:
            return 0.0
        return self._drafter_model(arm).predict(
            _draft_key(arm, rows), _draft_features(arm, rows, missing_tokens)
        )

    def learn(self, observed: StepObservation, missing_tokens: int = 0) -> float | None:
        """After each step. behind: tokens that its drafter had to catch up. Returns what the step has taken
        over what was foreseen, at the machine's pace; None while its place is new: what it takes more there
        is its place's."""
        rows, arm = observed.view.rows, observed.arm
        rest_s = max(observed.total_s - observed.draft_s, MIN_S)
        context = observed.view.context
        predicted_s = self.verify_s(rows, observed.nodes, context) + self.draft_s(arm, rows, missing_tokens)
        is_new = self._policy.num_measurements(_verify_key(rows, observed.nodes)) < MIN_KEY_STEPS
        self._update_slowdown(observed, predicted_s)
        features = _policy_features(rows, observed.nodes, context)
        self._policy.learn(_verify_key(rows, observed.nodes), features, rest_s / self.slowdown)
        draft = observed.draft
        whole = draft is None or draft.tokens_BN.shape[1] >= arm.nodes  # at the end less is asked for
        if observed.draft_s > 0 and whole:
            model, features = self._drafter_model(arm), _draft_features(arm, rows, missing_tokens)
            model.learn(_draft_key(arm, rows), features, observed.draft_s / self.slowdown)
        return None if is_new else observed.total_s / (self.slowdown * predicted_s)

    def _drafter_model(self, arm: Arm) -> TimeModel:
        if arm.drafter not in self._drafters:
            self._drafters[arm.drafter] = TimeModel(DRAFTER_PRIORS[arm.drafter], self._policy.unit_s, inner=4)
        return self._drafters[arm.drafter]

    def _update_slowdown(self, observed: StepObservation, predicted_s: float) -> None:
        """The pace follows places that are known, by the middle one of three steps."""
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
    """Numbers of rows that are one place: 1 to 4 each for itself, then four to each doubling or so."""
    if rows <= 4:
        return rows
    half = 1 << (rows.bit_length() - 3)
    return -(-rows // half) * half
