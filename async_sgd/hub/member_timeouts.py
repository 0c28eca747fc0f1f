"""Silent members of a hub, and the pushes that each unit still waits for.

Members that have nothing new to say are looked at every `expire_s` at most: a check takes constant time,
however many members there are. All of it follows from the state and the volatile state of the hub, and is
made at the first check.
"""

from collections.abc import Set
from heapq import heappop, heappush

from aedit.async_sgd.hub.members import SILENT, Clocks, Ranking
from aedit.async_sgd.hub.state import AWAITED_MISSES, HubState
from aedit.async_sgd.rules import (
    Accepted,
    Garbled,
    HubConfig,
    HubPlan,
    Joined,
    Left,
    Merged,
    Record,
    Refused,
)

HEARTBEAT_SHARE = 0.25
"""Share of a core that the heartbeats of all members may take at the hub."""

MISSED = 3.0
"""Intervals after which a member is silent for too long, where the interval is longer than configured."""

_LONGEST_S = 600.0

_PER_ROUND = 4
"""Heartbeats in a local phase, at least, if nodes learn from the hub that a round is due."""


def heartbeat_interval(plan: HubPlan, members: int, call_s: float) -> float:
    """Return the interval at which members report, so that all of them take `HEARTBEAT_SHARE` of a core.

    At least `hub.heartbeat_s`. call_s: CPU time of a heartbeat at the hub.
    """
    least_s = plan.hub.heartbeat_s
    longest_s = _LONGEST_S if plan.pace != "seconds" else min(_LONGEST_S, plan.every / _PER_ROUND)
    return max(least_s, min(longest_s, members * call_s / HEARTBEAT_SHARE))


def allowed_silence(config: HubConfig, heartbeat_s: float) -> float:
    """Return the silence after which a member is given up that was asked to report at this interval."""
    return (
        config.expire_s if heartbeat_s <= config.heartbeat_s else max(config.expire_s, MISSED * heartbeat_s)
    )


class AwaitedPushes:
    """The pushes of one unit: those that are here, and the members that may still bring one."""

    def __init__(self) -> None:
        self.came_s = Ranking()
        """Time at which the push of each node arrived."""
        self.undated: list[tuple[int, int]] = []
        """Pushes (node, seq) that are here since before this process."""
        self._awaited: set[int] = set()
        self._missing: set[int] = set()

    def expect(self, node: int, *, is_awaited: bool) -> None:
        """Note whether a push of this node is expected, if it is not here."""
        (self._awaited.add if is_awaited else self._awaited.discard)(node)
        missing = is_awaited and node not in self.came_s
        (self._missing.add if missing else self._missing.discard)(node)

    def arrived(self, node: int, at_s: float) -> None:
        """Note a push that is here since `at_s`."""
        if node not in self.came_s:
            self.came_s.put(node, at_s)
        self._missing.discard(node)

    def merged(self, node: int) -> None:
        """Note that the push of this node is here no more; `expect` must be called then."""
        self.came_s.put(node, None)

    def num_awaited(self, but: Set[int]) -> int:
        """Return how many members other than `but` are awaited, whether their push is here or not."""
        return len(self._awaited) - sum(node in self._awaited for node in but)

    def are_all_here(self, but: Set[int]) -> bool:
        """Return whether the pushes of all that are awaited are here; of `but` none is."""
        return len(self._missing) == sum(node in self._missing for node in but)


