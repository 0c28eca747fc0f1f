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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from aedit.edit.apply_anchor import OwnValues, land_unit, recorded, values_only
from aedit.edit.buffers import ModelBuffers, OpenBuffers
from aedit.edit.exchange import RoundOutcome
from aedit.proto.transports import Pending
from aedit.types import Round

if TYPE_CHECKING:
    from aedit.edit.sync import LayerSync

T = TypeVar("T")

_LATE = 2
"""Intervals after which the other units do not wait for an answer."""


@dataclass(slots=True)
class OpenRound:
    """A round that has not landed completely."""

    round: Round
    units: tuple[int, ...]
    opening: Pending[RoundOutcome]
    unsent: deque[int]  # in forward order
    opened_at: int = 0  # local step
    modes: tuple[Any, ...] = ()
    """Modes of the optimizers when it was opened: see `InnerOptimizers.modes`."""
    buffers: OpenBuffers | None = None
    waited_s: float = 0.0
    outcome: RoundOutcome | None = None
    sent: dict[int, Pending[Tensor]] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    """Units answered on every rank, which may land in the next forward pass; local step of the answer."""

    @property
    def late(self) -> set[int]:
        """Return the units that have not landed."""
        return self.sent.keys() | set(self.unsent)

    @property
    def landed(self) -> bool:
        """Return whether every unit of the round has landed."""
        buffers_landed = self.buffers is None or self.buffers.landed
        return buffers_landed and not self.late


