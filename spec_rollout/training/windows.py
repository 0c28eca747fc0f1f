"""Record of the times in which a node waited, by cause."""

from collections import deque
from dataclasses import dataclass

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

    def leave(self, cause: str, began_s: float, now_s: float) -> bool:
        """Close a window; return true if no other is open."""
        self.num_open -= 1
        self.count += 1
        self.spans.append(Span(cause, began_s, now_s))
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + now_s - began_s
        if self.num_open == 0:
            self._idle_s += now_s - self._idle_since_s
        return self.num_open == 0

    def idle_s(self, now_s: float) -> float:
        """Return all idle seconds until now."""
        return self._idle_s + (now_s - self._idle_since_s if self.num_open else 0.0)
