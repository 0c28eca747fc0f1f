"""State of a round under way on the node that opened it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from aedit.edit.buffers import OpenBuffers
from aedit.edit.exchange import Exchange, RoundOutcome
from aedit.edit.shards import Shards
from aedit.proto.transports import Pending
from aedit.types import Round

T = TypeVar("T")

_LATE = 2
"""Intervals after which the other units do not wait for an answer."""


@dataclass(slots=True)
class Flight:
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

    def send(self, exchange: Exchange) -> None:
        """Start the exchange of the next unit."""
        i = self.unsent.popleft()
        self.sent[i] = exchange.start(i)

    @property
    def opened(self) -> bool:
        """Return whether the answers to the opening are here. Never waits."""
        return self.opening.done() and (self.buffers is None or self.buffers.rows.done())

    @property
    def late(self) -> set[int]:
        """Return the units that have not landed."""
        return self.sent.keys() | set(self.unsent)

    @property
    def landed(self) -> bool:
        """Return whether every unit of the round has landed."""
        buffers_landed = self.buffers is None or self.buffers.landed
        return buffers_landed and not self.late


def note_answers(flights: Sequence[Flight], shards: Shards, step: int) -> list[Flight]:
    """Note which answers are here on every rank of the node, and land buffers that are.

    Returns the flights whose round has been decided. step: the local step. Never waits for another node.
    """
    if not flights:
        return []
    asked = [(flight, i) for flight in flights for i in flight.sent if i not in flight.ready]
    opening = [flight for flight in flights if flight.outcome is None]
    buffers = [flight.buffers for flight in flights if flight.outcome and flight.buffers]
    here = [flight.sent[i].done() for flight, i in asked] + [flight.opened for flight in opening]
    agreed = iter(shards.all(here + [each.done() for each in buffers]))
    for flight, i in asked:
        if next(agreed):
            flight.ready[i] = step
    opened = [flight for flight in opening if next(agreed)]
    for each in buffers:
        if next(agreed):
            each.land(_result)
    return opened


def movable(flights: Sequence[Flight], units: Sequence[int], step: int) -> tuple[int, ...]:
    """Return those of `units` that a round after local step `step` may move; () if it must be put off.

    It is put off while an answer is awaited, so that the units move together. A unit whose answer takes more
    than two of its intervals is left out instead: its owner may be away, and others are not.
    """
    awaited = [(flight, i) for flight in flights for i in flight.sent if i not in flight.ready]
    late = {i for flight, i in awaited if step - flight.opened_at > _LATE * flight.round.steps}
    if any(i in units and i not in late for _, i in awaited):
        return ()
    return tuple(i for i in units if i not in late)


def _result(pending: Pending[T]) -> T:
    return pending.result()
