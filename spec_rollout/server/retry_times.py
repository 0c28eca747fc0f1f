"""Times after which refused samples may come back, spread so that they come as rows become free."""

import heapq
from collections.abc import Callable

MIN_RETRY_S, MAX_RETRY_S = 1.0, 30.0
RETURNS_PER_ROW = 2.0
"""Samples that come back for each one that ends. With fewer than one, rows would stay empty."""
MOST_RETURNS = 10_000
"""Refused samples that are counted, so that a flood of requests takes no memory."""


class RetryTimes:
    """Gives each refused sample a time, and counts it as one that will come back then. Not thread-safe.

    Were all refused ones told when the samples of the queue are over, they would come back together: many
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
