"""Keys and values of rows in blocks of 16 tokens from one pool, with a table of blocks per row.

A row takes a block when it is about to write to it, and blocks of a released row serve other rows. A copied
row shares its blocks with the source until one of the two writes to them. The pool is one allocation, and the
table has a fixed address: captured CUDA graphs stay valid.

Shapes: B rows, K key/value heads, h head size, C slots that are read, n blocks of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.model.kv_extent import KVMemoryError, KVSizes, Span
from aedit.spec_rollout.model.model_support import to_device

BLOCK = 16
"""Tokens of one block."""
POOL_SHARE = 0.8
"""Largest share of the free memory of a CUDA device that a pool takes by default."""


@dataclass(frozen=True, slots=True)
class BlocksReader:
    """Keys and values of consecutive rows, gathered from their blocks layer by layer."""

    context: int
    pool: Tensor
    """(layers, 2, blocks * K, 16 * h)."""
    index: Tensor
    """int64, (B * K * n), of a block's head in the pool."""

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of a layer, each (B * K, C, h)."""
        keys, values = (half.index_select(0, self.index) for half in self.pool[layer].unbind(0))
        sizes = (self.index.shape[0] * BLOCK // self.context, self.context, self.pool.shape[-1] // BLOCK)
        return keys.view(sizes), values.view(sizes)


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
            block = self._take()
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

    def _take(self) -> int:
        block = self._free.pop()
        self._uses[block] = 1
        return block

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

    def reader(self, first_row: int, num_rows: int, context: int) -> BlocksReader:
        """Return the first slots of consecutive rows, at least `context`."""
        n = -(-context // BLOCK)
        blocks_B1n = self.table[first_row : first_row + num_rows, :n][:, None]
        heads = torch.arange(self.sizes.heads, device=self.table.device)[:, None]
        index = (blocks_B1n * self.sizes.heads + heads).reshape(-1)
        return BlocksReader(n * BLOCK, self._pool, index)
