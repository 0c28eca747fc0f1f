"""Everything a node needs to go on exactly where it was, as named tensors and plain numbers.

What must be kept of anchors and pseudo-gradients is the exchange's affair (`Exchange.state_dict`). A node of
a hub keeps no anchors: these come from the hub when it joins again, and what it had learned since its last
push is lost.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aedit.edit.exchange import MeanExchange
from aedit.edit.sync import LayerSync
from aedit.proto.transports.transport import Rows
from aedit.types import Round


def tensors(sync: LayerSync) -> dict[str, Tensor]:
    """Return the exchange's tensors, with nothing under way. Views: save before the next step. With an
    asynchronous exchange, something may be under way."""
    assert sync.free or not sync.in_flight, "land first: a snapshot holds no half round"
    return sync.exchange.state_dict()


def numbers(sync: LayerSync, owed: Sequence[Round]) -> dict[str, Any]:
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


def blank(sync: LayerSync, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Return tensors to load a snapshot into, shaped as this node shards them."""
    if saved["anchored"]:
        sync.exchange.allocate()
    sync.anchored = saved["anchored"]
    return {name: tensor.clone() for name, tensor in tensors(sync).items()}


def restore(sync: LayerSync, loaded: dict[str, Tensor], saved: dict[str, Any]) -> list[Round]:
    """Make `sync` what it was. Returns the rounds to open again once training goes on."""
    sync.steps, sync.anchored = saved["steps"], saved["anchored"]
    sync.round_id, sync.total_steps = saved["round_id"], saved["total_steps"]
    sync.schedule.last_id, sync.schedule.last_step = saved["last_id"], saved["last_step"]
    sync.exchange.load_state_dict(loaded)
    if sync.free:  # what was learned since the last push is not learned
        sync.schedule.last_step = sync.local_steps
        return []
    return [Round(id, steps) for id, steps in saved["owed"]]


def share(sync: LayerSync, exchange: MeanExchange, source: int, rows: Rows, *, adopt: bool) -> None:
    """Make all nodes take anchors and momentum of node `source`; with `adopt` the parameters follow.

    exchange: that of `sync`.
    """
    exchange.adopt_anchors_of(source, rows, key="resume/anchors")
    for i, unit in enumerate(sync.units) if adopt else ():
        unit.adopt(exchange.store.read(i)[0])
