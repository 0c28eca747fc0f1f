"""`AveragingExchange`: peers that meet average their parameters, and each takes the outer step by itself.

No peer owns the anchors. A peer sends its values x = anchor - D, receives the mean x' of those who took part,
and steps by anchor - x', which is their mean pseudo-gradient while all have the same anchors. Anchors that
differ come closer in every round, since all peers step towards the same point. A peer whose round fails goes
on alone, and its progress is part of the next round.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aedit.async_sgd.rules import Nesterov, OuterOptimizer
from aedit.edit.anchor_store import DeviceStore, kept_state, named_store
from aedit.edit.exchange import Immediate, LocalNotes, Polled, RoundOutcome, check_new, mark_taken
from aedit.edit.schedule import Notes
from aedit.edit.shards import Shards
from aedit.edit.units import SyncUnit
from aedit.proto.dht import AveragedRound, Averager
from aedit.proto.transports import Pending, Rows, then
from aedit.types import Round

LEAVE_S = 8.0
"""Longest time that a leaving peer waits for what the others say about the last average."""
_FP32_BYTES = 4


class AveragingExchange:
    """Exchange of a peer that averages its parameters with others, one process per node.

    Args:
        averager: Averages a vector of all units.
        outer: The outer optimizer; None: `Nesterov()`.
    """

    asynchronous = True
    max_steps_ahead = 2**62  # every round of an averager ends

    def __init__(self, averager: Averager, *, outer: OuterOptimizer | None = None) -> None:
        self.averager, self.outer = averager, outer or Nesterov()
        self.units: Sequence[SyncUnit] = ()
        self.apart: Sequence[SyncUnit] = ()
        self.shards = Shards()
        self.store = DeviceStore([])
        self.notes: Notes = LocalNotes()
        self.on_event: Callable[..., None] = lambda event, **values: None
        """Called with the name and values of what happens to rounds, by the thread that trains."""
        self.members = 1
        """Peers of the newest round."""
        self.rounds = self.failed = self.differing = 0
        self.bytes_sent = 0
        self.began_s = time.time()
        """When the first of the peers met so far began, by its clock of the day. Set it before training."""
        self._own_steps = 0
        self._steps = 0
        """Inner steps that no average contains."""
        self._round, self._asks = 0, False
        self._concluded = 0
        self._restored = False

    def bind(self, units: Sequence[SyncUnit], shards: Shards) -> None:
        """Store the units.

        Raises:
            ValueError: The node has several ranks, or the averager is for vectors of another length or serves
                another `LayerSync`.
        """
        if shards.size > 1:
            raise ValueError(f"hivemind averages whole models: one process per node, not {shards.size}")
        check_new(self.averager, "make a new averager for each LayerSync, with a prefix of its own")
        numel, length = sum(unit.numel for unit in units), self.averager.sent.size
        if numel != length:
            raise ValueError(f"the averager is for {length} parameters, and the model has {numel}")
        self.units, self.shards = units, shards
        ends = torch.tensor([unit.numel for unit in units]).cumsum(0).tolist()
        self._slices = [slice(end - unit.numel, end) for end, unit in zip(ends, units, strict=True)]
        self.allocate()
        mark_taken(self.averager)

    def compare(self, settings: Mapping[str, str]) -> None:
        """Do nothing: peers with other settings have another prefix, and do not meet."""

    def allocate(self) -> None:
        """Take the parameters as anchors, with new outer state."""
        flats = (unit.flat() for unit in self.units)
        self.store = DeviceStore((flat, self.outer.init(flat)) for flat in flats)

    def anchor(self) -> None:
        """Take the parameters as anchors, unless a checkpoint has brought them."""
        if not self._restored:
            self.allocate()

    def rows(self, key: str, row: Tensor) -> Pending[Rows]:
        """Return the row of this node alone."""
        return Immediate(lambda: Rows(row.unsqueeze(0), 0))

    def average(self, name: str, value: Tensor, weight: Tensor) -> Pending[Tensor]:
        """Raise ValueError: peers do not average values at every step."""
        raise ValueError("peers of a swarm average no values at every step: set edit.warmup_steps = 0")

    @torch.no_grad()
    def open(self, round: Round, units: Sequence[int], *, leaving: bool = False) -> Pending[RoundOutcome]:
        """Send the values of all units; in the place of values that are not finite, the unit's anchor."""
        self._own_steps += round.steps
        self._steps += round.steps
        norms, distrusted = [], []
        for i in units:
            value, anchor = self.units[i].value(), self.store.read(i)[0]
            norm = float(torch.linalg.vector_norm(self.units[i].representable(anchor) - value))
            norms.append(norm)
            fine = norm < float("inf")  # nan is not
            distrusted += [] if fine else [i]
            self._part(self.averager.sent, i).copy_(value if fine else anchor)
        self._round = round.id
        self._asks = round.steps > 0
        if self._asks:
            self.averager.start(round.id, self._steps, self.began_s)
        outcome = RoundOutcome(
            round,
            tuple(units),
            norms=tuple(norms),
            distrusted=tuple(distrusted),
            nodes=self.members,
            total_steps=self._own_steps,
            all_leaving=leaving,
        )
        return Immediate(lambda: outcome)

    def start(self, i: int) -> Pending[Tensor]:
        """Return the next anchor of unit `i`, there once the round has ended."""
        if not self._asks:
            return Immediate(lambda: self.store.read(i)[0])
        return then(Polled(partial(self.averager.outcome, self._round)), lambda end: self._next(i, end))

    @torch.no_grad()
    def _next(self, i: int, end: AveragedRound) -> Tensor:
        device = self.store.read(i)[0].device
        if not end.members:
            return self._part(self.averager.sent, i).to(device, copy=True)
        mean = self._part(self.averager.average, i).to(device, copy=True)
        anchor, state = self.store.read(i)
        if end.late:
            anchor, state = mean, self.outer.init(mean)
        else:
            step, state = self.outer.update(anchor - mean, state)
            anchor = anchor - step
        self.store.write(i, anchor, state)
        return anchor

    def conclude(self, i: int, outcome: RoundOutcome) -> RoundOutcome:
        """Return `outcome`, completed by the end of the round."""
        end = self.averager.outcome(outcome.round.id)
        if end is None:  # nothing was sent
            return outcome
        if self._concluded != end.number:
            self._count(end)
        if not end.members:
            return replace(outcome, refused=(*outcome.refused, i), nodes=1)
        distrusted = {*outcome.distrusted, i} if end.late else outcome.distrusted
        return replace(outcome, distrusted=tuple(sorted(distrusted)), nodes=end.members)

    def _count(self, end: AveragedRound) -> None:
        self._concluded, self.members = end.number, max(end.members, 1)
        self.rounds += 1
        if not end.members:
            self.failed += 1
            self.on_event("average_failed", round=end.number, error=end.why, seconds=round(end.seconds, 3))
            return
        self._steps, self.began_s = 0, min(self.began_s, end.began_s)
        # As sender of the parts that others reduce, and as reducer of an equal part.
        self.bytes_sent += 2 * _FP32_BYTES * self.averager.sent.size * (end.members - 1) // end.members
        seconds = round(end.seconds, 3)
        self.on_event("average", round=end.number, members=end.members, seconds=seconds, late=end.late)

    def abandon(self) -> None:
        """Do nothing: the averager ends the round, and no one reads its answer."""

    def note_step(self, steps: int, waited_s: float) -> None:
        """Report the comparisons that have arrived."""
        for each in self.averager.comparisons():
            self.differing += each.differ > 0
            values: dict[str, Any] = {"round": each.number, "members": each.members, "differ": each.differ}
            values |= {"answered": 1 + len(each.distances), "distance": max(each.distances, default=0.0)}
            if each.differ:
                values["error"] = f"{each.differ} of {each.members - 1} other peers have another average"
            self.on_event("averages_differ" if each.differ else "averages_compared", **values)

    def leave(self) -> None:
        """Wait for the last comparison, report it with the totals, and end the averager."""
        self.averager.close(LEAVE_S)
        self.note_step(self._own_steps, 0.0)
        self.withdraw()

    def withdraw(self) -> None:
        """Report the totals, and end the averager: no other peer waits for this one longer than a round."""
        self.averager.close()
        self.on_event("averaging", rounds=self.rounds, failed=self.failed, differing=self.differing)

    def defaults(self) -> None:
        """Return None: the caller decides."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return anchors and outer state by parameter."""
        return named_store(self.units, self.store)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, after `bind`."""
        self.store = DeviceStore(kept_state(unit, state) for unit in self.units)
        self._restored = True

    def _part(self, vector: Any, i: int) -> Tensor:
        return torch.from_numpy(vector[self._slices[i]])
