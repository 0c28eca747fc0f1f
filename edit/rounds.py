"""Rounds under way: their units are sent, their answers awaited, their anchors landed.

`forward` landing (EDiT, arXiv:2412.07210, figure 1): the forward pre-hook of a unit starts the exchange of
the units up to `prefetch` places ahead, waits for the unit's own answer, and lets the module run on the new
anchor. `arrival` landing: nothing waits; when the answer is there, the next forward pass adds
`anchor - sent` to the parameters.

Nothing lands in a pass with other values in place of the parameters, or in one that is recorded. In a loop
with such passes, or without passes of the modules, units land in `sync.step()`, where the parameters are the
node's own.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from torch import Tensor, nn

from aedit.edit.apply_anchor import OwnValues, recorded, take, values_only
from aedit.edit.buffers import Buffers
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange, RoundOutcome
from aedit.edit.open_round import Flight, movable, note_answers
from aedit.edit.optimizers import InnerOptimizers
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit
from aedit.proto.transports import Pending
from aedit.types import Round

T = TypeVar("T")


class RoundNode(Protocol):
    """The parts of a `LayerSync` that its rounds use."""

    model: nn.Module
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
        self.own_values = OwnValues(node.model, node.units, node.shards)
        self.hooked: list[nn.Module] = []
        """Modules before which buffers land in a forward pass."""
        self._noted_at: int | None = None
        """Local step after which the parameters were noted last."""
        self._lands_between_steps = False
        self._ran: set[int] = set()
        """Units whose module has run since the last step, so that they can be expected to land in a pass."""
        self._replaces = False
        """True once the program has put other values in place of the parameters, or has written to them."""
        self._lands_in_step = False
        """True if units land in `sync.step()`: all ranks of the node have agreed on it."""

    def __bool__(self) -> bool:
        return bool(self._flights)

    def movable(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `units` that the next round may move; () if it must be put off."""
        return movable(self._flights, units, self._node.local_steps) if self._free else units

    # -- what the training loop calls

    def open(self, round: Round, units: tuple[int, ...], *, leaving: bool) -> Flight:
        """Open `round` for `units` and return it without waiting for its answers."""
        node = self._node
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
        else:
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

    def end_step(self) -> None:
        """Look at what has been written since the last step.

        Raises:
            RuntimeError: A unit has landed, and older values were then put in its place.
        """
        self.own_values.look()
        self._replaces |= self.own_values.replaced
        if self.own_values.restored:
            names = ", ".join(self._node.units[i].name for i in sorted(self.own_values.restored))
            raise RuntimeError(
                f"unit {names} has landed in a forward pass and was then overwritten with its older values:"
                " call sync.finish() before you save weights that you put back later"
            )

    def land_in_step(self) -> None:
        """Land the units that can land in no forward pass, or should have landed in the last one."""
        node = self._node
        for flight in list(self._flights):
            if self._forward:
                if flight.opened_at < node.local_steps:
                    self._finish(flight)
                continue
            until = node.local_steps if self._lands_in_step else node.local_steps - 1
            for i, since in list(flight.ready.items()):
                if since <= until and node.units[i].modules:
                    self._land(flight, i)

    def open_in_step(self, round: Round, units: tuple[int, ...]) -> None:
        """Open `round`, and land it at once if its units can land in no forward pass."""
        flight = self.open(round, units, leaving=False)
        node = self._node
        runs = all(i in self._ran for i in units if node.units[i].modules)
        if self._forward and not self._free:
            runs &= set(self.hooked).issuperset(self._buffers.holders)
        self._lands_in_step = not node.shards.all([runs and not self._replaces])[0]
        if self._forward and self._lands_in_step:
            self._finish(flight)

    def note_parameters(self) -> None:
        """Remember what the parameters are before the forward passes in which units may land."""
        lands = bool(self._flights) if self._forward else any(flight.ready for flight in self._flights)
        self.own_values.note(exactly=lands, sampled=self._lands_between_steps)
        self._noted_at = self._node.local_steps
        self._ran.clear()

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

    def begin_pass(self) -> None:
        """Note that the model runs, from its beginning."""
        self.own_values.new_pass()

    def before_forward(self, i: int) -> None:
        """Land unit `i`, whose module is about to run."""
        self._node.optimizers.note_pass()
        if recorded():
            return
        self._ran.add(i)
        if self.own_values.learning:
            self.own_values.there()
        for flight in list(self._flights):
            due = flight.late if self._forward else flight.ready
            if i in due and self.own_values.there():
                self._land(flight, i)

    def before_buffers(self) -> None:
        """Land all buffers: autograd saves them, so none may change after the first module with any runs."""
        if self._flights and not recorded() and self.own_values.there():
            for flight in list(self._flights):
                self._land_buffers(flight)

    def after_forward(self) -> None:
        """Land the units whose module did not run in this forward pass, before the backward pass."""
        if recorded():
            return
        self._ran.update(range(len(self._node.units)))
        if self._forward and self._flights and self.own_values.there():
            self.finish()

    # -- one round

    def _send_ahead(self, flight: Flight) -> bool:
        """Send the next units of a round, as far ahead as landing allows; return whether there were any."""
        most = self._node.config.prefetch + 1 if self._forward else len(flight.units)
        num_unsent = len(flight.unsent)
        while flight.unsent and len(flight.sent) < most:
            self._send(flight)
        return len(flight.unsent) < num_unsent

    def _check_own_values(self, units: Sequence[int]) -> None:
        """Raise ValueError if a landing in `units` would be lost with the values that are there now."""
        if self._noted_at != self._node.local_steps or not units:
            return
        if not self._node.shards.all([self.own_values.same()])[0]:
            raise ValueError(
                "sync.land(): the parameters are not those of the last sync.step(), such as their average, "
                "and what lands would be lost with them: put them back, and call it after sync.step()"
            )

    def _send(self, flight: Flight, landing: int | None = None) -> None:
        """Send the next unit; if it is not `landing`, inner steps may come before its answer."""
        unit = self._node.units[flight.unsent[0]]
        if unit.sent is None and flight.unsent[0] != landing:
            unit.sent = unit.flat()
        flight.send(self._node.exchange)

    def _send_all(self, flight: Flight) -> None:
        self._outcome(flight)
        while flight.unsent:
            self._send(flight)

    def _outcome(self, flight: Flight) -> RoundOutcome:
        node = self._node
        if flight.outcome is None:
            flight.outcome = node.wait(flight.opening, flight, needed=node.position)
            node.total_steps = flight.outcome.total_steps
            if flight.buffers:
                rows = node.wait(flight.buffers.rows, flight)
                wait = partial(node.wait, flight=flight)
                flight.buffers.send(rows, wait, trusted=flight.outcome.trusts_node)
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
            self._send(flight, landing=i)
        if i not in flight.sent:
            return
        anchor = self._answer(flight, i)
        outcome = flight.outcome = node.exchange.conclude(i, outcome)
        if self._forward:
            node.optimizers.check_modes(flight.modes, flight.round.id)
        self.own_values.landing(i)
        take(node.units[i], anchor, node.optimizers, node.shards, adopt=i in outcome.distrusted)
        self.own_values.landed(i)
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
