"""Volatile state of a hub: what need not survive a restart."""

from aedit.async_sgd.hub.members import Report


class Clocks:
    """Volatile state: true now, and not necessarily after a restart."""

    def __init__(self) -> None:
        self.offset_s: float | None = None
        self.seen: dict[int, float] = {}
        self.came_s: dict[tuple[int, int, int], float] = {}
        """By unit, node and sequence number."""
        self.reports: dict[int, Report] = {}
