"""Storage of keys and values of rows, and the extents of it that new tokens read.

`KVRows` has consecutive slots: every row has room for its greatest length, and `PagedTensor` commits what was
written. It is for a CPU, where gathering blocks takes three times as long as the attention itself. Memory of
which a quarter is in use moves to huge pages, which are read a third faster. `KVBlocks` has blocks of 16
tokens from one pool, with a table of blocks per row; equal beginnings of rows share blocks.

One product reads as many slots of each row as the longest row has. In a batch with a long tail this is
several times the number of cached tokens. So `kv_extents` splits the rows, in order, into groups that are
read separately wherever this saves more than the additional calls cost.

Shapes: B rows, K key/value heads, h head size, C slots that are read.
"""

import mmap
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod

import numpy as np
import torch
from torch import Tensor

from aedit.spec_rollout.model.model_support import to_device
from aedit.system import HUGE_PAGE_BYTES, HUGE_PAGES_AT_ONCE, use_huge_pages

PAGE_BYTES = mmap.PAGESIZE
# The constant has a name since Python 3.12; its value depends on the processor.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if platform.machine() in ("x86_64", "aarch64") else 0)
LOOK_BYTES = 16 << 20
"""Bytes by which the rows of `KVRows` grow until it looks which memory should be in huge pages. It then moves
as much at most, so that no pass waits for long."""
BLOCK = 16
"""Tokens of one block."""
POOL_SHARE = 0.8
"""Largest share of the free memory of a CUDA device that a pool takes by default."""
Span = tuple[int, int, int]
"""Row, first slot, end of the slots."""
KVReader = Callable[[int], tuple[Tensor, Tensor]]
"""Returns keys and values of a layer for consecutive rows, each (B * K, C, h)."""


@dataclass(frozen=True, slots=True)
class KVExtent:
    """Cache slots that the new tokens of some consecutive rows read."""

    first_row: int
    num_rows: int
    context: int
    """Number of slots C of a row that are read: at least the longest length plus the new tokens."""
    needs_mask: bool = True
    """False only if every new token attends to all C slots."""


def kv_extents(lengths: Sequence[int], q: int, min_saved_slots: int) -> list[KVExtent]:
    """Return extents that cover the rows 0, 1, ... with q new tokens each.

    Args:
        lengths: Number of cached tokens of each row.
        q: Number of new tokens per row.
        min_saved_slots: Slots of one row that a split must save.
    """
    found: list[KVExtent] = []
    pending = [(0, len(lengths))]
    while pending:
        first, end = pending.pop()
        split = _best_split(lengths[first:end], min_saved_slots)
        if split:
            pending += [(first + split, end), (first, first + split)]
            continue
        longest = max(lengths[first:end])
        needs_mask = q > 1 or min(lengths[first:end]) != longest
        found.append(KVExtent(first, end - first, longest + q, needs_mask))
    return found


