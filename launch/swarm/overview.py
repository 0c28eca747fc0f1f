"""Decides whether a peer knows enough of the others to begin to keep parts."""

import time
from collections.abc import Callable, Collection

_LEAST_S, _STEADY_S, _MOST_S = 3.0, 2.0, 60.0
"""Least time that it waits, time in which no other peer has come, and longest time that it waits."""
_ANSWERS = 3
"""Least number of answers of other peers in which none has come."""
_LATE_S = 3.0
"""Time between two looks after which this process was stopped, or has too little of its machine."""
_MANY = 3
"""One of so many that vanish within a lease: it may be this peer that does not hear."""


class Overview:
    """Waits after the start, after a stop, and when many have vanished.

    A peer that has just started knows the peer that it was told of, then those that this one tells, once they
    have answered. Until then it seems to be one of few: it would begin to keep, and fetch, every part of the
    model. So would one that hears from others again after a stop or a cut. On a busy machine answers come
    late, so answers count and not only time.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Wait from now on. lease_s: of the peers' cards. clock: in seconds."""
        self._lease_s, self._clock = lease_s, clock
        self._looked_s = self._came_s = clock()
        self._waits_since_s: float | None = self._looked_s
        self._answers, self._live = 0, frozenset[bytes]()
        self._vanished_s: dict[bytes, float] = {}

    def is_enough(self, live: Collection[bytes], answers: int) -> bool:
        """Return whether the peer may begin to keep parts.

        Args:
            live: Keys of the live peers.
            answers: Number of answers of other peers that it has taken since it started.
        """
        now, before = self._clock(), self._live
        late = now - self._looked_s > _LATE_S
        self._live, self._looked_s = frozenset(live), now
        if late or not self._live <= before:
            self._came_s, self._answers = now, answers
        if late or (before - self._live and self._many_have_vanished(before, now)):
            self._waits_since_s = now if self._waits_since_s is None else self._waits_since_s
        if self._waits_since_s is None:
            return True
        waited_s = now - self._waits_since_s
        is_steady = now - self._came_s >= _STEADY_S and answers - self._answers >= _ANSWERS
        if waited_s >= _MOST_S or (waited_s >= _LEAST_S and is_steady):
            self._waits_since_s = None
        return self._waits_since_s is None

    def _many_have_vanished(self, before: frozenset[bytes], now: float) -> bool:
        self._vanished_s |= dict.fromkeys(before - self._live, now)
        self._vanished_s = {
            key: at_s
            for key, at_s in self._vanished_s.items()
            if key not in self._live and now - at_s < self._lease_s
        }
        return len(self._vanished_s) * _MANY >= len(self._live) + len(self._vanished_s)
