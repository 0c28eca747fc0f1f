"""Permits to read the first message of an upload, which may be large."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from time import monotonic


@dataclass(slots=True, eq=False)
class _Reader:
    peer: Hashable
    end: Callable[[], object]
    since_s: float


class ReadPermits:
    """At most `most` uploads are read at a time that have not said yet what they are; the others wait.

    While others wait, the oldest one of the peer with most of them is ended, once it has had `hold_s`. Used
    by the event loop only. Without it, a thousand first chunks would be in memory before one is refused.
    """

    def __init__(self, most: int, hold_s: float = 1.0, clock: Callable[[], float] = monotonic) -> None:
        self._most, self._hold_s, self._clock = most, hold_s, clock
        self._readers: list[_Reader] = []
        self._queue: deque[asyncio.Future[None]] = deque()

    async def enter(self, peer: Hashable, end: Callable[[], object]) -> Callable[[], None]:
        """Wait for a permit and return the function that gives it back; `end` ends the upload."""
        if len(self._readers) >= self._most or self._queue:
            await self._turn()
        reader = _Reader(peer, end, self._clock())
        self._readers.append(reader)

        def leave() -> None:
            if reader in self._readers:
                self._readers.remove(reader)
                self._wake()

        return leave

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append(turn)
        try:
            while not turn.done():
                await asyncio.wait([turn], timeout=self._hold_s)
                if not turn.done():
                    self.end_oldest()
        finally:
            if turn in self._queue:
                self._queue.remove(turn)

    def end_oldest(self) -> None:
        """End one upload that has had its time and sent nothing, if there is one."""
        crowds = Counter(reader.peer for reader in self._readers)
        late = [one for one in self._readers if self._clock() - one.since_s >= self._hold_s]
        if late:
            oldest = max(late, key=lambda one: (crowds[one.peer], -one.since_s))
            self._readers.remove(oldest)
            oldest.end()
            self._wake()

    def _wake(self) -> None:
        if self._queue:
            self._queue.popleft().set_result(None)
