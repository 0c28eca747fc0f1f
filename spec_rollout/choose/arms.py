"""Interface of arm choosers: input before a step, observation after it, and the decision.

A decision may depend on the past only. Before drafting this holds by construction: an `EngineView` has
neither logits nor noise of the next step. After drafting (`ArmChooser.trim`, RLHFSpec's "draft once, choose n
afterwards") the decision depends on the draft. Whether that is allowed depends on how drafts are verified.

Coupled: the token of a position is `argmax(logp / T + G)`, independent of any draft. Verifying fewer nodes
only leaves more of the same tokens to later steps. So nothing leaks, although drafts made with shared noise
depend on the noise.

Rejection with certain drafts (a point mass, such as the suffix drafter's): the draft and its scores are
functions of the past, so trimming is allowed.

Rejection with drawn drafts: a token x ~ q is replaced such that the result has distribution p on average over
x. Verifying x only where q(x) is high, and drawing from p otherwise, averages over another q than the one
that rejection divides by: the result is not p. Such drafts are never trimmed. `Draft.logq_BNV` is set in
exactly this case.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from aedit.spec_rollout.drafters import OFF, Arm, Draft, parse_arm

BUCKETS = (1, 2, 5, 9, 17, 33)
"""First number of running rows of each bucket: what is learned for 3 rows also holds for 2 and 4."""


def bucket(rows: int) -> int:
    """Return the bucket of this number of running rows: its first number in `BUCKETS`."""
    return BUCKETS[max(bisect_right(BUCKETS, rows) - 1, 0)]


def real_nodes(draft: Draft) -> int | list[int]:
    """Return the number of real nodes of each row: nodes beyond it are never accepted.

    Returns all nodes on a GPU, where reading the counts would synchronize.
    """
    if draft.counts_B is None or draft.counts_B.device.type != "cpu":
        return draft.tokens_BN.shape[1]
    counts: list[int] = draft.counts_B.tolist()
    return counts


@dataclass(frozen=True, slots=True)
class EngineView:
    """State of an engine before a step."""

    rows: int
    """Number of running rows B, at least 1."""
    context: int
    """Number of cached tokens of all running rows together, which attention reads."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Available drafters, by `Arm.drafter`, with the version of their weights (0 if they have none).

    A learned drafter that has never passed its gate is not available."""

    def has(self, arm: Arm) -> bool:
        """Return true if the arm is off or its drafter is available."""
        return arm.is_off or arm.drafter in self.versions


@dataclass(slots=True)
class SkippedSteps:
    """Sums over steps for which the chooser was not asked; see `ArmChooser`."""

    rows: int = 0
    """Number of running rows of each."""
    arm: Arm = OFF
    """Arm of each."""
    num_steps: int = 0
    emitted: int = 0
    """Number of emitted tokens."""
    total_s: float = 0.0
    """Cost in seconds."""

    def add(self, emitted: int, total_s: float) -> None:
        """Add a step."""
        self.num_steps += 1
        self.emitted += emitted
        self.total_s += total_s


@dataclass(frozen=True, slots=True, eq=False)
class StepObservation:
    """Observation of one step."""

    view: EngineView
    """State before the step."""
    arm: Arm
    """Chosen arm."""
    emitted: int
    """Number of emitted tokens of all rows, after the cut at stop tokens and lengths."""
    total_s: float
    """Cost of the whole step, with drafting: seconds of processor time on a CPU, of device time on CUDA."""
    draft_s: float = 0.0
    """Cost of drafting, including missed pairs that were computed first."""
    nodes: int = 0
    """Verified nodes per row: `arm.nodes`, or fewer if trimmed. The mean, rounded up."""
    verified_B: Sequence[int] = ()
    """Verified nodes of each row; empty: `nodes` each."""
    draft: Draft | None = None
    """The whole proposal, or None. Read its tensors at once: they may be reused afterwards."""
    accepted_B: Sequence[int] = ()
    """Accepted nodes of each row, before the cut."""
    path_Bm: Sequence[Sequence[int]] | None = None
    """For trees: indices of the accepted tokens of each row among the verified tokens, root (0) first, so
    that node n is n + 1. Entries beyond accepted_B + 1 are ignored. None for chains."""
    learning_s: float = 0.0
    """Cost of `choose` and `learn` for the step before."""
    skipped: SkippedSteps = field(default_factory=SkippedSteps)
    """Steps before this one that were not observed."""


class ArmChooser(Protocol):
    """Chooses the arm of each step from its observations alone.

    The same observations in the same order give the same arms on every rank.

    A chooser may have a method `rest(view)`, which is called after `learn`. It returns an arm and the number
    of following steps that take it without a call of `choose`, `trim` and `learn`, as long as the number of
    rows stays. The next observation has their sums.
    """

    def choose(self, view: EngineView) -> Arm:
        """Return the arm of the next step."""

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int | Sequence[int]:
        """Return how many of the drafted nodes to verify, of all rows or of each; 0 is plain decoding.

        They are the first nodes of a row. Returns all of them if `draft.logq_BNV` is set;
        see the module's documentation.
        """

    def learn(self, observed: StepObservation) -> None:
        """Receive the observation of a step. Called once after each step that was chosen, in order."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same arm, or off while its drafter is not available."""

    arm: Arm

    @classmethod
    def of(cls, text: str) -> "Fixed":
        """Return the chooser of an arm's text, such as `Fixed.of("layer:4")`.

        Raises:
            ValueError: The text is not an arm; see `parse_arm`.
        """
        return cls(parse_arm(text))

    def choose(self, view: EngineView) -> Arm:
        """Return the arm."""
        return self.arm if view.has(self.arm) else OFF

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int | list[int]:
        """Return the number of real nodes of each row."""
        return real_nodes(draft)

    def learn(self, observed: StepObservation) -> None:
        """Ignore the observation."""
