"""Keys and values of the rows, allocated once, and what new tokens see of them.

Shapes: B rows, q new tokens of each, H heads, K key/value heads, G = H / K, h head size, C slots that are
looked at. The slot of a token is its number in the row; where a tree is verified, nodes of equal depth have
slots of their own and one position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.model.attention_mask import attention_mask
from aedit.spec_rollout.model.kv_extent import KVExtent
from aedit.spec_rollout.model.layers import LayerShape

MIN_SAVED_BYTES = 64 << 10
"""Of one layer's keys and values: reading so many takes as long as another piece's calls, on one CPU core."""


class KVCache:
    """Keys and values of `rows` rows with `slots` slots each, for all layers.

    One tensor, (layers, 2, rows, K, slots, h): keys lie as the products with queries read them, and a row's
    first slots are one piece per head. `like` gives dtype and device.
    """

    def __init__(self, num_layers: int, shape: LayerShape, rows: int, slots: int, like: Tensor) -> None:
        self.shape, self.rows, self.slots = shape, rows, slots
        sizes = (num_layers, 2, rows, shape.num_kv_heads, slots, shape.head_dim)
        self.kv = torch.zeros(sizes, dtype=like.dtype, device=like.device)
        self._heads = self.kv.flatten(2, 3)  # (layers, 2, rows * K, slots, h)
        flat = self.kv.flatten(2, 4)
        self._flat_keys = flat[:, 0].unbind(0)
        self._flat_values = flat[:, 1].unbind(0)
        self._seen = torch.zeros(1, 1, 1, dtype=self.kv.dtype, device=self.kv.device)

    @property
    def min_saved_slots(self) -> int:
        """Slots of a row that are not to be read for the rows to be looked at in one more piece."""
        return MIN_SAVED_BYTES // (2 * self.shape.num_kv_heads * self.shape.head_dim * self.kv.element_size())

    @property
    def num_bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()

    def prepare(
        self, lengths_B: Tensor, q: int, kv_extents: Sequence[KVExtent], ancestors_Bqq: Tensor | None = None
    ) -> "StepAttention":
        """Make room for q tokens after the first lengths_B of each row, and look at what is there. reaches:
        of these rows, in their order. sees_Bqq: who sees whom among the new tokens, where they are a tree
        (`sight.ancestors`)."""
        shape, device = self.shape, self.kv.device
        num_rows, first_row = lengths_B.shape[0], kv_extents[0].first_row
        rows = torch.arange(first_row, first_row + num_rows, device=device)
        heads = torch.arange(shape.num_kv_heads, device=device) * self.slots
        slots_Bq = (rows * (shape.num_kv_heads * self.slots) + lengths_B)[:, None]
        slots_Bq = slots_Bq + torch.arange(q, device=device)
        views = []
        for reach in kv_extents:
            of = slice(reach.first_row - first_row, reach.first_row - first_row + reach.num_rows)
            views.append(
                self._look(reach, lengths_B[of], q, None if ancestors_Bqq is None else ancestors_Bqq[of])
            )
        return StepAttention(self, (num_rows, q), (slots_Bq[:, :, None] + heads).reshape(-1), views)

    def _look(self, reach: KVExtent, lengths_B: Tensor, q: int, ancestors_Bqq: Tensor | None) -> "KVView":
        num_kv_heads = self.shape.num_kv_heads
        first, end = reach.first_row * num_kv_heads, (reach.first_row + reach.num_rows) * num_kv_heads
        keys, values = self._heads[:, :, first:end, : reach.context].unbind(1)
        mask = self._seen
        if reach.needs_mask:
            mask = self._for_heads(attention_mask(lengths_B, q, reach.context, ancestors_Bqq))
        return KVView(reach.num_rows, keys.transpose(-1, -2).unbind(0), values.unbind(0), mask)

    def _for_heads(self, mask_BqC: Tensor) -> Tensor:
        """The mask as scores are laid out, (B * K, q * G, C)."""
        num_rows, q, context = mask_BqC.shape
        kinds = self.shape.num_kv_heads, self.shape.group
        wide = mask_BqC.to(self.kv.dtype)[:, None, :, None].expand(num_rows, kinds[0], q, kinds[1], context)
        return wide.reshape(num_rows * kinds[0], q * kinds[1], context)

    def write(self, layer: int, slots: Tensor, keys_TKh: Tensor, values_TKh: Tensor) -> None:
        head_dim = self.shape.head_dim
        self._flat_keys[layer].index_copy_(0, slots, keys_TKh.reshape(-1, head_dim))
        self._flat_values[layer].index_copy_(0, slots, values_TKh.reshape(-1, head_dim))

    def keep_path(self, lengths_B: Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Of the tokens after the first lengths_B, let those of the path follow one another.

        path_Bm: which of the q tokens are kept, in order, the root (0) first; counts_B: how many after the
        root. What a row's path has beyond its count stays where it is.
        """
        m = path_Bm.shape[1]
        steps = torch.arange(m, device=path_Bm.device)
        path_Bm = torch.where(steps <= counts_B[:, None], path_Bm, steps)
        sources, targets = self._moves(lengths_B, path_Bm), self._moves(lengths_B, steps[None])
        flat = self.kv.flatten(2, 4).flatten(0, 1)
        flat.index_copy_(1, targets, flat.index_select(1, sources))

    def _moves(self, lengths_B: Tensor, steps_Bm: Tensor) -> Tensor:
        """The flat slots of these steps after the rows' lengths, over all heads."""
        heads = torch.arange(lengths_B.shape[0] * self.shape.num_kv_heads, device=lengths_B.device)
        heads = heads.view(lengths_B.shape[0], -1, 1) * self.slots
        return (heads + (lengths_B[:, None] + steps_Bm)[:, None]).reshape(-1)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """The first `length` slots of row `target` become those of row `source`."""
        self.kv[:, :, target, :, :length].copy_(self.kv[:, :, source, :, :length])

    def read_kv(self, row: int, length: int) -> Tensor:
        """A copy of a row's first slots, (layers, 2, K, length, h)."""
        return self.kv[:, :, row, :, :length].clone()

    def write_kv(self, row: int, kv: Tensor) -> None:
        """Put into a row what `read_kv` gave elsewhere. ValueError if it is of another model or too long."""
        layers, two, _, heads, slots, head_dim = self.kv.shape
        if kv.dim() != 5 or (*kv.shape[:3], kv.shape[4]) != (layers, two, heads, head_dim):
            raise ValueError(f"keys and values of shape {tuple(kv.shape)} are of another model")
        if kv.dtype != self.kv.dtype:
            raise ValueError(f"keys and values in {kv.dtype}: this cache is in {self.kv.dtype}")
        if kv.shape[3] > slots:
            raise ValueError(f"keys and values of {kv.shape[3]} tokens: a row has room for {slots}")
        self.kv[:, :, row, :, : kv.shape[3]].copy_(kv)


