"""The journaled state of a hub, and how a record changes it.

Nothing else changes it, and no clock is read here.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from aedit.async_sgd.hub.members import CERTIFIED, NORM, LastDecision, Member, Ranking, Roster, kind
from aedit.async_sgd.hub.outer_step import Anchor, Computed
from aedit.async_sgd.hub.pool import Block, Pool
from aedit.async_sgd.rules import Contribution, Push, PushTimes, SizeHistory, Vector, records
from aedit.types import Layout, Verdict

KEPT_MEMBERS = 1024
"""Members that have left and are kept, and as many that were excluded.

No setting: a replay of a journal must not depend on the configuration at the time of the replay.
"""

AWAITED_MISSES = 2
"""With quorum "all", a node that has missed so many merges in a row is not awaited until it pushes again."""


class Denied(Exception):
    """A request that the hub refuses, with the reason for the peer."""

    def __init__(
        self,
        kind: Literal["unknown", "replaced", "excluded", "full", "different", "taken", "foreign"],
        reason: str,
    ) -> None:
        """Create a refusal.

        kind: join again; end; end; come again later; can never succeed; held by another peer until later; it
        belongs to another peer.
        """
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(slots=True)
class Unit:
    """State of one unit that this hub owns."""

    anchor: Anchor | None = None
    pending: dict[tuple[int, int], Push] = field(default_factory=dict)
    """Pushes that are not merged yet, by node and sequence number, in the order of arrival."""
    history: SizeHistory = field(default_factory=SizeHistory)
    deltas: deque[tuple[int, bytes]] = field(default_factory=deque)
    """Newest last: a version, and what was added to the one before. Together shorter than
    the anchor: beyond that a chain is of no use."""
    merged_at_s: float = 0.0
    usual_s: float | None = None
    """Between merges, of late."""
    up: Vector | None = None
    """Two levels: what the parent hub thinks this unit is."""
    sent: Vector | None = None
    """Two levels: what is on its way to the parent."""
    sent_at: int = 0
    """Newest version that was sent to the parent or came from it."""
    norm: float = 0.0
    """Norm of the last merged pseudo-gradient; for views, not kept over a restart."""
    brought: dict[int, Contribution] = field(default_factory=dict)
    """The last push of this unit by each node."""
    times: dict[int, PushTimes] = field(default_factory=dict)
    """When each node's pushes of this unit were accepted."""
    gaps: Ranking = field(default_factory=Ranking)
    """Usual times between pushes of the live nodes, as `times` has them; not saved."""
    steps: int = 0
    """Training steps in accepted pushes."""
    missed: dict[int, int] = field(default_factory=dict)
    """Merges of this unit in a row without a push of a node, by node, counted up to `AWAITED_MISSES`."""
    apart: bool = False
    """True if the unit is trained apart from the model: its steps are no steps of the run."""

    @property
    def version(self) -> int:
        """Return the version of the newest anchor; 0 before the unit is founded."""
        return self.anchor.version if self.anchor else 0

    def brought_with(
        self, pushes: Iterable[Push], version: int, at_s: float, nodes: int
    ) -> dict[int, Contribution]:
        """Return `brought` after a merge of `pushes` into `version` at `at_s`. nodes: members now."""
        after = dict(self.brought)
        for push in pushes:
            before = after.get(push.node, Contribution(self.version, at_s=at_s))
            after[push.node] = before.pushed(push, version, at_s, nodes)
        return after


