"""Places that peers take by turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Hashable


class FairTurns:
    """At most `places` are taken at a time. Peers take turns, however often each has asked.

    Used by the event loop only.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    def waiting(self, peer: Hashable) -> int:
        """Return how many turns this peer has asked for and not got."""
        return len(self._waiting.get(peer, ()))

    def ask(self, peer: Hashable) -> "asyncio.Future[None]":
        """Return a future that is done when a place is the caller's, until `give` or `drop`."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            turn.set_result(None)
        else:
            self._waiting.setdefault(peer, deque()).append(turn)
        return turn

    def drop(self, turn: "asyncio.Future[None]") -> None:
        """Ask no longer; give back the place if it is the caller's already."""
        if turn.done() and not turn.cancelled():
            self.give()
        turn.cancel()

    def give(self) -> None:
        """Give a place back: to the next peer's first turn that is still asked for."""
        while self._waiting:
            peer, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[peer] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
