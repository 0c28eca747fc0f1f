"""State of a round under way on the node that opened it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import Tensor

from aedit.edit.buffers import OpenBuffers
from aedit.edit.exchange import Exchange, RoundOutcome
from aedit.edit.shards import Shards
from aedit.proto.transports.transport import Pending
from aedit.types import Round

T = TypeVar("T")


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


def under_way(flights: Sequence[Flight], units: Sequence[int]) -> bool:
    """Return whether any of `units` has been sent and not answered."""
    return any(i in flight.sent and i not in flight.ready for flight in flights for i in units)


def _result(pending: Pending[T]) -> T:
    return pending.result()
