"""Start afresh, or go on from the newest checkpoint that all nodes have.

The nodes first tell each other what they have, so that they all choose the same one, also when one of them
lost its last, and when their number has changed: a node without a checkpoint adopts the anchors of one
that has it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from aedit.edit import snapshot
from aedit.edit.sync import LayerSync
from aedit.launch.checkpoint import Checkpoints, Mark, read_meta
from aedit.launch.order import SampleOrder
from aedit.proto.transport import Rows, Transport
from aedit.types import Round, UserError

_NONE = -1.0
_MOST = 16
"""Newest checkpoints a node tells the others of."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Where a node goes on."""

    mark: Mark
    order: SampleOrder
    owed: list[Round]
    tokens: int
    elapsed_s: float
    busy_s: float
    other_s: float
    waited_s: float


def training_state(sync: LayerSync) -> dict[str, Any]:
    """All tensors of a node, named and sharded as its parameters are."""
    model, inner = get_state_dict(sync.model, sync.inner)
    return {"model": model, "inner": inner, "sync": snapshot.tensors(sync), "rng": torch.get_rng_state()}


def resume(
    sync: LayerSync, checkpoints: Checkpoints, transport: Transport, order: SampleOrder, facts: dict[str, Any]
) -> Resumed | None:
    """Restore `sync` from the newest common checkpoint, or return None if there is none anywhere.

    All nodes and ranks together. order: a fresh one, which says which node this is. facts: what a
    checkpoint must have been made with; UserError names the first that differs.
    """
    marks = [mark.number for mark in checkpoints.marks()][-_MOST:]
    row = torch.full((_MOST,), _NONE, dtype=torch.float64)
    row[: len(marks)] = torch.tensor(marks, dtype=torch.float64)
    has = transport.gather("resume/has", row).result()
    mark = _common(has.rows)
    if mark is None:
        return None
    mine = checkpoints.meta(mark) if mark.number in marks else None
    if mine is not None:
        _check(mine["facts"], facts, checkpoints.path(mark))
    known = _tell_each_other(mark, checkpoints, transport, mine, order)
    owed = _load(sync, checkpoints, mark, mine) if mine is not None else []
    if (~_holders(has.rows, mark)).any():
        _share_anchors(sync, transport, has, mark, mine, known)
    checkpoints.drop_after(mark)
    order = _order(order, mine, known, nodes=len(has.rows))
    clock = (mine or {}).get("clock", {})
    return Resumed(
        mark,
        order,
        owed,
        tokens=(mine or {}).get("tokens", 0),
        elapsed_s=float(known[:, _ELAPSED].max()),
        busy_s=clock.get("busy_s", 0.0),
        other_s=clock.get("other_s", 0.0),
        waited_s=clock.get("waited_s", 0.0),
    )


def _common(has: Tensor) -> Mark | None:
    """The newest mark on every node that has any; if they share none, the newest anywhere."""
    sets = [{int(n) for n in row if n != _NONE} for row in has.tolist()]
    sets = [marks for marks in sets if marks]
    if not sets:
        return None
    return Mark.of(max(set.intersection(*sets) or set.union(*sets)))


def _holders(has: Tensor, mark: Mark) -> Tensor:
    return (has == mark.number).any(1)


def _check(made_with: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    for name, value in facts.items():
        if made_with.get(name) != value:
            raise UserError(
                f"{path} was made with {name} = {made_with.get(name)}, this run has {value}: "
                "give the run another name, or the old value back"
            )


def _load(sync: LayerSync, checkpoints: Checkpoints, mark: Mark, meta: dict[str, Any]) -> list[Round]:
    snapshot.blank(sync, meta["sync"])
    state = training_state(sync)
    state["sync"] = {name: tensor.clone() for name, tensor in state["sync"].items()}
    checkpoints.load(mark, state)
    set_state_dict(sync.model, sync.inner, model_state_dict=state["model"], optim_state_dict=state["inner"])
    torch.set_rng_state(state["rng"])
    return snapshot.restore(sync, state["sync"], meta["sync"])


# --- what the nodes tell each other of the chosen checkpoint

_NUMBERS = ("steps", "anchored", "round_id", "total_steps", "last_id", "last_step")
_STREAM = ("num_samples", "seed", "node", "nodes", "base", "drawn")
_ELAPSED = len(_NUMBERS) + len(_STREAM)


def _tell_each_other(
    mark: Mark,
    checkpoints: Checkpoints,
    transport: Transport,
    mine: dict[str, Any] | None,
    order: SampleOrder,
) -> Tensor:
    """One row per node: its numbers, the sample stream that has gone furthest as far as it sees, seconds
    so far."""
    fresh = dict.fromkeys(_NUMBERS, 0)
    numbers = mine["sync"] if mine else fresh
    stream = max(_visible_streams(mark, checkpoints) or [order.state()], key=_furthest)
    elapsed_s = mine["clock"]["elapsed_s"] if mine else 0.0
    row = [float(numbers[n]) for n in _NUMBERS] + [float(stream[n]) for n in _STREAM] + [elapsed_s]
    return transport.gather("resume/knows", torch.tensor(row, dtype=torch.float64)).result().rows


def _visible_streams(mark: Mark, checkpoints: Checkpoints) -> list[dict[str, int]]:
    """Of every node whose checkpoint lies on this machine, so that a node that is gone is not forgotten."""
    nodes = checkpoints.directory.parent.parent
    paths = nodes.glob(f"*/{checkpoints.directory.name}/{mark.name}")
    return [read_meta(path)["order"] for path in paths if (path / "meta.json").is_file()]


def _furthest(stream: dict[str, int]) -> int:
    return stream["base"] + stream["nodes"] * stream["drawn"]


def _order(order: SampleOrder, mine: dict[str, Any] | None, known: Tensor, nodes: int) -> SampleOrder:
    """The same stream if the nodes are the same, else a new one above all that was drawn."""
    fresh = order.state()
    if mine is not None and mine["order"]["nodes"] == nodes and mine["order"]["node"] == fresh["node"]:
        return SampleOrder.resume(mine["order"])
    columns = known[:, len(_NUMBERS) : _ELAPSED].long().tolist()
    streams = [dict(zip(_STREAM, row, strict=True)) for row in columns]
    return SampleOrder.restart(streams, fresh["node"], nodes)


def _share_anchors(
    sync: LayerSync,
    transport: Transport,
    has: Rows,
    mark: Mark,
    mine: dict[str, Any] | None,
    known: Tensor,
) -> None:
    """Nodes without the checkpoint take anchors, momentum and round numbers from the first that has it."""
    source = int(_holders(has.rows, mark).int().argmax())
    numbers = dict(zip(_NUMBERS, known[source].long().tolist(), strict=False))
    if not numbers["anchored"]:
        raise UserError(f"{mark.name} is from the warm-up, where nodes cannot join: start the same nodes")
    if mine is None:
        saved = {**numbers, "anchored": True, "own_steps": 0, "owed": []}
        snapshot.restore(sync, snapshot.blank(sync, saved), saved)
    snapshot.share(sync, source, has, adopt=mine is None)
