"""Members of the run: decisions, reports and volatile state of each, and tables of the live ones."""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from aedit.async_sgd.rules import Joined, Push, Refused
from aedit.types import Verdict

_FORGIVEN_AFTER = 16
"""Accepted pushes that make one violation forgotten."""
NORM = "norm"
"""Kind of reason for what is too long to be trusted: the part of a reason before its first colon."""


SILENT = "silent"
"""First word of why a member has left that has not reported for too long."""

CERTIFIED = "certified"
"""Proof of a node whose name is that of its certificate or token."""


@dataclass(frozen=True, slots=True)
class LastDecision:
    """The newest decision about a node's pushes of one unit."""

    seq: int = 0
    verdict: Verdict = Verdict.NONE
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """A node's report about itself. Not journaled.

    Lost when the hub restarts, and sent again with the next heartbeat.
    """

    steps: int = 0
    tokens: int = 0
    steps_per_s: float = 0.0
    busy_s: float = 0.0
    wait_s: float = 0.0
    wire_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    loss: float = math.nan
    state: str = "joining"
    rl: Mapping[str, float] = field(default_factory=dict)
    """Reinforcement learning, by names of `RL_REPORT`; empty in a run on text."""


_EARLIER = 8
"""Earlier sessions of a process that are known."""


@dataclass(slots=True)
class Member:
    """One node, from its first join on; it stays on the list when it leaves."""

    name: str
    node: int
    session: int = 0
    process: int = 0
    """Fingerprints of session and process of its newest join: other hubs can read the journal."""
    proof: str = ""
    origin: str = ""
    voter: int = 0
    """Identity under which it votes in a failover; 0: it does not vote."""
    donor: str = ""
    live: bool = False
    excluded: bool = False
    gone: str = ""
    """Why it left."""
    steps: int = 0
    """Inner steps in accepted pushes, summed over units."""
    tokens: int = 0
    leased: int = 0
    """Samples that it was ever given. Those that it lost as it was silent count: it may have used them."""
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refused pushes by kind of reason."""
    violations: int = 0
    offended: int = 0
    """Sequence number of the last violation: one bad round is one violation, however many units it has."""
    weight: float = 0.0
    """Share of its last push in its round."""
    staleness: int = 0
    received: dict[int, int] = field(default_factory=dict)
    """Sequence number of the last push that was accepted or refused, by unit."""
    decisions: dict[int, LastDecision] = field(default_factory=dict)
    earlier: tuple[int, ...] = field(default=(), compare=False)
    """Sessions of this very process before its newest join, as far as this hub has seen them."""
    era: int = field(default=0, compare=False)
    """Number of snapshots begun before this object was made: it belongs to those that began later, too."""

    def copied(self, era: int) -> "Member":
        """Return a copy that changes apart from this one."""
        return replace(
            self,
            refused=dict(self.refused),
            received=dict(self.received),
            decisions=dict(self.decisions),
            era=era,
        )

    def join(self, record: Joined) -> None:
        """Take the record of a join: new session, process and donor address."""
        is_same = record.process != 0 and record.process == self.process
        self.earlier = (*self.earlier, self.session)[-_EARLIER:] if is_same else ()
        self.session, self.donor, self.live, self.gone = record.session, record.donor, True, ""
        self.process, self.proof, self.origin = record.process, record.proof, record.origin
        self.voter = record.voter

    def accept(self, push: Push, *, counts: bool = True) -> None:
        """Count an accepted push. Every 16 accepted pushes forgive one violation.

        counts: whether its steps are steps of the run.
        """
        self.received[push.unit] = push.seq
        if counts:
            self.steps += push.steps
            self.tokens += push.tokens
        self.accepted += 1
        if self.accepted % _FORGIVEN_AFTER == 0:
            self.violations = max(0, self.violations - 1)

    def refuse(self, record: Refused) -> None:
        """Note a refused push: the decision, its reason and its violation."""
        self.received[record.unit] = max(record.seq, self.received.get(record.unit, 0))
        verdict = Verdict.DISTRUSTED if record.distrusted else Verdict.REFUSED
        self.decide(record.unit, LastDecision(record.seq, verdict, record.reason))
        self.count(record.reason)
        if record.violation:
            self.add_violation(record.seq)

    def count(self, reason: str) -> None:
        """Count one more push that was not merged, by reason, for `status`."""
        self.refused[kind(reason)] = self.refused.get(kind(reason), 0) + 1

    def add_violation(self, seq: int) -> None:
        """Count one violation per round, however many units it has."""
        if seq > self.offended:
            self.violations += 1
            self.offended = seq

    def is_refused(self, unit: int) -> bool:
        """Return whether its last push of the unit was refused: others need not wait for the next one."""
        last = self.decision(unit)
        return last.verdict in (Verdict.REFUSED, Verdict.DISTRUSTED) and last.seq == self.received.get(unit)

    def is_distrusted(self, unit: int) -> bool:
        """Return whether its last push of the unit was distrusted."""
        last = self.decision(unit)
        return last.verdict == Verdict.DISTRUSTED and last.seq == self.received.get(unit)

    def decision(self, unit: int) -> LastDecision:
        """Return the newest decision about this node's pushes of the unit; number 0 without one."""
        return self.decisions.get(unit, LastDecision())

    def decide(self, unit: int, decision: LastDecision) -> None:
        """Note a decision about a push of this node, unless there is a newer one."""
        if decision.seq > self.decision(unit).seq:
            self.decisions[unit] = decision


