"""Traffic of an agent: bytes moved, and the time in which any transfer was under way."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Traffic:
    """Counters that several threads update."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since_s = 0.0
        self._wire_s = 0.0
        self.bytes_up = 0
        self.bytes_down = 0

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Count the time of the block as transfer time; overlapping blocks count once."""
        with self._lock:
            self._since_s = self._since_s if self._active else self._clock()
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                self._wire_s += 0.0 if self._active else self._clock() - self._since_s

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Add bytes."""
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down

    @property
    def wire_s(self) -> float:
        """Return the seconds in which a transfer was under way."""
        with self._lock:
            return self._wire_s + (self._clock() - self._since_s if self._active else 0.0)
