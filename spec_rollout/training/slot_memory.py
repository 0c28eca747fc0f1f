"""Layout of the shared memory of publications; see `publishing.py`. NumPy only, for readers without torch."""

import mmap
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aedit.system import memory_fence

ALIGN_BYTES = 64
BLOCK_BYTES = 4096
"""Slots start at page boundaries; the checksum is computed over sums of such blocks."""

HEAD_BYTES = BLOCK_BYTES
NEWEST = 0
"""Header word: number of the newest publication; 0 is none."""
NUMBER, VERSION, CHECKSUM = 0, 1, 2
"""Words of a slot's own part of the header, which has 8 words."""
PATTERN_TYPES = {"float64": "<u8", "float32": "<u4", "bfloat16": "<u2", "float16": "<u2"}
"""NumPy type of the bit patterns of the dtypes that readers without torch can read."""


@dataclass(frozen=True, slots=True)
class ArrayPublication:
    """A complete publication; the arrays belong to the caller."""

    number: int
    version: int
    arrays: Mapping[str, NDArray[Any]]
    """Bit patterns by name, as unsigned numbers."""


class ArrayReader:
    """Reads the publications of a `SharedSlots` of another process."""

    def __init__(self, specs: Sequence[tuple[str, Sequence[int], str]], fd: int) -> None:
        """Map the memory.

        Args:
            specs: Name, shape and dtype in torch of each tensor, in order.
            fd: File descriptor of the memory.

        Raises:
            ValueError: A dtype cannot be read without torch.
        """
        self._places: list[tuple[str, int, tuple[int, ...], str]] = []
        offset = 0
        for name, shape, dtype in specs:
            if dtype not in PATTERN_TYPES:
                raise ValueError(f"{name} is {dtype}: expected one of {', '.join(PATTERN_TYPES)}")
            self._places.append((name, offset, tuple(shape), PATTERN_TYPES[dtype]))
            offset += round_up(prod(shape) * np.dtype(PATTERN_TYPES[dtype]).itemsize, ALIGN_BYTES)
        self._slot_bytes = round_up(offset, BLOCK_BYTES)
        memory = memoryview(mmap.mmap(fd, HEAD_BYTES + 2 * self._slot_bytes))
        self._head: NDArray[np.int64] = np.frombuffer(memory, np.int64, HEAD_BYTES // 8)
        self._bytes: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def newest(self) -> ArrayPublication | None:
        """Return a copy of the newest publication; None if there is none, or it was being replaced."""
        number = int(self._head[NEWEST])
        if number == 0:
            return None
        memory_fence()
        start = 8 * (1 + number % 2)
        header = self._head[start : start + 8]
        before, version, expected = header[:3].tolist()
        begin = HEAD_BYTES + number % 2 * self._slot_bytes
        slot = self._bytes[begin : begin + self._slot_bytes].copy()
        memory_fence()
        if before != number or int(header[NUMBER]) != number or checksum(slot, number, version) != expected:
            return None
        arrays = {
            name: slot[offset : offset + prod(shape) * np.dtype(kind).itemsize].view(kind).reshape(shape)
            for name, offset, shape, kind in self._places
        }
        return ArrayPublication(number, version, arrays)


def checksum(slot: NDArray[np.uint8], number: int, version: int) -> int:
    """Return the checksum of a slot's bytes with its number and version.

    It is the CRC-32 of sums of blocks. It detects any one changed word and any mixture of two publications,
    ten times faster than a CRC-32 of the bytes.
    """
    words = slot.view(np.uint64).reshape(-1, BLOCK_BYTES // 8)
    name = zlib.crc32(np.array([number, version], np.int64).tobytes())
    return zlib.crc32(words.sum(axis=1, dtype=np.uint64).tobytes(), name)


def round_up(num_bytes: int, unit: int) -> int:
    """Return the smallest multiple of `unit` that is not below `num_bytes`."""
    return -(-num_bytes // unit) * unit
