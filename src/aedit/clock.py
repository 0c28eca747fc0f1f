"""Virtual time: a clock that moves on request, and turns for threads that each have such a clock.

Tests, benchmarks and the simulator run the production code on it: results do not depend on the machine.
Standard library only.
"""

from collections.abc import Callable
from threading import Condition

from aedit.types import checked

TURN_WITHIN_S = 300.0
"""Real seconds that a thread waits for its turn before it raises TimeoutError."""


@checked()
class VirtualClock:
    """A clock in seconds that moves only on request. Call it like `time.monotonic`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`. Raises ValueError if they are negative."""
        if seconds < 0:
            raise ValueError(f"a clock cannot be advanced by {seconds:g} s: give 0 or more")
        self.now_s += seconds

    def advance_to(self, now_s: float) -> None:
        """Move forward to `now_s`; do nothing if it is in the past."""
        self.now_s = max(self.now_s, now_s)


Waiting = tuple[Callable[[], bool], Callable[[], float]]
"""Whether a thread could go on, and the virtual time of the answer that it waits for."""
_READY: Waiting = (lambda: True, lambda: 0.0)


class Turns:
    """Virtual clocks of threads that run one at a time: always the one whose clock is furthest behind.

    The same program gives the same results whatever the machine does, also where decisions depend on time.
    """

    def __init__(self, threads: int) -> None:
        self.clocks = [VirtualClock() for _ in range(threads)]
        self.given_at: dict[str, float] = {}
        """Time at which the last thread so far brought its part, in virtual seconds, by key."""
        self._waiting = dict.fromkeys(range(threads), _READY)
        self._turn: int | None = 0
        self._changed = Condition()

    def begin(self, thread: int) -> None:
        """Wait for the first turn of `thread`."""
        self._until_turn(thread)

    def step(self, thread: int, seconds: float) -> None:
        """Let `seconds` pass for `thread`, and first run all threads that are now behind it."""
        self.clocks[thread].advance(seconds)
        self._hand_over(thread, _READY)

    def give(self, thread: int, key: str) -> None:
        """Record that `thread` brings its part to `key` now."""
        self.given_at[key] = max(self.given_at.get(key, 0.0), self.clocks[thread].now_s)

    def wait(self, thread: int, key: str, ready: Callable[[], bool]) -> None:
        """Let others run until `ready()`; the clock moves to when the last part was brought to `key`."""
        self._hand_over(thread, (ready, lambda: self.given_at[key]))
        self.clocks[thread].advance_to(self.given_at[key])

    def leave(self, thread: int) -> None:
        """Give the turn away for good."""
        with self._changed:
            self._next()

    def _hand_over(self, thread: int, waiting: Waiting) -> None:
        with self._changed:
            self._waiting[thread] = waiting
            self._next()
        self._until_turn(thread)

    def _next(self) -> None:
        runnable = [
            (max(self.clocks[n].now_s, at_s()), n) for n, (ready, at_s) in self._waiting.items() if ready()
        ]
        self._turn = min(runnable)[1] if runnable else None
        self._changed.notify_all()

    def _until_turn(self, thread: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._turn == thread, TURN_WITHIN_S):
                raise TimeoutError(f"thread {thread}: no turn within {TURN_WITHIN_S:g} s of real time")
            del self._waiting[thread]
