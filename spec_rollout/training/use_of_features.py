"""Decision whether features find a use: a node that never waits does not collect them."""

from dataclasses import dataclass

PATIENCE = 32
"""Policy versions without a wait after which features are not collected any longer."""
LEAST_SHARE, LEAST_S = 0.002, 1.0
"""A version has a wait if this share of its time was waited, or so many seconds."""


@dataclass(slots=True)
class UseOfFeatures:
    """Waits of a node by policy version.

    Features are collected from the start, so that the first wait has some. They end after `patience` versions
    without a wait and begin again with the next wait. From then on the patience is twice the longest time
    without one: a node that waits rarely has features whenever it waits.
    """

    patience: int = PATIENCE
    unused: int = 0
    """Versions since the last wait."""
    _idle_s: float = 0.0
    _began_s: float = 0.0

    def next_version(self, idle_s: float, now_s: float) -> bool:
        """Return whether to collect the features of the next version.

        Args:
            idle_s: All time that the node has waited so far.
            now_s: Time, of any clock.
        """
        waited_s, lasted_s = idle_s - self._idle_s, now_s - self._began_s
        self._idle_s, self._began_s = idle_s, now_s
        if waited_s > 0 and waited_s >= min(LEAST_S, LEAST_SHARE * lasted_s):
            self.patience, self.unused = max(self.patience, 2 * self.unused), 0
        else:
            self.unused += 1
        return self.unused < self.patience
