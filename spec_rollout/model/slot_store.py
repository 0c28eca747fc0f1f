"""Keys and values of rows for layers of any shapes, behind the cache interface of `transformers`.

A model's own forward calls `update` of each layer with its new keys and values and attends to what the call
returns. `step_cache` writes them to the slots of this step's rows and returns these rows' slots.

Shapes: B rows of a step, q new tokens per row, K key/value heads, h head size, C slots that are read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from aedit.spec_rollout.model.kv_storage import PagedTensor, padded_to_pages


@dataclass(frozen=True, slots=True, eq=False)
class StepSlots:
    """Slots of one forward pass."""

    rows: slice | Tensor
    """Rows of the store, in the order of the batch."""
    rows_B: Tensor
    """int64: the same as a tensor."""
    slots_Bq: Tensor
    """int64: slot of each new token."""
    context: int
    """Number of slots C that are read."""

    @property
    def past(self) -> int:
        """Return the number of slots before the new tokens of the longest row."""
        return self.context - self.slots_Bq.shape[1]


class SlotStore:
    """Keys and values of `rows` rows with `slots` slots each. Layers get their shapes at the first write."""

    def __init__(self, rows: int, slots: int, num_layers: int) -> None:
        self.rows, self.slots, self.num_layers = rows, slots, num_layers
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._memories: list[PagedTensor] = []
        self._used = [0] * rows

    @property
    def num_written_layers(self) -> int:
        """Return how many layers have used the store."""
        return len(self._layers)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of the keys and values of one token."""
        return sum(x.shape[1] * x.shape[3] * x.element_size() for x in self._in_order())

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the slots that are in use."""
        return sum(self._used) * self.token_bytes

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the bytes of all slots."""
        return self.rows * self.slots * self.token_bytes

    def mark_used(self, rows: Sequence[int], ends: Sequence[int]) -> None:
        """Count the slots up to each row's end as in use."""
        for row, end in zip(rows, ends, strict=True):
            self._used[row] = max(self._used[row], min(end, self.slots))

    def update(self, layer: int, step: StepSlots, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values, (B, K, q, h) each; return those of the rows' slots, (B, K, C, h).

        Raises:
            ValueError: The model passes another number of rows or tokens than the step has.
        """
        for x in (keys, values):
            if x.dim() != 4 or (x.shape[0], x.shape[2]) != tuple(step.slots_Bq.shape):
                raise ValueError(
                    f"keys and values of layer {layer} have the shape {tuple(x.shape)}, expected "
                    f"({step.slots_Bq.shape[0]}, heads, {step.slots_Bq.shape[1]}, head size)"
                )
        if layer not in self._layers:
            self._layers[layer] = self._zeros(keys), self._zeros(values)
        return self._update(layer, 0, step, keys), self._update(layer, 1, step, values)

    def _update(self, layer: int, which: int, step: StepSlots, new: Tensor) -> Tensor:
        stored = self._layers[layer][which]
        rows_B, slots_Bq = step.rows_B.to(stored.device), step.slots_Bq.to(stored.device)
        stored[rows_B[:, None], :, slots_Bq] = new.transpose(1, 2)
        return stored[:, :, : step.context][step.rows]

    def _zeros(self, like: Tensor) -> Tensor:
        """Return zeros for all rows. On a CPU the pages that are written take memory."""
        sizes = (self.rows, like.shape[1], self.slots, like.shape[3])
        count = math.prod(sizes)
        padded = padded_to_pages(count * like.element_size()) // like.element_size()
        self._memories.append(PagedTensor([padded], like.dtype, like.device))
        return self._memories[-1].tensor[:count].view(sizes)

    def keep_path(self, lengths_B: Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move accepted nodes of rows 0 .. B - 1 to consecutive slots. See `KVCache.keep_path`."""
        steps = torch.arange(path_Bm.shape[1], device=path_Bm.device)
        path_Bm = torch.where(steps <= counts_B[:, None], path_Bm, steps)
        rows_B1 = torch.arange(path_Bm.shape[0], device=path_Bm.device)[:, None]
        sources, targets = lengths_B[:, None] + path_Bm, lengths_B[:, None] + steps
        for x in self._in_order():
            rows, source, target = (index.to(x.device) for index in (rows_B1, sources, targets))
            x[rows, :, target] = x[rows, :, source]

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        for x in self._in_order():
            x[target, :, :length] = x[source, :, :length]
        self.mark_used([target], [length])

    def release_row(self, row: int) -> None:
        """Give the memory of a row back."""
        if self._used[row]:
            for memory, x in zip(self._memories, self._in_order(), strict=True):
                row_bytes = x.nbytes // self.rows
                memory.discard(row * row_bytes, (row + 1) * row_bytes)
        self._used[row] = 0

    def clear(self) -> None:
        """Overwrite all keys and values by zeros: a value that is not finite would spread even if masked."""
        for memory in self._memories:
            memory.discard(0, memory.tensor.nbytes)

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of slots start .. length - 1 of a row, (1, 1, 1, length - start, bytes of a token).

        The last dimension holds keys and values of all layers.
        """
        parts = [x[row, :, start:length].transpose(0, 1).flatten(1) for x in self._tensors()]
        return torch.cat([part.to(parts[0].device) for part in parts], -1)[None, None, None]

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write the result of `read_kv` to a row, from slot `start` on.

        Raises:
            ValueError: It is of another model, or a row has fewer slots.
        """
        parts = self._tensors()
        widths = [x.shape[1] * x.shape[3] for x in parts]
        if kv.dim() != 5 or (*kv.shape[:3], kv.shape[4]) != (1, 1, 1, sum(widths)):
            raise ValueError(
                f"keys and values are of another model: shape {tuple(kv.shape)}, "
                f"expected (1, 1, 1, tokens, {sum(widths)})"
            )
        end = start + kv.shape[3]
        if end > self.slots:
            raise ValueError(f"keys and values of {end} tokens exceed the {self.slots} slots of a row")
        for x, part in zip(parts, torch.split(kv[0, 0, 0], widths, -1), strict=True):
            x[row, :, start:end] = part.view(kv.shape[3], x.shape[1], x.shape[3]).transpose(0, 1).to(x)
        self.mark_used([row], [end])

    def _in_order(self) -> list[Tensor]:
        """Return keys and values of the layers in the order of their first writes."""
        return [x for layer in self._layers.values() for x in layer]

    def _tensors(self) -> list[Tensor]:
        """Return keys and values of the layers by index."""
        return [x for index in sorted(self._layers) for x in self._layers[index]]


class _StepLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of the cache of a step."""

    is_sliding = False

    def __init__(self, store: SlotStore, index: int, step: StepSlots) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._store, self._index, self._step, self._length = store, index, step, step.past
        self.is_initialized = True

    def lazy_initialization(self, *args: Any) -> None:
        """Do nothing: the store allocates at the first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write new keys and values; return those that the new tokens attend to."""
        self._length = self._step.context
        return self._store.update(self._index, self._step, key_states, value_states)

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens, with those of this step once they are written."""
        return self._length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the number of keys that `update` returns and the position of the first one."""
        return self._step.context, 0

    def get_max_length(self) -> int:
        """Return the number of slots of a row."""
        return self._store.slots

    get_max_cache_shape = get_max_length


def step_cache(store: SlotStore, step: StepSlots) -> Cache:
    """Return the cache that a model's forward is called with: the slots of one step in a store."""
    return Cache(layers=[_StepLayer(store, index, step) for index in range(store.num_layers)])


class TextStore:
    """Token ids of each row. Its keys and values are the ids: (1, 1, 1, tokens, 1), int64."""

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.texts: list[list[int]] = [[] for _ in range(rows)]

    @property
    def kv_bytes(self) -> int:
        """Return 0: a text needs no keys and values."""
        return 0

    kv_bytes_reserved = kv_bytes

    def extend(self, row: int, start: int, tokens: Sequence[int]) -> list[int]:
        """Replace the row's tokens from `start` on and return its text."""
        self.texts[row][start:] = tokens
        return self.texts[row]

    def keep_path(self, lengths_B: Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Refuse trees.

        Raises:
            ValueError: Always.
        """
        raise ValueError("trees need keys and values in a cache")

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self.texts[target] = self.texts[source][:length]

    def release_row(self, row: int) -> None:
        """Forget the row's text."""
        self.texts[row] = []

    def clear(self) -> None:
        """Do nothing: texts do not depend on weights."""

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return the token ids of slots start .. length - 1, (1, 1, 1, length - start, 1)."""
        return torch.tensor(self.texts[row][start:length], dtype=torch.int64).view(1, 1, 1, -1, 1)

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write the result of `read_kv` to a row, from slot `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """
        if kv.dtype != torch.int64 or kv.dim() != 5 or (*kv.shape[:3], kv.shape[4]) != (1, 1, 1, 1):
            raise ValueError(
                f"the text of a row must be int64, (1, 1, 1, tokens, 1), got {kv.dtype}, {tuple(kv.shape)}"
            )
        if start + kv.shape[3] > self.slots:
            raise ValueError(f"{start + kv.shape[3]} tokens exceed the {self.slots} slots of a row")
        self.extend(row, start, kv.flatten().tolist())