@dataclass(frozen=True, slots=True)
class KVView:
    """What the new tokens of some rows see of the cache."""

    num_rows: int
    keys: Sequence[Tensor]
    """Per layer, (B * K, h, C)."""
    values: Sequence[Tensor]
    """Per layer, (B * K, C, h)."""
    mask: Tensor
    """(B * K, q * G, C), 0 or -inf; (1, 1, 1) if nothing is hidden."""

    def read(self, layer: int, queries: Tensor, scale: float) -> Tensor:
        """What the queries of these rows, (B * K, q * G, h), read, in the same shape."""
        scores = torch.baddbmm(self.mask, queries, self.keys[layer], alpha=scale)
        return torch.bmm(torch.softmax(scores, -1), self.values[layer])


@dataclass(frozen=True, slots=True)
class StepAttention:
    """What new tokens see, for one pass through the layers."""

    cache: KVCache
    sizes: tuple[int, int]
    """B, q."""
    slots: Tensor
    """int64, (B * q * K): where the cache takes their keys and values."""
    views: Sequence[KVView]
    """Of the rows in their order."""

    def attend(self, layer: int, q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
        """Keep the new keys and values, and read: (T, H * h), T = B * q. See `layers.Attend`."""
        self.cache.write(layer, self.slots, k_TKh, v_TKh)
        num_rows, q = self.sizes
        shape = self.cache.shape
        sizes = (num_rows, q, shape.num_kv_heads, shape.group, shape.head_dim)
        # Heads that share keys are rows of one product: no key is read or copied twice (measured, for one to
        # 32 rows over 300 tokens: half the time of scaled_dot_product_attention).
        if q > 1:
            q_THh = q_THh.view(sizes).transpose(1, 2)
        q_THh = q_THh.reshape(num_rows * shape.num_kv_heads, q * shape.group, shape.head_dim)
        if len(self.views) == 1:
            read = self.views[0].read(layer, q_THh, shape.scale)
        else:
            parts = torch.split(q_THh, [look.num_rows * shape.num_kv_heads for look in self.views])
            looked = zip(self.views, parts, strict=True)
            read = torch.cat([look.read(layer, part, shape.scale) for look, part in looked])
        if q > 1:
            read = read.view(num_rows, shape.num_kv_heads, q, shape.group, shape.head_dim).transpose(1, 2)
        return read.reshape(num_rows * q, shape.num_heads * shape.head_dim)
