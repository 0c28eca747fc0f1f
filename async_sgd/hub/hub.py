"""The hub of an asynchronous run, as a state machine without network, files or a clock of its own.

Deciding (`join`, `offer`, `tick`, `lease`, ...) reads the state and the time and returns records; journaled
state changes only when the driver has written them down and calls `apply`. One decision at a time: its
records are applied before the next one is asked for, but `compute`, the heavy part of a merge, may run
meanwhile. Times are those of any monotonic clock, in seconds.
"""

from collections.abc import Iterable, Set
from dataclasses import replace

from aedit.async_sgd.hub import outer_step, step_bounds
from aedit.async_sgd.hub.decide_join import Joiner, joining
from aedit.async_sgd.hub.decide_merge import decide_merge, is_due
from aedit.async_sgd.hub.decide_push import exclusion, judged
from aedit.async_sgd.hub.member_timeouts import MemberTimeouts, allowed_silence, heartbeat_interval
from aedit.async_sgd.hub.members import SILENT, Clocks, Member, NodeReport
from aedit.async_sgd.hub.outer_step import AdvanceRule, Anchor, Computed, Quantiser
from aedit.async_sgd.hub.pool import Block
from aedit.async_sgd.hub.recovery_anchors import RecoveryAnchors
from aedit.async_sgd.hub.saved_state import Saved, load_state, save_state
from aedit.async_sgd.hub.state import Denied, HubState, Unit
from aedit.async_sgd.rules import (
    Accepted,
    Garbled,
    HubPlan,
    Joined,
    Leased,
    Left,
    Merged,
    Mixed,
    Push,
    Record,
    RoundOpened,
    Ticked,
    Used,
    Vector,
    directions,
    make_outer,
)
from aedit.types import checked

_TICK_S = 1.0
"""Interval at which the age of the run is written to the journal."""

_LOOKS = 10
"""Looks at silent members in `hub.expire_s`, at least."""

_MOST_BLOCKS = 64
"""In one lease, however small the pieces are that have come back."""

_WITHHELD = 20.0
"""Times `hub.expire_s`: how long the samples of a silent node wait for its return before others get them."""

MOST_LEASES = 1024
"""Unused leases of one node; who has more must train first."""


