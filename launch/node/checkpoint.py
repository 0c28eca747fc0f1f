"""Checkpoints of one node, sharded over its ranks and renamed into place when complete.

nodes/N/checkpoints/round_000012/ holds one safetensors file per rank, the metadata of
torch.distributed.checkpoint, and meta.json, which is written last (see `checkpoint_files`). A directory with
any other name is not a checkpoint. Names end in _1, _2, ... if a node stops several times in one round.

To resume, the nodes exchange the lists of their checkpoints, so that all choose the same one, also if one of
them lost its last or their number has changed: a node without a checkpoint takes the anchors of another.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from aedit.edit import LayerSync, MeanExchange, Shards, snapshot
from aedit.launch.data import SampleOrder, first_free
from aedit.launch.node.checkpoint_files import SafetensorsReader, SafetensorsWriter
from aedit.proto.transports import Rows, Transport
from aedit.system import sync_directory, write_atomically
from aedit.types import Round, UserError

_NAME = re.compile(r"round_(\d{6,})(?:_(\d+))?$")
_SUBS = 1000
_NONE = -1.0
_MOST = 16
"""Number of newest checkpoints that a node reports to the others."""
_NUMBERS = ("steps", "anchored", "round_id", "total_steps", "last_id", "last_step")
_STREAM = ("num_samples", "seed", "node", "nodes", "base", "drawn")
_ELAPSED = len(_NUMBERS) + len(_STREAM)


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Identity of a checkpoint, equal on all nodes for one state of the run."""

    round: int
    sub: int = 0
    """Number of stops in this round so far; 0 for the checkpoint at its end."""

    @property
    def name(self) -> str:
        """Return the name of the directory."""
        return f"round_{self.round:06d}" + (f"_{self.sub}" if self.sub else "")

    @property
    def number(self) -> int:
        """Return one integer, in the order of marks, to compare them over the network."""
        return self.round * _SUBS + self.sub

    @classmethod
    def of(cls, number: int) -> "Mark":
        """Return the mark of an integer from `number`."""
        return cls(*divmod(number, _SUBS))


class NodeCheckpoints:
    """Directory of the checkpoints of one node."""

    def __init__(self, directory: Path, *, keep: int, shards: Shards) -> None:
        self.directory = directory
        self.keep = keep
        self.shards = shards

    def marks(self) -> list[Mark]:
        """Return the marks of the complete checkpoints, oldest first."""
        found = []
        for path in self.directory.glob("round_*") if self.directory.is_dir() else ():
            if (match := _NAME.fullmatch(path.name)) and (path / "meta.json").is_file():
                found.append(Mark(int(match[1]), int(match[2] or 0)))
        return sorted(found)

    def path(self, mark: Mark) -> Path:
        """Return the directory of a checkpoint."""
        return self.directory / mark.name

    def save(self, mark: Mark, state: Mapping[str, Any], meta: Mapping[str, Any]) -> int:
        """Write a checkpoint; return its bytes. All ranks of the node together.

        Raises OSError if it cannot be written; the older ones are then intact.
        """
        writing = self.directory / f".writing-{mark.name}"
        try:
            if self.shards.leads:
                shutil.rmtree(writing, ignore_errors=True)
            self._lead(lambda: writing.mkdir(parents=True))
            self._write(state, writing)
            self._lead(lambda: self._complete(mark, writing, meta))
        except dcp.CheckpointException as error:
            raise OSError(f"checkpoint {mark.name}: {_reason(error)}") from error
        finally:
            if self.shards.leads:
                shutil.rmtree(writing, ignore_errors=True)
        return sum(file.stat().st_size for file in self.path(mark).iterdir()) if self.shards.leads else 0

    def load(self, mark: Mark, into: dict[str, Any]) -> None:
        """Read a checkpoint into tensors with this node's sharding, in place.

        All ranks of the node together.
        """
        try:
            dcp.load(
                into,
                storage_reader=SafetensorsReader(self.path(mark)),
                process_group=self.shards.group,
                no_dist=self.shards.size == 1,
            )
        except (dcp.CheckpointException, RuntimeError, ValueError, OSError, EOFError) as error:
            raise UserError(
                f"{self.path(mark)} cannot be read ({_reason(error)}); remove it to resume from an older one"
            ) from error

    def meta(self, mark: Mark) -> dict[str, Any]:
        """Return the contents of the checkpoint's meta.json."""
        return read_meta(self.path(mark))

    def drop_after(self, mark: Mark | None) -> None:
        """Remove the checkpoints after `mark`, which a resume from it invalidates."""
        for other in self.marks() if self.shards.leads else ():
            if mark is not None and other > mark:
                shutil.rmtree(self.path(other))

    def _write(self, state: Mapping[str, Any], writing: Path) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank needs none
            dcp.save(
                dict(state),
                storage_writer=SafetensorsWriter(writing),
                process_group=self.shards.group,
                no_dist=self.shards.size == 1,
            )

    def _lead(self, act: Callable[[], None]) -> None:
        """Call `act` on the first rank; raise on all ranks if it fails, so that none waits for another."""
        failure: OSError | None = None
        if self.shards.leads:
            try:
                act()
            except OSError as error:
                failure = error
        if not self.shards.decide([failure is None])[0]:
            raise failure or OSError("the node's first rank could not write")

    def _complete(self, mark: Mark, writing: Path, meta: Mapping[str, Any]) -> None:
        write_atomically(writing / "meta.json", json.dumps(meta, indent=1))
        shutil.rmtree(self.path(mark), ignore_errors=True)  # left from before a resume at an older checkpoint
        os.rename(writing, self.path(mark))
        sync_directory(self.directory)
        for old in self.marks()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        for left in self.directory.glob(".writing-*"):
            shutil.rmtree(left, ignore_errors=True)


