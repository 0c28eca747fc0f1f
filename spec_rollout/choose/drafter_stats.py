"""Statistics of one drafter: acceptance by depth, calibration of its scores, and missing tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from aedit.spec_rollout.choose.arms import StepObservation
from aedit.spec_rollout.choose.calibration import Calibration, DraftNodes, accepted_nodes
from aedit.spec_rollout.choose.survival import Survival
from aedit.spec_rollout.drafters import OFF, Arm, Draft

BATCH_ROWS, BATCH_DRAFTS = 32, 16
"""Drafted rows, and drafts, after which outcomes are processed together: one costs as much as all of them."""

IDLE_STEPS = 64
"""Number of steps without the drafter that are counted together."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftOutcome:
    """Outcome of one draft."""

    draft: Draft
    """Copy of the tensors that are needed."""
    verified: int
    accepted_B: Sequence[int]
    path_Bm: Sequence[Sequence[int]] | None


@dataclass(slots=True)
class DrafterStats:
    """Statistics of one drafter."""

    survival: Survival = field(default_factory=Survival)
    calibration: Calibration = field(default_factory=Calibration)
    missing_tokens: int = 1 << 30
    """Tokens emitted since its last draft. It may have to compute all cached tokens."""
    _last_used: int = 0
    """Step of its last draft."""
    _outcomes: list[DraftOutcome] = field(default_factory=list)
    """Outcomes that are not processed yet, all of one arm and size."""
    _arm: Arm = OFF
    """Arm of these outcomes."""

    def begin_step(self, version: int | None, step: int) -> bool:
        """Prepare for a step and return true if the drafter has a new version.

        Statistics of an unused drafter decay.

        Args:
            version: Version of its weights; None if it is not available.
            step: Number of the step.
        """
        is_new = version is not None and version != self.survival.version
        if version is not None and is_new:
            self._learn()
            self.survival.set_version(version)
            self.calibration.set_version(version)
        if step - self._last_used >= IDLE_STEPS:
            self.survival.decay_idle(IDLE_STEPS)
            self._last_used = step
        return is_new

    def add(self, observed: StepObservation, step: int, *, immediately: bool) -> None:
        """Add the observation of a step with one of its arms.

        Args:
            observed: Observation.
            step: Number of the step.
            immediately: Process it now, as it will be needed at once.
        """
        self.missing_tokens, self._last_used = 0, step
        draft = observed.draft
        if draft is None or draft.tokens_BN.shape[1] == 0:
            return
        pending = self._outcomes
        if pending and (
            observed.arm != self._arm or pending[0].draft.tokens_BN.shape[1] != draft.tokens_BN.shape[1]
        ):
            self._learn()
        self._arm = observed.arm
        self._outcomes.append(
            DraftOutcome(_copied(draft), observed.nodes, observed.accepted_B, observed.path_Bm)
        )
        rows = len(self._outcomes) * len(observed.accepted_B)
        if immediately or rows >= BATCH_ROWS or len(self._outcomes) >= BATCH_DRAFTS:
            self._learn()

    def _learn(self) -> None:
        """Process the queued outcomes."""
        if not self._outcomes:
            return
        outcomes, self._outcomes = self._outcomes, []
        nodes = DraftNodes.of(_joined([outcome.draft for outcome in outcomes]))
        rows, num_nodes = nodes.levels_BN.shape
        counts = [count for outcome in outcomes for count in outcome.accepted_B]
        paths = [path for outcome in outcomes for path in outcome.path_Bm or ()]
        verified = np.repeat(
            [outcome.verified for outcome in outcomes], [len(outcome.accepted_B) for outcome in outcomes]
        )
        accepted_BN = accepted_nodes((rows, num_nodes), counts, paths or None)
        verified_BN = np.arange(num_nodes) < verified[:, None]
        # Trimmed nodes count with their probability of acceptance. Otherwise deep nodes, which are verified
        # only after promising drafts, would be overestimated.
        probabilities = np.where(verified_BN, accepted_BN, self.calibration.probabilities(nodes))
        self.survival.learn(self._arm, nodes.along_paths(probabilities), len(outcomes))
        self.calibration.learn(nodes, verified_BN, accepted_BN)


def _copied(draft: Draft) -> Draft:
    """Return a copy of the tensors that are read later; of the tokens only the number is."""
    parents, counts = draft.parents_BN, draft.counts_B
    return Draft(
        draft.tokens_BN,
        None if parents is None else parents.clone(),
        None if counts is None else counts.clone(),
        draft.scores_BN.clone(),
    )


def _joined(drafts: Sequence[Draft]) -> Draft:
    """Concatenate drafts of one arm and size."""
    if len(drafts) == 1:
        return drafts[0]
    parents = [outcome.parents_BN for outcome in drafts if outcome.parents_BN is not None]
    counts = [outcome.counts_B for outcome in drafts if outcome.counts_B is not None]
    return Draft(
        torch.cat([outcome.tokens_BN for outcome in drafts]),
        torch.cat(parents) if parents else None,
        torch.cat(counts) if counts else None,
        torch.cat([outcome.scores_BN for outcome in drafts]),
    )
