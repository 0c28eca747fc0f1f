"""KV cache of the engine's rows, and attention of new tokens over it.

Shapes: B rows, q new tokens per row, H heads, K key/value heads, G = H / K query heads per key/value head, h
head size, C cache slots that are read. A token's slot is its index in the row. When a tree is verified, nodes
of equal depth have different slots and the same position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aedit.spec_rollout.model.attention_mask import attention_mask
from aedit.spec_rollout.model.kv_storage import KVBlocks, KVExtent, KVReader, KVRows, KVSizes, Span
from aedit.spec_rollout.model.layers import AttentionSpec, LayerShape
from aedit.types import PositiveInt, checked

MIN_SAVED_BYTES = 64 << 10
"""Bytes of keys and values of one layer that take as long to read as the calls of one more extent, on one CPU
core."""
L2_BYTES = 2 << 20
"""Bytes of keys of one layer that a CPU core's second cache does not hold."""
LARGE_VALUES = 256 << 10
"""Bytes of values of one layer from which on sums by index are faster than a product with a single row."""
MOST_READS = 4
"""Query heads per key/value head up to which reading the values once for each is not slower."""


def default_layout(device: torch.device) -> Literal["rows", "blocks"]:
    """Return the layout that is fast on a device."""
    return "rows" if device.type == "cpu" else "blocks"


@checked()
@dataclass(frozen=True, slots=True)
class KVMemory:
    """Layout of keys and values in memory, and the size of their pool."""

    layout: Literal["auto", "rows", "blocks"] = "auto"
    """`rows`: consecutive slots, committed by the operating system when they are written. `blocks`: a pool
    with a table per row. `auto`: see `default_layout`."""
    num_blocks: PositiveInt | None = None
    """Blocks of 16 tokens in the pool. None: enough for all rows at their greatest length, but at most 80 %
    of the free memory of a CUDA device."""

    def storage(self, sizes: KVSizes, like: Tensor) -> "KVRows | KVBlocks":
        """Return an empty storage in the dtype and on the device of `like`.

        Raises:
            ValueError: The layout is unknown, or the memory is not available.
        """
        layout = default_layout(like.device) if self.layout == "auto" else self.layout
        if layout == "rows" and self.num_blocks is None:
            return KVRows(sizes, like.dtype, like.device)
        if layout == "blocks":
            return KVBlocks(sizes, like.dtype, like.device, self.num_blocks)
        raise ValueError(
            f"KVMemory must be of layout rows without num_blocks, blocks or auto, got {self.layout!r} with "
            f"num_blocks {self.num_blocks}"
        )


