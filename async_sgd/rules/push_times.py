"""When a node's pushes of a unit were accepted, and how many inner steps that time allows.

Times are seconds of the run's age as the journal has them, so that the same records give the same values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high

from aedit.async_sgd.rules.push_weights import MOST_CLAIM

FASTEST = 64.0
"""Times the usual number of steps or pushes per second of the other nodes: what one honest node can do."""

SLACK = 2.0
"""Times the steps that a node can do at its usual speed: speeds change, and pushes are late."""

BURST = 4.0
"""Local phases that are always possible in one push: of a node that pauses, or waits for answers."""

TOP_STEPS_PER_S = 1000.0
"""Largest speed of a node of which nothing else is known: an inner step of a millisecond."""

_FADES = 0.9
"""Factor by which a speed of before counts less with every push: delays make the speed of late too low."""

_KEPT = 0.75
"""Weight of the pushes before the newest one in a node's usual speed."""

_THREE = 1 + _KEPT + _KEPT**2
"""`PushTimes.num` after three pushes."""


@dataclass(frozen=True, slots=True)
class PushTimes:
    """Accepted pushes of one unit by one node."""

    at_s: float
    """Time of the newest accepted push; without one, of the first join."""
    before_s: float
    """Time of the accepted push before the newest one."""
    since_s: float
    """Time of the newest accepted push, or of a later join."""
    steps: int = 0
    """Inner steps of the newest accepted push."""
    total_steps: int = 0
    num: float = 0.0
    """Number of accepted pushes, older ones counting less."""
    num_steps: float = 0.0
    num_s: float = 0.0
    speed_before: float = 0.0
    """Highest speed in the pushes before the newest one, that of each earlier push a tenth lower; 0 if it is
    unknown."""

    @classmethod
    def began(cls, at_s: float) -> "PushTimes":
        """Return the times of a node that can push from `at_s` on."""
        return cls(at_s, at_s, at_s)

    def joined(self, at_s: float) -> "PushTimes":
        """Return the times of a node that has joined again: its absence does not count against its speed."""
        return replace(self, since_s=at_s)

    def pushed(self, at_s: float, steps: int) -> "PushTimes":
        """Return the times after another accepted push."""
        return PushTimes(
            at_s,
            self.at_s,
            at_s,
            steps,
            self.total_steps + steps,
            1 + _KEPT * self.num,
            steps + _KEPT * self.num_steps,
            max(0.0, at_s - self.since_s) + _KEPT * self.num_s,
            max(self.num_steps / self.num_s if self.num_s else 0.0, _FADES * self.speed_before),
        )

    @property
    def gap_s(self) -> float | None:
        """Return the usual time between two pushes; None before the first one."""
        return self.num_s / self.num if self.num else None

    def speed(self, now_s: float) -> float | None:
        """Return the steps per second in accepted pushes of late; None where no time has passed.

        It falls while the node is silent for longer than usual.
        """
        if not self.num_s:
            return None
        overdue_s = max(0.0, now_s - self.since_s - self.num_s / self.num)
        return self.num_steps / (self.num_s + overdue_s)

    @property
    def is_regular(self) -> bool:
        """Return whether there are three pushes or more: the first ones hold the start of the node."""
        return self.num >= _THREE

    @property
    def best_speed(self) -> float:
        """Return what its steps per second may be, whatever its newest push shows.

        Infinity before its third push. A push that stood for long holds the steps before that only, and the
        next one holds the rest; without samples a node makes no steps: the speeds before count too.
        """
        if not self.is_regular:
            return math.inf
        return max(self.speed(self.since_s) or 0.0, self.speed_before)


