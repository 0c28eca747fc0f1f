"""When a peer that has just started knows enough of the others to begin to keep parts."""

import time
from collections.abc import Callable, Collection

_LEAST_S, _STEADY_S, _MOST_S = 3.0, 2.0, 15.0
"""Least time since the start, time in which no other peer has been found, and time after which it begins."""


class Newcomer:
    """A peer that has just started.

    It knows the peer that it was told of, then those that this one tells, once they have answered. Until then
    it seems to be one of few: it would begin to keep, and fetch, every part of the model.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start now. clock: in seconds."""
        self._clock, self._began_s = clock, clock()
        self._found_s, self._known = self._began_s, set[bytes]()

    def knows_enough(self, live: Collection[bytes]) -> bool:
        """Return whether it may begin to keep parts. live: keys of the live peers."""
        now = self._clock()
        if not self._known.issuperset(live):
            self._found_s = now
            self._known |= set(live)
        up_s = now - self._began_s
        return up_s >= _MOST_S or (up_s >= _LEAST_S and now - self._found_s >= _STEADY_S)
