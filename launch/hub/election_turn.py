"""The time at which a replica of a swarm asks to be elected, so that of several one asks first."""

import random
import time
from collections.abc import Callable

_APART_S = 1.0
"""Between the turns of two replicas that have lost their owner together."""


class ElectionTurn:
    """The next time at which a replica without an owner asks for votes."""

    def __init__(self, window_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Draw the first time. window_s: how long a request for votes lasts."""
        self._window_s, self._clock = window_s, clock
        self._at_s = self._drawn_s()

    def lost_owner(self, place: int | None) -> None:
        """Note that the owner cannot be followed any more: the replicas ask one after the other.

        place: of this replica among those that are left, from 0; None if it has none.
        """
        self._at_s = self._drawn_s() if place is None else self._clock() + place * _APART_S

    def take(self) -> bool:
        """Return whether it is time to ask now; the next time is then drawn anew."""
        if self._clock() < self._at_s:
            return False
        self._at_s = self._drawn_s()
        return True

    def _drawn_s(self) -> float:
        return self._clock() + self._window_s * random.uniform(0.5, 1.5)
