"""What is known of one drafter: how far its lines go, what its scores are worth, and what it has not seen."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from aedit.spec_rollout.arms.arms import Observed
from aedit.spec_rollout.arms.calibration import Calibration, Nodes, accepted_nodes
from aedit.spec_rollout.arms.survival import Survival
from aedit.spec_rollout.drafters.drafts import OFF, Arm, Draft

LESSON_ROWS, LESSONS = 32, 16
"""Drafted rows, and drafts, that are learnt from together, whichever come first: one costs as much as all."""

REST = 64
"""Steps at rest that are counted together."""


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """What came of one draft."""

    draft: Draft
    """A copy of what is read of it."""
    verified: int
    accepted_B: Sequence[int]
    path_Bm: Sequence[Sequence[int]] | None


@dataclass(slots=True)
class Known:
    """One drafter."""

    survival: Survival = field(default_factory=Survival)
    calibration: Calibration = field(default_factory=Calibration)
    behind: int = 1 << 30
    """Tokens emitted since it was last asked; it may have to read as many as are live."""
    _asked: int = 0
    """Step at which it was."""
    _lessons: list[Lesson] = field(default_factory=list)
    """Not learnt yet; all of one arm and size."""
    _arm: Arm = OFF
    """Theirs."""

    def see(self, version: int | None, step: int) -> bool:
        """Before a step. version: of its weights from now on, None if it is not there. Returns whether it is
        a new one. What is known of a drafter at rest fades."""
        is_new = version is not None and version != self.survival.version
        if version is not None and is_new:
            self._learn()
            self.survival.see(version)
            self.calibration.see(version)
        if step - self._asked >= REST:
            self.survival.rest(REST)
            self._asked = step
        return is_new

    def add(self, observed: Observed, step: int, *, now: bool) -> None:
        """After a step of one of its arms. now: there will be questions at once."""
        self.behind, self._asked = 0, step
        draft = observed.draft
        if draft is None or draft.tokens_BN.shape[1] == 0:
            return
        waiting = self._lessons
        if waiting and (
            observed.arm != self._arm or waiting[0].draft.tokens_BN.shape[1] != draft.tokens_BN.shape[1]
        ):
            self._learn()
        self._arm = observed.arm
        self._lessons.append(Lesson(_copied(draft), observed.nodes, observed.accepted_B, observed.path_Bm))
        rows = len(self._lessons) * len(observed.accepted_B)
        if now or rows >= LESSON_ROWS or len(self._lessons) >= LESSONS:
            self._learn()

    def _learn(self) -> None:
        """What waits."""
        if not self._lessons:
            return
        lessons, self._lessons = self._lessons, []
        nodes = Nodes.of(_joined([each.draft for each in lessons]))
        rows, num_nodes = nodes.levels_BN.shape
        counts = [count for each in lessons for count in each.accepted_B]
        paths = [path for each in lessons for path in each.path_Bm or ()]
        verified = np.repeat([each.verified for each in lessons], [len(each.accepted_B) for each in lessons])
        accepted_BN = accepted_nodes((rows, num_nodes), counts, paths or None)
        verified_BN = np.arange(num_nodes) < verified[:, None]
        # Nodes that were cut count as likely as they would have been accepted: else deep ones, verified only
        # where all looks good, would seem better than they are.
        chances = np.where(verified_BN, accepted_BN, self.calibration.chances(nodes))
        self.survival.learn(self._arm, nodes.along_paths(chances), len(lessons))
        self.calibration.learn(nodes, verified_BN, accepted_BN)


def _copied(draft: Draft) -> Draft:
    """What stays when its tensors are used again; of the tokens nothing but their number."""
    parents, counts = draft.parents_BN, draft.counts_B
    return Draft(
        draft.tokens_BN,
        None if parents is None else parents.clone(),
        None if counts is None else counts.clone(),
        draft.scores_BN.clone(),
    )


def _joined(drafts: Sequence[Draft]) -> Draft:
    """All rows of drafts of one arm and size."""
    if len(drafts) == 1:
        return drafts[0]
    parents = [each.parents_BN for each in drafts if each.parents_BN is not None]
    counts = [each.counts_B for each in drafts if each.counts_B is not None]
    return Draft(
        torch.cat([each.tokens_BN for each in drafts]),
        torch.cat(parents) if parents else None,
        torch.cat(counts) if counts else None,
        torch.cat([each.scores_BN for each in drafts]),
    )
