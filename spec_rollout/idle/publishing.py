"""Tensors that go from one process to another through memory they share: two slots, an index, no lock.

The writer fills the slot that the index does not point at and then moves the index. The reader copies what
the index points at and looks again: what was overwritten meanwhile, or does not have the checksum it was
published with, is not taken, and the reader stays with what it has. Neither ever waits for the other, and a
writer that is stopped or killed in the middle has published nothing.
"""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aedit.system import memory_fence

ALIGN_BYTES = 64
BLOCK_BYTES = 4096
"""Slots begin on a page, and their checksum is made of the sums of such blocks."""

HEAD_BYTES = BLOCK_BYTES
NEWEST = 0
"""Word of the header: the number of the newest publication; 0 is none."""
NUMBER, VERSION, CHECKSUM = 0, 1, 2
"""Words of a slot's own part of the header, 8 from its beginning to the next one's."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor without its numbers."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """What a slot holds, in order. Both processes must have the same."""

    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> "SlotLayout":
        return SlotLayout(tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()))

    @property
    def slot_bytes(self) -> int:
        return _round_up(sum(_round_up(spec.num_bytes, ALIGN_BYTES) for spec in self.specs), BLOCK_BYTES)

    @property
    def num_bytes(self) -> int:
        """Shared memory that `SharedSlots` of this layout need."""
        return HEAD_BYTES + 2 * self.slot_bytes

    def views(self, slot: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors in the bytes of a slot."""
        offset = 0
        for spec in self.specs:
            yield spec.name, slot[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
            offset += _round_up(spec.num_bytes, ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class Publication:
    """A whole publication; the tensors belong to whoever has it."""

    number: int
    """Counts publications from 1."""
    version: int
    """Of the policy that it was made for."""
    tensors: dict[str, Tensor]


class SharedSlots:
    """Two slots in shared memory. One process publishes, one takes; each makes its own `SharedSlots` over
    the same
    bytes, which are zeros at first."""

    def __init__(self, layout: SlotLayout, memory: memoryview) -> None:
        """Raises ValueError if the memory is too small."""
        if len(memory) < layout.num_bytes:
            raise ValueError(f"slots need {layout.num_bytes:,} bytes of shared memory, got {len(memory):,}")
        self.layout = layout
        self.torn = 0
        """Publications that were overwritten while this process copied them; they are looked at again."""
        self.corrupt = 0
        """Publications that were not what their checksum says; they are never taken."""
        self._head: NDArray[np.int64] = np.frombuffer(memory, np.int64, HEAD_BYTES // 8)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._corrupt_number = 0

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> int:
        """Let the other process have a copy of `tensors` from now on; returns its number. Raises ValueError,
        and publishes nothing, if they are not as the layout says."""
        _check(self.layout, tensors)
        number = self.newest_number + 1
        header, slot = self._slot_header(number), self._slot(number)
        header[NUMBER] = 0
        memory_fence()
        for name, view in self.layout.views(slot):
            view.copy_(tensors[name].detach())
        header[VERSION] = version
        header[CHECKSUM] = checksum(slot, number, version)
        memory_fence()
        header[NUMBER] = number
        memory_fence()
        self._head[NEWEST] = number
        return number

    @property
    def newest_number(self) -> int:
        return int(self._head[NEWEST])

    def newest(self, after: int = 0) -> Publication | None:
        """A copy of the newest publication; None if it is not newer than number `after`, or not whole."""
        number = self.newest_number
        return None if number <= after or number == self._corrupt_number else self._copy(number)

    def last_good(self) -> Publication | None:
        """The newest publication, or the one before if that is not whole."""
        number = self.newest_number
        return self.newest() or (self._copy(number - 1) if number > 1 else None)

    def _copy(self, number: int) -> Publication | None:
        memory_fence()
        header = self._slot_header(number)
        before, version, expected = header[:3].tolist()
        slot = self._slot(number).clone() if before == number else None
        memory_fence()
        if slot is None or int(header[NUMBER]) != number:
            self.torn += 1
            return None
        if checksum(slot, number, version) != expected:
            self.corrupt += 1
            self._corrupt_number = number
            return None
        return Publication(number, version, dict(self.layout.views(slot)))

    def _slot_header(self, number: int) -> NDArray[np.int64]:
        start = 8 * (1 + number % 2)
        return self._head[start : start + 8]

    def _slot(self, number: int) -> Tensor:
        start = HEAD_BYTES + number % 2 * self.layout.slot_bytes
        return self._bytes[start : start + self.layout.slot_bytes]


def checksum(slot: Tensor, number: int, version: int) -> int:
    """Of a slot's bytes and what they are called. Sums of blocks, then CRC-32 of the sums: any one changed
    word and any mixture of two publications is seen, ten times faster than by CRC-32 of the bytes."""
    words = slot.numpy().view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
    name = zlib.crc32(np.array([number, version], np.int64).tobytes())
    return zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes(), name)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())


def _check(layout: SlotLayout, tensors: Mapping[str, Tensor]) -> None:
    names = [spec.name for spec in layout.specs]
    if sorted(names) != sorted(tensors):
        raise ValueError(f"to publish: expected {', '.join(names)}, got {', '.join(tensors)}")
    for spec in layout.specs:
        found = tensors[spec.name]
        if tuple(found.shape) != spec.shape or found.dtype != spec.dtype:
            got = f"{found.dtype} {tuple(found.shape)}"
            raise ValueError(f"to publish: {spec.name} must be {spec.dtype} {spec.shape}, got {got}")


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit
