"""Losses of a draft layer: predicted features, and the tokens that the policy's head predicts from them.

Shapes: P pairs of a packed row, C of them counted, V vocabulary, d hidden size.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training.batches import PackedRow, visible
from aedit.types import check

TokenLoss = Literal["ce", "lk", "tv", "coupled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Settings of the loss.

    The loss is the sum over feedback passes s of decay^s [token_weight * token loss + feature_weight *
    SmoothL1]. One pass with weights 0.1 and 1 is EAGLE (arXiv:2401.15077); more passes are HASS
    (arXiv:2408.15766); more passes without feature loss are EAGLE-3 (arXiv:2503.01840).

    Measured on a policy of 1 M parameters trained on Python code, from a new layer at lr 1e-3, share of
    chains of 4 that is accepted after 150 steps of 1,024 pairs: weights 1 and 1, three passes 0.417; 1 and 0,
    three passes 0.408 (lk: 0.412); 1 and 1, one pass 0.385; EAGLE's 0.383; 1 and 0, one pass 0.323. One pass
    takes a third of the time of three, so for short trainings it is ahead (after 24 s: 0.414, two 0.371,
    three 0.315), but it stays behind at depth.
    """

    tokens: TokenLoss = "ce"
    """ce: cross entropy of the policy's distribution. lk: -log of the sum over tokens of min(p, q), which is
    the probability that a drawn token is accepted. tv, coupled: expected number of rejected tokens of a chain
    of `num_passes`, see `rejected`."""
    token_weight: float = 1.0
    feature_weight: float = 1.0
    num_passes: int = 3
    decay: float = 0.8
    """Not of the token losses tv and coupled, in which each position counts as often as it is reached."""

    def __post_init__(self) -> None:
        kinds = get_args(TokenLoss)
        check(self.tokens in kinds, "tokens", f"must be one of {', '.join(kinds)}", self.tokens)
        check(self.token_weight >= 0, "token_weight", "must be 0 or more", self.token_weight)
        check(self.feature_weight >= 0, "feature_weight", "must be 0 or more", self.feature_weight)
        check(self.num_passes >= 1, "num_passes", "must be 1 or more", self.num_passes)
        check(0 < self.decay <= 1, "decay", "must be above 0 and at most 1", self.decay)


@dataclass(frozen=True, slots=True)
class PolicyEmbeddings:
    """Input and output embeddings of the policy: its own tensors, which are never changed."""

    embedding_Vd: Tensor
    head_Vd: Tensor
    version: int
    """Version of the policy."""


@dataclass(frozen=True, slots=True)
class Losses:
    """Losses of one packed row, as sums that can be added over rows."""

    total: Tensor
    """Loss, not yet divided by the number of counted pairs."""
    overlap_S: Tensor
    """Sum over pairs, for each pass, of the sum over tokens of min(p, q), where p is known."""
    num_overlap_S: Tensor
    """Number of pairs in `overlap_S`."""


