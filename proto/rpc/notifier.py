"""Wakes calls in an event loop that wait for something that happens in a thread."""

import asyncio
import contextlib
import threading
from dataclasses import dataclass


class Notifier:
    """Counts what happens, and wakes those who wait for the next time. Any thread may call `notify`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.count = 0

    def notify(self) -> None:
        """Count another time, and wake those who wait."""
        with self._lock:
            self.count += 1
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(event.set)

    async def wait(self, seen: int, limit_s: float) -> None:
        """Return when it has notified more often than `seen` times, or after `limit_s`."""
        entry = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self.count != seen:
                return
            self._waiting.append(entry)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(entry[1].wait(), limit_s)
        finally:
            with self._lock, contextlib.suppress(ValueError):  # it was notified
                self._waiting.remove(entry)


@dataclass(frozen=True, slots=True)
class Quiet:
    """Yielded by a handler that streams and has nothing to send: it is asked again after a notification."""

    notifier: Notifier
    seen: int
    """Notifications before there was nothing."""
    limit_s: float
    """Time after which the handler is asked again in any case."""
