"""Everything a node needs to go on exactly where it was, as named tensors and plain numbers.

What must be kept of anchors and pseudo-gradients is the exchange's affair (`Exchange.state_dict`). A node of
a hub keeps no anchors: these come from the hub when it joins again, and what it had learned since its last
push is lost.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from aedit.edit.exchange import Exchange
from aedit.edit.mean_exchange import MeanExchange
from aedit.proto.transports import Rows
from aedit.types import Round

if TYPE_CHECKING:
    from aedit.edit.sync import LayerSync

_PROGRESS = "progress"
"""Key of what is no exchange's: int64 [6], in the order of `numbers`."""
_FIELDS = ("steps", "anchored", "round_id", "total_steps", "last_id", "last_step")


def tensors(sync: "LayerSync") -> dict[str, Tensor]:
    """Return the exchange's tensors, with nothing under way. They are views: save before the next step.

    With an asynchronous exchange, something may be under way.
    """
    assert sync.free or not sync.in_flight, "land first: a snapshot holds no half round"
    return sync.exchange.state_dict()


def numbers(sync: "LayerSync", owed: Sequence[Round]) -> dict[str, Any]:
    """Return the rest, for JSON. owed: rounds that were opened and abandoned, to be opened again."""
    return {
        "steps": sync.steps,
        "anchored": sync.anchored and not sync.free,
        "round_id": sync.round_id,
        "total_steps": sync.total_steps,
        "last_id": sync.schedule.last_id,
        "last_step": sync.schedule.last_step,
        "owed": [[round.id, round.steps] for round in owed],
    }


def blank(sync: "LayerSync", saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors to load a snapshot into, shaped as this node shards them."""
    if saved["anchored"]:
        sync.exchange.allocate()
    sync.anchored = saved["anchored"]
    return {name: tensor.clone() for name, tensor in tensors(sync).items()}


def restore(sync: "LayerSync", loaded: dict[str, Tensor], saved: dict[str, Any]) -> list[Round]:
    """Restore `sync`. Returns the rounds to open again once training goes on."""
    sync.steps, sync.anchored = saved["steps"], saved["anchored"]
    sync.round_id, sync.total_steps = saved["round_id"], saved["total_steps"]
    sync.schedule.last_id, sync.schedule.last_step = saved["last_id"], saved["last_step"]
    sync.exchange.load_state_dict(loaded)
    if sync.free:  # what was learned since the last push is not learned
        sync.schedule.last_step = sync.local_steps
        return []
    return [Round(id, steps) for id, steps in saved["owed"]]


def share(sync: "LayerSync", exchange: MeanExchange, source: int, rows: Rows, *, adopt: bool) -> None:
    """Make all nodes take anchors and momentum of node `source`; with `adopt` the parameters follow.

    exchange: that of `sync`.
    """
    exchange.adopt_anchors_of(source, rows, key="resume/anchors")
    for i, unit in enumerate(sync.units) if adopt else ():
        unit.adopt(exchange.store.read(i)[0])


def state_dict(sync: "LayerSync") -> dict[str, Tensor]:
    """Return what `LayerSync.state_dict` promises."""
    if sync.in_flight and not sync.free:
        raise ValueError("a round is under way: call sync.finish() before sync.state_dict()")
    found = numbers(sync, [])
    state = {_PROGRESS: torch.tensor([int(found[name]) for name in _FIELDS])}
    if sync.anchored:
        return state | sync.exchange.state_dict()
    # A checkpoint is read into tensors of the same names, in place: no two may share their memory.
    sync.exchange.allocate()
    return state | {name: tensor.clone() for name, tensor in sync.exchange.state_dict().items()}


def load_state_dict(sync: "LayerSync", state: Mapping[str, Tensor]) -> None:
    """Do what `LayerSync.load_state_dict` promises."""
    _compare(state_dict(sync), state)
    saved = dict(zip(_FIELDS, state[_PROGRESS].tolist(), strict=True))
    tensors = {name: tensor.detach().clone() for name, tensor in state.items() if name != _PROGRESS}
    restore(sync, tensors, saved | {"anchored": bool(saved["anchored"]), "owed": []})


def check_same_round(exchange: Exchange, position: int) -> None:
    """Raise ValueError on all nodes if they resume from different rounds. All nodes call this together.

    Args:
        exchange: The way to the other nodes.
        position: `LayerSync.position` of the state that this node has loaded, 0 if it has loaded none.
    """
    row = torch.tensor([position], dtype=torch.float64)
    rows = exchange.rows("start/position", row).result().rows[:, 0].tolist()
    for node, theirs in enumerate(rows):
        if theirs != rows[0]:
            raise ValueError(
                f"node 0 resumes after round {int(rows[0])} and node {node} after round {int(theirs)}:"
                " load checkpoints of one round on all nodes, or none on any"
            )


def _compare(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    for name in sorted({*expected, *found}):
        here, there = expected.get(name), found.get(name)
        if here is None or there is None or here.shape != there.shape:
            what, wanted = (
                f"of shape {tuple(t.shape)}" if t is not None else "missing" for t in (there, here)
            )
            raise ValueError(
                f"{name} is {what} in the checkpoint and {wanted} here: resume with the model, optimizer and"
                " exchange that it was made with"
            )
