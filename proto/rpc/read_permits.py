"""Permits to read the first message of an upload, which may be large."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from time import monotonic

from aedit.proto.rpc.fair_turns import FairTurns


class ReadPermit:
    """One upload's permit."""

    def __init__(self, peer: Hashable, end: Callable[[], object], since_s: float) -> None:
        self.peer, self.end, self.since_s = peer, end, since_s
        self.has_sent = False
        """Its first message has arrived: it is not ended for silence."""


class ReadPermits:
    """At most `most` uploads are read at a time that have not said yet what they are; the others wait.

    Peers take turns. While others wait, the oldest one of the peer with most of those that have sent nothing
    is ended, once it has had `hold_s`. Used by the event loop only. Without it, a thousand first chunks would
    be in memory before one is refused.
    """

    def __init__(self, most: int, hold_s: float = 1.0, clock: Callable[[], float] = monotonic) -> None:
        self._hold_s, self._clock = hold_s, clock
        self._turns = FairTurns(most)
        self._held: list[ReadPermit] = []

    async def enter(self, peer: Hashable, end: Callable[[], object]) -> ReadPermit:
        """Wait for a permit and return it; `end` ends the upload. `leave` gives it back."""
        turn = self._turns.ask(peer)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=self._hold_s)
                if not turn.done():
                    self.end_oldest()
        except asyncio.CancelledError:
            self._turns.drop(turn)
            raise
        permit = ReadPermit(peer, end, self._clock())
        self._held.append(permit)
        return permit

    def leave(self, permit: ReadPermit) -> None:
        """Give the permit back. Does nothing if that was done before."""
        if permit in self._held:
            self._held.remove(permit)
            self._turns.give()

    def end_oldest(self) -> None:
        """End one upload that has had its time and sent nothing, if there is one."""
        silent = [permit for permit in self._held if not permit.has_sent]
        crowds = Counter(permit.peer for permit in silent)
        late = [permit for permit in silent if self._clock() - permit.since_s >= self._hold_s]
        if late:
            oldest = max(late, key=lambda permit: (crowds[permit.peer], -permit.since_s))
            oldest.end()
            self.leave(oldest)
