"""Schedules: when the next round is due, on the node's own clock, at its own pace, or when the hub opens one.

A schedule knows an injected monotonic clock and step numbers, no tensors.
"""

import time
from collections.abc import Callable
from typing import Protocol

from aedit.edit.config import EditConfig
from aedit.types import News, PositiveFloat, PositiveInt, Round, checked


class Notes(Protocol):
    """Small messages by which nodes share decisions: the notes of a transport."""

    def post(self, key: str, text: str) -> None:
        """Post `text` under `key`; the first text under a key stays."""

    def read(self, key: str) -> str | None:
        """Return the text under `key`, or None."""


class RoundSchedule(Protocol):
    """The interface of a schedule, asked once after every inner step of a local phase.

    Not asked while a hub has not answered for the units that the next round would move. A schedule counts the
    rounds of one `LayerSync`, which refuses one that has served another.
    """

    last_id: int = 0
    last_step: int = 0

    def due(self, step: int) -> Round | None:
        """Return the round to open after local step `step` (from 1), or None."""

    def listen(self, notes: Notes) -> None:
        """Agree with the other nodes through `notes` from now on. Most schedules need no agreement."""
        return


def _next(schedule: RoundSchedule, step: int) -> Round:
    """Count the next round, which is opened after local step `step`."""
    round = Round(schedule.last_id + 1, step - schedule.last_step)
    schedule.last_id, schedule.last_step = round.id, step
    return round


@checked()
class EverySteps(RoundSchedule):
    """EDiT: a round after every `every` inner steps. Equal on all nodes by itself."""

    def __init__(self, every: PositiveInt) -> None:
        self.every = every

    def due(self, step: int) -> Round | None:
        """Return a round at every multiple of `every` steps."""
        return _next(self, step) if step % self.every == 0 else None


@checked()
class EverySeconds(RoundSchedule):
    """A-EDiT: a round once `every` seconds have passed since the last one; nodes may be at different steps.

    Decided once: the first node to see the time pass posts a note, and a node opens a round when it sees the
    note, whatever its own clock says. The clock is monotonic, so wall clocks may be wrong or jump.
    """

    by_time = True
    """Nodes open a round at steps of their own, so two blocks of one thread cannot both wait for them."""

    def __init__(self, every: PositiveFloat, clock: Callable[[], float] = time.monotonic) -> None:
        self.every = every
        self.clock = clock
        self._last_at: float | None = None
        self._notes: Notes | None = None

    def due(self, step: int) -> Round | None:
        """Return a round if the time has passed here or at another node."""
        now = self.clock()
        if self._last_at is None:  # the first local step, not the start of the warm-up
            self._last_at = now
        is_due = now - self._last_at >= self.every
        if self._notes is not None:
            key = f"round/{self.last_id + 1}"
            if is_due:
                self._notes.post(key, "due")
            is_due = self._notes.read(key) is not None
        if not is_due:
            return None
        self._last_at = now
        return _next(self, step)

    def listen(self, notes: Notes) -> None:
        """Share the decision with other nodes through `notes`."""
        self._notes = notes


@checked()
class AtMultiples(RoundSchedule):
    """A round at each multiple of `every` seconds of a shared clock, such as wall-clock time.

    It lets peers meet that have no other way to agree. A clock that is set back delays the next round by at
    most `every` seconds.
    """

    by_time = True

    def __init__(self, every: PositiveFloat, clock: Callable[[], float] = time.time) -> None:
        self.every = every
        self.clock = clock
        self._seen: int | None = None

    def due(self, step: int) -> Round | None:
        """Return a round at the first step after a multiple has passed, once for several of them."""
        now, seen = int(self.clock() // self.every), self._seen
        self._seen = now
        return _next(self, step) if seen is not None and now > seen else None


def make_schedule(config: EditConfig) -> RoundSchedule:
    """Return the schedule that `[edit]` names.

    With fragments each round moves one, so rounds are more frequent.
    """
    match config.schedule:
        case "steps":
            return EverySteps(int(config.every) // config.fragments)
        case "seconds":
            return EverySeconds(config.every / config.fragments)
        case "dylu":
            raise ValueError('edit.schedule = "dylu" needs a hub; without one use "steps" or "seconds"')


MISSED_INTERVALS = 2.0
"""Intervals without a report of the hub after which the node's own clock decides."""


class OwnPace(RoundSchedule):
    """A round `every` steps after the last one; with `news`, as many as the hub asks of this node.

    DyLU (arXiv:2401.09135, section 5.2): the fastest node does `every` steps, the others what they can in
    that time. share: of those steps; 1 / fragments if each round moves one of so many fragments.
    """

    def __init__(self, every: int, news: Callable[[], News] | None = None, *, share: float = 1.0) -> None:
        self.every, self.news, self.share = every, news, share

    def due(self, step: int) -> Round | None:
        """Return the round to open after local step `step`, or None."""
        pace = self.news().pace_steps if self.news else 0
        steps = max(1, round((pace or self.every) * self.share))
        return _next(self, step) if step - self.last_step >= steps else None


class HubPace(RoundSchedule):
    """A round when the hub opens one, which it does every `every_s` seconds.

    After `MISSED_INTERVALS` intervals without a report of the hub, the node's own clock decides. With
    fragments, the remaining ones follow at equal distances.
    """

    def __init__(
        self,
        every_s: float,
        news: Callable[[], News],
        *,
        fragments: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.every_s, self.news, self.fragments, self.clock = every_s, news, fragments, clock
        self._seen: int | None = None
        self._opened_at = self._last_at = clock()
        self._left = 0  # fragments whose turn comes before the hub's next round

    def due(self, step: int) -> Round | None:
        """Return the round to open after local step `step`, or None."""
        news, now = self.news(), self.clock()
        if self._seen is None:  # rounds opened before this node came are not its own
            self._seen, self._opened_at = news.round, now
        silent = news.age_s >= MISSED_INTERVALS * self.every_s
        if news.round > self._seen or (silent and now - self._opened_at >= self.every_s):
            self._seen, self._opened_at = max(news.round, self._seen), now
            self._left = self.fragments - 1
        elif self._left and now - self._last_at >= self.every_s / self.fragments:
            self._left -= 1
        else:
            return None
        self._last_at = now
        return _next(self, step)


def make_pace(edit: EditConfig, news: Callable[[], News]) -> RoundSchedule:
    """Return the schedule of a node with a hub that `edit.schedule` names."""
    match edit.schedule:
        case "steps":
            return OwnPace(int(edit.every), share=1 / edit.fragments)
        case "dylu":
            return OwnPace(int(edit.every), news, share=1 / edit.fragments)
        case "seconds":
            return HubPace(edit.every, news, fragments=edit.fragments)