def _best_split(lengths: Sequence[int], min_saved_slots: int) -> int:
    """Return the row before which a split saves the most slots, or 0 if no split saves enough."""
    most, split = min_saved_slots, 0
    if len(lengths) < 2 or (max(lengths) - min(lengths)) * (len(lengths) - 1) <= min_saved_slots:
        return 0
    left, right = list(accumulate(lengths, max)), list(accumulate(reversed(lengths), max))[::-1]
    for i in range(1, len(lengths)):
        # Slots that one extent would read, minus those that two extents read.
        saved = len(lengths) * left[-1] - i * left[i - 1] - (len(lengths) - i) * right[i]
        if saved > most:
            most, split = saved, i
    return split


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Sizes of the keys and values of all rows."""

    layers: int
    rows: int
    heads: int
    """Key/value heads K."""
    slots: int
    """Slots of one row: the greatest number of tokens, with a draft."""
    head_dim: int


class KVMemoryError(ValueError):
    """There is not enough memory for keys and values. The message says what to lower."""


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
        self._grown_bytes = 0
        """Bytes that rows have grown by since the last look; see `LOOK_BYTES`."""
        self._token_bytes = 2 * sizes.layers * sizes.heads * slot_bytes

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the pages that were written since their rows were released."""
        memory = self._memory
        if not memory.is_sparse:
            return self.kv_bytes_reserved
        num_bytes = sum(map(self._row_bytes, self._ends))
        if memory.is_huge.any():
            num_bytes += int((HUGE_PAGE_BYTES - self._used_bytes())[memory.is_huge].sum())
        return num_bytes

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
                self._grown_bytes += (end - self._ends[row]) * self._token_bytes
                self._ends[row] = end
        if self._grown_bytes >= LOOK_BYTES:
            self._grown_bytes = 0
            self._memory.use_huge_pages(self._used_bytes())

    def _used_bytes(self) -> np.ndarray:
        """Return the bytes of pages in use between each two `PagedTensor.edges`."""
        in_row = [padded_to_pages(end * self._slot_bytes) for end in self._ends]
        in_head = np.tile(np.repeat(in_row, self.sizes.heads), 2 * self.sizes.layers)
        before = np.append(0, np.cumsum(in_head))
        head, offset = np.divmod(self._memory.edges, self._head_bytes)
        return np.diff(before[head] + np.minimum(offset, np.append(in_head, 0)[head]))

    def release(self, row: int) -> None:
        """Give the memory of a row back. A huge page is kept until no row uses it."""
        if not self._ends[row]:
            return
        self._ends[row] = 0
        row_bytes = self.sizes.heads * self._head_bytes
        for plane in range(2 * self.sizes.layers):
            first = (plane * self.sizes.rows + row) * row_bytes
            self._memory.discard(first, first + row_bytes)
        if self._memory.is_huge.any():
            self._memory.give_back(self._used_bytes())

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

    def reader(self, first_row: int, num_rows: int, context: int) -> tuple[int, KVReader]:
        """Return `context` and a reader of that many first slots of consecutive rows, as views."""
        heads = self.sizes.heads
        of = self._heads[:, :, first_row * heads : (first_row + num_rows) * heads, :context]
        keys, values = of.unbind(1)
        keys_of, values_of = keys.unbind(0), values.unbind(0)
        return context, lambda layer: (keys_of[layer], values_of[layer])


def padded_to_pages(num_bytes: int) -> int:
    """Return `num_bytes` rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class PagedTensor:
    """A tensor of zeros on the CPU whose pages are committed when they are written.

    Elsewhere than on Linux and on a CPU it is an ordinary tensor, which takes its memory at once.
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
            self._bytes = self.tensor.view(-1).view(torch.uint8)
        first = -self.tensor.data_ptr() % HUGE_PAGE_BYTES if self.is_sparse else num_bytes
        self.edges = np.arange(first, num_bytes + 1, HUGE_PAGE_BYTES)
        """Offsets in bytes of which each two bound a possible huge page."""
        self.is_huge = np.zeros(len(self.edges[1:]), bool)
        """Which of those are in use."""

    @property
    def is_sparse(self) -> bool:
        """Return true if pages that were not written take no memory."""
        return self._map is not None

    def use_huge_pages(self, used_bytes: np.ndarray) -> None:
        """Use some more huge pages where at least a quarter of one is in use.

        used_bytes: int64, bytes in use between each two `edges`.
        """
        found = np.flatnonzero(~self.is_huge & (4 * used_bytes >= HUGE_PAGE_BYTES))
        for i in found[:HUGE_PAGES_AT_ONCE]:
            self.is_huge[i] = self._moved_to_huge_page(int(self.edges[i]))
            if not self.is_huge[i]:
                return  # the system has none, or no more

    def _moved_to_huge_page(self, first: int) -> bool:
        assert self._map is not None
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE, first, HUGE_PAGE_BYTES)
            is_moved = use_huge_pages(self.tensor.data_ptr() + first, HUGE_PAGE_BYTES)
            self._map.madvise(mmap.MADV_NOHUGEPAGE, first, HUGE_PAGE_BYTES)  # from now on, as everywhere else
        except OSError:
            return False
        return is_moved

    def give_back(self, used_bytes: np.ndarray) -> None:
        """Give back the huge pages of which nothing is in use. used_bytes: see `use_huge_pages`."""
        for i in np.flatnonzero(self.is_huge & (used_bytes == 0)):
            self.is_huge[i] = False
            self.discard(int(self.edges[i]), int(self.edges[i + 1]))

    def discard(self, first: int, end: int) -> None:
        """Overwrite the whole pages within the bytes first .. end - 1 by zeros, and give those back.

        A part of a huge page is not given back. Elsewhere than on Linux nothing is.
        """
        if self._map is None:
            self._bytes[first:end].zero_()
            return
        first, end = padded_to_pages(first), end // PAGE_BYTES * PAGE_BYTES
        for i in np.flatnonzero(self.is_huge & (self.edges[:-1] < end) & (self.edges[1:] > first)):
            within = slice(max(first, int(self.edges[i])), min(end, int(self.edges[i + 1])))
            self._bytes[within].zero_()
            self._give_back(first, within.start)
            first = within.stop
        self._give_back(first, end)

    def _give_back(self, first: int, end: int) -> None:
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


