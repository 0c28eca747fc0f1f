"""Gates of trained drafters: publication, rollback, learning rate, pauses; drafters of other nodes.

All functions are pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.sampling import gumbel
from aedit.spec_rollout.training.batches import PackedRow, newest_held_out, newest_samples, pack_samples
from aedit.spec_rollout.training.feature_ring import Buffer, FeatureReader
from aedit.spec_rollout.training.losses import PolicyEmbeddings, log_probabilities, overlap, predict_features
from aedit.types import check

GateDecision = Literal["publish", "keep", "revert"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Settings of the gate. Match rates are shares of drafted tokens that the policy accepts, 0 to 1."""

    gain: float = 0.005
    """Least increase of the match rate for a publication."""
    harm: float = 0.02
    """Decrease of the match rate at which training restarts from the published drafter."""
    deviations: float = 1.5
    """Standard errors by which an increase or decrease must differ from 0 besides."""
    near_peak: float = 0.98
    """Training rests only while the published drafter's match rate is at least this share of its peak."""
    smoothing: float = 0.3
    """Weight of a new measurement in the moving average of the published drafter's match rate."""
    patience: int = 3
    """Training rests after this many evaluations in a row have found nothing better."""
    rest_versions: int = 8
    """Versions of the policy that the first rest lasts; each later one in a row lasts twice as many."""
    most_rest_versions: int = 64
    """Upper limit of that."""
    smallest_lr: float = 1 / 16
    """Lower limit of the factor of the learning rate."""

    def __post_init__(self) -> None:
        for name in ("gain", "deviations"):
            check(getattr(self, name) >= 0, name, "must be 0 or more", getattr(self, name))
        check(0 < self.smoothing <= 1, "smoothing", "must be above 0 and at most 1", self.smoothing)
        for name in ("patience", "rest_versions", "most_rest_versions"):
            check(getattr(self, name) >= 1, name, "must be 1 or more", getattr(self, name))
        check(0 < self.smallest_lr <= 1, "smallest_lr", "must be above 0 and at most 1", self.smallest_lr)


@dataclass(frozen=True, slots=True)
class Match:
    """Match of a drafter with the policy on held-out samples, for chains of D tokens."""

    overlap_D: tuple[float, ...]
    """Probability that a token at each depth is accepted if all before it were: sum over tokens of min(p, q).
    """
    coupled_D: tuple[float, ...]
    """The same for drafting with the policy's own noise, measured with sampled noise."""
    num_pairs: int

    @property
    def rate(self) -> float:
        """Return the share of a chain's drafted tokens that is accepted.

        It is the mean of the products of `overlap_D`.
        """
        product = torch.tensor(self.overlap_D, dtype=torch.float64).cumprod(0)
        return float(product.mean())


@dataclass(frozen=True, slots=True)
class GateState:
    """State of the gate."""

    lr_factor: float = 1.0
    num_rejected: int = 0
    """Evaluations in a row that found nothing better."""
    num_rests: int = 0
    """Rests in a row that ended as the policy had moved often enough."""
    average: float | None = None
    """Moving average of the published drafter's match rate."""
    peak: float = 0.0
    """Largest average since its publication."""


def decide(
    published: float,
    candidate: float,
    error: float,
    state: GateState,
    config: GateConfig,
    *,
    is_early: bool = False,
) -> tuple[GateDecision, GateState]:
    """Return the decision on a trained drafter, and the new state.

    A drafter that is not better is not published, and the learning rate is halved; after a better one it is
    doubled, up to its initial value. One that seems better, but not by more than chance explains, goes on to
    train: of many drafters that are measured on few samples, the luckiest would be published. So does one
    that is not better after few steps.

    Args:
        published: Match rate of the published drafter.
        candidate: Match rate of the trained drafter on the same samples.
        error: Standard error of their difference; see `difference_error`.
        state: State of the gate.
        config: Settings.
        is_early: The drafter had few steps since the last evaluation that was not early.
    """
    difference, chance = candidate - published, config.deviations * error
    if difference >= config.gain:
        if difference < chance:
            return "keep", state
        factor = min(1.0, 2 * state.lr_factor)
        return "publish", GateState(lr_factor=factor, average=candidate, peak=candidate)
    decision: GateDecision = "revert" if difference < -max(config.harm, chance) else "keep"
    if is_early and decision == "keep":
        return decision, state
    factor = max(config.smallest_lr, state.lr_factor / 2)
    return decision, replace(state, lr_factor=factor, num_rejected=state.num_rejected + 1)


