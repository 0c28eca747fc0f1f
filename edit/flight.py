"""A round under way, as the node that opened it sees it."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from aedit.edit.buffers import OpenBuffers
from aedit.edit.exchange import RoundOutcome
from aedit.edit.shards import Shards
from aedit.proto.transports.transport import Pending
from aedit.types import Round

T = TypeVar("T")


@dataclass(slots=True)
class Flight:
    """A round that has not landed whole."""

    round: Round
    units: tuple[int, ...]
    opening: Pending[RoundOutcome]
    unsent: deque[int]  # in forward order
    opened_at: int = 0  # local step
    buffers: OpenBuffers | None = None
    waited_s: float = 0.0
    verdict: RoundOutcome | None = None
    sent: dict[int, Pending[Tensor]] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)  # answered on every rank: may land in the next forward


def note_answers(flights: Sequence[Flight], shards: Shards) -> list[Flight]:
    """Note which answers are here on every rank of the node, and land buffers that are.

    Returns the flights whose verdict has come. Never waits for another node.
    """
    if not flights:
        return []
    asked = [(flight, i) for flight in flights for i in flight.sent if i not in flight.ready]
    opening = [flight for flight in flights if flight.verdict is None]
    buffers = [flight.buffers for flight in flights if flight.verdict and flight.buffers]
    here = [flight.sent[i].done() for flight, i in asked] + [flight.opening.done() for flight in opening]
    agreed = iter(shards.all(here + [each.done() for each in buffers]))
    for flight, i in asked:
        if next(agreed):
            flight.ready.add(i)
    opened = [flight for flight in opening if next(agreed)]
    for each in buffers:
        if next(agreed):
            each.land(_result)
    return opened


def _result(pending: Pending[T]) -> T:
    return pending.result()
