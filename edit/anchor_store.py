"""Storage of anchors and outer states between rounds: on the device, or in pinned host memory.

A unit is read once to measure its pseudo-gradient and once to step; with offload it is on the device only
then.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.async_sgd.rules import OuterState
from aedit.edit.detector import NormHistory
from aedit.edit.shards import local
from aedit.edit.units import SyncUnit

Kept = tuple[Tensor, OuterState[Tensor]]


class DeviceStore:
    """Anchor and outer state of every unit, on the device."""

    def __init__(self, kept: Iterable[Kept]) -> None:
        self._kept = list(kept)

    def ahead(self, i: int) -> None:
        """Start to copy unit `i` to the device, if it is elsewhere. Never blocks the host."""

    def read(self, i: int) -> Kept:
        """Return unit `i` on the device, ready for the current stream. The tensors must not be changed."""
        return self._kept[i]

    def write(self, i: int, anchor: Tensor, state: OuterState[Tensor]) -> None:
        """Keep new values; the caller gives up the tensors. Never blocks the host."""
        self._kept[i] = (anchor, state)

    def peek(self, i: int) -> Kept:
        """Return unit `i` where it is, for a checkpoint; complete when this returns."""
        return self._kept[i]

    def __len__(self) -> int:
        return len(self._kept)


class PinnedStore(DeviceStore):
    """Keeps everything in pinned host memory, allocated once and copied on a side stream.

    Two units are on the device at most: the one in use and the one that comes next (double buffering).
    """

    def __init__(self, kept: Iterable[Kept]) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        super().__init__((_pinned(anchor), state.map(_pinned)) for anchor, state in kept)
        self._device: dict[int, Kept] = {}

    def ahead(self, i: int) -> None:
        """See `DeviceStore.ahead`."""
        if i in self._device or i >= len(self._kept):
            return
        anchor, state = self._kept[i]
        with torch.cuda.stream(self._stream):  # also orders this copy behind the write of the round before
            self._device[i] = (anchor.cuda(non_blocking=True), state.map(lambda t: t.cuda(non_blocking=True)))

    def read(self, i: int) -> Kept:
        """See `DeviceStore.read`."""
        self.ahead(i)
        current = torch.cuda.current_stream()
        current.wait_stream(self._stream)
        anchor, state = self._device.pop(i)
        for tensor in (anchor, *state.arrays):
            tensor.record_stream(current)
        return anchor, state

    def write(self, i: int, anchor: Tensor, state: OuterState[Tensor]) -> None:
        """See `DeviceStore.write`."""
        self._device.pop(i, None)
        self._stream.wait_stream(torch.cuda.current_stream())
        host_anchor, host_state = self._kept[i]
        self._kept[i] = (host_anchor, replace(host_state, count=state.count))
        with torch.cuda.stream(self._stream):
            for host, device in zip((host_anchor, *host_state.arrays), (anchor, *state.arrays), strict=True):
                host.copy_(device, non_blocking=True)
                device.record_stream(self._stream)

    def peek(self, i: int) -> Kept:
        """See `DeviceStore.peek`."""
        self._stream.synchronize()
        return self._kept[i]


def _pinned(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def named(kind: str, unit: SyncUnit, flat: Tensor) -> dict[str, Tensor]:
    """Return `flat` cut into one tensor per parameter of `unit`, under KIND/PARAMETER. Views of `flat`."""
    parts = zip(unit.split(flat), unit.names, strict=True)
    return {f"{kind}/{name}": _like(p, part.view_as(local(p))) for (p, part), name in parts}


def flat(kind: str, unit: SyncUnit, state: Mapping[str, Tensor]) -> Tensor:
    """Return the vector that `named` has cut, as a new one."""
    return torch.cat([local(state[f"{kind}/{name}"]).reshape(-1) for name in unit.names])


def named_history(kind: str, history: NormHistory) -> dict[str, Tensor]:
    """Return the tensors of a history of norms, under KIND/FIELD."""
    return {f"{kind}/{name}": tensor for name, tensor in history._asdict().items()}


def history(kind: str, state: Mapping[str, Tensor]) -> NormHistory:
    """Return the history that `named_history` has named."""
    return NormHistory(*(state[f"{kind}/{name}"] for name in NormHistory._fields))


def named_store(units: Sequence[SyncUnit], store: DeviceStore) -> dict[str, Tensor]:
    """Return anchor and outer state of every unit by parameter. Views of what the store holds."""
    state: dict[str, Tensor] = {}
    for i, unit in enumerate(units):
        anchor, outer = store.peek(i)
        state |= named("anchor", unit, anchor)
        for kind, array in zip(("momentum", "pending"), outer.arrays, strict=False):
            state |= named(kind, unit, array) if array.numel() else {}
        if outer.pending is not None:
            state[f"pending_count/{unit.name}"] = torch.tensor(outer.count)
    return state


def kept_state(unit: SyncUnit, state: Mapping[str, Tensor]) -> Kept:
    """Return a unit's anchor and outer state out of a state dict."""
    anchor = flat("anchor", unit, state)
    has_momentum = f"momentum/{unit.names[0]}" in state
    momentum = flat("momentum", unit, state) if has_momentum else anchor.new_zeros(0)
    if f"pending_count/{unit.name}" not in state:
        return anchor, OuterState(momentum)
    count = int(state[f"pending_count/{unit.name}"])
    return anchor, OuterState(momentum, flat("pending", unit, state), count)


def _like(p: nn.Parameter, part: Tensor) -> Tensor:
    """Return `part`, this rank's shard of a tensor shaped as `p`, as such a tensor."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