class OpenRounds:
    """Open, send, await and land the rounds of `node`."""

    def __init__(self, node: "LayerSync", buffers: ModelBuffers) -> None:
        self._node, self._buffers = node, buffers
        self._free = node.exchange.asynchronous
        self._forward = node.config.landing == "forward"
        self._open: list[OpenRound] = []  # oldest first
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
        self._cut_short = ""
        """What an exception has cut short; "" if nothing."""

    def __bool__(self) -> bool:
        return bool(self._open)

    @contextmanager
    def whole(self, what: str, *, waits: bool = False) -> Iterator[None]:
        """Note that an exception in this block, such as KeyboardInterrupt, leaves `what` half done.

        Other waits stay outside: one that is interrupted can go on later.

        waits: The block waits for other nodes. An error of a wait, such as that they have left, is no
            interrupt: this node can leave, too.
        """
        before, self._cut_short = self._cut_short, self._cut_short or what
        try:
            yield
        except Exception:
            if waits:
                self._cut_short = before
            raise
        self._cut_short = before

    def check_whole(self) -> None:
        """Raise RuntimeError if an exception has cut something short that cannot be repeated."""
        if self._cut_short:
            raise RuntimeError(
                f"an exception has cut {self._cut_short} short, so other nodes have other values than this"
                " one: leave the `with` block, and resume all nodes from a checkpoint"
            )

    def movable(self, units: tuple[int, ...]) -> tuple[int, ...]:
        """Return those of `units` that the next round may move; () if it must be put off.

        With an asynchronous exchange it is put off while an answer is awaited, so that the units move
        together. A unit whose answer takes more than two of its intervals is left out instead: its owner may
        be away, and others are not.
        """
        if not self._free:
            return units
        step = self._node.local_steps
        awaited = [(opened, i) for opened in self._open for i in opened.sent if i not in opened.ready]
        late = {i for opened, i in awaited if step - opened.opened_at > _LATE * opened.round.steps}
        if any(i in units and i not in late for _, i in awaited):
            return ()
        return tuple(i for i in units if i not in late)

    # -- what the training loop calls

    def make_room(self, units: tuple[int, ...]) -> None:
        """Land or send what older rounds have of `units`, so that another round may move them."""
        for opened in list(self._open):
            if self._free and not self._forward:
                for i in opened.units:
                    if i in units:
                        self._land(opened, i)
            elif self._forward or set(units) & set(opened.units):
                self._finish(opened)
            else:  # one order of messages on all nodes: this round's follow those of older rounds
                self._send_all(opened)

    def open(self, round: Round, units: tuple[int, ...], *, leaving: bool) -> OpenRound:
        """Open `round` for `units` and return it without waiting for its answers."""
        node = self._node
        self.check_whole()
        self.make_room(units)
        node.optimizers.look([p for unit in node.units for p in unit.params])
        for i in units:
            node.units[i].before_round()
        if not self._forward:
            for i in units:
                node.units[i].sent = node.units[i].flat()
        with self.whole(f"the opening of round {round.id}"):
            opening = node.exchange.open(round, units, leaving=leaving)
            opened = OpenRound(round, units, opening, deque(units), node.local_steps, node.optimizers.modes)
            if not self._free:
                opened.buffers = self._buffers.open(str(round.id), stepped=round.steps > 0)
            self._open.append(opened)
        if self._free:
            self._buffers.warn_if_changed()
        node.on_open(opening.result() if self._free and opening.done() else RoundOutcome(round, units))
        if self._free:
            self._send_all(opened)
        return opened

    def note_answers(self) -> None:
        """Send the units of rounds that have been decided, and note which answers may land. Never waits."""
        if self._forward:
            return
        for opened in self._note_answers():
            self._send_all(opened)
        for opened in list(self._open):
            self._conclude(opened)

    def hold_back(self) -> None:
        """Wait for answers of a hub that the node has trained without for `max_steps_ahead` steps."""
        for opened in list(self._open) if self._free else ():
            if self._node.local_steps - opened.opened_at >= self._node.exchange.max_steps_ahead:
                self._finish(opened)

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
        for opened in list(self._open):
            if self._forward:
                if opened.opened_at < node.local_steps:
                    self._finish(opened)
                continue
            until = node.local_steps if self._lands_in_step else node.local_steps - 1
            for i, since in list(opened.ready.items()):
                if since <= until and node.units[i].modules:
                    self._land(opened, i)

    def open_in_step(self, round: Round, units: tuple[int, ...]) -> None:
        """Open `round`, and land it at once if its units can land in no forward pass."""
        opened = self.open(round, units, leaving=False)
        node = self._node
        runs = all(i in self._ran for i in units if node.units[i].modules)
        if self._forward and not self._free:
            runs &= set(self.hooked).issuperset(self._buffers.holders)
        self._lands_in_step = not node.shards.all([runs and not self._replaces])[0]
        if self._forward and self._lands_in_step:
            self._finish(opened)

    def note_parameters(self) -> None:
        """Remember what the parameters are before the forward passes in which units may land."""
        lands = bool(self._open) if self._forward else any(opened.ready for opened in self._open)
        self.own_values.note(exactly=lands, sampled=self._lands_between_steps)
        self._noted_at = self._node.local_steps
        self._ran.clear()

    @values_only
    def land(self) -> int:
        """Land the units whose answers are here on all ranks of the node; return how many. Never waits."""
        landed = 0
        self._lands_between_steps = True
        while True:
            for opened in self._note_answers():
                self._outcome(opened)
            sent = [self._send_ahead(opened) for opened in self._open if opened.outcome]
            ready = [(opened, i) for opened in self._open for i in opened.units if i in opened.ready]
            if not any(sent) and not ready:
                break
            self._check_own_values([i for _, i in ready])
            for opened, i in ready:
                self._land(opened, i)
            landed += len(ready)
        for opened in list(self._open):
            self._conclude(opened)
        return landed

    def finish(self) -> None:
        """Wait for all rounds under way and land them."""
        self.check_whole()
        for opened in list(self._open):
            self._finish(opened)

    def abandon(self) -> list[Round]:
        """Forget the rounds that not every node has opened, and return them.

        With an asynchronous exchange, forget all rounds: the agent delivers what it was given.
        """
        unopened = [opened for opened in self._open if self._free or opened.outcome is None]
        for opened in reversed(unopened):
            self._node.exchange.abandon()
            self._open.remove(opened)
            for i in opened.units:
                self._node.units[i].sent = None
        return [opened.round for opened in unopened if opened.outcome is None]

    # -- hooks

    def before_forward(self, i: int) -> None:
        """Land unit `i`, whose module is about to run."""
        self._node.optimizers.note_pass()
        if recorded():
            return
        self._ran.add(i)
        if self.own_values.learning:
            self.own_values.there()
        for opened in list(self._open):
            due = opened.late if self._forward else opened.ready
            if i in due and self.own_values.there():
                self._land(opened, i)

    def before_buffers(self) -> None:
        """Land all buffers: autograd saves them, so none may change after the first module with any runs."""
        if self._open and not recorded() and self.own_values.there():
            for opened in list(self._open):
                self._land_buffers(opened)

    def after_forward(self) -> None:
        """Land the units whose module did not run in this forward pass, before the backward pass."""
        if recorded():
            return
        self._ran.update(range(len(self._node.units)))
        if self._forward and self._open and self.own_values.there():
            self.finish()

    # -- one round

    def _send_ahead(self, opened: OpenRound) -> bool:
        """Send the next units of a round, as far ahead as landing allows; return whether there were any."""
        most = self._node.config.prefetch + 1 if self._forward else len(opened.units)
        num_unsent = len(opened.unsent)
        while opened.unsent and len(opened.sent) < most:
            self._send(opened)
        return len(opened.unsent) < num_unsent

    def _check_own_values(self, units: Sequence[int]) -> None:
        """Raise ValueError if a landing in `units` would be lost with the values that are there now."""
        if self._noted_at != self._node.local_steps or not units:
            return
        if not self._node.shards.all([self.own_values.same()])[0]:
            raise ValueError(
                "sync.land(): the parameters are not those of the last sync.step(), such as their average, "
                "and what lands would be lost with them: put them back, and call it after sync.step()"
            )

    def _send(self, opened: OpenRound, landing: int | None = None) -> None:
        """Send the next unit; if it is not `landing`, inner steps may come before its answer."""
        i = opened.unsent[0]
        unit = self._node.units[i]
        if unit.sent is None and i != landing:
            unit.sent = unit.flat()
        with self.whole(f"the sending of unit {unit.name} in round {opened.round.id}"):
            opened.unsent.popleft()
            opened.sent[i] = self._node.exchange.start(i)

    def _send_all(self, opened: OpenRound) -> None:
        self._outcome(opened)
        while opened.unsent:
            self._send(opened)

    def _outcome(self, opened: OpenRound) -> RoundOutcome:
        node = self._node
        if opened.outcome is None:
            outcome = node.wait(opened.opening, opened, needed=node.position)
            rows = node.wait(opened.buffers.rows, opened) if opened.buffers else None
            with self.whole(f"the sending of buffers in round {opened.round.id}", waits=True):
                if opened.buffers and rows is not None:
                    wait = partial(node.wait, opened=opened)
                    opened.buffers.send(rows, wait, trusted=outcome.trusts_node)
                opened.outcome, node.total_steps = outcome, outcome.total_steps
        return opened.outcome

    def _finish(self, opened: OpenRound) -> None:
        for i in opened.units:
            self._land(opened, i)
        self._land_buffers(opened)

    @values_only
    def _land_buffers(self, opened: OpenRound) -> None:
        if opened.buffers and not opened.buffers.landed:
            self._outcome(opened)
            opened.buffers.land(partial(self._node.wait, opened=opened))
            self._conclude(opened)

    @values_only
    def _land(self, opened: OpenRound, i: int) -> None:
        """Land unit `i` once: a recomputed or repeated forward pass finds nothing left to do."""
        self.check_whole()
        node, outcome = self._node, self._outcome(opened)
        place = opened.units.index(i)
        while opened.unsent and opened.units.index(opened.unsent[0]) <= place + node.config.prefetch:
            self._send(opened, landing=i)
        if i not in opened.sent:
            return
        anchor = self._answer(opened, i)
        if self._forward:
            node.optimizers.check_modes(opened.modes, opened.round.id)
        with self.whole(f"the landing of unit {node.units[i].name} in round {opened.round.id}"):
            outcome = opened.outcome = node.exchange.conclude(i, outcome)
            self.own_values.landing(i)
            land_unit(node.units[i], anchor, node.optimizers, node.shards, adopt=i in outcome.distrusted)
            self.own_values.landed(i)
            del opened.sent[i]
            opened.ready.pop(i, None)
        self._conclude(opened)

    def _answer(self, opened: OpenRound, i: int) -> Tensor:
        """Return the next anchor of unit `i`, after a wait if it is not there yet.

        If the wait is interrupted, the unit stays under way.
        """
        node = self._node
        if i in opened.ready:
            anchor = opened.sent[i].result()
        elif self._free:
            what = f"the hub's answer for unit {node.units[i].name} of round {opened.round.id}"
            anchor = node.wait_together(opened.sent[i], what, opened=opened, position=node.position)
        else:
            anchor = node.wait(opened.sent[i], opened)
        return anchor

    def _conclude(self, opened: OpenRound) -> None:
        if opened.outcome and opened.landed:
            self._open.remove(opened)
            self._node.round_id = max(self._node.round_id, opened.round.id)
            self._node.on_round(opened.outcome, opened.waited_s)

    # -- answers

    def _note_answers(self) -> list[OpenRound]:
        """Note which answers are here on every rank of the node, and land buffers that are.

        Returns the rounds that have been decided. Never waits for another node.
        """
        node = self._node
        if not self._open:
            return []
        asked = [(opened, i) for opened in self._open for i in opened.sent if i not in opened.ready]
        opening = [opened for opened in self._open if opened.outcome is None]
        buffers = [opened.buffers for opened in self._open if opened.outcome and opened.buffers]
        here = [opened.sent[i].done() for opened, i in asked]
        here += [
            each.opening.done() and (each.buffers is None or each.buffers.rows.done()) for each in opening
        ]
        agreed = iter(node.shards.all(here + [each.done() for each in buffers]))
        for opened, i in asked:
            if next(agreed):
                opened.ready[i] = node.local_steps
        decided = [opened for opened in opening if next(agreed)]
        for each in buffers:
            if next(agreed):
                each.land(lambda pending: pending.result())
        return decided
