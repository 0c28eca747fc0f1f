"""Flat layout of a sync unit: its parameters in registration order, whole, row-major, as one fp32 vector.

Nodes with any number of ranks agree on it, and each rank knows which slices of it are its own.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit
from aedit.types import Layout, TensorLayout, UnitLayout


def layout(units: Sequence[SyncUnit]) -> Layout:
    """Return names and whole shapes of all parameters, unit by unit: equal on all nodes of a run."""
    found = []
    for unit in units:
        pairs = zip(unit.names, unit.params, strict=True)
        found.append(UnitLayout(unit.name, tuple(TensorLayout(name, tuple(p.shape)) for name, p in pairs)))
    return Layout(tuple(found))


def owned_slices(unit: SyncUnit, shards: Shards) -> list[slice]:
    """Return the slices of the canonical vector that this rank holds, in the order of `SyncUnit.flat`.

    Adjacent slices are joined: a node of one rank has one per unit. Raises ValueError if a parameter is
    sharded over anything but its first dimension.
    """
    found: list[slice] = []
    start = 0
    for p, name in zip(unit.params, unit.names, strict=True):
        part = _rows(p, name, shards)
        if found and found[-1].stop == start + part.start:
            found[-1] = slice(found[-1].start, start + part.stop)
        else:
            found.append(slice(start + part.start, start + part.stop))
        start += p.numel()
    return found


def _rows(p: nn.Parameter, name: str, shards: Shards) -> slice:
    """Return this rank's elements of `p`: whole rows, as `torch.chunk` distributes them, perhaps none."""
    if not isinstance(p, DTensor) or shards.size == 1:
        return slice(0, p.numel())
    if not p.placements[0].is_shard(0):
        raise ValueError(
            f"{name} is sharded as {p.placements[0]}: a hub needs shards of whole rows, Shard(0)"
        )
    rows = p.shape[0]
    per_rank = -(-rows // shards.size)
    first, last = min(shards.rank * per_rank, rows), min((shards.rank + 1) * per_rank, rows)
    width = p.numel() // max(rows, 1)
    return slice(first * width, last * width)


class SharedVector:
    """This rank's slices of a canonical vector in memory that other processes see too."""

    def __init__(self, whole: NDArray[np.float32], slices: Sequence[slice], device: torch.device) -> None:
        self._parts = [torch.from_numpy(whole[part]) for part in slices]
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def read(self) -> Tensor:
        """Return the slices as one vector on the device. On a CPU node of one rank it shares the memory."""
        parts = [part.to(self._device, non_blocking=True) for part in self._parts]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def target(self) -> Tensor | None:
        """Return the tensor that `write` would fill, if a kernel can write there itself; else None."""
        return self._parts[0] if len(self._parts) == 1 and self._stream is None else None

    def write(self, flat: Tensor) -> None:
        """Write `flat`. From a GPU the copy may still be under way when this returns; see `written`."""
        sizes = [part.numel() for part in self._parts]
        if self._stream is None:
            for part, values in zip(self._parts, torch.split(flat, sizes), strict=True):
                part.copy_(values)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for part, values in zip(self._parts, torch.split(flat, sizes), strict=True):
                part.copy_(values, non_blocking=True)
            flat.record_stream(self._stream)
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied = self._stream.record_event(copied)

    def written(self) -> bool:
        """Return whether the last `write` is complete. Never blocks."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def when_written(self, call: Callable[[], None]) -> None:
        """Call `call` when the last `write` is complete: now, or in a thread while a GPU still copies."""
        copied = self._copied
        if copied is None or self.written():
            return call()

        def wait_and_call() -> None:
            copied.synchronize()
            call()

        threading.Thread(target=wait_and_call, name="outbox", daemon=True).start()


def pin(arrays: Sequence[NDArray[np.float32]]) -> None:
    """Pin `arrays`, so that a GPU copies from and to them asynchronously.

    Where the driver refuses (a limit on locked memory), copies are slower and nothing else changes.
    """
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for array in arrays:
        if int(cudart.cudaHostRegister(array.ctypes.data, array.nbytes, 0)):
            # The driver reports it once more after the next kernel: run one here.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
