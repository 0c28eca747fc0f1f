"""A `Transport` between threads in virtual time: a thread that waits lets those run that are behind."""

from typing import Generic, TypeVar

from torch import Tensor

from aedit.clock import Turns
from aedit.proto.transports.memory import MemoryTransport
from aedit.proto.transports.transport import Mean, Pending, Rows
from aedit.types import checked

T = TypeVar("T")


@checked()
class VirtualTransport:
    """A memory transport whose waits take virtual time."""

    def __init__(self, transport: MemoryTransport, turns: Turns) -> None:
        self.transport, self.turns = transport, turns

    @property
    def bytes_sent(self) -> int:
        """See `Transport.bytes_sent`."""
        return self.transport.bytes_sent

    def channel(self, name: str | None = None) -> "VirtualTransport":
        """See `Transport.channel`."""
        return VirtualTransport(self.transport.channel(name), self.turns)

    def gather(self, key: str, row: Tensor) -> Pending[Rows]:
        """See `Transport.gather`."""
        return self._asked(key, self.transport.gather(key, row))

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> Pending[Mean]:
        """See `Transport.weighted_mean`."""
        return self._asked(key, self.transport.weighted_mean(key, value, weight))

    def _asked(self, key: str, pending: Pending[T]) -> Pending[T]:
        key = self.transport.prefix + key
        self.turns.give(self.transport.node, key)
        return _Turned(self, key, pending)

    def post(self, key: str, text: str) -> None:
        """See `Transport.post`."""
        self.transport.post(key, text)

    def read(self, key: str) -> str | None:
        """See `Transport.read`."""
        return self.transport.read(key)

    def close(self) -> None:
        """See `Transport.close`."""
        self.transport.close()


class _Turned(Generic[T]):
    def __init__(self, transport: VirtualTransport, key: str, pending: Pending[T]) -> None:
        self._transport, self._key, self._pending = transport, key, pending

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> T:
        if not self._pending.done():
            node = self._transport.transport.node
            self._transport.turns.wait(node, self._key, self._pending.done)
        return self._pending.result()
