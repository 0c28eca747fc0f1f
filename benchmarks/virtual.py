"""Nodes that compute for real in virtual time: one at a time, always the one whose clock is furthest behind.

The same seed gives the same bits whatever the machine does, also when rounds are opened by the clock, and
no two threads fight for a core.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition
from typing import Generic, TypeVar

from torch import Tensor

from aedit.proto.transports.memory import MemoryTransport
from aedit.proto.transports.transport import Mean, Pending, Rows

T = TypeVar("T")

TURN_WITHIN_S = 300.0


@dataclass(slots=True)
class _Waiting:
    """ready: whether the node could go on. at: the virtual time of the answer it waits for, if any."""

    ready: Callable[[], bool]
    at: Callable[[], float]


class Turns:
    """The virtual clocks of all nodes, and whose turn it is."""

    def __init__(self, nodes: int) -> None:
        self.now_s = [0.0] * nodes
        self.given_at: dict[str, float] = {}
        """When the last node so far has brought its part to a key."""
        self._waiting = dict.fromkeys(range(nodes), _READY)
        self._turn: int | None = 0
        self._changed = Condition()

    def begin(self, node: int) -> None:
        """Wait for this node's first turn."""
        self._until_mine(node)

    def step(self, node: int, seconds: float) -> None:
        """Let `seconds` of this node's time pass, and those go first who are now behind it."""
        self.now_s[node] += seconds
        self._hand_over(node, _READY)

    def wait(self, node: int, key: str, pending: Pending[T]) -> None:
        """Let others work until `pending`, asked for under `key`, is answered."""
        self._hand_over(node, _Waiting(pending.done, lambda: self.given_at[key]))
        self.now_s[node] = max(self.now_s[node], self.given_at[key])

    def leave(self, node: int) -> None:
        """This node takes no further turns."""
        with self._changed:
            self._next()

    def _hand_over(self, node: int, waiting: _Waiting) -> None:
        with self._changed:
            self._waiting[node] = waiting
            self._next()
        self._until_mine(node)

    def _next(self) -> None:
        runnable = [(max(self.now_s[n], w.at()), n) for n, w in self._waiting.items() if w.ready()]
        self._turn = min(runnable)[1] if runnable else None
        self._changed.notify_all()

    def _until_mine(self, node: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == node, TURN_WITHIN_S):
                raise TimeoutError(f"node {node}: no turn within {TURN_WITHIN_S:g} s")
            del self._waiting[node]


_READY = _Waiting(lambda: True, lambda: 0.0)


class VirtualTransport:
    """A memory transport whose waits give the turn away."""

    def __init__(self, transport: MemoryTransport, turns: Turns) -> None:
        self.transport, self.turns = transport, turns
        self.bytes_sent = 0

    def gather(self, key: str, row: Tensor) -> Pending[Rows]:
        return self._asked(key, self.transport.gather(key, row))

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> Pending[Mean]:
        return self._asked(key, self.transport.weighted_mean(key, value, weight))

    def _asked(self, key: str, pending: Pending[T]) -> Pending[T]:
        given_at, now_s = self.turns.given_at, self.turns.now_s[self.transport.node]
        given_at[key] = max(given_at.get(key, 0.0), now_s)
        self.bytes_sent = self.transport.bytes_sent
        return _Turned(self, key, pending)

    def post(self, key: str, text: str) -> None:
        self.transport.post(key, text)

    def read(self, key: str) -> str | None:
        return self.transport.read(key)

    def close(self) -> None:
        self.transport.close()


class _Turned(Generic[T]):
    def __init__(self, transport: VirtualTransport, key: str, pending: Pending[T]) -> None:
        self._transport, self._key, self._pending = transport, key, pending

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> T:
        if not self._pending.done():
            self._transport.turns.wait(self._transport.transport.node, self._key, self._pending)
        return self._pending.result()
