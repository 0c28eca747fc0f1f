"""Statistics of a drafter: acceptance by depth, calibration of its scores (RLHFSpec), and missing tokens.

The calibration is a map F from the drafter's probability of a token to the probability that the policy
accepts it. Only nodes with an accepted parent are informative: what the policy would have drawn elsewhere is
never known. So F is P(accepted | parent accepted) as a function of the drafter's conditional probability,
which verifying fewer or other nodes does not bias. A path is accepted with the product along it. First
children and later siblings have separate maps: with shared noise a first child is accepted far more often
than a sibling of the same probability.

This runs in every step, so probabilities are quantized to levels, and F is a table over levels.

Shapes: B rows, N nodes of a draft.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from aedit.spec_rollout.choose.arms import StepObservation
from aedit.spec_rollout.drafters import OFF, Arm, Draft

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
NUM_LEVELS = 256
"""Number of levels of a probability."""
NO_NODE = 2 * NUM_LEVELS
"""Level of padding. First children have levels below `NUM_LEVELS`, later siblings those above."""
NUM_BINS = 16
CENTRES: Floats = (np.arange(NUM_BINS) + 0.5) / NUM_BINS
LEVELS: Floats = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
MIN_SCORE = -1e4
"""Lower limit of scores, which keeps -inf out of the arithmetic."""
PRIOR_NODES = 2.0
"""Prior nodes of each bin, accepted as often as the drafter's probability times its usual bias."""
MEMORY_NODES = 4000.0
"""Number of observed nodes after which the weight of an old one is 1 / e."""
VERSION_DECAY = 0.02
"""Weight of observations of older versions of the drafter."""
UPDATES_PER_FIT = 4
"""Number of updates after which the map is fitted again."""
LOOP_MAX_NODES = 40
"""Number of nodes of all rows up to which Python loops are faster than arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class DraftNodes:
    """A draft as NumPy arrays."""

    levels_BN: Ints
    """Level of the drafter's probability of each node given its parent."""
    parents_BN: Ints | None
    """None for chains."""

    @classmethod
    def of(cls, draft: Draft) -> "DraftNodes":
        """Return copies of the draft's data: its tensors may be reused."""
        scores = np.maximum(draft.scores_BN.numpy(force=True), MIN_SCORE)
        parents = None
        if draft.parents_BN is None:
            gains = scores.copy()
            gains[:, 1:] -= scores[:, :-1]
        else:
            parents = draft.parents_BN.numpy(force=True).astype(np.int64)
            gains = scores - _of_parent(scores, parents, 0.0)
        levels = np.minimum(np.exp(gains) * NUM_LEVELS, NUM_LEVELS - 1).astype(np.int64)
        if parents is not None:
            levels += NUM_LEVELS * _is_later(parents)
        if draft.counts_B is not None:
            counts = draft.counts_B.numpy(force=True)
            levels[np.arange(levels.shape[1]) >= counts[:, None]] = NO_NODE
        return cls(levels, parents)

    @property
    def real_BN(self) -> Bools:
        """Return which entries are nodes and not padding, (B, N)."""
        real: Bools = self.levels_BN != NO_NODE
        return real

    def along_paths(self, probabilities_BN: Floats) -> Floats:
        """Return the products from the root to each node of probabilities given the parent, (B, N)."""
        if self.parents_BN is None:
            return np.cumprod(probabilities_BN, axis=1, dtype=np.float64)
        up = self.parents_BN
        while (up >= 0).any():  # each iteration doubles the distance to the ancestor
            probabilities_BN = probabilities_BN * _of_parent(probabilities_BN, up, 1.0)
            up = _of_parent(up, up, -1)
        return probabilities_BN

    def observed(self, verified_BN: Bools, accepted_BN: Bools) -> Bools:
        """Return the nodes whose acceptance is known, (B, N): verified nodes of an accepted parent."""
        if self.parents_BN is None:
            reached = np.ones_like(accepted_BN)
            reached[:, 1:] = accepted_BN[:, :-1]
        else:
            reached = _of_parent(accepted_BN, self.parents_BN, True)
        observed: Bools = reached & verified_BN & self.real_BN
        return observed


def _of_parent(values_BN: NDArray[Any], parents_BN: Ints, of_root: float) -> NDArray[Any]:
    """Return each node's value of its parent, (B, N)."""
    rows = np.arange(len(values_BN))[:, None]
    found: NDArray[Any] = values_BN[rows, parents_BN]
    found[parents_BN < 0] = of_root
    return found


def _is_later(parents_BN: Ints) -> Bools:
    """Return the nodes that are not the first child of their parent, (B, N)."""
    rows, numbers = np.arange(len(parents_BN))[:, None], np.arange(parents_BN.shape[1])
    first = np.full((len(parents_BN), len(numbers) + 1), len(numbers))  # the last column is the root's
    np.minimum.at(first, (rows, parents_BN), numbers)
    later: Bools = first[rows, parents_BN] != numbers
    return later


