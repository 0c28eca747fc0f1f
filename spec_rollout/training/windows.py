"""Times in which a node waited, by cause, and whether features find a use."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aedit.spec_rollout.training.publishing import Publication

KEPT_SPANS = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """One wait, in seconds on the monotonic clock."""

    cause: str
    began_s: float
    ended_s: float


class Windows:
    """Idle windows of a node.

    Windows of several threads may overlap; the node is idle while at least one is open. Not thread-safe: its
    owner holds a lock.
    """

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        """Latest windows."""
        self.by_cause: dict[str, float] = {}
        """Seconds by cause; overlapping windows count for each."""
        self.used_by_cause: dict[str, float] = {}
        """Seconds of the work by the cause of the window that ended next. What is measured at the end of a
        piece of work counts for the window in which that was."""
        self._used_s = 0.0
        self.count = 0
        """Number of windows that have ended."""
        self.num_open = 0
        self._idle_s, self._idle_since_s = 0.0, 0.0

    def enter(self, now_s: float) -> bool:
        """Open a window; return true if it is the only open one."""
        self.num_open += 1
        if self.num_open == 1:
            self._idle_since_s = now_s
        return self.num_open == 1

    def leave(self, cause: str, began_s: float, now_s: float, used_s: float = 0.0) -> bool:
        """Close a window; return true if no other is open. used_s: by the work, in all windows so far."""
        self.num_open -= 1
        self.count += 1
        self.spans.append(Span(cause, began_s, now_s))
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + now_s - began_s
        self.used_by_cause[cause] = self.used_by_cause.get(cause, 0.0) + used_s - self._used_s
        self._used_s = used_s
        if self.num_open == 0:
            self._idle_s += now_s - self._idle_since_s
        return self.num_open == 0

    def idle_s(self, now_s: float) -> float:
        """Return all idle seconds until now."""
        return self._idle_s + (now_s - self._idle_since_s if self.num_open else 0.0)


PATIENCE = 32
"""Policy versions without a used wait after which features are not collected any longer."""
RETRY_VERSIONS = 8
"""Versions of each later attempt."""
LEAST_SHARE, LEAST_S = 0.002, 1.0
"""A version has a wait if this share of its time was waited, or so many seconds."""
USED_SHARE = 0.1
"""Share of its waits in which the trainer must have computed for them to count as used."""


@dataclass(slots=True)
class UseOfFeatures:
    """Decides by policy version whether the features of a node are collected.

    Features are collected from the start, so that the first wait has some. They end after `patience` versions
    without a wait that the trainer used: waits of a few milliseconds are too short for it. They begin again
    with the next wait, each time for `RETRY_VERSIONS`, and after twice as many waits as before. Once a wait
    was used, the patience is twice the longest time without one: a node that waits rarely has features
    whenever it waits.
    """

    patience: int = PATIENCE
    unused: int = 0
    """Versions since the last used wait, or since the last attempt but for `RETRY_VERSIONS`."""
    _since: int = 0
    """Versions since the last used wait."""
    _waits: int = 0
    """Waits while nothing was collected."""
    _rest: int = 1
    """Waits until the next attempt."""
    _idle_s: float = 0.0
    _used_s: float = 0.0
    _began_s: float = 0.0

    def next_version(self, idle_s: float, used_s: float, now_s: float, *, rests: bool = False) -> bool:
        """Return whether to collect the features of the next version.

        Args:
            idle_s: All time that the node has waited so far.
            used_s: All processor time that the trainer has computed in it.
            now_s: Time, of any clock.
            rests: The trainer leaves waits unused by its own choice, and measures on the features.
        """
        waited_s, computed_s = idle_s - self._idle_s, used_s - self._used_s
        lasted_s = now_s - self._began_s
        self._idle_s, self._used_s, self._began_s = idle_s, used_s, now_s
        has_wait = waited_s > 0 and waited_s >= min(LEAST_S, LEAST_SHARE * lasted_s)
        if has_wait and (rests or computed_s >= USED_SHARE * waited_s):
            self.patience = max(self.patience, 2 * self._since)
            self.unused = self._since = self._waits = 0
            self._rest = 1
            return True
        self.unused, self._since = self.unused + 1, self._since + 1
        if self.unused < self.patience:
            return True
        self._waits += has_wait
        if self._waits < self._rest:
            return False
        self.unused, self._waits, self._rest = max(0, self.patience - RETRY_VERSIONS), 0, 2 * self._rest
        return True


class NoTraining:
    """`DrafterTraining` without a trainer."""

    def __init__(self) -> None:
        self.windows = Windows()
        self._lock = threading.Lock()

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Measure the time inside the context."""
        with self._lock:
            began_s = time.monotonic()
            self.windows.enter(began_s)
        try:
            yield
        finally:
            with self._lock:
                self.windows.leave(cause, began_s, time.monotonic())

    @property
    def used_s(self) -> float:
        """Return 0."""
        return 0.0

    def newest(self, after: int = 1) -> Publication | None:
        """Return None."""
        return None

    def pause(self) -> None:
        """Do nothing."""

    def unpause(self) -> None:
        """Do nothing."""

    def update_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Do nothing."""

    def offer(self, drafter: Mapping[str, Tensor]) -> int:
        """Return 1, the number of the initial drafter."""
        return 1

    def status(self) -> dict[str, Any]:
        """Return the windows; see `DrafterTraining.status`."""
        with self._lock:
            return {
                "state": "off",
                "error": "",
                "windows": self.windows.count,
                "idle_s": self.windows.idle_s(time.monotonic()),
                "idle_by_cause_s": dict(self.windows.by_cause),
                "steps": 0,
                "published": 0,
                "refused": 0,
                "training": {},
            }

    def close(self) -> None:
        """Do nothing."""