class KVCache:
    """Keys and values of all rows and layers in one storage, and attention over them.

    `specs` are the layers' attentions.
    """

    def __init__(self, specs: Sequence[AttentionSpec], shape: LayerShape, storage: KVRows | KVBlocks) -> None:
        self.specs, self.shape, self.storage = tuple(specs), shape, storage
        self.slots = storage.sizes.slots
        self._windows = {spec.window for spec in self.specs}
        self.dtype, self.device = storage.tensor.dtype, storage.tensor.device
        self._flat = storage.tensor.flatten(2, 4)
        self._flat_keys = self._flat[:, 0].unbind(0)
        self._flat_values = self._flat[:, 1].unbind(0)
        is_plain = self.dtype in (torch.float32, torch.bfloat16) and isinstance(storage, KVRows)
        self._has_sums = is_plain and self.device.type == "cpu"
        """`ValueSlots` are possible."""
        self._seen = torch.zeros(1, 1, 1, dtype=self.dtype, device=self.device)

    @property
    def min_saved_slots(self) -> int:
        """Return how many slots per row one more extent must save to be worth its calls."""
        return MIN_SAVED_BYTES // (2 * self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize)

    def reserve(self, spans: Sequence[Span]) -> None:
        """Take memory for these slots, which will be written.

        Raises:
            ValueError: There is not enough memory.
        """
        self.storage.reserve(spans)

    def prepare(
        self, lengths_B: Tensor, q: int, kv_extents: Sequence[KVExtent], ancestors_Bqq: Tensor | None = None
    ) -> "StepAttention":
        """Return the attention of q new tokens per row that follow the first `lengths_B` tokens of each row.

        Args:
            lengths_B: Number of cached tokens of each row.
            q: Number of new tokens per row.
            kv_extents: Extents that cover these rows, in order.
            ancestors_Bqq: Result of `attention_mask.ancestors` if the new tokens are a tree, else None.
        """
        device = self.device
        num_rows, first_row = lengths_B.shape[0], kv_extents[0].first_row
        rows = torch.arange(first_row, first_row + num_rows, device=device)
        slots_BqK = self.storage.flat_slots(
            rows[:, None], lengths_B[:, None] + torch.arange(q, device=device)
        )
        views = []
        for extent in kv_extents:
            of = slice(extent.first_row - first_row, extent.first_row - first_row + extent.num_rows)
            views.append(
                self._view(extent, lengths_B[of], q, None if ancestors_Bqq is None else ancestors_Bqq[of])
            )
        return StepAttention(self, (num_rows, q), slots_BqK, views)

    def _view(self, extent: KVExtent, lengths_B: Tensor, q: int, ancestors_Bqq: Tensor | None) -> "KVView":
        context, reader = self.storage.reader(extent.first_row, extent.num_rows, extent.context)
        token_bytes = self.shape.num_kv_heads * self.shape.head_dim * self.dtype.itemsize
        is_large = extent.num_rows * context * token_bytes >= LARGE_VALUES
        masks = {}
        for window in self._windows:
            masks[window] = self._seen
            is_cut = context > extent.context or (window is not None and window < context)
            if extent.needs_mask or is_cut:
                mask_BqC = attention_mask(lengths_B, q, context, ancestors_Bqq, window)
                # As scores are laid out: (B * K, q * G, C).
                mask = mask_BqC.to(self.dtype)[:, None, :, None]
                mask = mask.expand(-1, self.shape.num_kv_heads, -1, self.shape.group, -1)
                masks[window] = mask.reshape(-1, q * self.shape.group, context)
        if q > 1 or self.shape.group > MOST_READS or not is_large or not self._has_sums:
            return KVView(extent.num_rows, reader, masks)
        rows = torch.arange(extent.first_row, extent.first_row + extent.num_rows)
        slots = self.storage.flat_slots(rows[:, None], torch.arange(context))
        slots_BKGC = (
            slots.view(len(rows), context, -1, 1).permute(0, 2, 3, 1).expand(-1, -1, self.shape.group, -1)
        )
        values = ValueSlots(
            self._flat_values, slots_BKGC.flatten(), torch.arange(0, slots_BKGC.numel(), context)
        )
        return KVView(extent.num_rows, reader, masks, values)

    def write(self, layer: int, slots: Tensor, keys_TKh: Tensor, values_TKh: Tensor) -> None:
        """Write the keys and values of T new tokens of one layer to flat `slots`."""
        head_dim = self.shape.head_dim
        self._flat_keys[layer].index_copy_(0, slots, keys_TKh.reshape(-1, head_dim))
        self._flat_values[layer].index_copy_(0, slots, values_TKh.reshape(-1, head_dim))

    def keep_path(self, lengths_B: Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move the keys and values of an accepted path to consecutive slots after the first `lengths_B`.

        Args:
            lengths_B: Number of tokens of each row before the new tokens.
            path_Bm: int64, indices of the kept tokens among the q new ones, in order, starting with the root
                (0).
            counts_B: Number of kept tokens of each row after the root. Entries of `path_Bm` beyond it are
                ignored.
        """
        m = path_Bm.shape[1]
        steps = torch.arange(m, device=path_Bm.device)
        path_Bm = torch.where(steps <= counts_B[:, None], path_Bm, steps)
        rows_B1 = torch.arange(lengths_B.shape[0], device=lengths_B.device)[:, None]
        sources = self.storage.flat_slots(rows_B1, lengths_B[:, None] + path_Bm)
        targets = self.storage.flat_slots(rows_B1, lengths_B[:, None] + steps)
        flat = self._flat.flatten(0, 1)
        flat.index_copy_(1, targets, flat.index_select(1, sources))

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of the slots start .. length - 1 of a row, (layers, 2, K, length - start, h)."""
        return self.storage.read(row, start, length).clone(memory_format=torch.contiguous_format)

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write keys and values from `read_kv`, of this or another cache, to a row from slot `start` on.

        Raises:
            ValueError: Shape or dtype belong to another model, or a row has fewer slots.
        """
        sizes, slots = self.storage.sizes, self.slots
        if kv.dim() != 5 or (*kv.shape[:3], kv.shape[4]) != (sizes.layers, 2, sizes.heads, sizes.head_dim):
            raise ValueError(
                f"keys and values are of another model: shape {tuple(kv.shape)}, "
                f"expected ({sizes.layers}, 2, {sizes.heads}, tokens, {sizes.head_dim})"
            )
        if kv.dtype != self.dtype:
            raise ValueError(f"keys and values must be in this cache's {self.dtype}, got {kv.dtype}")
        end = start + kv.shape[3]
        if end > slots:
            raise ValueError(f"keys and values of {end} tokens exceed the {slots} slots of a row")
        self.storage.write(row, start, kv)


@dataclass(frozen=True, slots=True)
class ValueSlots:
    """Slots of the values that one new token of each row attends to."""

    flat_values: Sequence[Tensor]
    """Values of each layer by flat slots, (slots, h)."""
    slots: Tensor
    """int64, (B * K * G * C): flat slots that each query head reads."""
    starts: Tensor
    """int64, (B * K * G): where they begin in `slots`."""

    def weighted(self, layer: int, weights: Tensor) -> Tensor:
        """Return the sums of the values times their weights (B * K, G, C): (B * K, G, h).

        Measured over 12 layers, 16 rows, 12 heads and 200 tokens: 9 instead of 16 ms in fp32, 5 instead of 8
        in bf16. A product with one row on the left reads memory at half the speed.
        """
        flat = self.flat_values[layer], self.slots, self.starts
        sums, *_ = torch.embedding_bag(*flat, mode=0, per_sample_weights=weights.flatten())
        return sums.view(*weights.shape[:2], -1)


@dataclass(frozen=True, slots=True)
class KVView:
    """Keys and values of a few consecutive rows, with the masks of their new tokens."""

    num_rows: int
    reader: KVReader
    masks: Mapping[int | None, Tensor]
    """Mask of each window size: (B * K, q * G, C), 0 or -inf; (1, 1, 1) if no slot is masked."""
    values: "ValueSlots | None" = None
    """Where the values are; None if a product with them is as fast as sums by index."""

    def attend(self, layer: int, queries: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the attention output of `queries`, (B * K, q * G, h), in the same shape."""
        mask, (keys, values) = self.masks[spec.window], self.reader(layer)
        if spec.softcap is None:
            scores = _products(mask, queries, keys, spec.scale)
        else:
            scores = _products(queries.new_zeros(1, 1, 1), queries, keys, spec.scale / spec.softcap)
            scores = torch.add(mask, scores.tanh_(), alpha=spec.softcap)
        weights = torch.softmax(scores, -1)
        if self.values is not None:
            return self.values.weighted(layer, weights)
        return torch.bmm(weights, values)


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention of the new tokens of one forward pass, for all layers."""

    cache: KVCache
    sizes: tuple[int, int]
    """B and q."""
    slots: Tensor
    """int64, (B * q * K): flat cache slots of the new keys and values."""
    views: Sequence[KVView]
    """Views that cover the rows, in order."""

    def attend(self, layer: int, q_THh: Tensor, k_TKh: Tensor, v_TKh: Tensor) -> Tensor:
        """Write the new keys and values and return the attention output, (T, H * h) with T = B * q.

        Implements `layers.Attend` for layer `layer`.
        """
        self.cache.write(layer, self.slots, k_TKh, v_TKh)
        num_rows, q = self.sizes
        shape = self.cache.shape
        sizes = (num_rows, q, shape.num_kv_heads, shape.group, shape.head_dim)
        # Query heads that share keys are rows of one product: no key is read or copied twice. Measured for
        # 1 to 32 rows over 300 tokens: half the time of scaled_dot_product_attention.
        if q > 1:
            q_THh = q_THh.view(sizes).transpose(1, 2)
        q_THh = q_THh.reshape(num_rows * shape.num_kv_heads, q * shape.group, shape.head_dim)
        spec = self.cache.specs[layer]
        if len(self.views) == 1:
            output = self.views[0].attend(layer, q_THh, spec)
        else:
            parts = torch.split(q_THh, [view.num_rows * shape.num_kv_heads for view in self.views])
            views_parts = zip(self.views, parts, strict=True)
            output = torch.cat([view.attend(layer, part, spec) for view, part in views_parts])
        if q > 1:
            output = output.view(num_rows, shape.num_kv_heads, q, shape.group, shape.head_dim).transpose(1, 2)
        return output.reshape(num_rows * q, shape.num_heads * shape.head_dim)


def _products(mask: Tensor, queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return mask + scale * queries keys^T: (n, r, C) of queries (n, r, h) and keys (n, C, h)."""
    if queries.device.type == "cpu" and _is_faster_from_left(queries, keys):
        scores = torch.baddbmm(mask.transpose(1, 2), keys, queries.transpose(1, 2), alpha=scale)
        return scores.transpose(1, 2).contiguous()
    return torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale)


def _is_faster_from_left(queries: Tensor, keys: Tensor) -> bool:
    """Return true if the product with the keys as the left factor is the faster one on a CPU.

    Measured over 12 layers, 16 rows, 12 heads and 300 tokens: 16 instead of 50 ms in bf16, 18 instead of 25
    in fp32. For fp32 keys that are in the processor's cache it is the slower one.
    """
    if queries.dtype == torch.float32:
        return queries.shape[1] <= 4 and keys.numel() * keys.itemsize > L2_BYTES
    return queries.dtype == torch.bfloat16
