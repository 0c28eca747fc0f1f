"""Vectors of a unit as named tensors, shaped and sharded as its parameters, and back.

Named after parameters, they can be loaded by a node with another number of ranks, and exported without any
of this code.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.async_sgd.rules import OuterState
from aedit.edit.detector import NormHistory
from aedit.edit.shards import local
from aedit.edit.store import Kept, OuterStore
from aedit.edit.units import SyncUnit

_HISTORY = ("norms_WL", "mean_L", "var_L", "rounds_L", "suspects_L")


def named(kind: str, unit: SyncUnit, flat: Tensor) -> dict[str, Tensor]:
    """Return `flat` cut into one tensor per parameter of `unit`, under KIND/PARAMETER. Views of `flat`."""
    parts = zip(unit.split(flat), unit.names, strict=True)
    return {f"{kind}/{name}": _like(p, part.view_as(local(p))) for (p, part), name in parts}


def flat(kind: str, unit: SyncUnit, state: Mapping[str, Tensor]) -> Tensor:
    """Return the vector that `named` has cut, as a new one."""
    return torch.cat([local(state[f"{kind}/{name}"]).reshape(-1) for name in unit.names])


def named_history(kind: str, history: NormHistory) -> dict[str, Tensor]:
    """Return the tensors of a history of norms, under KIND/FIELD."""
    return {f"{kind}/{name}": getattr(history, name) for name in _HISTORY}


def history(kind: str, state: Mapping[str, Tensor]) -> NormHistory:
    """Return the history that `named_history` has named."""
    return NormHistory(*(state[f"{kind}/{name}"] for name in _HISTORY))


def named_store(units: Sequence[SyncUnit], store: OuterStore) -> dict[str, Tensor]:
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
