"""Prefill of many rows in few forward passes: which tokens a pass computes, and their attention.

The tokens of a pass are flat, without padding, through all linear layers. Only attention is computed by
groups of pieces of similar length, padded at the end, and with `scaled_dot_product_attention`, so that no
scores are kept. A piece that follows cached tokens reads them from its row of the cache.

Shapes: T tokens of a pass, n pieces of a group, L tokens of its longest piece, C cached and new tokens of one
row, H heads, K key/value heads, G = H / K, h head size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.model.attention_mask import attention_mask
from aedit.spec_rollout.model.cache import KVCache
from aedit.spec_rollout.model.layers import AttentionSpec
from aedit.spec_rollout.model.model_support import to_device

MASK_BYTES = 32 << 20
"""Upper limit of a mask in bytes, and of the scores of a layer with a softcap."""
ACTIVATION_BYTES = 8 << 20
"""Upper limit of the largest activation of one pass in bytes. Larger ones leave the cache of the core: 16
prompts of 260 tokens took a fifth more time with 64 MiB."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one row that `Target.prefill` computes."""

    row: int
    start: int
    """Position of the first token: number of tokens that are cached in the row before it."""
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of a segment that one pass computes."""

    segment: int
    row: int
    start: int
    tokens: Sequence[int]

    @property
    def count(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + self.count


def pass_limits(cache: KVCache, widest: int) -> tuple[int, int, bool]:
    """Return the limits of `plan_passes` for a model whose widest activation has `widest` numbers a token."""
    num_bytes = cache.dtype.itemsize
    has_softcap = any(spec.softcap is not None for spec in cache.specs)
    has_window = any(spec.window is not None for spec in cache.specs)
    per_score = num_bytes * (cache.shape.num_heads if has_softcap else 1)
    max_tokens = max(16, ACTIVATION_BYTES // (widest * num_bytes))
    return max_tokens, MASK_BYTES // per_score, has_softcap or has_window


def plan_passes(
    segments: Sequence[Segment], max_tokens: int, max_scores: int, masks_first: bool
) -> Iterator[list[Piece]]:
    """Yield the pieces of each pass; pieces of similar length at the start of their row are neighbours.

    A segment is split only if it is longer than a piece may be.

    Args:
        segments: Tokens to compute.
        max_tokens: Upper limit of the tokens of a pass.
        max_scores: Upper limit of new tokens times tokens they attend to, for a piece that needs a mask.
        masks_first: A piece at the start of its row needs a mask, too: a layer has a window or a softcap.
    """

    def most(start: int) -> int:
        """Return how many tokens after the first `start` of a row may be one piece."""
        if start == 0 and not masks_first:
            return max_tokens
        # T (start + T) <= max_scores
        return min(max_tokens, max(16, int((start * start / 4 + max_scores) ** 0.5 - start / 2)))

    order = sorted(range(len(segments)), key=lambda i: (segments[i].start > 0, len(segments[i].tokens)))
    taken: list[Piece] = []
    room = max_tokens
    for i in order:
        segment = segments[i]
        at, end = segment.start, segment.start + len(segment.tokens)
        while at < end:
            count = min(end - at, most(at))
            # A row's next piece reads the keys of the one before, so it belongs to a later pass.
            if taken and (count > room or taken[-1].segment == i):
                yield taken
                taken, room = [], max_tokens
            taken.append(Piece(i, segment.row, at, segment.tokens[at - segment.start :][:count]))
            at, room = at + count, room - count
    if taken:
        yield taken


class PrefillAttention:
    """Attention of the flat tokens of one pass, for all layers."""

    def __init__(self, cache: KVCache, pieces: Sequence[Piece]) -> None:
        self.cache, device = cache, cache.device
        self.positions_T = torch.cat(
            [torch.arange(piece.start, piece.end, device=device) for piece in pieces]
        )
        rows_T = to_device([piece.row for piece in pieces], device).repeat_interleave(
            to_device([piece.count for piece in pieces], device), output_size=len(self.positions_T)
        )
        self.slots = cache.storage.flat_slots(rows_T, self.positions_T)
        self.parts: list[FirstPieces | LaterPiece] = []
        offsets = [0, *accumulate(piece.count for piece in pieces)]
        for first, end in _groups(pieces):
            tokens = slice(offsets[first], offsets[end])
            if pieces[first].start:
                self.parts.append(LaterPiece(cache, pieces[first], tokens))
            else:
                counts = [piece.count for piece in pieces[first:end]]
                self.parts.append(FirstPieces(cache, counts, tokens))

    def attend(self, layer: int, q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
        """Write the new keys and values and return the attention output, (T, H * h).

        Implements `layers.Attend` for layer `layer`.
        """
        self.cache.write(layer, self.slots, k_TKh, v_TKh)
        outputs = [
            part.attend(layer, q_THh[part.tokens], k_TKh[part.tokens], v_TKh[part.tokens])
            for part in self.parts
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _groups(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Yield first and end index of the pieces whose attention is computed together."""
    first = 0
    for i in range(1, len(pieces) + 1):
        starts_together = i < len(pieces) and not pieces[first].start and not pieces[i].start
        if starts_together and pieces[i].count <= 1.25 * pieces[first].count + 16:
            continue
        yield first, i
        first = i


