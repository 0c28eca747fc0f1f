"""When the next round is due. A schedule knows an injected monotonic clock and step numbers, and no
tensors."""

import time
from collections.abc import Callable
from typing import Protocol

from aedit.edit.config import EditConfig
from aedit.types import Round


class Notes(Protocol):
    """Where nodes read what one of them has decided: the notes of a transport."""

    def post(self, key: str, text: str) -> None: ...

    def read(self, key: str) -> str | None: ...


class RoundSchedule(Protocol):
    """Asked once after every inner step of a local phase; not while a hub has not answered for the units that
    the next round would move."""

    last_id: int
    last_step: int

    def due(self, step: int) -> Round | None:
        """The round to open after local step `step` (counted from 1), if it is time for one."""

    def listen(self, notes: Notes) -> None:
        """From now on agree with the other nodes through `notes`, if the schedule needs to agree at all."""


class EverySteps:
    """EDiT: a round after every `every` inner steps. Equal on all nodes by itself."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.last_id = 0
        self.last_step = 0

    def due(self, step: int) -> Round | None:
        return _next(self, step) if step % self.every == 0 else None

    def listen(self, notes: Notes) -> None:
        pass


class EverySeconds:
    """A-EDiT: a round once `every` seconds have passed since the last one, each node being at a step of
    its own.

    Decided once: the first node to see the time pass posts a note, and a node opens a round when it sees
    the note, whatever its own clock says. The clock is monotonic, so wall clocks may be wrong or jump.
    """

    def __init__(self, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self.clock = clock
        self.last_id = 0
        self.last_step = 0
        self._last_at: float | None = None
        self._notes: Notes | None = None

    def due(self, step: int) -> Round | None:
        now = self.clock()
        if self._last_at is None:  # the first local step, not the start of the warm-up
            self._last_at = now
        if not self._decided(now - self._last_at >= self.every):
            return None
        self._last_at = now
        return _next(self, step)

    def listen(self, notes: Notes) -> None:
        self._notes = notes

    def _decided(self, time_is_up: bool) -> bool:
        if self._notes is None:
            return time_is_up
        key = f"round/{self.last_id + 1}"
        if time_is_up:
            self._notes.post(key, "due")
        return self._notes.read(key) is not None


def _next(schedule: RoundSchedule, step: int) -> Round:
    round = Round(schedule.last_id + 1, step - schedule.last_step)
    schedule.last_id, schedule.last_step = round.id, step
    return round


def make_schedule(config: EditConfig) -> RoundSchedule:
    """The schedule that `[edit]` names. With fragments each round moves one of them, so rounds come more
    often."""
    match config.schedule:
        case "steps":
            return EverySteps(int(config.every) // config.fragments)
        case "seconds":
            return EverySeconds(config.every / config.fragments)
        case "dylu":
            raise ValueError('edit.schedule = "dylu" needs a hub; without one use "steps" or "seconds"')
