"""Rounds under way: their units are sent, their answers awaited, their anchors landed.

`forward` landing (EDiT, arXiv:2412.07210, figure 1): the forward pre-hook of a unit starts the exchange of
the units up to `prefetch` places ahead, waits for the unit's own answer, and lets the module run on the new
anchor. `arrival` landing: nothing waits; when the answer is there, the next forward pass adds
`anchor - sent` to the parameters.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor

from aedit.edit.buffers import Buffers
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange, RoundOutcome
from aedit.edit.flight import Flight, movable, note_answers
from aedit.edit.landing import StandIns, take, values_only, warn_of_idle_modules
from aedit.edit.optimizers import InnerOptimizers
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit
from aedit.proto.transports.transport import Pending
from aedit.types import Round

T = TypeVar("T")


class RoundNode(Protocol):
    """The parts of a `LayerSync` that its rounds use."""

    units: Sequence[SyncUnit]
    shards: Shards
    exchange: Exchange
    optimizers: InnerOptimizers
    config: EditConfig
    on_round: Callable[[RoundOutcome, float], None]
    round_id: int
    """Highest number of a round that has landed."""
    total_steps: int
    """Inner steps of all nodes up to that round."""

    @property
    def local_steps(self) -> int:
        """Return the inner steps since the warm-up."""

    @property
    def position(self) -> int:
        """Return the number of warm-up steps and rounds that the node has reached."""

    def wait(self, pending: Pending[T], flight: Flight | None = None, needed: int | None = None) -> T:
        """Return the answer once it is there."""

    def wait_together(
        self, pending: Pending[T], what: str, *, flight: Flight | None = None, position: int = 0
    ) -> T:
        """Return the answer, on all ranks of the node at one time."""


class OpenRounds:
    """Open, send, await and land the rounds of `node`."""

    def __init__(self, node: RoundNode, buffers: Buffers) -> None:
        self._node, self._buffers = node, buffers
        self._free = node.exchange.asynchronous
        self._forward = node.config.landing == "forward"
        self._flights: list[Flight] = []  # oldest first
        self._stand_ins = StandIns(node.units, node.shards)
        self._noted_at: int | None = None
        """Local step after which the parameters were noted last."""
        self._lands_between_steps = False

    def __bool__(self) -> bool:
        return bool(self._flights)

    def movable(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `units` that the next round may move; () if it must be put off."""
        return movable(self._flights, units, self._node.local_steps) if self._free else units

    # -- what the training loop calls

    def open(self, round: Round, units: tuple[int, ...], *, leaving: bool) -> Flight:
        """Open `round` for `units` and return it without waiting for its answers."""
        node = self._node
        warn_of_idle_modules(self._flights, node.units, node.config.landing, node.local_steps)
        for flight in list(self._flights):
            if self._free and not self._forward:
                for i in flight.units:
                    if i in units:
                        self._land(flight, i)
            elif self._forward or set(units) & set(flight.units):
                self._finish(flight)
            else:  # one order of messages on all nodes: this round's follow those of older rounds
                self._send_all(flight)
        node.optimizers.look([p for unit in node.units for p in unit.params])
        for i in units:
            node.units[i].before_round()
        if not self._forward:
            for i in units:
                node.units[i].sent = node.units[i].flat()
        opening = node.exchange.open(round, units, leaving=leaving)
        flight = Flight(round, units, opening, deque(units), node.local_steps, node.optimizers.modes)
        if self._free:
            self._buffers.warn_if_changed()
        elif self._buffers:
            flight.buffers = self._buffers.open(str(round.id), stepped=round.steps > 0)
        self._flights.append(flight)
        if self._free:
            self._send_all(flight)
        return flight

    def note_answers(self) -> None:
        """Send the units of rounds that have been decided, and note which answers may land. Never waits."""
        if self._forward:
            return
        for flight in note_answers(self._flights, self._node.shards, self._node.local_steps):
            self._send_all(flight)
        for flight in list(self._flights):
            self._conclude(flight)

    def hold_back(self) -> None:
        """Wait for answers of a hub that the node has trained without for `max_steps_ahead` steps."""
        for flight in list(self._flights) if self._free else ():
            if self._node.local_steps - flight.opened_at >= self._node.exchange.max_steps_ahead:
                self._finish(flight)

    def note_parameters(self) -> None:
        """Remember what the parameters are before the forward passes in which units may land."""
        if self._forward or self._lands_between_steps or any(flight.ready for flight in self._flights):
            self._stand_ins.note_parameters()
            self._noted_at = self._node.local_steps

    @values_only
    def land(self) -> int:
        """Land the units whose answers are here on all ranks of the node; return how many. Never waits."""
        node, landed = self._node, 0
        self._lands_between_steps = True
        while True:
            for flight in note_answers(self._flights, node.shards, node.local_steps):
                self._outcome(flight)
            sent = [self._send_ahead(flight) for flight in self._flights if flight.outcome]
            ready = [(flight, i) for flight in self._flights for i in flight.units if i in flight.ready]
            if not any(sent) and not ready:
                break
            self._check_own_values([i for _, i in ready])
            for flight, i in ready:
                self._land(flight, i)
            landed += len(ready)
        for flight in list(self._flights):
            self._conclude(flight)
        return landed

    def finish(self) -> None:
        """Wait for all rounds under way and land them."""
        for flight in list(self._flights):
            self._finish(flight)

    def abandon(self) -> list[Round]:
        """Forget the rounds that not every node has opened, and return them.

        With an asynchronous exchange, forget all rounds: the agent delivers what it was given.
        """
        unopened = [flight for flight in self._flights if self._free or flight.outcome is None]
        for flight in reversed(unopened):
            self._node.exchange.abandon()
            self._flights.remove(flight)
            for i in flight.units:
                self._node.units[i].sent = None
        return [flight.round for flight in unopened if flight.outcome is None]

    # -- hooks

    def before_forward(self, i: int) -> None:
        """Land unit `i`, whose module is about to run."""
        for flight in list(self._flights):
            due = flight.late if self._forward else flight.ready
            if i in due and not self._stand_ins.run([i]):
                self._land(flight, i)

    def before_buffers(self) -> None:
        """Land all buffers: autograd saves them, so none may change after the first module with any runs."""
        for flight in list(self._flights):
            if not self._stand_ins.run(flight.late):
                self._land_buffers(flight)

    def after_forward(self) -> None:
        """Land the units whose module did not run in this forward pass, before the backward pass."""
        for flight in list(self._flights) if self._forward else ():
            if not self._stand_ins.run(flight.late):
                self._finish(flight)

    # -- one round

    def _send_ahead(self, flight: Flight) -> bool:
        """Send the next units of a round, as far ahead as landing allows; return whether there were any."""
        most = self._node.config.prefetch + 1 if self._forward else len(flight.units)
        num_unsent = len(flight.unsent)
        while flight.unsent and len(flight.sent) < most:
            flight.send(self._node.exchange)
        return len(flight.unsent) < num_unsent

    def _check_own_values(self, units: Sequence[int]) -> None:
        """Raise ValueError if a landing in `units` would be lost with the values that are there now."""
        if self._noted_at == self._node.local_steps and units and self._stand_ins.there(units):
            raise ValueError(
                "sync.land(): the parameters are not those of the last sync.step(), such as their average, "
                "and what lands would be lost with them: put them back, and call it after sync.step()"
            )

    def _send_all(self, flight: Flight) -> None:
        self._outcome(flight)
        while flight.unsent:
            flight.send(self._node.exchange)

    def _outcome(self, flight: Flight) -> RoundOutcome:
        node = self._node
        if flight.outcome is None:
            flight.outcome = node.wait(flight.opening, flight, needed=node.position)
            node.total_steps = flight.outcome.total_steps
            if flight.buffers:
                rows = node.wait(flight.buffers.rows, flight)
                flight.buffers.send(rows, trusted=flight.outcome.trusts_node)
        return flight.outcome

    def _finish(self, flight: Flight) -> None:
        for i in flight.units:
            self._land(flight, i)
        self._land_buffers(flight)

    @values_only
    def _land_buffers(self, flight: Flight) -> None:
        if flight.buffers and not flight.buffers.landed:
            self._outcome(flight)
            flight.buffers.land(partial(self._node.wait, flight=flight))
            self._conclude(flight)

    @values_only
    def _land(self, flight: Flight, i: int) -> None:
        """Land unit `i` once: a recomputed or repeated forward pass finds nothing left to do."""
        node, outcome = self._node, self._outcome(flight)
        place = flight.units.index(i)
        while flight.unsent and flight.units.index(flight.unsent[0]) <= place + node.config.prefetch:
            flight.send(node.exchange)
        if i not in flight.sent:
            return
        anchor = self._answer(flight, i)
        outcome = flight.outcome = node.exchange.conclude(i, outcome)
        if self._forward:
            node.optimizers.check_modes(flight.modes, flight.round.id)
        take(node.units[i], anchor, node.optimizers, node.shards, adopt=i in outcome.distrusted)
        flight.ready.pop(i, None)
        self._conclude(flight)

    def _answer(self, flight: Flight, i: int) -> Tensor:
        """Return the next anchor of unit `i`, after a wait if it is not there yet.

        If the wait is interrupted, the unit stays under way.
        """
        node = self._node
        if i in flight.ready:
            anchor = flight.sent[i].result()
        elif self._free:
            what = f"the hub's answer for unit {node.units[i].name} of round {flight.round.id}"
            anchor = node.wait_together(flight.sent[i], what, flight=flight, position=node.position)
        else:
            anchor = node.wait(flight.sent[i], flight)
        del flight.sent[i]
        return anchor

    def _conclude(self, flight: Flight) -> None:
        if flight.outcome and flight.landed:
            self._flights.remove(flight)
            self._node.round_id = max(self._node.round_id, flight.round.id)
            self._node.on_round(flight.outcome, flight.waited_s)