class KVBlocks:
    """Storage of one tensor, (layers, 2, blocks, K, 16, h). Block 0 belongs to no row."""

    def __init__(
        self, sizes: KVSizes, dtype: torch.dtype, device: torch.device, num_blocks: int | None = None
    ) -> None:
        self.sizes = sizes
        self._per_row = -(-sizes.slots // BLOCK)
        self._block_bytes = 2 * sizes.layers * sizes.heads * BLOCK * sizes.head_dim * dtype.itemsize
        self.num_blocks = self._default_blocks(device) if num_blocks is None else num_blocks
        if self.num_blocks < self._per_row:
            raise KVMemoryError(
                f"{self.num_blocks} blocks of {BLOCK} tokens do not hold one row of {sizes.slots} tokens, "
                f"which needs {self._per_row}: lower max_tokens or raise the number of blocks"
            )
        shape = (sizes.layers, 2, 1 + self.num_blocks, sizes.heads, BLOCK, sizes.head_dim)
        with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            self.table = torch.zeros(sizes.rows, self._per_row, dtype=torch.int64, device=device)
        self._pool = self.tensor.flatten(2, 3).flatten(3, 4)
        self._of_row: list[list[int]] = [[] for _ in range(sizes.rows)]
        self._uses = [0] * (1 + self.num_blocks)
        self._free = list(range(self.num_blocks, 0, -1))

    def _default_blocks(self, device: torch.device) -> int:
        """Return the blocks of all rows at their greatest length, or as many as memory allows."""
        most = self.sizes.rows * self._per_row
        if device.type != "cuda":
            return most
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return min(most, int(POOL_SHARE * free_bytes) // self._block_bytes)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of the blocks in use."""
        return (self.num_blocks - len(self._free)) * self._block_bytes

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the bytes of the pool."""
        return self.num_blocks * self._block_bytes

    def reserve(self, spans: Sequence[Span]) -> None:
        """Give the rows the blocks of these slots, which will be written, as their own.

        Raises:
            KVMemoryError: Too few blocks are free. Nothing has changed.
        """
        wanted = [(row, i) for row, first, end in spans for i in self._missing(row, first, end)]
        if len(wanted) > len(self._free):
            raise KVMemoryError(
                f"{len(wanted)} more blocks of {BLOCK} tokens are needed for keys and values, but only "
                f"{len(self._free)} of {self.num_blocks} are free: decode fewer rows at a time, lower "
                "max_tokens or make the target with more blocks"
            )
        for row, i in wanted:
            mine = self._of_row[row]
            if i < len(mine) and self._uses[mine[i]] == 1:
                continue  # the other rows that shared it have got copies in this call
            block = self._free.pop()
            self._uses[block] = 1
            if i < len(mine):
                self.tensor[:, :, block].copy_(self.tensor[:, :, mine[i]])
                self._uses[mine[i]] -= 1
                mine[i] = block
            else:
                mine.append(block)
        self._set_table([(row, i, self._of_row[row][i]) for row, i in wanted])

    def _missing(self, row: int, first: int, end: int) -> list[int]:
        """Return which blocks of a row are shared or not there, of those that hold these slots."""
        mine = self._of_row[row]
        shared = [
            i for i in range(first // BLOCK, min(len(mine), -(-end // BLOCK))) if self._uses[mine[i]] > 1
        ]
        return [*shared, *range(len(mine), -(-end // BLOCK))]

    def _set_table(self, entries: Sequence[tuple[int, int, int]]) -> None:
        if entries:
            at, blocks = zip(*((row * self._per_row + i, block) for row, i, block in entries), strict=True)
            device = self.table.device
            self.table.view(-1).index_copy_(0, to_device(at, device), to_device(blocks, device))

    def release(self, row: int) -> None:
        """Give up the blocks of a row. Those that no other row uses are free, and read as zeros."""
        mine, self._of_row[row] = self._of_row[row], []
        for block in mine:
            self._uses[block] -= 1
        freed = [block for block in mine if not self._uses[block]]
        self._free += reversed(freed)
        if freed:
            # A value that is not finite would make NaN out of a weight of 0 in the row that is next.
            self.tensor.index_fill_(2, to_device(freed, self.tensor.device), 0)
        self._set_table([(row, i, 0) for i in range(len(mine))])

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` slots of row `target` those of row `source`, which shares its blocks."""
        if source == target:
            return
        self.release(target)
        mine = self._of_row[source][: -(-length // BLOCK)]
        for block in mine:
            self._uses[block] += 1
        self._of_row[target] = list(mine)
        self._set_table([(target, i, block) for i, block in enumerate(mine)])

    def flat_slots(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Return the flat slots of all heads for slots of these rows, which broadcast: (numel * K)."""
        blocks = self.table[rows, slots // BLOCK]
        heads = torch.arange(self.sizes.heads, device=self.table.device) * BLOCK
        flat = blocks * (self.sizes.heads * BLOCK) + slots % BLOCK
        return (flat[..., None] + heads).reshape(-1)

    def read(self, row: int, first: int, end: int) -> Tensor:
        """Return a copy of the slots first .. end - 1 of a row, (layers, 2, K, end - first, h)."""
        near, blocks = first // BLOCK, self.table[row, first // BLOCK : -(-end // BLOCK)]
        kv = self.tensor.index_select(2, blocks).transpose(2, 3).flatten(3, 4)
        return kv[..., first - near * BLOCK : end - near * BLOCK, :]

    def read_layer(self, layer: int, row: int, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the slots first .. end - 1 of a row, each (K, end - first, h)."""
        near, blocks = first // BLOCK, self.table[row, first // BLOCK : -(-end // BLOCK)]
        kv = self.tensor[layer].index_select(1, blocks).transpose(1, 2).flatten(2, 3)
        keys, values = kv[..., first - near * BLOCK : end - near * BLOCK, :].unbind(0)
        return keys, values

    def write(self, row: int, first: int, kv: Tensor) -> None:
        """Write keys and values, (layers, 2, K, T, h), to a row from slot `first` on."""
        end = first + kv.shape[3]
        self.reserve([(row, first, end)])
        steps = torch.arange(first, end, device=self.table.device)
        flat = self.flat_slots(torch.tensor(row, device=self.table.device), steps)
        self.tensor.flatten(2, 4).index_copy_(2, flat, kv.transpose(2, 3).flatten(2, 3))

    def reader(self, first_row: int, num_rows: int, context: int) -> tuple[int, KVReader]:
        """Return how many first slots of consecutive rows are read, at least `context`, and their reader.

        It gathers keys and values from their blocks, layer by layer.
        """
        n = -(-context // BLOCK)
        blocks_B1n = self.table[first_row : first_row + num_rows, :n][:, None]
        heads = torch.arange(self.sizes.heads, device=self.table.device)[:, None]
        index = (blocks_B1n * self.sizes.heads + heads).reshape(-1)
        sizes = (num_rows * self.sizes.heads, n * BLOCK, self.sizes.head_dim)

        def read(layer: int) -> tuple[Tensor, Tensor]:
            keys, values = (half.index_select(0, index) for half in self._pool[layer].unbind(0))
            return keys.view(sizes), values.view(sizes)

        return n * BLOCK, read
