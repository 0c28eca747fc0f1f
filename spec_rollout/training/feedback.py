"""Feedback passes: the draft layer as it runs while drafting, for all pairs of a row at once.

A chain starts at a pair with the policy's own feature; then the layer is fed its own predictions. Pass s
computes the prediction s tokens into a chain, for all positions where a chain may have started (HASS,
arXiv:2408.15766; EAGLE-3's training-time test, arXiv:2503.01840). Pair t gets the prediction of pass s - 1 at
t - 1, and attends to what the drafter's cache would hold: keys and values of policy features up to t - s,
where the chain started, then of one prediction from each of the passes 1..s at t - s + 1..t.

Of pairs that do not count, such as those of a prompt, only the keys and values are computed.

Shapes: P pairs, C of them in a pass, K key/value heads, G query heads per key/value head, e head size, d
hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training.packing import PackedRow, visible


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