def draft_losses(
    layer: DraftLayer, packed: PackedRow, embeddings: PolicyEmbeddings, config: LossConfig
) -> Losses:
    """Return the loss of a packed row, summed over counted pairs. Only the layer gets gradients.

    The feature loss is of layers that predict features only (not of EAGLE-3's form).

    The policy's distribution is computed from its feature with the current head. This is valid only for
    features of the same policy version. For older features the token that their policy drew is used instead,
    a sample of its distribution. (Old features with the new head give the distribution of neither policy.)
    """
    features_Pd = packed.features_Pw[:, : embeddings.head_Vd.shape[1]]
    total = torch.zeros((), dtype=layer.gain.dtype, device=features_Pd.device)
    reached_P = total.new_ones(len(packed.counts_P))
    overlaps, counts = [], []
    for s, made in enumerate(predict_features(layer, packed, embeddings.embedding_Vd, config.num_passes)):
        at_C, predicted_Cd = made.at_C, made.predicted_Cd
        next_Cd, drawn_C = features_Pd[at_C + 1].to(predicted_Cd.dtype), packed.targets_P[at_C]
        is_exact_C = packed.versions_P[at_C] == embeddings.version
        logq_CV = F.log_softmax(layer.logits(predicted_Cd, embeddings.head_Vd), -1)
        p_CV = teacher(next_Cd, drawn_C, is_exact_C, embeddings.head_Vd)
        if layer.draft_tokens is not None:
            p_CV, drawn_C = narrowed(p_CV, drawn_C, layer.draft_tokens)
        if config.tokens == "ce" or config.tokens == "lk":
            of_tokens = config.decay**s * token_loss(p_CV, logq_CV, config.tokens).sum()
        else:
            rejected_C, go_on_C = rejected(p_CV, logq_CV, drawn_C, config.tokens)
            reached_C = reached_P[at_C - s]
            of_tokens = (1 - reached_C * (1 - rejected_C)).sum()
            reached_P = reached_P.index_put((at_C - s,), reached_C * go_on_C)
        total = total + config.token_weight * of_tokens
        if layer.predicts_features:
            of_features = F.smooth_l1_loss(predicted_Cd, next_Cd, reduction="none").mean(-1).sum()
            total = total + config.decay**s * config.feature_weight * of_features
        overlaps.append((overlap(p_CV, logq_CV.detach()) * is_exact_C).sum())
        counts.append(is_exact_C.sum())
    return Losses(total, torch.stack(overlaps), torch.stack(counts))


@torch.no_grad()
def teacher(features_Cd: Tensor, drawn_C: Tensor, is_exact_C: Tensor, head_Vd: Tensor) -> Tensor:
    """Return the target distribution of each pair, (C, V).

    It is the policy's where the feature is of this policy version, else one-hot of the drawn token.
    """
    p_CV = log_probabilities(features_Cd, head_Vd).exp()
    drawn_CV = F.one_hot(drawn_C, head_Vd.shape[0]).to(p_CV.dtype)
    return torch.where(is_exact_C[:, None], p_CV, drawn_CV)


def narrowed(p_CV: Tensor, drawn_C: Tensor, draft_tokens_D: Tensor) -> tuple[Tensor, Tensor]:
    """Return p of the draft vocabulary, (C, D), and the token's index in it, int64, (C,); -1: not in it.

    Those p have a sum below 1: what is outside cannot be accepted.
    """
    at_C = torch.searchsorted(draft_tokens_D, drawn_C).clamp_max(len(draft_tokens_D) - 1)
    return p_CV[:, draft_tokens_D], torch.where(draft_tokens_D[at_C] == drawn_C, at_C, -1)


def log_probabilities(features_Cd: Tensor, head_Vd: Tensor) -> Tensor:
    """Return the log-probabilities of the policy's head for features, (C, V), at temperature 1."""
    return F.log_softmax(F.linear(features_Cd, head_Vd.detach().to(features_Cd.dtype)), -1)


def token_loss(p_CV: Tensor, logq_CV: Tensor, kind: Literal["ce", "lk"]) -> Tensor:
    """Return the loss of each pair, (C,). Both kinds are smallest where q equals p (lk: 0)."""
    if kind == "ce":
        return -(p_CV * logq_CV).sum(-1)
    return -overlap(p_CV, logq_CV).clamp_min(torch.finfo(p_CV.dtype).tiny).log()


