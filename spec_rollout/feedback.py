"""The draft layer as it runs when it drafts, for every pair of a packed row at once.

A chain begins at a pair with the policy's own feature; from there on the layer eats its own guesses. Pass s
is what it does s tokens into a chain, for all places where the chain may have begun (HASS, arXiv:2408.15766;
EAGLE-3's training-time test, arXiv:2503.01840): pair t is given the guess of pass s - 1 at t - 1, and sees
what the drafter's cache would hold: keys and values of policy features up to t - s, where the chain began,
then of one guess from each of the passes 1..s at t - s + 1..t.

Shapes: P pairs, K heads of keys and values, G queries of each, e head size, d hidden size.
"""

import torch
from torch import Tensor

from aedit.spec_rollout.draft_layer import DraftLayer
from aedit.spec_rollout.packing import Packed, visible


def guesses(layer: DraftLayer, packed: Packed, embedding_Vd: Tensor, num_passes: int) -> list[Tensor]:
    """The guessed feature after each pair, (P, d), in each of the passes 0..num_passes - 1. Those of pass s
    mean something where `chained(packed.counts_P, s)` or, at least, the chain began in the same segment."""
    embedded_1Pd = embedding_Vd[packed.tokens_P].to(layer.gain.dtype)[None]
    positions_1P = packed.positions_P[None]
    eaten_Pw = packed.features_Pw.to(layer.gain.dtype)
    made: list[Tensor] = []
    seen: list[Tensor] = []
    for _ in range(num_passes):
        fused_1Pd = layer.fused(eaten_Pw[None], embedded_1Pd)
        queries, kv = layer.queries_kv(fused_1Pd, positions_1P)
        seen.append(kv[0])
        mixed_Pq = _attend(queries[0], seen, packed.segments_P)
        made.append(layer.guess(fused_1Pd, mixed_Pq[None])[0])
        eaten_Pw = _later(made[-1], 1)
    return made


def chained(counts_P: Tensor, num_steps: int) -> Tensor:
    """Bool: the pairs that count at which a chain can be that began at a pair which counts, `num_steps`
    before. As no segment's last pair counts, none of them has begun in another segment."""
    is_chained_P = counts_P
    for _ in range(num_steps):
        is_chained_P = counts_P & _later(is_chained_P, 1)
    return is_chained_P


def _attend(queries_PHe: Tensor, seen: list[Tensor], segments_P: Tensor) -> Tensor:
    """(P, H * e): each pair over what `seen`, the keys and values of passes 0..s, lets it see. Where a chain
    would have to begin before the segment does, what it sees means nothing."""
    num_pairs, num_heads, e = queries_PHe.shape
    steps = len(seen) - 1
    heads = [kv.view(num_pairs, 2, -1, e) for kv in seen]
    queries_KGPe = queries_PHe.view(num_pairs, -1, num_heads // heads[0].shape[2], e).permute(1, 2, 0, 3)
    queries_KGPe = queries_KGPe * e**-0.5
    keys_KPe, values_KPe = (x.transpose(0, 1) for x in heads[0].unbind(1))
    own = [_own(heads[j], steps - j) for j in range(1, steps + 1)]
    scores_KGPP = queries_KGPe @ keys_KPe.transpose(-1, -2).unsqueeze(1)
    scores_KGPP = scores_KGPP.masked_fill(~visible(segments_P, steps), float("-inf"))
    of_own = [(queries_KGPe * key_KPe.unsqueeze(1)).sum(-1, keepdim=True) for key_KPe, _ in own]
    weights_KGPS = torch.cat([scores_KGPP, *of_own], -1).softmax(-1)
    mixed_KGPe = weights_KGPS[..., :num_pairs] @ values_KPe.unsqueeze(1)
    for j, (_, value_KPe) in enumerate(own):
        mixed_KGPe = mixed_KGPe + weights_KGPS[..., num_pairs + j, None] * value_KPe.unsqueeze(1)
    return mixed_KGPe.permute(2, 0, 1, 3).reshape(num_pairs, -1)


def _own(heads_P2Ke: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """The key and the value, (K, P, e), that each pair sees of one pass, `distance` before it."""
    key_KPe, value_KPe = (_later(x, distance).transpose(0, 1) for x in heads_P2Ke.unbind(1))
    return key_KPe, value_KPe


def _later(x_P: Tensor, distance: int) -> Tensor:
    """Moved along the pairs: what was at t is at t + distance; zeros come in."""
    if distance == 0:
        return x_P
    return torch.cat((torch.zeros_like(x_P[:distance]), x_P[:-distance]))
