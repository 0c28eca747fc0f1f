"""Threads that peers share by turns."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aedit.proto.rpc.fair_turns import FairTurns

T = TypeVar("T")


class Crowded(Exception):
    """A peer has too many calls that wait for a thread."""


class FairPool:
    """Runs functions in `threads` threads. Peers take turns, however many calls each has waiting.

    `run` is for the event loop; all of its state belongs to that thread.
    """

    def __init__(self, threads: int, name: str, *, most_waiting: int = 1024) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._turns = FairTurns(threads)
        self._most_waiting = most_waiting

    async def run(self, peer: Hashable, work: Callable[[], T]) -> T:
        """Return what `work` returns, called in a thread.

        Raises Crowded if this peer has too many calls waiting.
        """
        if self._turns.waiting(peer) >= self._most_waiting:
            raise Crowded(f"{self._most_waiting} calls of this peer wait already")
        turn = self._turns.ask(peer)
        try:
            await turn
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._turns.drop(turn)

    def shutdown(self) -> None:
        """End the threads when they have finished what they do."""
        self._pool.shutdown(wait=False, cancel_futures=True)