def accepted_nodes(
    shape: tuple[int, int], accepted_B: Sequence[int], path_Bm: Sequence[Sequence[int]] | None
) -> Bools:
    """Return the accepted nodes, (B, N), from `StepObservation.accepted_B` and `StepObservation.path_Bm`."""
    if path_Bm is None:
        return np.arange(shape[1]) < np.asarray(accepted_B)[:, None]
    accepted = np.zeros(shape, dtype=bool)
    for row, (path, count) in enumerate(zip(path_Bm, accepted_B, strict=True)):
        accepted[row, [token - 1 for token in path[1 : count + 1]]] = True
    return accepted


class AcceptanceCalibration:
    """The map F of one drafter, for its newest version."""

    def __init__(self) -> None:
        # Row 0: first children; row 1: later siblings.
        self._num_observed: Floats = np.zeros((2, NUM_BINS))
        self._num_accepted: Floats = np.zeros((2, NUM_BINS))
        self._table: Floats = np.concatenate([LEVELS, LEVELS, [0.0]])
        self._levels: list[float] = self._table.tolist()
        self._version: int | None = None
        self._num_updates = 0

    def probabilities(self, nodes: DraftNodes) -> Floats:
        """Return the probability that each node is accepted if its parent is, (B, N); 0 for padding."""
        return self._table[nodes.levels_BN]

    def expected_accepted(self, draft: Draft) -> list[float]:
        """Return for each node the sum over all rows of the probability that its path is accepted."""
        rows, num_nodes = draft.scores_BN.shape
        if rows * num_nodes > LOOP_MAX_NODES:
            nodes = DraftNodes.of(draft)
            found: list[float] = nodes.along_paths(self.probabilities(nodes)).sum(axis=0).tolist()
            return found
        chain = [range(-1, num_nodes - 1)] * rows
        parents = chain if draft.parents_BN is None else draft.parents_BN.tolist()
        counts = [num_nodes] * rows if draft.counts_B is None else draft.counts_B.tolist()
        gains = [0.0] * num_nodes
        for scores, parents_of, count in zip(draft.scores_BN.tolist(), parents, counts, strict=True):
            for n, probability in enumerate(self._along_path(scores[:count], parents_of)):
                gains[n] += probability
        return gains

    def _along_path(self, scores: Sequence[float], parents: Sequence[int]) -> list[float]:
        """Return the path probabilities of one row; see `DraftNodes.along_paths`."""
        table, later = self._levels, set[int]()
        paths, path_scores = [1.0], [0.0]  # entry 0 is the root, entry n + 1 is node n
        for score, parent in zip(scores, parents, strict=False):
            score = max(score, MIN_SCORE)
            level = min(int(math.exp(score - path_scores[parent + 1]) * NUM_LEVELS), NUM_LEVELS - 1)
            if parent in later:
                level += NUM_LEVELS
            later.add(parent)
            paths.append(paths[parent + 1] * table[level])
            path_scores.append(score)
        return paths[1:]

    def set_version(self, version: int) -> None:
        """Set the drafter's version. Observations of another version become a weak prior."""
        if self._version is not None and version != self._version:
            self._num_observed *= VERSION_DECAY
            self._num_accepted *= VERSION_DECAY
        self._version = version

    def learn(self, nodes: DraftNodes, verified_BN: Bools, accepted_BN: Bools) -> None:
        """Update the map with verified drafts.

        Args:
            nodes: Drafted nodes.
            verified_BN: Nodes that were verified.
            accepted_BN: Nodes that were accepted.
        """
        seen = nodes.observed(verified_BN, accepted_BN)
        bins = nodes.levels_BN[seen] // (NUM_LEVELS // NUM_BINS)
        counts = np.bincount(bins, minlength=2 * NUM_BINS).reshape(2, NUM_BINS)
        kept = np.exp(counts.sum(axis=1, keepdims=True) / -MEMORY_NODES)
        self._num_observed = kept * self._num_observed + counts
        accepted = np.bincount(bins, accepted_BN[seen], 2 * NUM_BINS).reshape(2, NUM_BINS)
        self._num_accepted = kept * self._num_accepted + accepted
        self._num_updates += 1
        if self._num_updates % UPDATES_PER_FIT == 0 or self._num_updates < UPDATES_PER_FIT:
            self._fit(0)
            if nodes.parents_BN is not None:
                self._fit(1)
            self._levels = self._table.tolist()

    def _fit(self, kind: int) -> None:
        """Fit the table of first children (kind 0) or later siblings (kind 1)."""
        seen, accepted = self._num_observed[kind], self._num_accepted[kind]
        bias = (accepted.sum() + 1) / (seen @ CENTRES + 1)
        weights = seen + PRIOR_NODES
        prior = np.minimum(bias * CENTRES, 1.0)
        shares = (accepted + PRIOR_NODES * prior) / weights
        fitted = isotonic_regression(shares, weights=weights).x
        self._table[kind * NUM_LEVELS : (kind + 1) * NUM_LEVELS] = np.interp(LEVELS, CENTRES, fitted)


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


