"""What a drafter's scores are worth: the map F from its probability of a token to the chance that the policy
says so too (RLHFSpec), learnt from what was verified.

Only nodes whose parent was accepted tell anything: what the policy would have said elsewhere is never known.
F is therefore P(accepted | parent accepted) as a function of the drafter's conditional probability, which
verifying fewer or other nodes does not bias; a path is accepted with the product along it. First children and
their later siblings have maps of their own: with shared noise a first child is accepted far more often than a
sibling of the same probability.

Shapes: B rows, N nodes of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aedit.spec_rollout.drafts import Draft

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

NUM_BINS = 20
CENTRES: Floats = (np.arange(NUM_BINS) + 0.5) / NUM_BINS

PRIOR_NODES = 2.0
"""Nodes of each bin that are supposed to have been accepted as often as the drafter said, times what it is
usually too sure or unsure."""

MEMORY_NODES = 4000.0
"""Seen nodes after which the weight of an old one is 1 / e."""

KEPT = 0.02
"""Weight of what an older version of the drafter has shown."""

FIT_EVERY = 4
"""Lessons after which the map is fitted anew."""


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """A draft as arrays of this machine."""

    chance_BN: Floats
    """The drafter's probability of each node given its parent; 0 where there is no node."""
    real_BN: Bools
    first_BN: Bools
    """First child of its parent."""
    parents_BN: NDArray[np.int64] | None

    @classmethod
    def of(cls, draft: Draft) -> "Nodes":
        """Copies: the draft's tensors may be used again."""
        scores = draft.scores_BN.numpy(force=True).astype(np.float64)
        real = np.ones(scores.shape, dtype=bool)
        if draft.counts_B is not None:
            real = np.arange(scores.shape[1]) < draft.counts_B.numpy(force=True)[:, None]
            scores = np.where(real, scores, -745.0)
        before = np.zeros_like(scores)
        first, parents = np.ones_like(real), None
        if draft.parents_BN is None:
            before[:, 1:] = scores[:, :-1]
        else:
            parents = draft.parents_BN.numpy(force=True).astype(np.int64)
            np.copyto(before, np.take_along_axis(scores, np.maximum(parents, 0), 1), where=parents >= 0)
            same = parents[:, :, None] == parents[:, None, :]
            first = ~np.tril(same, -1).any(axis=2)
        chance: Floats = np.exp(np.minimum(scores - before, 0.0)) * real
        return cls(chance, real, first, parents)

    @classmethod
    def joined(cls, parts: "Sequence[Nodes]") -> "Nodes":
        """The rows of several drafts of one arm."""
        if len(parts) == 1:
            return parts[0]
        trees = [each.parents_BN for each in parts if each.parents_BN is not None]
        return cls(
            np.concatenate([each.chance_BN for each in parts]),
            np.concatenate([each.real_BN for each in parts]),
            np.concatenate([each.first_BN for each in parts]),
            np.concatenate(trees) if trees else None,
        )

    def along_paths(self, accepted_BN: Floats) -> Floats:
        """(B, N): products from the root to each node, of chances that hold given the parent."""
        chances = accepted_BN * self.real_BN
        if self.parents_BN is None:
            return np.cumprod(chances, axis=1, dtype=np.float64)
        rows = np.arange(len(chances))
        for n in range(chances.shape[1]):
            parents = self.parents_BN[:, n]
            chances[:, n] *= np.where(parents >= 0, chances[rows, np.maximum(parents, 0)], 1.0)
        return chances

    def seen(self, verified_BN: Bools, accepted_BN: Bools) -> Bools:
        """(B, N): nodes that the policy has judged: verified, of an accepted parent."""
        reached = np.ones_like(accepted_BN)
        if self.parents_BN is None:
            reached[:, 1:] = accepted_BN[:, :-1]
        else:
            of_parent = np.take_along_axis(accepted_BN, np.maximum(self.parents_BN, 0), 1)
            reached = of_parent | (self.parents_BN < 0)
        return reached & verified_BN & self.real_BN


