"""Schedules of a node with a hub: at its own pace, or when the hub opens a round.

Rounds are numbered per node; no node waits for another one's. `LayerSync` does not ask while a unit of the
next round is still under way, so a late node gets a round at once.
"""

import time
from collections.abc import Callable

from aedit.edit.config import EditConfig
from aedit.edit.schedule import Notes, RoundSchedule
from aedit.types import News, Round

SILENCE = 2.0
"""Intervals without a word from the hub after which a node keeps time by itself."""


class OwnPace:
    """A round `every` steps after the last one; with `news`, as many as the hub asks of this node.

    DyLU (arXiv:2401.09135, section 5.2): the fastest node does `every` steps, the others what they can in
    that time. share: of those steps; 1 / fragments if each round moves one of so many fragments.
    """

    def __init__(self, every: int, news: Callable[[], News] | None = None, *, share: float = 1.0) -> None:
        self.every, self.news, self.share = every, news, share
        self.last_id = 0
        self.last_step = 0

    def due(self, step: int) -> Round | None:
        """Return the round to open after local step `step`, or None."""
        told = self.news().pace_steps if self.news else 0
        steps = max(1, round((told or self.every) * self.share))
        return _now(self, step) if step - self.last_step >= steps else None

    def listen(self, notes: Notes) -> None:
        """Do nothing: this schedule needs no agreement."""
        pass


class HubPace:
    """A round when the hub opens one, which it does every `every_s` seconds.

    After `SILENCE` intervals without a report from the hub, the node's own clock decides. With fragments, the
    remaining ones follow at equal distances.
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
        self.last_id = 0
        self.last_step = 0
        self._seen: int | None = None
        self._opened_at = self._last_at = clock()
        self._left = 0  # fragments whose turn comes before the hub's next round

    def due(self, step: int) -> Round | None:
        """Return the round to open after local step `step`, or None."""
        news, now = self.news(), self.clock()
        if self._seen is None:  # rounds opened before this node came are not its own
            self._seen, self._opened_at = news.round, now
        silent = news.age_s >= SILENCE * self.every_s
        if news.round > self._seen or (silent and now - self._opened_at >= self.every_s):
            self._seen, self._opened_at = max(news.round, self._seen), now
            self._left = self.fragments - 1
        elif self._left and now - self._last_at >= self.every_s / self.fragments:
            self._left -= 1
        else:
            return None
        self._last_at = now
        return _now(self, step)

    def listen(self, notes: Notes) -> None:
        """Do nothing: the hub decides for all nodes."""
        pass


def make_pace(edit: EditConfig, news: Callable[[], News]) -> RoundSchedule:
    """Return the schedule of a node with a hub that `edit.schedule` names."""
    match edit.schedule:
        case "steps":
            return OwnPace(int(edit.every), share=1 / edit.fragments)
        case "dylu":
            return OwnPace(int(edit.every), news, share=1 / edit.fragments)
        case "seconds":
            return HubPace(edit.every, news, fragments=edit.fragments)


def _now(schedule: RoundSchedule, step: int) -> Round:
    round = Round(schedule.last_id + 1, step - schedule.last_step)
    schedule.last_id, schedule.last_step = round.id, step
    return round