class FirstPieces:
    """Attention of pieces at the start of their rows, padded at the end to the longest.

    No token attends to padding, as this comes after all tokens of its row.
    """

    def __init__(self, cache: KVCache, counts: Sequence[int], tokens: slice) -> None:
        self.specs, self.group, self.tokens, self.num_pieces = (
            cache.specs,
            cache.shape.group,
            tokens,
            len(counts),
        )
        self.longest, device, dtype = max(counts), cache.device, cache.dtype
        self._padded: Tensor | None = None
        if min(counts) < self.longest:
            counts_n1 = to_device(counts, device, torch.int64)[:, None]
            steps_L = torch.arange(self.longest, device=device)
            ends_n1 = counts_n1.cumsum(0)
            # Padding repeats the last token.
            self._padded = torch.minimum(ends_n1 - counts_n1 + steps_L, ends_n1 - 1).reshape(-1)
            starts = range(0, len(counts) * self.longest, self.longest)
            parts = [torch.arange(a, a + n, device=device) for a, n in zip(starts, counts, strict=True)]
            self._real = torch.cat(parts)
        start = torch.zeros(1, dtype=torch.int64, device=device)
        self._masks = {
            spec.window: attention_mask(start, self.longest, self.longest, window=spec.window)[0].to(dtype)
            for spec in self.specs
            if spec.softcap is not None or (spec.window is not None and spec.window < self.longest)
        }

    def attend(self, layer: int, q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
        """Return the attention output of these pieces' tokens."""
        spec = self.specs[layer]
        if self._padded is not None:
            q_THh, k_TKh, v_TKh = (x.index_select(0, self._padded) for x in (q_THh, k_TKh, v_TKh))
        sizes = (self.num_pieces, self.longest)
        q, k, v = (x.view(*sizes, *x.shape[1:]).transpose(1, 2) for x in (q_THh, k_TKh, v_TKh))
        heads = q.shape[1:]
        if self.group > 1:
            # Pieces and key/value heads are the batch: keys are expanded without a copy per query head.
            q = q.reshape(-1, self.group, *heads[1:])
            k, v = (x.flatten(0, 1)[:, None].expand(-1, self.group, -1, -1) for x in (k, v))
        output = attention(q, k, v, spec, self._masks.get(spec.window))
        output = output.reshape(self.num_pieces, *heads).transpose(1, 2)
        output = output.reshape(self.num_pieces * self.longest, -1)
        return output if self._padded is None else output.index_select(0, self._real)


class LaterPiece:
    """Attention of a piece that follows cached tokens of its row."""

    def __init__(self, cache: KVCache, piece: Piece, tokens: slice) -> None:
        self.cache, self.piece, self.tokens = cache, piece, tokens
        start = to_device([piece.start], cache.device)
        self._masks, self._firsts = {}, {}
        for window in {spec.window for spec in cache.specs}:
            first = 0 if window is None else max(0, piece.start - window + 1)
            mask = attention_mask(start, piece.count, piece.end, window=window)[0]
            self._masks[window], self._firsts[window] = mask[:, first:].to(cache.dtype), first

    def attend(self, layer: int, q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
        """Return the attention output of this piece's tokens, whose keys and values are in the cache."""
        spec, shape = self.cache.specs[layer], self.cache.shape
        first = self._firsts[spec.window]
        keys_KCh, values_KCh = self.cache.storage.read_layer(layer, self.piece.row, first, self.piece.end)
        q = q_THh.view(-1, shape.num_kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        k, v = (x[:, None].expand(-1, shape.group, -1, -1) for x in (keys_KCh, values_KCh))
        output = attention(q, k, v, spec, self._masks[spec.window])
        return output.permute(2, 0, 1, 3).reshape(self.piece.count, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None) -> Tensor:
    """Return softmax(scale q k^T + mask) v, with softcap where the layer has one.

    Args:
        q: (b, g, L, h).
        k: (b, g, C, h).
        v: (b, g, C, h).
        spec: Scale and softcap; the window is part of the mask.
        mask: (L, C), 0 or -inf; None if query i attends to the keys 0 .. i.
    """
    if spec.softcap is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=spec.scale)
    assert mask is not None
    scores = (q @ k.transpose(-1, -2)).mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    return torch.softmax(scores.add_(mask), -1) @ v
