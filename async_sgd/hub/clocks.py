"""Volatile state of a hub: what need not survive a restart."""

from aedit.async_sgd.hub.members import Report
from aedit.async_sgd.hub.ranking import Ranking


class Clocks:
    """Volatile state: true now, and not necessarily after a restart."""

    def __init__(self) -> None:
        self.offset_s: float | None = None
        self.began_s = -1.0
        """Age of the run at which this hub process began; below 0 if it began with the run."""
        self.seen: dict[int, float] = {}
        self.came_s: dict[tuple[int, int, int], float] = {}
        """Time at which a push arrived, by unit, node and sequence number."""
        self.pushed_s: dict[tuple[int, int], float] = {}
        """Age of the run at the last accepted push, by unit and node. The journal has it to a second."""
        self.reports: dict[int, Report] = {}
        self.speeds = Ranking()
        """Inner steps per second of the live nodes that have pushed, each as of its last word."""