def possible_steps(
    times: PushTimes, now_s: float, made_s: float, steps_per_s: float, every: float | None
) -> float:
    """Return the steps that a push can hold that arrives at `now_s`.

    `BURST` local phases of `every` steps are possible whatever the speeds, if no more than `top_steps`. More
    take time, from `made_s` on.

    Args:
        times: Of the node and unit.
        now_s: Age of the run.
        made_s: Age of the run before which the steps of the push cannot have begun; see `made_until`.
        steps_per_s: Of `possible_speed`.
        every: Steps in a local phase; None if local phases are not counted in steps.
    """
    if math.isinf(steps_per_s):
        return top_steps(times, now_s, every)
    return max(possible_at_once(times, now_s, every), steps_per_s * max(0.0, now_s - made_s))


def possible_speed(own: float | None, others: Sequence[float], every: float | None) -> float:
    """Return the steps per second that a node can make at most; infinity without others.

    `SLACK` times its own speed of late or the usual one of the others, whichever is higher. Its own speed
    counts up to `MOST_CLAIM` times the usual one; up to `FASTEST` times that of a single other node, which
    does not say what is usual.

    Args:
        own: Speed of the node in steps per second, if it is known.
        others: Speeds of the other live nodes, as far as they are known.
        every: Steps in a local phase; None if local phases are not counted in steps: then all nodes may be
            `MOST_CLAIM` times as fast as usual.
    """
    if not others:
        return math.inf
    usual = median_high(others)
    most = usual * (MOST_CLAIM if len(others) > 1 else FASTEST)
    least = usual if every is not None else most
    return SLACK * max(least, min(own or 0.0, most))


def made_until(times: PushTimes, made_s: float, steps_per_s: float) -> float:
    """Return the age of the run before which the steps of the next push cannot have begun.

    A node sends a push after the answer to the one before, and its steps take time. A push may be long on its
    way, again and again, and the next one holds what was made meanwhile: only the sum over all pushes takes
    as much time as the steps. It is the theoretical arrival time of the generic cell rate algorithm (ITU-T
    I.371), in between the last two arrivals.

    Args:
        times: Of the node and unit, with the newest push.
        made_s: The same time of the push before the newest one.
        steps_per_s: What the node can make at most.
    """
    took_s = times.steps / steps_per_s if steps_per_s > 0 else math.inf
    return min(times.at_s, max(times.before_s, made_s + took_s))


def possible_at_once(times: PushTimes, now_s: float, every: float | None) -> float:
    """Return the steps that a push can hold whatever the speeds of others. every: as in `possible_steps`."""
    return min(max(1.0, BURST * (every or 0.0)), top_steps(times, now_s, every))


def top_steps(times: PushTimes, now_s: float, every: float | None) -> float:
    """Return the steps that any node can have made by `now_s`, at `TOP_STEPS_PER_S`.

    The first push can hold a local phase in any case: a node may bring steps of before it joined.
    """
    least = 1.0 if times.num else max(1.0, every or 0.0)
    return max(least, _steps_at(TOP_STEPS_PER_S, times, now_s))


def _steps_at(steps_per_s: float, times: PushTimes, now_s: float) -> float:
    """Return the steps since the last accepted push at this speed; without one, since the join.

    Or since the push before the last one, less the steps of the last: a push that was long on its way arrives
    shortly before the next.
    """
    since_before = steps_per_s * max(0.0, now_s - times.before_s) - times.steps
    return max(steps_per_s * max(0.0, now_s - times.at_s), since_before)


def least_gap(usual_s: float | None) -> float:
    """Return the shortest time between two pushes of a node.

    0 with fewer than two others, as one does not say what is usual.

    Args:
        usual_s: Low median of the usual gaps of the others; None with fewer than two.
    """
    return 0.0 if usual_s is None else usual_s / FASTEST


def is_early(times: PushTimes, since_s: float, least_s: float) -> bool:
    """Return whether a push that comes `since_s` after the last one makes more than one every `least_s`.

    Two may come shortly after each other; it counts what is usual for the node.
    """
    return since_s < least_s and times.gap_s is not None and times.gap_s < least_s
