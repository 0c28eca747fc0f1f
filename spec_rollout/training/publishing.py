"""Lock-free publication of tensors from one process to another: two slots in shared memory and an index.

The writer fills the slot that the index does not point to, then moves the index. The reader copies the slot
that the index points to and checks the index again; a copy that was overwritten meanwhile, or whose checksum
is wrong, is dropped. Neither waits for the other, and a writer that is suspended or killed halfway has
published nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aedit.spec_rollout.training.slot_memory import (
    ALIGN_BYTES,
    BLOCK_BYTES,
    CHECKSUM,
    HEAD_BYTES,
    NEWEST,
    NUMBER,
    VERSION,
    checksum,
    round_up,
)
from aedit.system import memory_fence


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and dtype of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Tensors of a slot, in order. Both processes must use the same layout."""

    specs: tuple[TensorSpec, ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor]) -> "SlotLayout":
        """Return the layout of these tensors."""
        return SlotLayout(tuple(TensorSpec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()))

    @property
    def slot_bytes(self) -> int:
        """Return the size of a slot in bytes."""
        return round_up(sum(round_up(spec.num_bytes, ALIGN_BYTES) for spec in self.specs), BLOCK_BYTES)

    @property
    def num_bytes(self) -> int:
        """Return the shared memory that `SharedSlots` of this layout need, in bytes."""
        return HEAD_BYTES + 2 * self.slot_bytes

    def views(self, slot: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield name and view of each tensor in the bytes of a slot."""
        offset = 0
        for spec in self.specs:
            yield spec.name, slot[offset : offset + spec.num_bytes].view(spec.dtype).view(spec.shape)
            offset += round_up(spec.num_bytes, ALIGN_BYTES)


@dataclass(frozen=True, slots=True)
class Publication:
    """A complete publication; the tensors belong to the caller."""

    number: int
    """Counts publications from 1."""
    version: int
    """Version of the policy that it was made for."""
    tensors: dict[str, Tensor]


class SharedSlots:
    """Two slots in shared memory, for one publishing process and any number of reading ones.

    Each process makes its own `SharedSlots` over the same bytes, which are zero at first.
    """

    def __init__(self, layout: SlotLayout, memory: memoryview) -> None:
        """Use `memory`.

        Raises:
            ValueError: The memory is too small.
        """
        if len(memory) < layout.num_bytes:
            raise ValueError(f"slots need {layout.num_bytes:,} bytes of shared memory, got {len(memory):,}")
        self.layout = layout
        self.torn = 0
        """Number of publications that were overwritten while this process copied them. They are read again.
        """
        self.corrupt = 0
        """Number of publications with a wrong checksum. They are never returned."""
        self._head: NDArray[np.int64] = np.frombuffer(memory, np.int64, HEAD_BYTES // 8)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self._corrupt_number = 0

    def publish(self, tensors: Mapping[str, Tensor], version: int) -> int:
        """Publish a copy of `tensors` and return its number.

        Raises:
            ValueError: The tensors differ from the layout. Nothing is published.
        """
        _check(self.layout, tensors)

        def write(views: Mapping[str, Tensor]) -> None:
            for name, view in views.items():
                view.copy_(tensors[name].detach())

        return self.publish_by(write, version)

    def publish_by(self, write: Callable[[Mapping[str, Tensor]], None], version: int) -> int:
        """Publish what `write` writes into the tensors of a slot, all of them, and return its number.

        If it raises, nothing is published.
        """
        number = self.newest_number + 1
        header, slot = self._slot_header(number), self._slot(number)
        header[NUMBER] = 0
        memory_fence()
        write(dict(self.layout.views(slot)))
        header[VERSION] = version
        header[CHECKSUM] = slot_checksum(slot, number, version)
        memory_fence()
        header[NUMBER] = number
        memory_fence()
        self._head[NEWEST] = number
        return number

    @property
    def newest_number(self) -> int:
        """Return the number of the newest publication; 0 is none."""
        return int(self._head[NEWEST])

    def newest(self, after: int = 0) -> Publication | None:
        """Return a copy of the newest publication, or None.

        Returns None if its number is at most `after`, or if it is not valid.
        """
        number = self.newest_number
        return None if number <= after or number == self._corrupt_number else self._copy(number)

    def last_good(self) -> Publication | None:
        """Return the newest publication, or the one before if the newest is not valid."""
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
        if slot_checksum(slot, number, version) != expected:
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


def slot_checksum(slot: Tensor, number: int, version: int) -> int:
    """Return the checksum of a slot's bytes with its number and version; see `checksum`."""
    return checksum(slot.numpy(), number, version)


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """Return true if all values are finite."""
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
