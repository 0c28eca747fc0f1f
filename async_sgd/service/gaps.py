"""Gaps in the numbers of pushes: a node whose hub has lost pushes cannot help them, one that goes on can."""

FREE = 2
"""Gaps of a member and unit between two of its accepted pushes that cost nothing.

The first push after a loss, and its repetition if the answer was lost: the answer makes the node join again,
which tells it the right number.
"""


class Gaps:
    """Counts gaps of each member by unit."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[str, dict[int, int]]] = {}
        """Name of the member and its gaps by unit, by index. An index may go to another name later."""

    def add(self, node: int, name: str, unit: int) -> bool:
        """Count a gap and return whether it is a violation."""
        known, counts = self._counts.get(node, (name, {}))
        if known != name:
            counts = {}
        counts[unit] = counts.get(unit, 0) + 1
        self._counts[node] = name, counts
        return counts[unit] > FREE

    def accepted(self, node: int, unit: int) -> None:
        """Note that a push was accepted: gaps count from zero."""
        if node in self._counts:
            self._counts[node][1].pop(unit, None)
