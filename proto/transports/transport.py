"""The interface between a round and the network.

Every call returns at once. Keys are equal on all nodes, and every node asks for the same keys in the same
order. There is no fixed number of nodes: each answer says who took part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from aedit.types import NonNegativeInt, check, checked

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


class Once(Generic[T]):
    """`Pending` whose answer is computed once, by the thread that asks first."""

    def __init__(self, is_done: Callable[[], bool], compute: Callable[[], T]) -> None:
        """Create it. compute: waits and returns the answer; without a wait once `is_done` is true."""
        self._is_done, self._compute = is_done, compute
        self._answer: list[T] = []

    def done(self) -> bool:
        """See `Pending.done`."""
        return bool(self._answer) or self._is_done()

    def result(self) -> T:
        """See `Pending.result`."""
        if not self._answer:
            self._answer.append(self._compute())
        return self._answer[0]


def then(pending: Pending[S], convert: Callable[[S], T]) -> Once[T]:
    """Return a `Pending` whose answer is computed from that of another one."""
    return Once(pending.done, lambda: convert(pending.result()))


@checked()
@dataclass(frozen=True, slots=True)
class Rows:
    """One row per node that answered in time, in an order equal on all nodes.

    rows: (nodes, width), on CPU.
    """

    rows: Tensor
    mine: NonNegativeInt | None
    """This node's row; None when the others closed the set without it."""


@checked()
@dataclass(frozen=True, slots=True)
class Mean:
    """sum(weight * value) / sum(weight) over the nodes that answered in time; zeros if no weight did."""

    value: Tensor
    total_weight: Tensor
    """0-dim, on the value's device: asking for its number is what waits, not receiving it."""


class Transport(Protocol):
    """Messages between the nodes of one run."""

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes handed to the network so far, those of all channels included."""

    def channel(self, name: str | None = None) -> "Transport":
        """Return a transport between the same nodes whose keys, notes and order of messages are its own.

        So one transport serves several `LayerSync` objects of a process. All nodes make their channels in one
        order. It closes with this transport.

        Args:
            name: Begins its keys in error messages; None: `sync1`, `sync2` and so on, in the order of
                creation.

        Raises:
            ValueError: This node has a channel of that name, or another node's has another name.
        """

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
        """Leave, with all channels.

        Other nodes do not wait for this one from now on, where the transport can do without it.
        """


class ChannelNames:
    """Names of the channels of one transport, in the order of their creation."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str | None) -> str:
        """Return the name of the next channel.

        Raises:
            ValueError: The name is taken, or it is empty or contains a slash or a line break.
        """
        made = f"sync{len(self.names) + 1}" if name is None else name
        fine = isinstance(made, str) and made and not set("/\n") & set(made)
        check(bool(fine), "name", "must be a text without slash and line break, and not empty", made)
        check(made not in self.names, "name", "must be another for each channel of a transport", made)
        self.names.append(made)
        return made

    def compare(self, names: Mapping[int, str], here: int) -> None:
        """Raise ValueError unless all nodes give the newest channel the name that node `here` gives it.

        names: by node.
        """
        mine = self.names[-1]
        for node, theirs in names.items():
            if theirs != mine:
                raise ValueError(
                    f"channel {len(self.names)} of the transport is {mine!r} on node {here} and {theirs!r} "
                    f"on node {node}: make exchanges in one thread, in the same order on all nodes"
                )
