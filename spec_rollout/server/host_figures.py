"""Figures of an `EngineHost`, its time without requests, and times at which refused samples may come back.

These times are spread, so that the samples come as rows become free.
"""

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aedit.spec_rollout.server.host_line import HostLine
from aedit.spec_rollout.server.tickets import Priority

REFRESH_S = 0.2
"""Shortest time between two copies of the status of a busy engine."""
WINDOW_S = 10.0
"""Time over which speed is measured."""
MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
RETURNS_PER_ROW = 2.0
"""Samples that come back for each one that ends. With fewer than one, rows would stay empty."""
MOST_RETURNS = 10_000
"""Refused samples that are counted, so that a flood of requests takes no memory."""


class HostFigures:
    """Copies of figures that only the host's thread may read. Not thread-safe: the host's lock guards it."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lines: dict[str, dict[str, Any]] = {}
        self._num_tokens: dict[str, int] = {}
        self._read_s: dict[str, float] = {}
        self._num_closed_tokens = 0
        self._marks = deque([(clock(), 0, 0)])
        self._retry_times = RetryTimes(clock)
        self.num_over = 0
        """Samples that have left the host."""

    def update(self, line: HostLine, *, now: bool = False) -> None:
        """Copy the status of a line's engine.

        While samples are in it, no more often than every `REFRESH_S`, unless `now`: no step may follow.
        """
        now_s, name = self._clock(), line.name
        self._num_tokens[name] = line.engine.meters.num_tokens
        if not now and line.tickets and now_s - self._read_s.get(name, -REFRESH_S) < REFRESH_S:
            return
        self._read_s[name] = now_s
        num_run = sum(ticket.priority is Priority.RUN for ticket in line.tickets.values())
        self._lines[name] = {
            **line.engine.status(),
            "rows": line.engine.target.rows,
            "run_samples": num_run,
            "public_samples": len(line.tickets) - num_run,
            "finishing_samples": line.num_finishing,
            "spare_weight_bytes": line.weights.num_bytes,
        }
        self._marks.append((now_s, self.num_tokens, self.num_over))
        while len(self._marks) > 2 and self._marks[1][0] < now_s - WINDOW_S:
            self._marks.popleft()

    def forget(self, name: str) -> None:
        """Drop a closed line."""
        self._num_closed_tokens += self._num_tokens.pop(name, 0)
        self._lines.pop(name, None)
        self._read_s.pop(name, None)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that all engines have generated."""
        return self._num_closed_tokens + sum(self._num_tokens.values())

    def refuse(self, num_waiting: int) -> float:
        """Return the seconds after which a sample that is refused now may come back (`RetryTimes.refuse`)."""
        return self._retry_times.refuse(num_waiting, self._per_s(2, self.num_over))

    def status(self) -> dict[str, Any]:
        """Return tokens, finished samples, tokens per second of the last seconds, and the lines."""
        return {
            "tokens": self.num_tokens,
            "over": self.num_over,
            "tokens_per_s": self._per_s(1, self.num_tokens),
            "lines": {name: dict(figures) for name, figures in self._lines.items()},
        }

    def _per_s(self, i: int, total: int) -> float:
        now_s = self._clock()
        recent = [mark for mark in self._marks if mark[0] >= now_s - WINDOW_S]
        if not recent or now_s <= recent[0][0]:
            return 0.0
        return float(total - recent[0][i]) / (now_s - recent[0][0])


@dataclass(slots=True)
class IdleTime:
    """Seconds without a request."""

    seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _began_s: float | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def measured(self, cause: str) -> Iterator[None]:
        """Count the time inside the context if there is no request."""
        counts = cause == "no requests"
        with self._lock:
            self._began_s = self.clock() if counts else None
        try:
            yield
        finally:
            with self._lock:
                if self._began_s is not None:
                    self.seconds += self.clock() - self._began_s
                self._began_s = None

    @property
    def so_far_s(self) -> float:
        """Return the seconds, with those of a time that has not ended."""
        with self._lock:
            return self.seconds + (0.0 if self._began_s is None else self.clock() - self._began_s)

    @property
    def is_now(self) -> bool:
        """Return whether there is no request now."""
        return self._began_s is not None


class RetryTimes:
    """Gives each refused sample a time, and counts it as one that will come back then. Not thread-safe.

    If all refused samples got the time at which the queue is empty, they would come back together: many
    clients would be refused again and again, and their requests would take the processor from the samples.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._return_s: list[float] = []

    def refuse(self, num_waiting: int, over_per_s: float) -> float:
        """Return the seconds after which a sample that is refused now may come back.

        Args:
            num_waiting: Samples of its priority that wait.
            over_per_s: Samples that ended per second lately; 0 if none has.
        """
        now_s = self._clock()
        while self._return_s and self._return_s[0] <= now_s:
            heapq.heappop(self._return_s)
        before = num_waiting + len(self._return_s) / RETURNS_PER_ROW
        estimated_s = before / over_per_s if over_per_s else MIN_RETRY_S
        retry_s = min(MAX_RETRY_S, max(MIN_RETRY_S, estimated_s))
        if len(self._return_s) < MOST_RETURNS:
            heapq.heappush(self._return_s, now_s + retry_s)
        return retry_s
