"""Threads that peers share by turns."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Crowded(Exception):
    """A peer has too many calls that wait for a thread."""


class FairPool:
    """Runs functions in `threads` threads. Peers take turns, however many calls each has waiting.

    `run` is for the event loop; all of its state belongs to that thread.
    """

    def __init__(self, threads: int, name: str, *, most_waiting: int = 1024) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._most_waiting = most_waiting
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, peer: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread.

        Raises Crowded if this peer has too many calls waiting.
        """
        await self._turn(peer)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._pass_on()

    def shutdown(self) -> None:
        """End the threads when they have finished what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, peer: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        queue = self._waiting.setdefault(peer, deque())
        if len(queue) >= self._most_waiting:
            raise Crowded(f"{len(queue)} calls of this peer wait already")
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give the free thread to the next peer's first call that still waits."""
        while self._waiting:
            peer, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[peer] = queue
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
