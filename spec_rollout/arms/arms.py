"""Which arm each step of the engine uses: what is known before the step, what came of it, and who decides.

A decision may depend on the past only. Before the drafter has spoken that is so by construction: a
`EngineView`
has neither logits nor noise of the step to come. After it has spoken (`ArmChooser.trim`, RLHFSpec's "draft
once, choose n afterwards") it depends on the draft, and whether it may depends on how drafts are verified:

- Coupled: the token of a position is `argmax(logp / T + G)`, which no draft enters. Verifying fewer nodes
  only leaves more of the same tokens to later steps, so that nothing can leak, although drafts made with
  shared noise know the noise.
- Rejection with certain drafts (a point mass, such as the suffix drafter's): the draft and its scores are
  functions of the past.
- Rejection with drawn drafts: a token x ~ q is replaced so that the outcome is p, on average over x. To
  verify x only where q(x) is high, and else to draw from p, averages over another q than the one that
  rejection divides by: the outcome is not p. Such drafts are never trimmed.

`Draft.logq_BNV` is there in exactly the third case.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aedit.spec_rollout.drafters.drafts import OFF, Arm, Draft, parse_arm

BUCKETS = (1, 2, 5, 9, 17, 33)
"""Live rows that a bucket begins with: what is learnt of 3 rows holds for 2 and 4 too."""


def bucket(rows: int) -> int:
    """Where so many live rows belong: the first of their bucket of `BUCKETS`."""
    return max(first for first in BUCKETS if first <= max(rows, 1))


def num_real_nodes(draft: Draft) -> int:
    """The drafted nodes that some row has: what lies beyond is never accepted. All of them on a GPU, where to
    ask would be to wait."""
    if draft.counts_B is None or draft.counts_B.is_cuda:
        return draft.tokens_BN.shape[1]
    return int(draft.counts_B.max())


@dataclass(frozen=True, slots=True)
class EngineView:
    """What an engine knows before a step."""

    rows: int
    """Live rows, at least 1: B."""
    context: int
    """Tokens of all live rows together that are in the cache: what attention reads."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Drafters that can be asked, by `Arm.drafter`, with the version of their weights (0 if they have
    none)."""

    def has(self, arm: Arm) -> bool:
        return arm.is_off or arm.drafter in self.versions


@dataclass(frozen=True, slots=True, eq=False)
class StepObservation:
    """What one step did."""

    view: EngineView
    """Of before the step."""
    arm: Arm
    """That was chosen."""
    emitted: int
    """Tokens of all rows that the step has made, after the cut at stop tokens and lengths."""
    total_s: float
    """The whole step, with drafting and whatever the arm made necessary."""
    draft_s: float = 0.0
    """Of that, the drafter's: what it had to catch up, and the proposal."""
    nodes: int = 0
    """Drafted nodes of a row that were verified: `arm.nodes` or, trimmed, fewer."""
    draft: Draft | None = None
    """What was proposed, all of it; its tensors are read at once and may be used again afterwards. None if
    nothing was."""
    accepted_B: Sequence[int] = ()
    """Drafted nodes of each row that were accepted, before the cut."""
    path_Bm: Sequence[Sequence[int]] | None = None
    """Trees: the accepted tokens of each row as indices of verified tokens, root (0) first, so that node n is
    n + 1; what lies beyond accepted_B + 1 is not read. None for chains."""


class ArmChooser(Protocol):
    """Decides by what it has been told, and by nothing else: the same observations in the same order give the
    same arms on every rank."""

    def choose(self, view: EngineView) -> Arm:
        """For the step to come."""

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        """How many of the drafted nodes are worth verifying: the first so many of each row, 0 is plain
        decoding. All of them if `draft.logq_BNV` is given: see above."""

    def learn(self, observed: StepObservation) -> None:
        """Once after each step, in order."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same arm, or off as long as its drafter is not there."""

    arm: Arm

    @classmethod
    def of(cls, text: str) -> "Fixed":
        """`Fixed.of("layer:4")`. ValueError as `parse_arm`."""
        return cls(parse_arm(text))

    def choose(self, view: EngineView) -> Arm:
        return self.arm if view.has(self.arm) else OFF

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int:
        return num_real_nodes(draft)

    def learn(self, observed: StepObservation) -> None:
        """Nothing to learn."""