BLOCK, MIN_BLOCKS = 32, 4
"""Consecutive chains whose mean counts as one measurement, as chains of near positions are alike; fewer where
there would be too few blocks."""


def difference_error(published_C: Tensor, candidate_C: Tensor) -> float:
    """Return the standard error of the mean difference of two drafters' chains, paired by position.

    Infinite if there are too few chains. Both are shares of accepted tokens as `match_sums` returns them.
    """
    size = min(BLOCK, len(published_C) // MIN_BLOCKS)
    if size < 2:
        return math.inf
    num_blocks = len(published_C) // size
    differences_C = (candidate_C - published_C)[: num_blocks * size]
    return float(differences_C.view(num_blocks, size).mean(1).std()) / math.sqrt(num_blocks)


def with_measurement(rate: float, state: GateState, config: GateConfig) -> GateState:
    """Return the state after another measurement of the published drafter's match rate."""
    old = rate if state.average is None else state.average
    average = old + config.smoothing * (rate - old)
    return replace(state, average=average, peak=max(state.peak, average))


def should_rest(state: GateState, config: GateConfig) -> bool:
    """Return true if further training would gain nothing.

    That is so if no better drafter was found for a while, in whatever versions of the policy, and the
    published one is near its peak.
    """
    return state.num_rejected >= config.patience and is_near_peak(state, config)


def is_near_peak(state: GateState, config: GateConfig) -> bool:
    """Return true if the published drafter matches the policy about as well as at its best."""
    return state.average is not None and state.average >= config.near_peak * state.peak


def rest_versions(state: GateState, config: GateConfig) -> int:
    """Return how many versions of the policy the next rest lasts at most."""
    return int(min(config.most_rest_versions, config.rest_versions * 2 ** min(state.num_rests, 30)))


def after_rest(state: GateState, config: GateConfig) -> GateState:
    """Return the state after a rest.

    If the published drafter has become worse, training begins anew at the full rate. Else it is a trial: the
    next evaluation decides whether the next, longer rest begins.
    """
    if not is_near_peak(state, config):
        return replace(state, lr_factor=1.0, num_rejected=0, num_rests=0)
    return replace(state, num_rejected=config.patience - 1, num_rests=state.num_rests + 1)


def after_move(state: GateState) -> GateState:
    """Return the state after a move of the policy: twice the learning rate, up to its initial value.

    A policy moves in each step of reinforcement learning, mostly by little, and a trained drafter needs a low
    rate.
    """
    return replace(state, lr_factor=min(1.0, 2 * state.lr_factor))


@torch.no_grad()
def held_out_match(
    layer: DraftLayer, rows: Sequence[PackedRow], embeddings: PolicyEmbeddings, depth: int
) -> Match:
    """Return a drafter's match with the policy at each of `depth` positions of a chain, on packed rows.

    The same rows get the same noise, so that drafters can be compared. Features of the versions before count
    too, as the policy moves little in the few steps that a ring holds: a comparison has the same for both.

    Raises:
        ValueError: No pair counts.
    """
    sums = torch.zeros(3, depth, dtype=torch.float64)
    for number, packed in enumerate(rows):
        sums += match_sums(layer, packed, embeddings, row_noise(number, packed, embeddings), depth)[0]
    return match_from_sums(sums)


def row_noise(number: int, packed: PackedRow, embeddings: PolicyEmbeddings) -> Tensor:
    """Return Gumbel noise for the pairs of a held-out row, (P, V)."""
    at_1P = torch.arange(len(packed.tokens_P), device=packed.tokens_P.device)[None]
    return gumbel(0, number, at_1P, embeddings.head_Vd.shape[0])[0]


@torch.no_grad()
def match_sums(
    layer: DraftLayer, packed: PackedRow, embeddings: PolicyEmbeddings, noise_PV: Tensor, depth: int
) -> tuple[Tensor, Tensor]:
    """Return sums over a row's pairs, and the share of accepted tokens of the chain from each of them.

    The sums, (3, depth), are of overlap, coupled matches and number of pairs; those of several rows can be
    added. The shares, (C,), are expectations along the policy's text. All are float64.
    """
    sums = torch.zeros(3, depth, dtype=torch.float64)
    reached_P = torch.ones(len(packed.counts_P), dtype=torch.float64)
    accepted_P = torch.zeros(len(packed.counts_P), dtype=torch.float64)
    features_Pd = packed.features_Pw[:, : embeddings.head_Vd.shape[1]]
    passes = predict_features(layer, packed, embeddings.embedding_Vd, depth, packed.counts_P)
    for s, made in enumerate(passes):
        at_C, predicted_Cd = made.at_C, made.predicted_Cd
        logp_CV = log_probabilities(features_Pd[at_C + 1].to(predicted_Cd.dtype), embeddings.head_Vd)
        logq_CV = F.log_softmax(layer.logits(predicted_Cd, embeddings.head_Vd), -1)
        noise_CV = noise_PV[at_C]
        drawn_C = (logp_CV + noise_CV).argmax(-1)
        if layer.draft_tokens is not None:
            logp_CV, noise_CV = logp_CV[:, layer.draft_tokens], noise_CV[:, layer.draft_tokens]
        drafted_C = (logq_CV + noise_CV).argmax(-1)
        if layer.draft_tokens is not None:
            drafted_C = layer.draft_tokens[drafted_C]
        is_same_C = drawn_C == drafted_C
        overlaps_C, starts_C = overlap(logp_CV.exp(), logq_CV).double().cpu(), (at_C - s).cpu()
        sums[:, s] = sums.new_tensor([float(overlaps_C.sum()), int(is_same_C.sum()), len(at_C)])
        reached_P[starts_C] *= overlaps_C
        accepted_P[starts_C] += reached_P[starts_C] / depth
    return sums, accepted_P[packed.counts_P.cpu()]


def match_from_sums(sums_3D: Tensor) -> Match:
    """Return the match from `match_sums`.

    Raises:
        ValueError: No pair was counted.
    """
    overlaps, coupled, counts = sums_3D
    if counts[0] == 0:
        raise ValueError("no held-out pair: wait for samples")
    counts = counts.clamp_min(1)
    return Match(tuple((overlaps / counts).tolist()), tuple((coupled / counts).tolist()), int(counts[0]))


HELD_OUT_TOKENS = 1024
"""Upper limit of the tokens of a comparison: the node computes it between two steps, not in a wait."""
MIN_TOKENS = 32
ROW_PAIRS = 256
TIE = 1e-6
"""Difference of two match rates that rounding explains."""


class LocalGate:
    """Compare two drafters on the held-out samples in a ring of features."""

    def __init__(self, features: Buffer, depth: int) -> None:
        """Make the gate.

        Args:
            features: Memory in which a `FeatureRing` is.
            depth: Length of the chains that are compared.
        """
        self._reader, self._depth = FeatureReader(features), depth

    def is_not_worse(
        self,
        candidate: DraftLayer,
        present: DraftLayer,
        embeddings: PolicyEmbeddings,
        *,
        held_out_only: bool = True,
    ) -> bool | None:
        """Return whether `candidate` matches the policy at least as well as `present`.

        Args:
            candidate: A drafter of another node.
            present: The drafter in use.
            embeddings: The policy's.
            held_out_only: Compare on samples that the training of this node leaves out.

        Returns:
            None if there are too few such samples.
        """
        choose = newest_held_out if held_out_only else newest_samples
        chosen = choose(self._reader.entries(), HELD_OUT_TOKENS)
        samples = [sample for entry in chosen if (sample := self._reader.read(entry)) is not None]
        if sum(len(sample.features_MF) for sample in samples) < MIN_TOKENS:
            return None
        device = present.gain.device
        rows = [row.to(device) for row in pack_samples(samples, ROW_PAIRS)]
        if not any(row.num_counted for row in rows):
            return None
        theirs, ours = (
            held_out_match(layer, rows, embeddings, self._depth).rate for layer in (candidate, present)
        )
        return math.isfinite(theirs) and not theirs < ours - TIE
