"""Numbers of nodes, kept in order, so that a median costs the same however many nodes there are."""

from bisect import bisect_left, insort
from collections.abc import Sequence


class Ranking:
    """Numbers in ascending order, at most one per node."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._sorted: list[float] = []

    def put(self, node: int, value: float | None) -> None:
        """Set the number of a node; None takes it out."""
        before = self._of.pop(node, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        if value is not None:
            self._of[node] = value
            insort(self._sorted, value)

    def clear(self) -> None:
        """Take all nodes out."""
        self._of.clear()
        self._sorted.clear()

    @property
    def nodes(self) -> Sequence[int]:
        """Return the nodes that have a number."""
        return tuple(self._of)

    @property
    def values(self) -> Sequence[float]:
        """Return all numbers, ascending; valid until the next change."""
        return self._sorted

    @property
    def median(self) -> float:
        """Return the number in the middle, or the mean of the two; there must be one."""
        low, high = (len(self._sorted) - 1) // 2, len(self._sorted) // 2
        return self._sorted[low] if low == high else (self._sorted[low] + self._sorted[high]) / 2

    def low_median_without(self, node: int) -> float | None:
        """Return the number in the middle, or the smaller of the two, of all other nodes.

        None if there are fewer than two.
        """
        own = self._of.get(node)
        num = len(self._sorted) - (own is not None)
        if num < 2:
            return None
        middle = (num - 1) // 2
        skipped = own is not None and bisect_left(self._sorted, own) <= middle
        return self._sorted[middle + skipped]

    def __contains__(self, node: object) -> bool:
        return node in self._of

    def __len__(self) -> int:
        return len(self._of)