def rejected(
    p_CV: Tensor, logq_CV: Tensor, drawn_C: Tensor, kind: Literal["tv", "coupled"]
) -> tuple[Tensor, Tensor]:
    """Return what makes the expected number of accepted tokens a loss without bias.

    Let m(x) be the probability that the token x is drafted and accepted, given that all before it was. With
    rejection sampling it is min(p(x), q(x)), and a draft is rejected with probability TV(p, q), the total
    variation. A chain x_1 .. x_s is accepted with the probability m_1(x_1) .. m_s(x_s). So, over texts x of
    the policy, its s-th token is accepted with the probability E[r_1(x_1) .. r_s-1(x_s-1) (1 - TV_s)], where
    r = m / p. The sum of this over s is the expected length, of which a text gives a sample. (The product of
    all 1 - TV does not: a token that is accepted is not any token of the policy.)

    The engine's coupled drafts draw with the policy's own noise G: x is accepted if it is the argmax of both
    log p + G and log q + G. exp(-G) is exponential of rate 1, and x wins both races with the probability

        m(x) = 1 / sum over y of max(p(y) / p(x), q(y) / q(x)),

    as in weighted MinHash. It is at most min(p, q), and its sum at least (1 - TV) / (1 + TV) (Daliri, Musco
    and Suresh, arXiv:2408.07978). Where q(y) / p(y) is larger than at x the maximum is q(y) / q(x), else
    p(y) / p(x), so sorting by that ratio gives all sums. Both losses are 0 only where q equals p.

    Args:
        p_CV: Target probabilities. A sum below 1 is that of the tokens that the drafter does not have.
        logq_CV: Log-probabilities of the drafter.
        drawn_C: int64, the token of the text; -1: one that the drafter does not have.
        kind: tv or coupled.

    Returns:
        The probability of a rejection and m / p at the text's token, (C,) each.
    """
    q_CV = logq_CV.exp()
    if kind == "tv":
        m_CV = torch.minimum(p_CV, q_CV)
    else:
        order_CV = (q_CV / p_CV).argsort(-1)  # 0 / 0 is sorted last, and its m is 0
        ps_CV, qs_CV = p_CV.gather(-1, order_CV), q_CV.gather(-1, order_CV)
        below_CV = ps_CV.cumsum(-1) + (1 - p_CV.sum(-1, keepdim=True)).clamp_min(0)
        above_CV = qs_CV.flip(-1).cumsum(-1).flip(-1) - qs_CV
        tiny = torch.finfo(p_CV.dtype).tiny
        sorted_CV = ps_CV * qs_CV / (above_CV * ps_CV + below_CV * qs_CV).clamp_min(tiny)
        m_CV = torch.zeros_like(q_CV).scatter(-1, order_CV, sorted_CV)
    ratio_CV = m_CV / p_CV.clamp_min(torch.finfo(p_CV.dtype).tiny)
    ratio_C = ratio_CV.gather(-1, drawn_C.clamp_min(0)[:, None])[:, 0]
    return 1 - m_CV.sum(-1), ratio_C * (drawn_C >= 0)


def overlap(p_CV: Tensor, logq_CV: Tensor) -> Tensor:
    """Return the sum over tokens of min(p, q), (C,).

    It is the probability that a token drawn from q is accepted.
    """
    return torch.minimum(p_CV, logq_CV.exp()).sum(-1)


@dataclass(frozen=True, slots=True)
class FeedbackPass:
    """Predictions of one pass."""

    at_C: Tensor
    """int64: indices of the pairs, ascending."""
    predicted_Cd: Tensor
    """Predicted feature after each pair."""


@dataclass(frozen=True, slots=True)
class _PassCache:
    """Keys and values of one pass."""

    kv_Ckv: Tensor
    index_P: Tensor
    """int64: index of each pair in `kv_Ckv`; 0 for pairs that are not in it."""

    def at(self, pairs: Tensor) -> Tensor:
        """Return the keys and values of these pairs, (len(pairs), kv)."""
        return self.kv_Ckv[self.index_P[pairs]]


