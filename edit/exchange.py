"""The `Exchange` interface: the source of the next anchor of each unit. Also: a node without peers."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from aedit.edit.config import EditConfig
from aedit.edit.schedule import Notes, RoundSchedule
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit
from aedit.proto.transports import Pending, Rows
from aedit.types import Round


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """The decisions that all nodes agreed on when a round was opened. Per-unit tuples follow `units`."""

    round: Round
    units: tuple[int, ...]
    norms: tuple[float, ...] = ()
    """This node's pseudo-gradient norms."""
    distrusted: tuple[int, ...] = ()
    """Units in which this node distrusts its own progress."""
    weights: tuple[float, ...] = ()
    effective_nodes: tuple[float, ...] = ()
    rolled_back: tuple[int, ...] = ()
    """Units that no node trusts: they return to their anchor, momentum untouched."""
    nodes: int = 1
    total_steps: int = 0
    """Inner steps of all nodes since the first local phase began."""
    refused: tuple[int, ...] = ()
    """Units whose pseudo-gradient a hub refused; the next one contains it."""
    all_leaving: bool = False
    """True if no node will take further steps."""
    healed_from: int | None = None
    """Node whose anchors this one had to adopt because its own were different."""

    @property
    def trusts_node(self) -> bool:
        """Return whether this node had the run's anchors and credible pseudo-gradients."""
        return not self.distrusted and self.healed_from is None


class Exchange(Protocol):
    """The source of the next anchors."""

    asynchronous: bool
    """True if rounds belong to this node alone: its answers do not depend on what other nodes do."""

    @property
    def apart(self) -> Sequence[SyncUnit]:
        """Return the units that are trained apart from the model and exchanged beside its own; often none."""

    @property
    def max_steps_ahead(self) -> int:
        """Return how many inner steps an asynchronous node may be ahead of its oldest missing answer."""

    @property
    def notes(self) -> Notes:
        """Return the store through which the nodes of this exchange leave notes for each other."""

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes that this node has given to the network."""

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return one small float64 row per node, as `Transport.gather` does; without peers, only its own."""

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Return the weighted mean over nodes of an fp32 vector. A value of weight 0 is not sent."""

    def bind(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        """Store the units of the model. Called once, before anything else: an exchange serves one model."""

    def compare(self, settings: Mapping[str, str]) -> None:
        """Compare `settings`, units and the exchange's own settings with those of the other nodes.

        All nodes call it together, before anything else; a hub compares when a node joins.

        Raises:
            ValueError: Something differs; the message names the first difference.
        """

    def anchor(self) -> None:
        """Make the current parameters the first anchors. All nodes call it together."""

    def open(self, round: Round, units: Sequence[int], *, leaving: bool = False) -> Pending[RoundOutcome]:
        """Announce `round` for `units` in one small message.

        Units may be started once the answer is there.
        """

    def start(self, i: int) -> Pending[Tensor]:
        """Send unit `i` of the newest round and return at once; the answer is its next anchor."""

    def conclude(self, i: int, outcome: RoundOutcome) -> RoundOutcome:
        """Return `outcome`, completed by the answer to unit `i`. Called once, just before the unit lands."""

    def abandon(self) -> None:
        """Forget the newest round, of which no unit has landed; its progress travels in the next round."""

    def leave(self) -> None:
        """Leave the run: everything has landed, and no further round will be opened."""

    def withdraw(self) -> None:
        """Leave after an error in the training loop, without the steps since the last round."""

    def defaults(self) -> tuple[EditConfig, RoundSchedule] | None:
        """Return configuration and schedule for a caller who gives none; None: no preference."""

    def note_step(self, steps: int, waited_s: float) -> None:
        """Record an inner step: the steps so far, and the seconds spent waiting for other nodes."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return everything that must outlive the process, by name, as views: save it before the next step.

        Tensors that belong to parameters have the shape and sharding of these. Nothing may be under way,
        unless the exchange is asynchronous.
        """

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, after `bind`. The tensors then belong to the exchange."""

    def allocate(self) -> None:
        """Make the parameters anchors of this node alone.

        A checkpoint is loaded into the `state_dict` that results: it has a place for every tensor of an
        anchored node.
        """


_TAKEN = "_taken_by_a_layer_sync"


def check_new(made: object, remedy: str) -> None:
    """Raise ValueError if `made`, which has the state of one `LayerSync`, has been given to one already."""
    if getattr(made, _TAKEN, False):
        kind = type(made).__name__
        raise ValueError(f"this {kind} has served another LayerSync, whose state it has: {remedy}")


def mark_taken(*made: object) -> None:
    """Note that `made` serve a `LayerSync` from now on."""
    for each in made:
        with suppress(AttributeError):  # a class with slots
            setattr(each, _TAKEN, True)


T = TypeVar("T")


class Immediate(Pending[T]):
    """An answer that is complete at once."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def done(self) -> bool:
        """Return True."""
        return True

    def result(self) -> T:
        """Return the answer."""
        return self._make()


class Polled(Pending[T]):
    """An answer that is there once `poll` returns one; only `done` polls."""

    def __init__(self, poll: Callable[[], T | None]) -> None:
        self._poll = poll
        self._found: T | None = None

    def done(self) -> bool:
        """Poll, and return whether the answer is there."""
        if self._found is None:
            self._found = self._poll()
        return self._found is not None

    def result(self) -> T:
        """Return the answer."""
        if not self.done():
            raise ValueError("result() was called before done() returned true")
        assert self._found is not None
        return self._found


class LocalNotes:
    """Notes of a node without peers."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}

    def post(self, key: str, text: str) -> None:
        """Keep the first text under a key."""
        self._notes.setdefault(key, text)

    def read(self, key: str) -> str | None:
        """Return the text under `key`, or None."""
        return self._notes.get(key)
