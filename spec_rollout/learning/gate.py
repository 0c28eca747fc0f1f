"""Whether a newly trained drafter is better than the one in use, and whether training is worth its power.

Pure: decisions are values, and depend on what is given only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.draft_layer import DraftLayer
from aedit.spec_rollout.learning.feedback import predict_features
from aedit.spec_rollout.learning.losses import PolicyEmbeddings, log_probabilities, overlap
from aedit.spec_rollout.learning.packing import PackedRow
from aedit.spec_rollout.sampling.noise import gumbel
from aedit.types import check

GateDecision = Literal["publish", "keep", "go back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """Match rates are shares of drafted tokens that the policy accepts, 0 to 1."""

    gain: float = 0.005
    """A drafter is published whose match rate is higher by at least this."""
    harm: float = 0.02
    """One whose rate is lower by this has been spoilt: training goes back to what was published."""
    near_peak: float = 0.98
    """Training rests only while the published drafter is so near to the best it has been."""
    small_kl_nats: float = 0.05
    """And the policy has moved by less than this, per token, since it was published."""
    smoothing: float = 0.3
    """Share of a new measurement in the moving average of the published drafter's match rate."""
    patience: int = 3
    """And so many verdicts one after the other have found nothing better: it has learned what it can."""
    smallest_lr: float = 1 / 16
    """The learning rate is not halved below this share of what it was."""

    def __post_init__(self) -> None:
        check(self.gain >= 0, "gain", "must be 0 or more", self.gain)
        check(0 < self.smoothing <= 1, "smoothing", "must be above 0 and at most 1", self.smoothing)
        check(self.patience >= 1, "patience", "must be 1 or more", self.patience)
        check(0 < self.smallest_lr <= 1, "smallest_lr", "must be above 0 and at most 1", self.smallest_lr)


@dataclass(frozen=True, slots=True)
class Match:
    """What a drafter is worth on held-out samples, for chains of D tokens."""

    overlap_D: tuple[float, ...]
    """How often a token at each depth is accepted if all before it were: sum over tokens of min(p, q)."""
    coupled_D: tuple[float, ...]
    """The same for drafting with the policy's own noise, measured with some."""
    num_pairs: int

    @property
    def rate(self) -> float:
        """Share of a chain's drafted tokens that is accepted: the mean of the products of `overlap_D`."""
        product = torch.tensor(self.overlap_D, dtype=torch.float64).cumprod(0)
        return float(product.mean())


@dataclass(frozen=True, slots=True)
class GateState:
    """All that the gate remembers."""

    lr_factor: float = 1.0
    num_rejected: int = 0
    """Verdicts since the last one that published."""
    average: float | None = None
    """Moving average of the published drafter's match rate."""
    peak: float = 0.0
    """The highest that it has been since it was published."""


def decide(
    published: float, candidate: float, state: GateState, config: GateConfig
) -> tuple[GateDecision, GateState]:
    """Both match rates are of the same held-out samples. Who is not better is not published and learns at
    half the rate; who is has the rate doubled again, up to what it was."""
    if candidate >= published + config.gain:
        factor = min(1.0, 2 * state.lr_factor)
        return "publish", GateState(lr_factor=factor, average=candidate, peak=candidate)
    factor = max(config.smallest_lr, state.lr_factor / 2)
    decision: GateDecision = "go back" if candidate < published - config.harm else "keep"
    return decision, replace(state, lr_factor=factor, num_rejected=state.num_rejected + 1)


def with_measurement(rate: float, state: GateState, config: GateConfig) -> GateState:
    """After another measurement of the published drafter's match rate."""
    old = rate if state.average is None else state.average
    average = old + config.smoothing * (rate - old)
    return replace(state, average=average, peak=max(state.peak, average))


def should_pause(state: GateState, kl_nats: float, config: GateConfig) -> bool:
    """Whether training would be in vain: nothing better has been found for a while, the published drafter is
    as good as ever, and the policy is where it was (a static drafter loses nothing below 0.05 nats a token).

    kl_nats: of the policy now from when the drafter was published; infinite or not a number: not known.
    """
    is_done = state.num_rejected >= config.patience
    is_good = state.average is not None and state.average >= config.near_peak * state.peak
    return is_done and is_good and kl_nats < config.small_kl_nats


def reset_after_move(state: GateState) -> GateState:
    """The policy has moved: there is something to learn again, at the full rate."""
    return replace(state, lr_factor=1.0, num_rejected=0)


@torch.no_grad()
def held_out_match(
    layer: DraftLayer, rows: Sequence[PackedRow], embeddings: PolicyEmbeddings, depth: int
) -> Match:
    """A drafter's match with the policy, at each of `depth` places of a chain, on packed rows.

    Counts the pairs whose features are of the policy that `embeddings` is of; ValueError if there are
    none. The
    same rows have the same noise, so that two drafters can be compared.
    """
    sums = torch.zeros(3, depth, dtype=torch.float64)
    for number, packed in enumerate(rows):
        sums += match_sums(layer, packed, embeddings, row_noise(number, packed, embeddings), depth)
    return match_from_sums(sums)


def row_noise(number: int, packed: PackedRow, embeddings: PolicyEmbeddings) -> Tensor:
    """(P, V): Gumbel noise for the pairs of a held-out row."""
    at_1P = torch.arange(len(packed.tokens_P), device=packed.tokens_P.device)[None]
    return gumbel(0, number, at_1P, embeddings.head_Vd.shape[0])[0]


@torch.no_grad()
def match_sums(
    layer: DraftLayer, packed: PackedRow, embeddings: PolicyEmbeddings, noise_PV: Tensor, depth: int
) -> Tensor:
    """(3, depth), float64: sums over a row's pairs, of the overlap and of coupled matches, and their number.
    Rows are added up."""
    sums = torch.zeros(3, depth, dtype=torch.float64)
    exact_P = packed.counts_P & (packed.versions_P == embeddings.version)
    features_Pd = packed.features_Pw[:, : embeddings.head_Vd.shape[1]]
    for s, made in enumerate(predict_features(layer, packed, embeddings.embedding_Vd, depth, exact_P)):
        at_C, predicted_Cd = made.at_C, made.predicted_Cd
        logp_CV = log_probabilities(features_Pd[at_C + 1].to(predicted_Cd.dtype), embeddings.head_Vd)
        logq_CV = log_probabilities(predicted_Cd, embeddings.head_Vd)
        noise_CV = noise_PV[at_C]
        is_same_C = (logp_CV + noise_CV).argmax(-1) == (logq_CV + noise_CV).argmax(-1)
        overlaps = float(overlap(logp_CV.exp(), logq_CV).double().sum())
        sums[:, s] = sums.new_tensor([overlaps, int(is_same_C.sum()), len(at_C)])
    return sums


def match_from_sums(sums_3D: Tensor) -> Match:
    """ValueError if there was nothing to match."""
    overlaps, coupled, counts = sums_3D
    if counts[0] == 0:
        raise ValueError("no held-out pair is of the policy that the drafter is matched with")
    counts = counts.clamp_min(1)
    return Match(tuple((overlaps / counts).tolist()), tuple((coupled / counts).tolist()), int(counts[0]))
