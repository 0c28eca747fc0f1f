"""Everything a node needs to go on exactly where it was, as named tensors and plain numbers.

Anchors and outer momentum are named after the parameters and sharded as they are, so that a node with
another number of ranks can load them, and so that they can be exported without any of this code.

A node of a hub keeps neither: its anchors come from the hub when it joins again, and what it had learned
since its last push is not learned. It keeps what it knows of its own norms, and its codec's residuals.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.async_sgd.rules.outer import OuterState
from aedit.edit.detector import NormHistory
from aedit.edit.exchange import MeanExchange
from aedit.edit.hub_exchange import HubExchange
from aedit.edit.shards import local
from aedit.edit.sync import LayerSync
from aedit.edit.units import SyncUnit
from aedit.proto.transports.transport import Rows
from aedit.types import Round

_HISTORY = ("norms_WL", "mean_L", "var_L", "rounds_L", "suspects_L")


def tensors(sync: LayerSync) -> dict[str, Tensor]:
    """Anchors, momentum and norm history of `sync`, with nothing under way. Views: save before the next
    step. With a hub, something may be under way."""
    if isinstance(sync.exchange, HubExchange):
        return _hub_tensors(sync.exchange)
    assert not sync.in_flight, "land first: a snapshot holds no half round"
    exchange = _mean(sync)
    named = _history("history", exchange.history)
    named["history/steps_L"] = exchange.steps_L
    for i, unit in enumerate(sync.units) if sync.anchored else ():
        anchor, state = exchange.store.peek(i)
        named |= {f"anchor/{name}": part for name, part in _named(unit, anchor)}
        for kind, array in zip(("momentum", "pending"), state.arrays, strict=False):
            parts = _named(unit, array) if array.numel() else ()
            named |= {f"{kind}/{name}": part for name, part in parts}
        if state.pending is not None:
            named[f"pending_count/{unit.name}"] = torch.tensor(state.count)
    return named


def numbers(sync: LayerSync, owed: Sequence[Round]) -> dict[str, Any]:
    """The rest, for JSON. owed: rounds that were opened and abandoned, to be opened again."""
    exchange = sync.exchange
    assert isinstance(exchange, MeanExchange | HubExchange)
    return {
        "steps": sync.steps,
        "anchored": sync.anchored and not sync.free,
        "round_id": sync.round_id,
        "total_steps": sync.total_steps,
        "own_steps": exchange.own_steps,
        "last_id": sync.schedule.last_id,
        "last_step": sync.schedule.last_step,
        "owed": [[round.id, round.steps] for round in owed],
    }


def blank(sync: LayerSync, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors to load a snapshot into, shaped as this node shards them."""
    if saved["anchored"]:
        exchange = _mean(sync)
        flats = (unit.flat() for unit in sync.units)
        exchange.keep((flat, exchange.outer.init(flat)) for flat in flats)
    sync.anchored = saved["anchored"]
    return {name: tensor.clone() for name, tensor in tensors(sync).items()}


def restore(sync: LayerSync, loaded: dict[str, Tensor], saved: dict[str, Any]) -> list[Round]:
    """Make `sync` what it was. Returns the rounds to open again once training goes on."""
    sync.steps, sync.anchored = saved["steps"], saved["anchored"]
    sync.round_id, sync.total_steps = saved["round_id"], saved["total_steps"]
    sync.schedule.last_id, sync.schedule.last_step = saved["last_id"], saved["last_step"]
    if isinstance(sync.exchange, HubExchange):
        _restore_hub(sync.exchange, loaded)
        sync.schedule.last_step = sync.local_steps
        return []
    exchange = _mean(sync)
    exchange.history = _read_history("history", loaded)
    exchange.steps_L = loaded["history/steps_L"]
    exchange.own_steps, exchange.total_steps = saved["own_steps"], saved["total_steps"]
    if sync.anchored:
        exchange.keep(_kept(unit, loaded) for unit in sync.units)
    return [Round(id, steps) for id, steps in saved["owed"]]


def share(sync: LayerSync, source: int, rows: Rows, *, adopt: bool) -> None:
    """All nodes take anchors and momentum of node `source`; with `adopt` the parameters follow."""
    exchange = _mean(sync)
    exchange.adopt_anchors_of(source, rows, key="resume/anchors")
    for i, unit in enumerate(sync.units) if adopt else ():
        unit.adopt(exchange.store.read(i)[0])


def _hub_tensors(exchange: HubExchange) -> dict[str, Tensor]:
    """While a push is under way its residual may be half that before it: either half is as good as what a
    crash right after a checkpoint leaves behind."""
    named = _history("history", exchange.norms) | _history("history_per_step", exchange.norms_per_step)
    for i, residual in exchange.link.residuals().items():
        named[f"residual/{exchange.units[i].name}"] = torch.from_numpy(residual)
    return named


def _restore_hub(exchange: HubExchange, loaded: dict[str, Tensor]) -> None:
    exchange.norms = _read_history("history", loaded)
    exchange.norms_per_step = _read_history("history_per_step", loaded)
    for i, residual in exchange.link.residuals().items():
        residual[:] = loaded[f"residual/{exchange.units[i].name}"].numpy()


def _history(kind: str, history: NormHistory) -> dict[str, Tensor]:
    return {f"{kind}/{name}": getattr(history, name) for name in _HISTORY}


def _read_history(kind: str, loaded: dict[str, Tensor]) -> NormHistory:
    return NormHistory(*(loaded[f"{kind}/{name}"] for name in _HISTORY))


def _mean(sync: LayerSync) -> MeanExchange:
    assert isinstance(sync.exchange, MeanExchange), "only a mean exchange keeps its state on the node"
    return sync.exchange


def _named(unit: SyncUnit, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    for (p, part), name in zip(unit.split(flat), unit.names, strict=True):
        yield name, _like(p, part.view_as(local(p)))


def _like(p: nn.Parameter, part: Tensor) -> Tensor:
    """`part` as a tensor of the whole parameter, of which it is this rank's shard."""
    if not isinstance(p, DTensor):
        return part
    return DTensor.from_local(
        part, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )


def _kept(unit: SyncUnit, loaded: dict[str, Tensor]) -> tuple[Tensor, OuterState[Tensor]]:
    anchor = _flat(unit, loaded, "anchor")
    has_momentum = f"momentum/{unit.names[0]}" in loaded
    momentum = _flat(unit, loaded, "momentum") if has_momentum else anchor.new_zeros(0)
    if f"pending_count/{unit.name}" not in loaded:
        return anchor, OuterState(momentum)
    count = int(loaded[f"pending_count/{unit.name}"])
    return anchor, OuterState(momentum, _flat(unit, loaded, "pending"), count)


def _flat(unit: SyncUnit, loaded: dict[str, Tensor], kind: str) -> Tensor:
    return torch.cat([local(loaded[f"{kind}/{name}"]).reshape(-1) for name in unit.names])
