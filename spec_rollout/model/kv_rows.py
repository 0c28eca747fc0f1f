"""Keys and values of rows at consecutive slots.

Every row has room for its greatest length; `PagedTensor` commits what was written. For a CPU, where gathering
blocks takes three times as long as the attention itself.

Shapes: B rows, K key/value heads, h head size, C slots that are read.
"""

import mmap
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from aedit.spec_rollout.model.kv_extent import KVMemoryError, KVSizes, Span


@dataclass(frozen=True, slots=True)
class RowsReader:
    """Keys and values of consecutive rows as views."""

    context: int
    keys: Sequence[Tensor]
    values: Sequence[Tensor]

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each (B * K, C, h)."""
        return self.keys[layer], self.values[layer]


class KVRows:
    """Storage of one tensor, (layers, 2, rows, K, slots, h), with heads that start at a page."""

    def __init__(self, sizes: KVSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes = sizes
        slot_bytes = sizes.head_dim * dtype.itemsize
        # Slots after the last one are never written: they cost address space only.
        padded = padded_to_pages(sizes.slots * slot_bytes)
        while padded % slot_bytes:
            padded += padded_to_pages(1)
        self._head_bytes, self._slot_bytes = padded, slot_bytes
        self._stride = padded // slot_bytes
        shape = (sizes.layers, 2, sizes.rows, sizes.heads, self._stride, sizes.head_dim)
        self._memory = PagedTensor(shape, dtype, device)
        self.tensor = self._memory.tensor
        self.rows = self.tensor[..., : sizes.slots, :]
        self._heads = self.tensor.flatten(2, 3)  # (layers, 2, rows * K, slots, h)
        self._ends = [0] * sizes.rows

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the pages that were written since their rows were released."""
        if not self._memory.is_sparse:
            return self.kv_bytes_reserved
        return sum(map(self._row_bytes, self._ends))

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the bytes of all rows at their greatest length."""
        return self.sizes.rows * self._row_bytes(self.sizes.slots)

    def _row_bytes(self, end: int) -> int:
        return 2 * self.sizes.layers * self.sizes.heads * padded_to_pages(end * self._slot_bytes)

    def reserve(self, spans: Sequence[Span]) -> None:
        """Declare that these slots will be written."""
        for row, _, end in spans:
            if end > self._ends[row]:
                self._ends[row] = end

    def release(self, row: int) -> None:
        """Give the memory of a row back."""
        if not self._ends[row]:
            return
        self._ends[row] = 0
        row_bytes = self.sizes.heads * self._head_bytes
        for plane in range(2 * self.sizes.layers):
            first = (plane * self.sizes.rows + row) * row_bytes
            self._memory.discard(first, first + row_bytes)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        self.reserve([(target, 0, length)])
        self.rows[:, :, target, :, :length].copy_(self.rows[:, :, source, :, :length])

    def flat_slots(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Return the flat slots of all heads for slots of these rows, which broadcast: (numel * K)."""
        heads = torch.arange(self.sizes.heads, device=self.tensor.device) * self._stride
        flat = rows * (self.sizes.heads * self._stride) + slots
        return (flat[..., None] + heads).reshape(-1)

    def read(self, row: int, first: int, end: int) -> Tensor:
        """Return the slots first .. end - 1 of a row, (layers, 2, K, end - first, h), as a view."""
        return self.rows[:, :, row, :, first:end]

    def read_layer(self, layer: int, row: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the slots first .. end - 1 of a row, each (K, end - first, h)."""
        keys, values = self.rows[layer, :, row, :, first:end].unbind(0)
        return keys, values

    def write(self, row: int, first: int, kv: Tensor) -> None:
        """Write keys and values, (layers, 2, K, T, h), to a row from slot `first` on."""
        self.reserve([(row, first, first + kv.shape[3])])
        self.rows[:, :, row, :, first : first + kv.shape[3]].copy_(kv)

    def reader(self, first_row: int, num_rows: int, context: int) -> RowsReader:
        """Return the first `context` slots of consecutive rows."""
        heads = self.sizes.heads
        of = self._heads[:, :, first_row * heads : (first_row + num_rows) * heads, :context]
        keys, values = of.unbind(1)
        return RowsReader(context, keys.unbind(0), values.unbind(0))


PAGE_BYTES = mmap.PAGESIZE
# The constant has a name since Python 3.12; its value depends on the processor.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)


def padded_to_pages(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class PagedTensor:
    """A tensor of zeros on the CPU whose pages are committed when they are written.

    Elsewhere than on Linux and on a CPU it is an ordinary tensor, and `discard` has no effect.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._map: mmap.mmap | None = None
        num_bytes = prod(sizes) * dtype.itemsize
        with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
            if device.type == "cpu" and sys.platform == "linux" and num_bytes:
                self._map = _mapping(num_bytes)
                self.tensor: Tensor = torch.frombuffer(self._map, dtype=dtype, count=prod(sizes)).view(*sizes)
            else:
                self.tensor = torch.zeros(*sizes, dtype=dtype, device=device)

    @property
    def is_sparse(self) -> bool:
        """Return true if pages that were not written take no memory."""
        return self._map is not None

    def discard(self, first: int, end: int) -> None:
        """Give back the whole pages within the bytes first .. end - 1. They read as zeros afterwards."""
        first, end = padded_to_pages(first), end // PAGE_BYTES * PAGE_BYTES
        if self._map is not None and first < end:
            self._map.madvise(mmap.MADV_DONTNEED, first, end - first)


def _mapping(num_bytes: int) -> mmap.mmap:
    """Return an anonymous mapping that reserves address space only.

    Raises:
        KVMemoryError: The operating system refuses it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    try:
        found = mmap.mmap(-1, padded_to_pages(num_bytes), flags=flags)
    except OSError as refusal:
        raise KVMemoryError(
            f"the system refuses {num_bytes / 2**30:.2f} GiB of address space for keys and values "
            f"({refusal}): lower rows or max_tokens, or raise the limit (ulimit -v, vm.overcommit_memory)"
        ) from refusal
    with suppress(OSError):  # a kernel without huge pages
        found.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would commit 2 MiB for one token
    return found
