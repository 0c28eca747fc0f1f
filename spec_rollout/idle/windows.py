"""When a node has waited, and for what."""

from collections import deque
from dataclasses import dataclass

KEPT_SPANS = 10_000


@dataclass(frozen=True, slots=True)
class Span:
    """One wait, on the monotonic clock."""

    cause: str
    began_s: float
    ended_s: float


class Windows:
    """Spans in which the node had nothing else to do. They may overlap, when several threads wait; the
    node's idle time is where at least one was open. Not for several threads at once: its owner has a lock."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=KEPT_SPANS)
        """The latest."""
        self.by_cause: dict[str, float] = {}
        """Seconds; overlapping ones count for each."""
        self.count = 0
        """Windows that have ended."""
        self.num_open = 0
        self._idle_s, self._idle_since_s = 0.0, 0.0

    def enter(self, now_s: float) -> bool:
        """Whether it is the only one."""
        self.num_open += 1
        if self.num_open == 1:
            self._idle_since_s = now_s
        return self.num_open == 1

    def leave(self, cause: str, began_s: float, now_s: float) -> bool:
        """Whether it was the last one."""
        self.num_open -= 1
        self.count += 1
        self.spans.append(Span(cause, began_s, now_s))
        self.by_cause[cause] = self.by_cause.get(cause, 0.0) + now_s - began_s
        if self.num_open == 0:
            self._idle_s += now_s - self._idle_since_s
        return self.num_open == 0

    def idle_s(self, now_s: float) -> float:
        """All idle time until now."""
        return self._idle_s + (now_s - self._idle_since_s if self.num_open else 0.0)
