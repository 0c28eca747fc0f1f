"""A round under way, as the node that opened it sees it."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from aedit.edit.exchange import RoundOutcome
from aedit.proto.transports.transport import Pending
from aedit.types import Round


@dataclass(slots=True)
class Flight:
    """A round that has not landed whole."""

    round: Round
    units: tuple[int, ...]
    opening: Pending[RoundOutcome]
    unsent: deque[int]  # in forward order
    opened_at: int = 0  # local step
    modes: tuple[Any, ...] = ()
    """What the parameters were when it was opened: see `InnerOptimizers.modes`."""
    waited_s: float = 0.0
    verdict: RoundOutcome | None = None
    sent: dict[int, Pending[Tensor]] = field(default_factory=dict)
    ready: dict[int, int] = field(default_factory=dict)
    """Units answered on every rank, which may land in the next forward; since which local step."""
