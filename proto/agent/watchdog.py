"""Detect a trainer that hangs, by its step counter alone."""

from dataclasses import dataclass

LEAST_S = 30.0
USUAL = 20.0
KEEP = 0.9
"""Share of the old average that stays when a new measurement comes in."""


@dataclass(frozen=True, slots=True)
class Watchdog:
    """Immutable state; `see` returns the next one. Times are on any monotonic clock."""

    steps: int = -1
    moved_s: float = 0.0
    usual_s: float = 0.0
    """Time of a step of late."""

    def see(self, steps: int, now_s: float) -> "Watchdog":
        """Return the state after the trainer has done `steps` steps at `now_s`."""
        if steps == self.steps:
            return self
        if self.steps < 0 or steps < self.steps:
            return Watchdog(steps, now_s, self.usual_s)
        step_s = (now_s - self.moved_s) / (steps - self.steps)
        usual_s = step_s if self.usual_s == 0 else KEEP * self.usual_s + (1 - KEEP) * step_s
        return Watchdog(steps, now_s, usual_s)

    def is_stalled(self, now_s: float) -> bool:
        """Return whether there was no step for 30 s and for 20 times the usual. Not before the first step."""
        return self.steps > 0 and now_s - self.moved_s > max(LEAST_S, USUAL * self.usual_s)


@dataclass(frozen=True, slots=True)
class Speed:
    """Steps per second of computing: waits are not counted."""

    steps: int = 0
    busy_s: float = 0.0
    per_s: float = 0.0

    def see(self, steps: int, busy_s: float) -> "Speed":
        """Return the next state. Both are counted by the trainer from its start."""
        took_s = busy_s - self.busy_s
        if steps < self.steps or took_s < 0:
            return Speed(steps, busy_s, self.per_s)
        if steps == self.steps or took_s == 0:
            return self
        now = (steps - self.steps) / took_s
        return Speed(steps, busy_s, now if self.per_s == 0 else KEEP * self.per_s + (1 - KEEP) * now)