@dataclass(slots=True)
class HubState:
    """Journaled state of a hub: made by applying records, and by nothing else."""

    part: tuple[int, int] = (0, 1)
    has_parent: bool = False
    awaits_all: bool = False
    """Whether a merge waits for every live member (quorum "all")."""
    apart: frozenset[str] = frozenset()
    """Names of the units that are trained apart from the model."""
    layout: Layout | None = None
    facts: dict[str, str] = field(default_factory=dict)
    num_samples: int = 0
    units: dict[int, Unit] = field(default_factory=dict)
    """Those that this hub owns, by index in the layout."""
    members: list[Member] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    departed: dict[int, None] = field(default_factory=dict)
    """Members that have left and are remembered, in the order of leaving."""
    excluded: dict[int, None] = field(default_factory=dict)
    """Excluded members without keys of their own, in the order of leaving."""
    free: list[int] = field(default_factory=list)
    """Indices of members that are forgotten."""
    founder: int | None = None
    pool: Pool = field(default_factory=Pool)
    lost: dict[int, list[Block]] = field(default_factory=dict)
    """Leases that went back to the pool because a node was silent, by node."""
    roster: Roster = field(default_factory=Roster)
    """Live members, which follow from `members`."""
    era: int = 0
    """Number of snapshots begun; not saved."""
    term: int = 0
    sessions: int = 0
    round: int = 0
    round_at_s: float = 0.0
    elapsed_s: float = 0.0
    steps: int = 0
    """In accepted pushes, summed over the units of the model."""
    tokens: int = 0
    mean_steps: float = 0.0
    """Steps per unit and node: every push counted against the members of its time."""
    banned: list[records.Banned] = field(default_factory=list)
    """Rollout servers."""
    configs: tuple[records.Configured, ...] = ()
    """Configurations of leader and replicas, from the newest one that is known to be agreed on."""

    # -- reading

    @property
    def live(self) -> dict[int, Member]:
        """Return the live members, by node. Must not be changed."""
        return self.roster.live

    @property
    def is_founded(self) -> bool:
        """Return whether every unit has an anchor."""
        return self.layout is not None and all(unit.anchor for unit in self.units.values())

    @property
    def total_steps(self) -> int:
        """Return the inner steps of all nodes; a step is in a push of every unit."""
        return self.steps // self._num_counting

    @property
    def total_tokens(self) -> int:
        """Return the tokens of all nodes; a token is in a push of every unit."""
        return self.tokens // self._num_counting

    def unit_name(self, index: int) -> str:
        """Return the name of a unit of the model."""
        assert self.layout is not None
        return self.layout.units[index].name

    def ban_of(self, server: str, public_key: bytes) -> records.Banned | None:
        """Return why the server of this name or key is banned; None if it is not."""
        key = public_key.hex()
        return next((ban for ban in self.banned if server == ban.server or key == ban.public_key), None)

    @property
    def policy_anchors(self) -> dict[int, Anchor]:
        """Return the newest anchor of every unit of the model that this hub owns; {} before all are there."""
        units = {index: unit for index, unit in self.units.items() if not unit.apart}
        found = {index: unit.anchor for index, unit in units.items() if unit.anchor is not None}
        return found if len(found) == len(units) else {}

    @property
    def policy_version(self) -> int:
        """Return the smallest version of this hub's units of the model; 0 before they are founded."""
        return min((unit.version for unit in self.units.values() if not unit.apart), default=0)

    @property
    def _num_counting(self) -> int:
        """Return the number of units whose steps are steps of the run, at least 1."""
        return max(1, sum(not unit.apart for unit in self.units.values()))

    # -- applying

    def apply(self, record: records.Record, computed: Computed | None = None) -> None:
        """Apply one record. `computed` belongs to Merged and Mixed."""
        match record:
            case records.Founded(layout, facts, num_samples):
                self.layout, self.facts, self.num_samples = layout, dict(facts), num_samples
                names, (mine, of) = [unit.name for unit in layout.units], self.part
                self.units = {i: Unit(apart=names[i] in self.apart) for i in range(mine, len(names), of)}
            case records.Joined():
                self._join(record)
            case records.Left():
                self._leave(record)
            case records.Accepted(push):
                self._accept(push)
            case records.Refused(node, index, _, reason):
                self.changing(node).refuse(record)
                unit = self.units.get(index)
                if unit and kind(reason) == NORM:
                    unit.history = unit.history.with_refusal(node)
            case records.Garbled(node, _, reason):
                self.changing(node).count(reason)
                self.changing(node).violations += 1
            case records.Merged():
                self._merge(record, _there(computed))
            case records.Mixed(index, version):
                unit = self.units[index]
                self._advance(unit, version, _there(computed))
                unit.up, unit.sent, unit.sent_at = _there(computed).up, None, version
            case records.SentUp(index, version):  # version 0 takes it back: the parent has refused it
                unit = self.units[index]
                assert version in (0, unit.version), f"version {version} is not at hand any more"
                unit.sent = unit.anchor.values if unit.anchor and version else None
            case records.RoundOpened(number, at_s):
                self.round, self.round_at_s = number, at_s
                self._pass(at_s)
            case records.Leased(node, start, end):
                self.pool.lease(node, start, end)
                member = self.changing(node)
                member.leased += end - start if member.live else 0  # one that comes back had them before
            case records.Used(node, start, upto):
                self.pool.use(node, start, upto)
            case records.Led(term):
                self.term = term
            case records.Configured():
                self.configs = (*self.configs, record)
            case records.Agreed(term, number):
                self.configs = tuple(one for one in self.configs if one.ballot >= (term, number))
            case records.Ticked(elapsed_s):
                self._pass(elapsed_s)
            case records.Banned():
                self.banned.append(record)

    def changing(self, node: int) -> Member:
        """Return a member in order to change it; a snapshot that has begun keeps it as it is."""
        member = self.members[node]
        if member.era != self.era:
            self.members[node] = member = member.copied(self.era)
            if member.live:
                self.roster.live[node] = member
        return member

    def index(self) -> None:
        """Make what follows from the rest of the state, after that was loaded."""
        self.names = {member.name: member.node for member in self.members if member.name}
        self.roster = Roster(self.members)
        for unit in self.units.values():
            unit.gaps = Ranking()
            for node in self.live:
                self._note_gap(unit, node)

    def _note_gap(self, unit: Unit, node: int) -> None:
        times = unit.times.get(node)
        unit.gaps.put(node, times.gap_s if times is not None and node in self.live else None)

    def _pass(self, elapsed_s: float) -> None:
        self.elapsed_s = max(self.elapsed_s, elapsed_s)

    def _join(self, record: records.Joined) -> None:
        while len(self.members) <= record.node:  # an index in between is left out: a member without a name
            self.members.append(Member("", len(self.members)))
        self.departed.pop(record.node, None)
        self.free = [node for node in self.free if node != record.node]
        member = self.changing(record.node)
        member.name = record.name
        self.names[record.name] = record.node
        member.join(record)
        self.roster.add(member)
        self.sessions += 1
        self.lost.pop(record.node, None)
        self._pass(record.at_s)
        for unit in self.units.values():
            unit.brought[record.node] = unit.brought.get(record.node, Contribution(0)).joined(
                unit.version, record.at_s
            )
            times = unit.times.get(record.node)
            unit.times[record.node] = times.joined(record.at_s) if times else PushTimes.began(record.at_s)
            self._note_gap(unit, record.node)
        if self.founder is None or not self.members[self.founder].live:
            self.founder = record.node

    def _leave(self, record: records.Left) -> None:
        member = self.changing(record.node)
        member.live, member.excluded, member.gone = False, record.excluded, record.reason
        self.roster.remove(member)
        for unit in self.units.values():
            unit.missed.pop(record.node, None)
            self._note_gap(unit, record.node)
        if record.excluded:
            for unit in self.units.values():
                unit.brought.pop(record.node, None)
        self.lost[record.node] = self.pool.outstanding(record.node)
        self.pool.give_back(record.node)
        self._keep_left_members(member)

    def _keep_left_members(self, member: Member) -> None:
        """Keep a member that has left, so that it can return with its index and name; drop the oldest ones.

        Excluded members with keys of their own are never dropped: their number is bounded by the number of
        keys. The others could return from other hosts until they are dropped. What is dropped depends on the
        records alone: a replay and a standby drop the same members at the same record.
        """
        self.departed.pop(member.node, None)
        if not member.excluded:
            self.departed[member.node] = None
        elif member.proof != CERTIFIED:
            self.excluded[member.node] = None
        busy = {pusher for unit in self.units.values() for pusher, _ in unit.pending}
        for gone in (self.departed, self.excluded):
            idle = [node for node in gone if node not in busy and node != self.founder]
            for node in idle[: max(0, len(gone) - KEPT_MEMBERS)]:
                del gone[node]
                self._drop_member(node)

    def _drop_member(self, node: int) -> None:
        """Free the index and the name. A node that joins under this name is new: its pushes count from 1."""
        del self.names[self.members[node].name]
        self.members[node] = Member("", node, era=self.era)
        self.roster.forget(node)
        self.free.append(node)
        self.lost.pop(node, None)
        for unit in self.units.values():
            for known in (unit.brought, unit.times, unit.missed):
                known.pop(node, None)

    def _accept(self, push: Push) -> None:
        unit = self.units[push.unit]
        unit.pending[push.node, push.seq] = push
        self.changing(push.node).accept(push, counts=not unit.apart)
        unit.steps += push.steps
        if push.base:
            times = unit.times.get(push.node, PushTimes.began(self.elapsed_s))
            unit.times[push.node] = times.pushed(self.elapsed_s, push.steps)
            self._note_gap(unit, push.node)
        if not unit.apart:
            self.steps += push.steps
            self.tokens += push.tokens
            self.mean_steps += push.steps / self._num_counting / max(1, len(self.live))
        unit.history = unit.history.with_push(push)

    def _merge(self, record: records.Merged, computed: Computed) -> None:
        unit = self.units[record.unit]
        if record.version == 1:  # who has joined before can push only from now on
            unit.brought = {node: one.joined(1, record.at_s) for node, one in unit.brought.items()}
            unit.times = {node: PushTimes.began(record.at_s) for node in unit.times}
            unit.gaps.clear()
        else:
            pushes = [unit.pending[part.node, part.seq] for part in record.parts]
            unit.brought = unit.brought_with(pushes, record.version, record.at_s, len(self.live))
        is_late = record.version > 1 and self._count_missed(record)
        self._advance(unit, record.version, computed)
        unit.norm = computed.norm
        total = (sum(part.weight for part in record.parts) or 1.0) / (record.share or 1.0)
        for part in record.parts:
            push = unit.pending.pop((part.node, part.seq))
            member = self.changing(part.node)
            if not unit.apart:  # a drafter that was not trained is pushed with weight 0
                member.weight, member.staleness = part.weight / total, part.staleness
            self._decide_merged(member, push, part, computed)
        if record.version > 1 and not is_late:
            interval_s = max(0.0, record.at_s - unit.merged_at_s)
            usual_s = interval_s if unit.usual_s is None else unit.usual_s
            unit.usual_s = usual_s + 0.25 * (interval_s - usual_s)
        unit.merged_at_s = record.at_s
        self._pass(record.at_s)

    def _count_missed(self, record: records.Merged) -> bool:
        """Count the awaited members without a push in this merge; return whether there are any.

        The time that such a merge has waited is not usual: if it counted, every wait would be longer than the
        one before.
        """
        if not self.awaits_all:
            return False
        missed, merged = self.units[record.unit].missed, {part.node for part in record.parts}
        for node in merged:
            missed.pop(node, None)
        late = {node for node, member in self.live.items() if not member.is_refused(record.unit)} - merged
        late = {node for node in late if missed.get(node, 0) < AWAITED_MISSES}
        for node in late:
            missed[node] = missed.get(node, 0) + 1
        return bool(late)

    def _decide_merged(self, member: Member, push: Push, part: records.MergePart, computed: Computed) -> None:
        decision = LastDecision(part.seq, Verdict.MERGED)
        if part.weight == 0 and push.steps > 0:
            reason = f"{NORM}: far longer than the others of its merge"
            decision = LastDecision(part.seq, Verdict.DISTRUSTED, reason)
            member.add_violation(part.seq)
        elif (part.node, part.seq) in computed.ignored:
            reason = "away: it points away from the others and did not count"
            decision = LastDecision(part.seq, Verdict.MERGED, reason)
        if decision.reason:
            member.count(decision.reason)
        member.decide(push.unit, decision)

    def _advance(self, unit: Unit, version: int, computed: Computed) -> None:
        assert computed.anchor.version == version == unit.version + 1, "versions count up, one by one"
        unit.anchor = computed.anchor
        if version == 1 and self.has_parent:
            unit.up, unit.sent_at = computed.anchor.values, 1
        if not computed.delta:
            unit.deltas.clear()
            return
        unit.deltas.append((version, computed.delta))
        whole_bytes = computed.anchor.values.nbytes
        while len(unit.deltas) > 1 and sum(len(data) for _, data in unit.deltas) > whole_bytes:
            unit.deltas.popleft()


def _there(computed: Computed | None) -> Computed:
    assert computed is not None, "a new version must be computed before it is applied"
    return computed