def read_meta(path: Path) -> dict[str, Any]:
    """Return the meta.json of the checkpoint at `path`."""
    try:
        meta: dict[str, Any] = json.loads((path / "meta.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}/meta.json cannot be read ({error}); remove {path} to resume from an older one"
        ) from error
    return meta


def _reason(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException) and error.failures:
        first = next(iter(error.failures.values()))
        error = first[0] if isinstance(first, tuple) else first
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


@dataclass(frozen=True, slots=True)
class Resumed:
    """State of a node, beside its tensors, at the checkpoint from which it resumes."""

    mark: Mark
    order: SampleOrder | None
    """None for a node of a hub, which leases the data."""
    owed: list[Round]
    tokens: int
    elapsed_s: float
    busy_s: float
    other_s: float
    waited_s: float
    idle_used_s: float
    """Processor time of idle work."""
    cuda_rng: list[int]
    """Random state of the GPU, for dropout; empty on CPU."""
    objective: dict[str, Any]
    """State of the node's objective; empty where it has none, or another node's checkpoint was used."""

    @classmethod
    def of(
        cls,
        mark: Mark,
        meta: Mapping[str, Any],
        order: SampleOrder | None,
        owed: list[Round],
        elapsed_s: float,
    ) -> "Resumed":
        """Return the state in a checkpoint's `meta`, which is empty if another node's was used."""
        clock = meta.get("clock", {})
        return cls(
            mark,
            order,
            owed,
            tokens=meta.get("tokens", 0),
            elapsed_s=elapsed_s,
            busy_s=clock.get("busy_s", 0.0),
            other_s=clock.get("other_s", 0.0),
            waited_s=clock.get("waited_s", 0.0),
            idle_used_s=clock.get("idle_used_s", 0.0),
            cuda_rng=meta.get("cuda_rng", []),
            objective=meta.get("objective", {}),
        )


def training_state(sync: LayerSync) -> dict[str, Any]:
    """Return all tensors of a node, named and sharded as its parameters are."""
    model, inner = get_state_dict(sync.model, sync.optimizers.outermost)
    return {"model": model, "inner": inner, "sync": snapshot.tensors(sync), "rng": torch.get_rng_state()}


def resume_training(
    sync: LayerSync,
    exchange: MeanExchange,
    checkpoints: NodeCheckpoints,
    order: SampleOrder,
    facts: dict[str, Any],
) -> Resumed | None:
    """Restore `sync` from the newest common checkpoint; return None if no node has one.

    All nodes and ranks together. Raises UserError that names the first of `facts` that differs.

    Args:
        sync: Of this node.
        exchange: That of `sync`.
        checkpoints: Of this node.
        order: A new one, which has the index of this node.
        facts: Properties that the checkpoint must have, see `facts_of`.
    """
    transport = exchange.transport
    has = transport.gather("resume/has", _inventory(checkpoints)).result()
    mark = _common(has.rows)
    if mark is None:
        return None
    mine = checkpoints.meta(mark) if mark in checkpoints.marks() else None
    if mine is not None:
        check_facts(mine["facts"], facts, checkpoints.path(mark))
    known = _exchange_progress(mark, checkpoints, transport, mine, order)
    owed = _load(sync, checkpoints, mark, mine) if mine is not None else []
    everybody_has_it = bool(_holders(has.rows, mark).all())
    if not everybody_has_it:
        owed += _share_anchors(sync, exchange, has, mark, mine, known)
    checkpoints.drop_after(mark)
    order = _order(order, mine if everybody_has_it else None, known)
    return Resumed.of(mark, mine or {}, order, owed, elapsed_s=float(known[:, _ELAPSED].max()))


def _inventory(checkpoints: NodeCheckpoints) -> Tensor:
    """Return (2 * _MOST).

    Numbers of this node's newest checkpoints, then the number of nodes that made each.
    """
    row = torch.full((2, _MOST), _NONE, dtype=torch.float64)
    for place, mark in enumerate(checkpoints.marks()[-_MOST:]):
        nodes = checkpoints.meta(mark)["order"]["nodes"]
        row[:, place] = torch.tensor([mark.number, nodes], dtype=torch.float64)
    return row.flatten()


def _common(has: Tensor) -> Mark | None:
    """Return the newest checkpoint that no node lacks of those that made it, else the newest of any node.

    Nodes that are absent now do not count. A node that was absent at the time of the checkpoint, or has lost
    all of its own, does not make the others return to an older one.
    """
    made_by = [dict(zip(*row.view(2, -1).long().tolist(), strict=True)) for row in has]
    made_by = [{mark: nodes for mark, nodes in marks.items() if mark != _NONE} for marks in made_by]
    anywhere = {mark: nodes for marks in made_by for mark, nodes in marks.items()}
    whole = [m for m, nodes in anywhere.items() if all(m in marks for marks in made_by[:nodes] if marks)]
    return Mark.of(max(whole or anywhere)) if anywhere else None


def _holders(has: Tensor, mark: Mark) -> Tensor:
    return (has[:, :_MOST] == mark.number).any(1)


def resume_alone(
    sync: LayerSync, checkpoints: NodeCheckpoints, facts: dict[str, Any], *, of_hub: bool = False
) -> Resumed | None:
    """Restore everything from the newest checkpoint of this node, which no other node must have.

    Return None without one. Raises UserError that names the first of `facts` that differs. All ranks of the
    node together.

    of_hub: the hub provides the parameters when the node joins, and leases the data.
    """
    marks = checkpoints.marks()
    if not marks:
        return None
    mark = marks[-1]
    meta = checkpoints.meta(mark)
    check_facts(meta["facts"], facts, checkpoints.path(mark))
    _load(sync, checkpoints, mark, meta, weights=not of_hub)
    order = None if of_hub else SampleOrder.resume(meta["order"])
    return Resumed.of(mark, meta, order, [], elapsed_s=meta["clock"]["elapsed_s"])


def check_facts(made_with: dict[str, Any], facts: dict[str, Any], path: Path) -> None:
    """Raise UserError that names the first property in which the checkpoint at `path` differs."""
    for name, value in facts.items():
        if made_with.get(name) != value:
            raise UserError(
                f"{path}: made with {name} = {made_with.get(name)}, but this run has {value}; "
                "give the run another name, or restore the old value"
            )


def _load(
    sync: LayerSync, checkpoints: NodeCheckpoints, mark: Mark, meta: dict[str, Any], *, weights: bool = True
) -> list[Round]:
    """Restore a checkpoint, with or without the parameters; return the rounds to open again."""
    exchange = snapshot.blank(sync, meta["sync"])
    state = training_state(sync) | {"sync": exchange}
    checkpoints.load(mark, state)
    inners = sync.optimizers.outermost
    if weights:
        set_state_dict(sync.model, inners, model_state_dict=state["model"], optim_state_dict=state["inner"])
    else:
        set_optimizer_state_dict(sync.model, inners, state["inner"])
    torch.set_rng_state(state["rng"])
    return snapshot.restore(sync, exchange, meta["sync"])


def _exchange_progress(
    mark: Mark,
    checkpoints: NodeCheckpoints,
    transport: Transport,
    mine: dict[str, Any] | None,
    order: SampleOrder,
) -> Tensor:
    """Return one row per node.

    Its numbers, the furthest sample stream that it sees, and its seconds so far.
    """
    fresh = dict.fromkeys(_NUMBERS, 0)
    numbers = mine["sync"] if mine else fresh
    stream = max(_visible_streams(mark, checkpoints) or [order.state()], key=first_free)
    elapsed_s = mine["clock"]["elapsed_s"] if mine else 0.0
    row = [float(numbers[n]) for n in _NUMBERS] + [float(stream[n]) for n in _STREAM] + [elapsed_s]
    return transport.gather("resume/knows", torch.tensor(row, dtype=torch.float64)).result().rows


def _visible_streams(mark: Mark, checkpoints: NodeCheckpoints) -> list[dict[str, int]]:
    """Return the sample streams of all nodes with a checkpoint on this machine, also of absent nodes."""
    nodes = checkpoints.directory.parent.parent
    paths = nodes.glob(f"*/{checkpoints.directory.name}/{mark.name}")
    return [read_meta(path)["order"] for path in paths if (path / "meta.json").is_file()]


def _order(order: SampleOrder, mine: dict[str, Any] | None, known: Tensor) -> SampleOrder:
    """Return the same stream if the nodes are the same, else a new one beyond all drawn positions.

    mine: None if some node has no stream to continue.
    """
    fresh = order.state()
    if mine is not None and all(mine["order"][name] == fresh[name] for name in ("node", "nodes")):
        return SampleOrder.resume(mine["order"])
    columns = known[:, len(_NUMBERS) : _ELAPSED].long().tolist()
    streams = [dict(zip(_STREAM, row, strict=True)) for row in columns]
    return SampleOrder.restart(streams, fresh["node"], fresh["nodes"])


def _share_anchors(
    sync: LayerSync,
    exchange: MeanExchange,
    has: Rows,
    mark: Mark,
    mine: dict[str, Any] | None,
    known: Tensor,
) -> list[Round]:
    """Send anchors, momentum and round numbers from the first node with the checkpoint to those without it.

    Returns the rounds that such a node must open at once, without an update, because its source owes them.
    """
    source = int(_holders(has.rows, mark).int().argmax())
    numbers = dict(zip(_NUMBERS, known[source].long().tolist(), strict=False))
    if not numbers["anchored"]:
        raise UserError(
            f"{mark.name}: made during the warm-up, when no node can be added; start the same nodes"
        )
    owed = range(int(numbers["round_id"]) + 1, int(numbers["last_id"]) + 1) if mine is None else ()
    if mine is None:
        saved = {**numbers, "anchored": True, "owed": []}
        snapshot.restore(sync, snapshot.blank(sync, saved), saved)
    snapshot.share(sync, exchange, source, has, adopt=mine is None)
    return [Round(id, 0) for id in owed]
