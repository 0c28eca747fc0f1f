"""Compare the predictions of `Goodput` with the outcome: step times, chances, speed-up.

Each prediction is made from what was known before the step. The recording takes time that no real engine
spends: `spent_s` counts it, to be subtracted.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from aedit.spec_rollout.choose import EngineView, Floats, Goodput, StepObservation, accepted_nodes, score_bins
from aedit.spec_rollout.drafters import OFF, Arm, Draft

NUM_BINS = 20
"""Bins of a predicted chance; the chooser uses others."""


@dataclass(slots=True)
class Scores:
    """Predicted chances of nodes and their outcomes, by bins of the chance."""

    promised: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    nodes: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))

    @property
    def error(self) -> float:
        """Return the expected calibration error; 0 without nodes."""
        total = float(self.nodes.sum())
        return float(np.abs(self.promised - self.accepted).sum()) / total if total else 0.0

    def add(self, chance: Floats, accepted: Floats) -> None:
        bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self.promised += np.bincount(bins, chance, NUM_BINS)
        self.accepted += np.bincount(bins, accepted, NUM_BINS)
        self.nodes += np.bincount(bins, minlength=NUM_BINS)


@dataclass(frozen=True, slots=True)
class Foretold:
    """Errors of the predictions."""

    step_error: float
    """Mean of |foretold - measured| / measured of step times."""
    middle_step_error: float
    """Their median: what single long steps do not move."""
    chance_errors: dict[str, float]
    """Calibration error by drafter."""
    chance_nodes: dict[str, int]
    """Drafted nodes that the policy has judged, by drafter."""
    speedup: float
    """Over plain decoding: what the choice expected of the arms that it played."""
    steps: int


@dataclass(slots=True)
class Watched:
    """Chooser that chooses as `inner` does."""

    inner: Goodput
    clock: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0
    _errors: list[float] = field(default_factory=list)
    _scores: defaultdict[str, Scores] = field(default_factory=lambda: defaultdict(Scores))
    _seconds: float = 0.0
    _plain_s: float = 0.0
    """Plain decoding's for what the arms were expected to make in `_seconds`."""

    def choose(self, view: EngineView) -> Arm:
        return self.inner.choose(view)

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        return self.inner.trim(view, arm, draft)

    def learn(self, observed: StepObservation) -> None:
        began_s = self.clock()
        self._note_time(observed)
        self._note_chances(observed)
        self.spent_s += self.clock() - began_s
        self.inner.learn(observed)

    def forget(self) -> None:
        """Discard the records so far."""
        self._errors, self._scores = [], defaultdict(Scores)
        self._seconds = self._plain_s = 0.0

    @property
    def foretold(self) -> Foretold:
        return Foretold(
            step_error=float(np.mean(self._errors)) if self._errors else 0.0,
            middle_step_error=float(np.median(self._errors)) if self._errors else 0.0,
            chance_errors={by: scores.error for by, scores in self._scores.items()},
            chance_nodes={by: int(scores.nodes.sum()) for by, scores in self._scores.items()},
            speedup=self._plain_s / self._seconds if self._seconds else 1.0,
            steps=len(self._errors),
        )

    def _note_time(self, observed: StepObservation) -> None:
        view, arm, cost = observed.view, observed.arm, self.inner.cost
        behind = self.inner.missing_tokens(view, arm) if arm.drafter in self.inner.drafters else 0
        foretold_s = cost.verify_s(view.rows, observed.nodes, view.context)
        foretold_s += cost.draft_s(arm, view.rows, behind)
        self._errors.append(abs(foretold_s * cost.slowdown / observed.total_s - 1))
        self._seconds += observed.total_s
        gain = self.inner.value(view, arm) / self.inner.value(view, OFF)
        self._plain_s += observed.total_s * gain

    def _note_chances(self, observed: StepObservation) -> None:
        draft, known = observed.draft, self.inner.drafters.get(observed.arm.drafter)
        if draft is None or known is None or draft.tokens_BN.shape[1] == 0:
            return
        bins = score_bins(draft)[:, : observed.nodes]
        accepted_BN = accepted_nodes(bins.shape, observed.accepted_B, observed.path_Bm)
        is_node_BN = known.chances(observed.arm, bins) > 0  # others are padding
        chances = known.chances(observed.arm, bins)[is_node_BN]
        self._scores[observed.arm.drafter].add(chances, accepted_BN[is_node_BN].astype(np.float64))