class MemberTimeouts:
    """Silent members and awaited pushes of a hub; `apply` must be called with every applied record."""

    def __init__(self, state: HubState, clocks: Clocks, plan: HubPlan) -> None:
        self.clocks = clocks
        self._state, self._plan, self._config = state, plan, plan.hub
        self._heap: list[tuple[float, int]] = []
        """One entry for each watched member: `expire_s` after this time it is looked at."""
        self._watched: set[int] = set()
        self._new: list[int] = []
        """Watched members without an entry: they are watched from the next check on."""
        self._offenders: set[int] = set()
        self._unready: set[int] = set()
        self._units: dict[int, AwaitedPushes] = {}
        for node in state.live:
            self._watch(node)
            self._check_violations(node)
            if not is_ready(clocks, node):
                self._unready.add(node)

    def leaving(self, now: float) -> list[Left]:
        """Return Left for members that were silent for too long or have too many violations, by node.

        A violation on arrival excludes at once and does not wait for this.
        """
        live, limit = self._state.live, self._config.push_filter.violations
        self._offenders = {n for n in self._offenders if n in live and live[n].violations >= limit}
        found = {node: Left(node, f"{SILENT} for {limit_s:g} s") for node, limit_s in self._silent(now)}
        for node in self._offenders:
            reason = f"excluded after {live[node].violations} violations"
            found[node] = Left(node, reason, excluded=True)
        return [found[node] for node in sorted(found)]

    def awaited(self, index: int, now: float) -> AwaitedPushes:
        """Return the pushes of a unit that are here and those that are expected."""
        unit = self._units.get(index)
        if unit is None:
            unit = self._units[index] = AwaitedPushes()
            unit.undated += self._state.units[index].pending
            self._expect_all(index)
        for node, seq in unit.undated:
            unit.arrived(node, self.clocks.came_s.setdefault((index, node, seq), now))
        unit.undated.clear()
        return unit

    def note_report(self, node: int) -> None:
        """Note the newest report of a member."""
        if (node in self._unready) == is_ready(self.clocks, node):
            (self._unready.discard if node in self._unready else self._unready.add)(node)
            self._expect(node)

    def apply(self, record: Record) -> None:
        """Follow an applied record."""
        match record:
            case Joined(_, node):
                self._watch(node)
                self._check_violations(node)
                self.note_report(node)
                self._expect(node)
            case Left(node):
                self._unready.discard(node)
                self._expect(node)
            case Garbled(node):
                self._check_violations(node)
            case Refused(node, index):
                self._check_violations(node)
                self._expect(node, index)
            case Accepted(push):
                if unit := self._units.get(push.unit):
                    unit.undated.append((push.node, push.seq))
                    self._expect(push.node, push.unit)
            case Merged(index, _, parts):
                for part in parts:
                    self._check_violations(part.node)
                    if unit := self._units.get(index):
                        unit.merged(part.node)
                        self._expect(part.node, index)
                if self._state.awaits_all and index in self._units:  # of those who missed it
                    self._expect_all(index)

    def _watch(self, node: int) -> None:
        if node not in self._watched:
            self._watched.add(node)
            self._new.append(node)

    def limit_s(self, node: int) -> float:
        """Return how long a member may be silent: as long as it was last allowed to be.

        A hub that begins to lead does not know what its members were asked for. It allows what it would ask.
        """
        known = self.clocks.silent_s.get(node)
        if known is not None:
            return max(known)
        usual_s = heartbeat_interval(self._plan, len(self._state.live), self.clocks.call_s)
        return allowed_silence(self._config, usual_s)

    def _silent(self, now: float) -> list[tuple[int, float]]:
        """Return the live members that are silent for longer than they may be, and how long that is."""
        live, seen, look_s = self._state.live, self.clocks.seen, self._config.expire_s
        for node in self._new:
            heappush(self._heap, (seen.setdefault(node, now) if node in live else now, node))
        self._new.clear()
        found = []
        while self._heap and now - self._heap[0][0] > look_s:
            _, node = heappop(self._heap)
            if node not in live:
                self._watched.discard(node)
            elif now - (last_s := seen.setdefault(node, now)) > (limit_s := self.limit_s(node)):
                found.append((last_s, node, limit_s))
            else:  # again when it is silent for too long, or sooner, as it may be asked for another interval
                heappush(self._heap, (min(now, last_s + (limit_s - look_s)), node))
        for last_s, node, _ in found:  # until its leaving is written down
            heappush(self._heap, (last_s, node))
        return [(node, limit_s) for _, node, limit_s in found]

    def _check_violations(self, node: int) -> None:
        if self._state.members[node].violations >= self._config.push_filter.violations:
            self._offenders.add(node)

    def _expect_all(self, index: int) -> None:
        for node in self._state.live:
            self._expect(node, index)

    def _expect(self, node: int, index: int | None = None) -> None:
        """Note whether a push of this node can be expected soon, of one unit or of all."""
        member = self._state.live.get(node)
        for i, expected in self._units.items() if index is None else [(index, self._units.get(index))]:
            if expected is not None:
                is_awaited = (
                    member is not None
                    and node not in self._unready
                    and not member.is_refused(i)
                    and self._state.units[i].missed.get(node, 0) < AWAITED_MISSES
                )
                expected.expect(node, is_awaited=is_awaited)


def is_ready(clocks: Clocks, node: int) -> bool:
    """Return whether a push of this node can be expected soon, by what it says of itself.

    Not of a node that still fetches its first weights, nor of one whose trainer is stuck.
    """
    report = clocks.reports.get(node)
    return report is None or report.state not in ("joining", "stalled")