def accepted_nodes(
    shape: tuple[int, int], accepted_B: Sequence[int], path_Bm: Sequence[Sequence[int]] | None
) -> Bools:
    """(B, N): nodes that were accepted, from `Observed.accepted_B` and `Observed.path_Bm`."""
    if path_Bm is None:
        return np.arange(shape[1]) < np.asarray(accepted_B)[:, None]
    accepted = np.zeros(shape, dtype=bool)
    for row, (path, count) in enumerate(zip(path_Bm, accepted_B, strict=True)):
        accepted[row, [token - 1 for token in path[1 : count + 1]]] = True
    return accepted


@dataclass(slots=True, eq=False)
class ScoreMap:
    """F for one kind of node: bins of decayed counts, made monotone."""

    seen: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    fitted: Floats = field(default_factory=lambda: CENTRES.copy())

    def __call__(self, chance: Floats) -> Floats:
        """P(accepted | parent accepted) of nodes to which the drafter gave these probabilities."""
        return np.interp(chance, CENTRES, self.fitted)

    def learn(self, chance: Floats, accepted: Bools) -> None:
        """Of seen nodes."""
        bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        kept = np.exp(-len(bins) / MEMORY_NODES)
        self.seen *= kept
        self.accepted *= kept
        self.seen += np.bincount(bins, minlength=NUM_BINS)
        self.accepted += np.bincount(bins, accepted, NUM_BINS)

    def fit(self) -> None:
        usual = (self.accepted.sum() + 1) / (self.seen @ CENTRES + 1)
        weights = self.seen + PRIOR_NODES
        supposed = np.minimum(usual * CENTRES, 1.0)
        self.fitted = isotonic((self.accepted + PRIOR_NODES * supposed) / weights, weights)

    def doubt(self) -> None:
        """The drafter has changed: what was learnt is a beginning."""
        self.seen *= KEPT
        self.accepted *= KEPT


class Calibration:
    """F of one drafter, for its newest version."""

    def __init__(self) -> None:
        self._first, self._later = ScoreMap(), ScoreMap()
        self._version: int | None = None
        self._lessons = 0
        self._promised, self._kept, self._tried = (np.zeros(NUM_BINS) for _ in range(3))

    @property
    def error(self) -> float:
        """Expected calibration error of what was foretold before each lesson, over the last `MEMORY_NODES`
        nodes or so: mean of |promised - accepted| over bins of promised chances. 0 before any."""
        total = float(self._tried.sum())
        return float(np.abs(self._promised - self._kept).sum()) / total if total else 0.0

    def chances(self, nodes: Nodes) -> Floats:
        """(B, N): how likely each node is accepted if its parent is."""
        chances = self._first(nodes.chance_BN)
        if nodes.parents_BN is not None:
            chances = np.where(nodes.first_BN, chances, self._later(nodes.chance_BN))
        return chances * nodes.real_BN

    def see(self, version: int) -> None:
        """The drafter's version from now on."""
        if self._version is not None and version != self._version:
            self._first.doubt()
            self._later.doubt()
        self._version = version

    def learn(self, nodes: Nodes, verified_BN: Bools, accepted_BN: Bools) -> None:
        """What came of drafts."""
        seen = nodes.seen(verified_BN, accepted_BN)
        self._judge(self.chances(nodes)[seen], accepted_BN[seen])
        first = seen & nodes.first_BN
        self._first.learn(nodes.chance_BN[first], accepted_BN[first])
        if nodes.parents_BN is not None:
            later = seen & ~nodes.first_BN
            self._later.learn(nodes.chance_BN[later], accepted_BN[later])
        self._lessons += 1
        if self._lessons % FIT_EVERY == 0 or self._lessons < FIT_EVERY:
            self._first.fit()
            self._later.fit()

    def _judge(self, promised: Floats, accepted: Bools) -> None:
        bins = np.minimum((promised * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        kept = np.exp(-len(bins) / MEMORY_NODES)
        for sums, added in ((self._promised, promised), (self._kept, accepted), (self._tried, None)):
            sums *= kept
            sums += np.bincount(bins, added, NUM_BINS)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """The nondecreasing sequence with the least weighted squares to `values` (pool adjacent violators).
    weights: all above 0."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while pools and pools[-1][0] >= value:
            before, more, members = pools.pop()
            value = (value * weight + before * more) / (weight + more)
            weight, count = weight + more, count + members
        pools.append((value, weight, count))
    return np.repeat([value for value, _, _ in pools], [count for _, _, count in pools])