def kind(reason: str) -> str:
    """Return the key under which a reason is counted."""
    return reason.split(":")[0]


class Roster:
    """Indexes of the live members, so that no call has to look at all of them."""

    def __init__(self, members: Iterable[Member] = ()) -> None:
        self.live: dict[int, Member] = {}
        """Live members by index."""
        self.order: list[int] = []
        """Their nodes, ascending."""
        self.excluded: list[int] = []
        """Nodes that were excluded, ascending."""
        self.changes = 0
        """Counts who comes and goes."""
        self._donors: list[int] = []
        for member in members:
            if member.live:
                self.add(member)
            elif member.excluded:
                self.remove(member)

    def add(self, member: Member) -> None:
        """Note that a member is live, perhaps with another donor address than before."""
        self.changes += 1
        if member.node not in self.live:
            insort(self.order, member.node)
        self.live[member.node] = member
        _put(self._donors, member.node, bool(member.donor))

    def remove(self, member: Member) -> None:
        """Note that a member has left."""
        self.changes += 1
        if self.live.pop(member.node, None) is not None:
            _put(self.order, member.node, is_in=False)
            _put(self._donors, member.node, is_in=False)
        if member.excluded:
            _put(self.excluded, member.node, is_in=True)

    def forget(self, node: int) -> None:
        """Note that a member that has left is remembered no more."""
        _put(self.excluded, node, is_in=False)

    def donors(self, node: int, most: int) -> tuple[str, ...]:
        """Return the addresses of the next `most` donors after `node`; then follows the first one again."""
        at = bisect_right(self._donors, node)
        after = (self._donors[at : at + most] + self._donors[: min(at, most)])[:most]
        return tuple(self.live[other].donor for other in after if other != node)


def _put(nodes: list[int], node: int, is_in: bool) -> None:
    """Put `node` into a sorted list, or take it out."""
    at = bisect_left(nodes, node)
    found = at < len(nodes) and nodes[at] == node
    if is_in and not found:
        nodes.insert(at, node)
    elif found and not is_in:
        del nodes[at]


class Ranking:
    """Numbers in ascending order, at most one per node."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._sorted: list[float] = []

    def put(self, node: int, value: float | None) -> None:
        """Set the number of a node; None takes it out."""
        before = self._of.pop(node, None)
        if before is not None:
            del self._sorted[bisect_left(self._sorted, before)]
        if value is not None:
            self._of[node] = value
            insort(self._sorted, value)

    def clear(self) -> None:
        """Take all nodes out."""
        self._of.clear()
        self._sorted.clear()

    @property
    def nodes(self) -> Sequence[int]:
        """Return the nodes that have a number."""
        return tuple(self._of)

    @property
    def values(self) -> Sequence[float]:
        """Return all numbers, ascending; valid until the next change."""
        return self._sorted

    @property
    def median(self) -> float:
        """Return the number in the middle, or the mean of the two; there must be one."""
        low, high = (len(self._sorted) - 1) // 2, len(self._sorted) // 2
        return self._sorted[low] if low == high else (self._sorted[low] + self._sorted[high]) / 2

    def low_median_without(self, node: int) -> float | None:
        """Return the number in the middle, or the smaller of the two, of all other nodes.

        None if there are fewer than two.
        """
        own = self._of.get(node)
        num = len(self._sorted) - (own is not None)
        if num < 2:
            return None
        middle = (num - 1) // 2
        skipped = own is not None and bisect_left(self._sorted, own) <= middle
        return self._sorted[middle + skipped]

    def __contains__(self, node: object) -> bool:
        return node in self._of

    def __len__(self) -> int:
        return len(self._of)


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
        self.reports: dict[int, NodeReport] = {}
        self.call_s = 0.0
        """CPU time of a heartbeat at this hub, as its server measures it; 0 for a hub without a network."""
        self.silent_s: dict[int, tuple[float, float]] = {}
        """How long a node may be silent by the last reply to it, and by the one before, which may be the last
        that it has; nodes that are asked for nothing unusual are left out."""
        self.lost_s: dict[int, float] = {}
        """Age of the run at which a node was given up as silent that had leases; at which this hub process
        began if that was before."""
        self.made_s: dict[tuple[int, int], float] = {}
        """Age of the run before which the steps of a node's next push cannot have begun, by unit and node.

        See `made_until`. Where it is unknown it is the time of the push before the newest one.
        """
        self.next_made_s: dict[tuple[int, int], float] = {}
        """The same after the push that has been decided, and is not applied yet."""
        self.speeds = Ranking()
        """Inner steps per second of the live nodes that have pushed, each as of its last report."""