@checked()
class Hub:
    """The state machine that owns the anchors of a run, or of its share of the units."""

    def __init__(self, plan: HubPlan, quantiser: Quantiser | None = None) -> None:
        """Create a hub without members. quantiser: of `hub.codec_down`; None for "fp32"."""
        assert (quantiser is None) == (plan.hub.codec_down == "fp32"), "a quantiser that is not used, or none"
        self.plan, self.config = plan, plan.hub
        outer, clip = make_outer(plan.outer), plan.penalty.clip
        self.rule = AdvanceRule(outer, plan.hub.merge, clip, quantiser, plan.hub.merge_cut)
        self.rules = {
            name: AdvanceRule(make_outer(rule.outer), "mean", None, quantiser)
            for name, rule in plan.rules.items()
        }
        """Rules of units that are trained apart from the model, by name."""
        self.state = HubState(part=plan.part, has_parent=bool(plan.hub.parent), apart=frozenset(plan.rules))
        self.state.awaits_all = plan.hub.quorum == "all"
        self.clocks, self.recovery_anchors = Clocks(), RecoveryAnchors(lambda: self.state, plan.hub.expire_s)
        self._timeouts: MemberTimeouts | None = None

    # -- deciding

    def join(self, joiner: Joiner, now: float) -> list[Record]:
        """Return the records that make `joiner` a member.

        The last record is Joined, with index and session.

        Raises Denied if the node trains another model, was excluded, or there are too many nodes.
        """
        decided = joining(self.state, joiner, self.config, self.elapsed_s(now))
        joined = next(record for record in decided if isinstance(record, Joined))
        self._start_clock(now)
        self.clocks.seen[joined.node] = now
        return decided

    def member(self, node: int, session: int) -> Member:
        """Return the live member with this index and session.

        Raises Denied if it is unknown or an earlier one of its process (the node joins again), replaced by a
        newer process, or excluded.
        """
        if not 0 <= node < len(self.state.members):
            raise Denied("unknown", f"no node {node} has joined this hub")
        member = self._must_be_live(node)
        if session in member.earlier:
            raise Denied("unknown", f"{member.name} has joined again since: call with its new session")
        if member.session != session:
            raise Denied("replaced", f"another process of {member.name} has joined since")
        return member

    def offer(self, push: Push, now: float, used: Iterable[Block] = ()) -> list[Record]:
        """Return Accepted or Refused (and Left if the node is excluded); nothing for a push decided before.

        used: positions of the node's leases that the steps of the push, and all before them, have used; see
        `use`. Its records follow Accepted: samples and steps are counted together or not at all.

        The same push may be offered repeatedly. Raises Denied if the pusher is not a live member, or the unit
        is not this hub's.
        """
        self._must_be_live(push.node)
        if push.unit not in self.state.units:  # not journaled: a client could send unboundedly many
            raise Denied("different", f"this hub has no unit {push.unit}")
        self.clocks.seen[push.node] = now
        founder = self.recovery_anchors.founder(push.unit, now)
        decided = judged(self.state, push, self.plan, self.clocks, self.elapsed_s(now), founder)
        if accepted := next((record.push for record in decided if isinstance(record, Accepted)), None):
            made_s = step_bounds.next_made_s(
                self.state, accepted, self.plan, self.clocks, self.elapsed_s(now)
            )
            self.clocks.next_made_s[push.unit, push.node] = made_s
            self.clocks.came_s.setdefault((push.unit, push.node, push.seq), now)
            decided += self.use(push.node, used)
        return decided

    def garbled(self, node: int, unit: int, reason: str) -> list[Record]:
        """Return Garbled (and Left if the node is excluded) for a message that is not a valid push.

        Raises Denied if the node is not a live member.
        """
        member = self._must_be_live(node)
        return [Garbled(node, unit, reason), *exclusion(member, reason, self.config.push_filter)]

    def tick(self, now: float, busy: Set[int] = frozenset()) -> list[Record]:
        """Return what is due at `now`: silent nodes leave, a round opens, units merge.

        One merge per unit at a time: call it again when they are applied. busy: units that must not be merged
        yet.
        """
        elapsed_s = self.elapsed_s(now)
        decided: list[Record] = []
        if elapsed_s >= self.state.elapsed_s + _TICK_S:
            decided.append(Ticked(elapsed_s))
        timeouts = self._member_timeouts()
        left = timeouts.leaving(now)
        decided += left
        due_s = self.state.round_at_s + self.plan.every  # on a fixed grid, so that rounds do not drift
        if self.plan.pace == "seconds" and self.state.is_founded and elapsed_s >= due_s:
            at_s = due_s if elapsed_s < due_s + self.plan.every else elapsed_s  # anew after a pause
            decided.append(RoundOpened(self.state.round + 1, at_s))
        leaving = {record.node for record in left}
        for index, unit in self.state.units.items():
            if unit.pending and index not in busy and self._is_due(index, unit, leaving, now):
                decided.append(decide_merge(self.state, self.clocks, self.plan, index, elapsed_s))
        return decided

    def quiet_s(self, now: float) -> float:
        """Return for how long nothing becomes due by time alone; 0 while pushes wait for their merge."""
        state = self.state
        if any(unit.pending for unit in state.units.values()):
            return 0.0
        due_s = state.elapsed_s + _TICK_S
        if self.plan.pace == "seconds" and state.is_founded:
            due_s = min(due_s, state.round_at_s + self.plan.every)
        return max(0.0, min(due_s - self.elapsed_s(now), self.config.expire_s / _LOOKS))

    def lease(self, node: int, samples: int, now: float) -> list[Record]:
        """Return leases of blocks of the sample stream, at most `hub.lease_samples` in all.

        0 asks for that many.

        Blocks that others have returned come first, so there may be several blocks, and fewer samples. Those
        of a node that has fallen silent wait for a while: it may train on them, and gets them back if it
        joins again. Raises Denied if the node holds too many unused samples.
        """
        self._must_be_live(node)
        self.clocks.seen[node] = now
        if len(self.state.pool.outstanding(node)) >= MOST_LEASES:
            raise Denied("full", f"node {node} has {MOST_LEASES} leases that it has not used")
        most = self.config.lease_samples
        withheld = self._withheld(self.elapsed_s(now))
        blocks = self.state.pool.offer(min(samples, most) if samples else most, withheld)
        return [Leased(node, start, end) for start, end in blocks[:_MOST_BLOCKS]]

    def use(self, node: int, consumed: Iterable[Block]) -> list[Record]:
        """Return Used for the positions start..upto of each block, at whose start a lease began.

        They are in an accepted push, or in one that another hub of the run is about to get. Positions that
        are known as used, or no longer the node's, are skipped.
        """
        blocks, at, reach = sorted(consumed), 0, 0
        decided: list[Record] = []
        leases = self.state.pool.leases.get(node, {}).items()
        for lease, (used, end) in sorted(leases, key=lambda item: item[1]):
            while at < len(blocks) and blocks[at][0] <= used:
                reach, at = max(reach, blocks[at][1]), at + 1
            if used < reach:
                decided.append(Used(node, lease, min(reach, end)))
        return decided

    def leave(self, node: int) -> list[Record]:
        """Return the records of a node that has sent its last pushes and leaves."""
        return [Left(node, "left")] if self.state.members[node].live else []

    def called(self, node: int, now: float) -> None:
        """Note that a live member has made a call, of any kind: it is there."""
        self.clocks.seen[node] = now

    def ask(self, node: int) -> tuple[float, float]:
        """Return the interval at which a live member is to report, and how long it may be silent.

        It may be silent for that long from now on, or for as long as the reply before has said, as this one
        may not arrive. Members that break ties report at `hub.heartbeat_s`: replicas wait for their votes.
        """
        heartbeat_s, voter = self.heartbeat_s, self.state.members[node].voter
        if voter and any(voter in config.electors for config in self.state.configs):
            heartbeat_s = self.config.heartbeat_s
        limit_s = allowed_silence(self.config, heartbeat_s)
        before_s = self.clocks.silent_s.get(node, (0.0, self.config.expire_s))[1]
        if max(limit_s, before_s) > self.config.expire_s:
            self.clocks.silent_s[node] = before_s, limit_s
        else:
            self.clocks.silent_s.pop(node, None)
        return heartbeat_s, limit_s

    def heartbeat(self, node: int, report: NodeReport, now: float) -> None:
        """Take the report of a live member. Nothing of it is journaled."""
        self.clocks.seen[node] = now
        self.clocks.reports[node] = report
        step_bounds.note(self.state, self.clocks, node)
        if self._timeouts is not None:
            self._timeouts.note_report(node)

    # -- applying

    def compute(self, record: Record) -> Computed | None:
        """Return the result of Merged or Mixed, the heavy part; None for other records.

        Changes nothing and needs no lock: only the record itself, when applied, changes what this reads.
        """
        match record:
            case Merged():
                return self._compute_merge(record)
            case Mixed():
                return self._compute_mix(record)
            case _:
                return None

    def apply(self, record: Record, computed: Computed | None = None) -> None:
        """Apply a record, in the order of the journal. Without `computed` the result is computed here."""
        if computed is None:
            computed = self.compute(record)
        self.state.apply(record, computed)
        self._keep_up(record)

    def saved(self) -> Saved:
        """Return everything that is journaled, for a snapshot. Copies no array; arrays never change."""
        return save_state(self.state)

    def restore(self, saved: Saved) -> None:
        """Continue from a snapshot, before any record is applied. Takes ownership of the arrays."""
        assert self.state.layout is None, "this hub has a past of its own"
        load_state(saved, self.state)

    # -- reading

    def elapsed_s(self, now: float) -> float:
        """Return the age of the run in seconds, outages of the hub not counted."""
        if self.state.layout is None:
            return 0.0
        return max(self.state.elapsed_s, now + self._start_clock(now))

    @property
    def heartbeat_s(self) -> float:
        """Return the interval at which members are to report; see `heartbeat_interval`."""
        return heartbeat_interval(self.plan, len(self.state.live), self.clocks.call_s)

    def progress(self, now: float) -> float:
        """Return the share of the budget that is used up, 0 to 1; 0 for a run without a budget."""
        if self.config.endless:
            return 0.0
        share = self.state.mean_steps / self.plan.steps
        if self.plan.seconds:
            share = max(share, self.elapsed_s(now) / self.plan.seconds)
        return min(1.0, share)

    def pace_steps(self, node: int) -> int:
        """Return the steps that this node should do before its next push; 0 with pace "seconds"."""
        return self.paces([node])[node]

    def paces(self, nodes: Iterable[int] | None = None) -> dict[int, int]:
        """Return `pace_steps` of these nodes, by node; default all live members."""
        return step_bounds.pace_steps(
            self.state, self.clocks, self.plan, self.state.roster.order if nodes is None else nodes
        )

    def anchor(self, index: int) -> tuple[int, Vector]:
        """Return (version, values) of the newest version as nodes hold it.

        (0, empty) before the unit is founded.

        The values must not be changed.
        """
        anchor = self.state.units[index].anchor
        return (0, Vector(0)) if anchor is None else (anchor.version, self.as_held(index, anchor))

    def as_held(self, index: int, anchor: Anchor) -> Vector:
        """Return the values of an anchor as nodes hold it. Needs no lock: anchors never change."""
        if anchor.handed is not None:
            return anchor.handed
        if not self.plan.outer.look_ahead:
            return anchor.values
        return self._advance_rule(index).outer.look_ahead(anchor.values, anchor.outer)

    def chain(self, index: int, base: int) -> tuple[tuple[int, bytes], ...] | None:
        """Return (version, encoded delta) after `base` up to the newest.

        None where the whole anchor is shorter.
        """
        unit = self.state.units[index]
        links = tuple((version, data) for version, data in unit.deltas if version > base)
        if unit.anchor is None or not base or len(links) != unit.version - base:
            return None
        shorter = sum(len(data) for _, data in links) < unit.anchor.values.nbytes
        return links if shorter else None

    # -- inside

    def _start_clock(self, now: float) -> float:
        """Start the clock at the first call: the run is as old as its journal says."""
        if self.clocks.offset_s is None:
            self.clocks.offset_s = self.state.elapsed_s - now
            self.clocks.began_s = -1.0 if self.state.layout is None else self.state.elapsed_s
            for node in self.state.lost:
                if node not in self.clocks.lost_s:
                    self._note_lost(node)
        return self.clocks.offset_s

    def _withheld(self, elapsed_s: float) -> list[Block]:
        """Return the unused positions of the nodes that have fallen silent of late and may come back."""
        lost_s, since_s = self.clocks.lost_s, elapsed_s - _WITHHELD * self.config.expire_s
        self.clocks.lost_s = {node: at_s for node, at_s in lost_s.items() if at_s > since_s}
        return [block for node in self.clocks.lost_s for block in self.state.lost.get(node, ())]

    def _note_lost(self, node: int) -> None:
        """Note whether a node has fallen silent that had leases."""
        self.clocks.lost_s.pop(node, None)
        if self.state.lost.get(node) and self.state.members[node].gone.startswith(SILENT):
            self.clocks.lost_s[node] = self.state.elapsed_s

    def _advance_rule(self, index: int) -> AdvanceRule:
        return self.rules.get(self.state.unit_name(index), self.rule)

    def _must_be_live(self, node: int) -> Member:
        member = self.state.members[node]
        if member.excluded:
            raise Denied("excluded", f"{member.name} was excluded: {member.gone}")
        if not member.live:
            raise Denied("unknown", f"{member.name} is not counted on any more: {member.gone}")
        return member

    def _member_timeouts(self) -> MemberTimeouts:
        """Return what this hub waits for; made anew where the volatile state is another one."""
        if self._timeouts is None or self._timeouts.clocks is not self.clocks:
            self._timeouts = MemberTimeouts(self.state, self.clocks, self.plan)
        return self._timeouts

    def _is_due(self, index: int, unit: Unit, leaving: Set[int], now: float) -> bool:
        if unit.anchor is None or unit.apart or self.config.each_alone:
            return True
        awaited = self._member_timeouts().awaited(index, now)
        usual_s = unit.usual_s
        if usual_s is None:  # as long as the first one has taken
            usual_s = awaited.came_s.values[0] + self._start_clock(now) - unit.merged_at_s
        return is_due(self.config, awaited, leaving, max(0.0, usual_s), now)

    def _compute_merge(self, record: Merged) -> Computed:
        unit = self.state.units[record.unit]
        assert self.state.layout is not None
        layout = self.state.layout.units[record.unit]
        pushes = [(unit.pending[part.node, part.seq], part) for part in record.parts]
        if unit.anchor is None:
            return outer_step.founded(pushes[0][0].values, layout, self._advance_rule(record.unit))
        if unit.apart:
            rule = self._advance_rule(record.unit)
            return outer_step.merged(unit.anchor, pushes, layout, rule, record.share)
        away = directions(pushes, layout, self.config.push_filter)
        trusted = [pair for pair, is_away in zip(pushes, away, strict=True) if not is_away]
        computed = outer_step.merged(unit.anchor, trusted, layout, self.rule, record.share)
        ignored = [part for (_, part), is_away in zip(pushes, away, strict=True) if is_away]
        return replace(computed, ignored=tuple((part.node, part.seq) for part in ignored))

    def _compute_mix(self, record: Mixed) -> Computed:
        unit = self.state.units[record.unit]
        assert unit.anchor is not None
        assert unit.up is not None
        rule = self._advance_rule(record.unit)
        # x <- (1 - a) x + a global (HALoS, arXiv:2506.04531); the momentum stays as it is.
        new = outer_step.mixture(unit.anchor.values, record.values, record.mix)
        computed = outer_step.handed_out(unit.anchor, new, unit.anchor.outer, rule)
        # The parent knows what was sent, and nothing newer.
        known = unit.up if unit.sent is None else unit.sent
        return replace(computed, up=outer_step.mixture(known, record.values, record.mix))

    def _keep_up(self, record: Record) -> None:
        """Bring volatile state up to date with the record."""
        match record:
            case Accepted(push):
                came_s = self.clocks.came_s.get((push.unit, push.node, push.seq))
                if came_s is not None:
                    self.clocks.pushed_s[push.unit, push.node] = self.elapsed_s(came_s)
                made_s = self.clocks.next_made_s.pop((push.unit, push.node), None)
                if made_s is not None:
                    self.clocks.made_s[push.unit, push.node] = made_s
                step_bounds.note(self.state, self.clocks, push.node)
            case Joined(_, node):
                step_bounds.note(self.state, self.clocks, node)
            case Left(node):
                self._note_lost(node)
                self.clocks.seen.pop(node, None)
                self.clocks.reports.pop(node, None)
                self.clocks.silent_s.pop(node, None)
                for unit in self.state.units:
                    self.clocks.pushed_s.pop((unit, node), None)
                step_bounds.note(self.state, self.clocks, node)
            case Merged(unit, version, parts):
                for part in parts:
                    self.clocks.came_s.pop((unit, part.node, part.seq), None)
                if version == 1:  # the speeds of the unit are measured from now on
                    for node in self.clocks.speeds.nodes:
                        step_bounds.note(self.state, self.clocks, node)
        if self._timeouts is not None:
            self._timeouts.apply(record)
