"""End streams that stand still.

A deadline for the whole would have to be hours for an array of gigabytes, and keepalive says only that the
peer's kernel is there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic


class Stream:
    """One transfer under way. Its thread calls `moved`."""

    def __init__(self, cancel: Callable[[], object], stall_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stall_s = stall_s
        self.started_s = self.last_s = clock()
        self.num_bytes = 0
        self.cancel = cancel
        self.stalled = False
        """It was ended for standing still."""

    def moved(self, num_bytes: int) -> None:
        """Note that so many more bytes have passed."""
        self.num_bytes += num_bytes
        self.last_s = self._clock()

    def due_s(self, bytes_per_s: float) -> float:
        """Return when it is to be ended, if nothing more passes."""
        paid_s = self.num_bytes / bytes_per_s
        return min(self.last_s, self.started_s + paid_s) + self._stall_s


class Watch:
    """Cancels a stream in which nothing has passed for `stall_s`, or less than `bytes_per_s` on average.

    `clock` is for tests; a thread runs only while there are streams.
    """

    def __init__(
        self, stall_s: float, bytes_per_s: float = 1024.0, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stall_s = stall_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._streams: set[Stream] = set()
        self._wake = threading.Condition()
        self._runs = False

    @contextmanager
    def over(self, cancel: Callable[[], object], stall_s: float | None = None) -> Iterator[Stream]:
        """Watch the stream that `cancel` ends for as long as the context lasts."""
        stream = Stream(cancel, self._stall_s if stall_s is None else stall_s, self._clock)
        with self._wake:
            self._streams.add(stream)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="watch", daemon=True).start()
            self._wake.notify()
        try:
            yield stream
        finally:
            with self._wake:
                self._streams.discard(stream)
                self._wake.notify()

    def end_stalled(self) -> float:
        """Cancel what is due; return the seconds until the next one may be."""
        now_s = self._clock()
        with self._wake:
            due = {stream: stream.due_s(self._bytes_per_s) for stream in self._streams}
            late = [stream for stream, due_s in due.items() if due_s <= now_s]
            self._streams.difference_update(late)
        for stream in late:
            stream.stalled = True
            stream.cancel()
        return min((due_s - now_s for due_s in due.values() if due_s > now_s), default=self._stall_s)

    def _run(self) -> None:
        while True:
            wait_s = self.end_stalled()
            with self._wake:
                if not self._streams:
                    self._runs = False
                    return
                self._wake.wait(wait_s)