class Survival:
    """Expected tokens of one drafter's arms."""

    def __init__(self) -> None:
        self._reached: list[float] = []
        self._accepted: list[float] = []
        self._trees: dict[Arm, tuple[float, float]] = {}
        self.version: int | None = None
        """Version of the drafter; None before it is known."""

    @property
    def num_rows(self) -> float:
        """Return the weighted number of observed rows."""
        return self._reached[0] if self._reached else 0.0

    def set_version(self, version: int) -> None:
        """Set the drafter's version. Observations of another version decay."""
        if self.version is not None and version != self.version:
            self._fade(SURVIVAL_DECAY)
        self.version = version

    def decay_idle(self, steps: int) -> None:
        """Decay the observations after this many steps without the drafter."""
        self._fade(math.exp(-steps / IDLE_MEMORY_STEPS))

    def learn(self, arm: Arm, survived_BN: NDArray[np.float64], steps: int = 1) -> None:
        """Add the outcome of some steps.

        Args:
            arm: Arm of the steps.
            survived_BN: For each row and node, 1 if the path to it was accepted, or the probability that it
                would have been.
            steps: Number of steps.
        """
        rows = len(survived_BN)
        kept = math.exp(-max(steps / MEMORY_STEPS, rows / MEMORY_ROWS))
        sums = survived_BN.sum(axis=0).tolist()
        if arm.is_chain:
            self._fade_chain(kept)
            self._add([rows, *sums[:-1]], sums)
        else:
            accepted, seen = self._trees.get(arm, (0.0, 0.0))
            self._trees[arm] = (kept * accepted + sum(sums), kept * seen + rows)

    def expected(self, arm: Arm, *, optimistic: bool = False) -> float:
        """Return the expected tokens per row and step, including the policy's own token: 1 or more."""
        chain = 1.0 + self._expected_chain(arm.depth, optimistic)
        if arm.is_chain:
            return chain
        accepted, seen = self._trees.get(arm, (0.0, 0.0))
        weight = OPTIMISTIC_ROWS if optimistic else PRIOR_ROWS
        return 1.0 + (accepted + weight * TREE_FACTOR * (chain - 1.0)) / (seen + weight)

    def _expected_chain(self, depth: int, optimistic: bool) -> float:
        expected, path = 0.0, 1.0
        prior_rows, prior = (OPTIMISTIC_ROWS, 1.0) if optimistic else (PRIOR_ROWS, PRIOR_CHANCE)
        for j in range(depth):
            has_data = j < len(self._reached)
            reached, accepted = (self._reached[j], self._accepted[j]) if has_data else (0.0, 0.0)
            probability = (accepted + prior_rows * prior) / (reached + prior_rows)
            path *= probability
            expected += path
            if not optimistic:
                prior = probability
        return expected

    def _add(self, reached: list[float], accepted: list[float]) -> None:
        missing = len(accepted) - len(self._reached)
        self._reached += [0.0] * missing
        self._accepted += [0.0] * missing
        for j, (more, survived) in enumerate(zip(reached, accepted, strict=True)):
            self._reached[j] += more
            self._accepted[j] += survived

    def _fade_chain(self, kept: float) -> None:
        self._reached = [kept * reached for reached in self._reached]
        self._accepted = [kept * accepted for accepted in self._accepted]

    def _fade(self, kept: float) -> None:
        self._fade_chain(kept)
        self._trees = {arm: (kept * a, kept * n) for arm, (a, n) in self._trees.items()}


@dataclass(slots=True)
class DrafterStats:
    """Statistics of one drafter."""

    survival: Survival = field(default_factory=Survival)
    calibration: AcceptanceCalibration = field(default_factory=AcceptanceCalibration)
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


MEMORY_STEPS, MEMORY_ROWS = 150.0, 600.0
"""Steps and rows after which the weight of an old one is 1 / e, whichever come first."""
IDLE_MEMORY_STEPS = 3000.0
"""The same for steps in which the drafter was not used."""
SURVIVAL_DECAY = 0.1
"""Weight of observations of older versions of the drafter."""
PRIOR_ROWS, PRIOR_CHANCE = 2.0, 0.5
"""Prior of the first node; deeper nodes have the estimate of the node before as prior."""
OPTIMISTIC_ROWS = 4.0
"""Accepted rows that an optimistic estimate adds to the observations."""
TREE_FACTOR = 1.1
"""Prior of a tree's accepted nodes, relative to the chain of its depth."""
