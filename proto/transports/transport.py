"""The interface between a round and the network.

Every call returns at once. Keys are equal on all nodes, and every node asks for the same keys in the same
order. There is no fixed number of nodes: each answer says who took part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

S = TypeVar("S")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class PeersMissing(TimeoutError):
    """A wait passed its deadline, or a peer has ended. The message names the key that was waited for."""


class Pending(Protocol[T_co]):
    """An answer under way."""

    def done(self) -> bool:
        """Return whether the answer is there. Never blocks; once True, `result` does not block either."""

    def result(self) -> T_co:
        """Wait for the answer and return it. Raises `PeersMissing` at the deadline. May be called again."""


class Then(Generic[S, T]):
    """`Pending` whose answer is computed once, by the thread that asks, from that of another one."""

    def __init__(self, pending: Pending[S], convert: Callable[[S], T]) -> None:
        self._pending = pending
        self._convert = convert
        self._answer: list[T] = []

    def done(self) -> bool:
        """See `Pending.done`."""
        return bool(self._answer) or self._pending.done()

    def result(self) -> T:
        """See `Pending.result`."""
        if not self._answer:
            self._answer.append(self._convert(self._pending.result()))
        return self._answer[0]


@dataclass(frozen=True, slots=True)
class Rows:
    """One row per node that answered in time, in an order equal on all nodes.

    rows: (nodes, width), on CPU.
    """

    rows: Tensor
    mine: int | None
    """This node's row; None when the others closed the set without it."""


@dataclass(frozen=True, slots=True)
class Mean:
    """sum(weight * value) / sum(weight) over the nodes that answered in time; zeros if no weight did."""

    value: Tensor
    total_weight: Tensor
    """0-dim, on the value's device: asking for its number is what waits, not receiving it."""


class Transport(Protocol):
    """Messages between the nodes of one run."""

    bytes_sent: int
    """Payload bytes handed to the network so far."""

    def gather(self, key: str, row: Tensor) -> Pending[Rows]:
        """Exchange one small float64 row. `row` is copied before this returns."""

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> Pending[Mean]:
        """Return the mean over nodes of equal-shaped fp32 `value`.

        A value of weight 0 never leaves the node, so a NaN in it does no harm. `value` is copied before this
        returns; the answer belongs to the caller.
        """

    def post(self, key: str, text: str) -> None:
        """Post a note that all nodes see soon. The first text under a key stays."""

    def read(self, key: str) -> str | None:
        """Return the note under `key` if it is here already. Never blocks: cheap enough for every step."""

    def close(self) -> None:
        """Leave. Other nodes do not wait for this one from now on, where the transport can do without it."""