def predict_features(
    layer: DraftLayer,
    packed: PackedRow,
    embedding_Vd: Tensor,
    num_passes: int,
    counts_P: Tensor | None = None,
) -> list[FeedbackPass]:
    """Return the passes 0 .. num_passes - 1; pass s predicts at the pairs `chained(counts_P, s)`.

    Args:
        layer: Draft layer.
        packed: Packed row.
        embedding_Vd: The policy's embedding.
        num_passes: Number of passes.
        counts_P: Bool, pairs to predict at; None is all that count. Never the last pair of a segment.
    """
    counts_P = packed.counts_P if counts_P is None else counts_P
    dtype = layer.gain.dtype
    at_C = torch.arange(len(counts_P), device=counts_P.device)
    inputs_Cw = packed.features_Pw.to(dtype)
    made: list[FeedbackPass] = []
    pass_caches: list[_PassCache] = []
    for s in range(num_passes):
        if s > 0:
            at_C, before = chained(counts_P, s).nonzero()[:, 0], made[-1]
            inputs_Cw = before.predicted_Cd[_indices(before.at_C, len(counts_P))[at_C - 1]]
        if not len(at_C):  # no chain is as long
            made.append(FeedbackPass(at_C, inputs_Cw))
            continue
        embedded_1Cd = embedding_Vd[packed.tokens_P[at_C]].to(dtype)[None]
        fused_1Cd = layer.fused(inputs_Cw[None], embedded_1Cd)
        queries, kv = layer.queries_kv(fused_1Cd, packed.positions_P[at_C][None])
        pass_caches.append(_PassCache(kv[0], _indices(at_C, len(counts_P))))
        fused_Cd, queries_CHe = fused_1Cd[0], queries[0]
        if s == 0:  # other pairs were computed for their keys and values only
            at_C = counts_P.nonzero()[:, 0]
            fused_Cd, queries_CHe = fused_Cd[at_C], queries_CHe[at_C]
        mixed_Cq = _attend(queries_CHe, at_C, pass_caches, packed.segments_P)
        made.append(FeedbackPass(at_C, layer.predict(fused_Cd[None], mixed_Cq[None])[0]))
    return made


def chained(counts_P: Tensor, num_steps: int) -> Tensor:
    """Return the counted pairs at which a chain can be that started at a counted pair `num_steps` before.

    The last pair of a segment never counts, so no chain crosses segments.
    """
    is_chained_P = counts_P
    for _ in range(num_steps):
        is_chained_P = counts_P & torch.cat((is_chained_P.new_zeros(1), is_chained_P[:-1]))
    return is_chained_P


def _attend(queries_CHe: Tensor, at_C: Tensor, pass_caches: list[_PassCache], segments_P: Tensor) -> Tensor:
    """Return the attention output of the pairs over the caches of passes 0..s, (C, H * e)."""
    num_queries, num_heads, e = queries_CHe.shape
    num_pairs, steps = len(segments_P), len(pass_caches) - 1
    keys_KPe, values_KPe = _heads(pass_caches[0].kv_Ckv, e)
    kinds = len(keys_KPe), num_heads // len(keys_KPe)
    queries_KGCe = queries_CHe.view(num_queries, *kinds, e).permute(1, 2, 0, 3)
    queries_KGCe = queries_KGCe * e**-0.5
    own = [_heads(pass_caches[j].at(at_C - (steps - j)), e) for j in range(1, steps + 1)]
    scores_KGCP = queries_KGCe @ keys_KPe.transpose(-1, -2).unsqueeze(1)
    scores_KGCP = scores_KGCP.masked_fill(~visible(segments_P, at_C, steps), float("-inf"))
    of_own = [(queries_KGCe * key_KCe.unsqueeze(1)).sum(-1, keepdim=True) for key_KCe, _ in own]
    weights_KGCS = torch.cat([scores_KGCP, *of_own], -1).softmax(-1)
    mixed_KGCe = weights_KGCS[..., :num_pairs] @ values_KPe.unsqueeze(1)
    for j, (_, value_KCe) in enumerate(own):
        mixed_KGCe = mixed_KGCe + weights_KGCS[..., num_pairs + j, None] * value_KCe.unsqueeze(1)
    return mixed_KGCe.permute(2, 0, 1, 3).reshape(num_queries, num_heads * e)


def _heads(kv_Ckv: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """Return keys and values, each (K, C, e)."""
    keys, values = kv_Ckv.view(len(kv_Ckv), 2, -1, head_size).transpose(0, 2).unbind(1)
    return keys, values


def _indices(at_C: Tensor, num_pairs: int) -> Tensor:
    """Return the index of each of `num_pairs` pairs in `at_C`."""
    indices_P = torch.zeros(num_pairs, dtype=torch.int64, device=at_C.device)
    indices_P[at_C] = torch.arange(len(at_C), device=at_C.device)
    return indices_P
