"""Calls that have been opened and have sent nothing yet."""

from collections import OrderedDict
from collections.abc import Callable, Hashable


class WaitingCalls:
    """Calls of which no message has arrived. Used by the event loop only.

    Above `most`, the oldest one of the peer that has the most is ended to make room.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self._by_peer: dict[Hashable, OrderedDict[object, Callable[[], object]]] = {}

    def enter(self, peer: Hashable, call: object, end: Callable[[], object]) -> None:
        """Add a call; `end` ends it."""
        self._by_peer.setdefault(peer, OrderedDict())[call] = end
        self._count += 1
        if self._count > self._most:
            crowd = max(self._by_peer, key=lambda peer: len(self._by_peer[peer]))
            oldest, end_oldest = next(iter(self._by_peer[crowd].items()))
            self.leave(crowd, oldest)
            end_oldest()

    def leave(self, peer: Hashable, call: object) -> None:
        """Remove a call that has sent something, or is over. Does nothing if it is not there."""
        calls = self._by_peer.get(peer)
        if calls and calls.pop(call, None) is not None:
            self._count -= 1
            if not calls:
                del self._by_peer[peer]
