"""Tests a hub under random events and restarts: no accepted push is lost or counted twice.

The ledger beside the hub sees only the hub's answers, in float64 and plain sets.
"""

import math
from collections import Counter, defaultdict
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine
from kit.hub_machine import AVERAGE, LAYOUT, Int8, World, config, kinds, picture, plan, through_a_file

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.hub.status import hub_status, run_news
from aedit.async_sgd.rules import (
    Accepted,
    Joined,
    Leased,
    Left,
    LimitConfig,
    Merged,
    PushFilterConfig,
    Refused,
    StalenessConfig,
    Used,
    push_norm,
)
from aedit.types import Verdict

NAMES = "abcde"
NODES = st.integers(0, len(NAMES) - 1)
UNITS = st.integers(0, 1)
FREE, USED = -1, -2


class Ledger:
    """Expected state, computed from the hub's answers alone."""

    def __init__(self):
        self.anchors = [np.zeros(unit.numel) for unit in LAYOUT.units]
        self.versions = [0, 0]
        self.accepted, self.merged = {}, Counter()
        self.owner = {}
        """Node by leased position."""
        self.unused = defaultdict(list)
        """Blocks by node, as (start, end)."""
        self.sessions = {}

    def note(self, record):
        match record:
            case Joined():
                assert record.session not in self.sessions.values(), "a session twice"
                self.sessions[record.node] = record.session
            case Accepted(push):
                key = (push.node, push.unit, push.seq)
                assert key not in self.accepted, "accepted twice"
                self.accepted[key] = push
            case Merged():
                self._merge(record)
            case Leased(node, start, end):
                assert start < end
                for position in range(start, end):
                    assert self.owner.get(position, FREE) == FREE, "a position with two nodes"
                    self.owner[position] = node
                self.unused[node].append((start, end))
            case Used(node, start, upto):
                self._use(node, start, upto)
            case Left(node):
                for start, end in self.unused.pop(node, []):
                    self.owner.update((p, FREE) for p in range(start, end) if self.owner[p] == node)

    def _merge(self, record):
        assert record.version == self.versions[record.unit] + 1, "a version moved back or was left out"
        self.versions[record.unit] = record.version
        pushes = []
        for part in record.parts:
            key = (part.node, record.unit, part.seq)
            self.merged[key] += 1
            assert self.merged[key] == 1, "merged twice"
            pushes.append(self.accepted[key])
        if record.version == 1:
            self.anchors[record.unit] = pushes[0].values.values.astype(np.float64)
            return
        pushes = [push for push in pushes if push.steps]
        share = 1.0 if record.share is None else record.share
        assert 0 <= share <= 1
        if len(pushes) == 1:  # in the hub's own precision
            step = pushes[0].values.values * np.float32(share)
            self.anchors[record.unit] = self.anchors[record.unit].astype(np.float32) - step
        elif pushes:
            self.anchors[record.unit] = self.anchors[record.unit] - share * np.mean(
                [push.values.values.astype(np.float64) for push in pushes], axis=0
            )

    def _use(self, node, start, upto):
        (block,) = (block for block in self.unused[node] if block[0] == start)
        assert start < upto <= block[1]
        for position in range(start, upto):
            assert self.owner[position] in (node, USED)
            self.owner[position] = USED


class Machine(RuleBasedStateMachine):
    """Random actions of five nodes, and of a hub that may die at any time."""

    @initialize(
        quorum=st.sampled_from([1, 1, 2, 3, "all"]),
        down=st.sampled_from(["fp32", "fp32", "e3m0"]),
        violations=st.sampled_from([3, 10**9]),
        members=st.sampled_from([0, 3, 4]),
    )
    def begin(self, quorum, down, violations, members):
        trusting = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=violations)
        hub = config(
            quorum=quorum,
            codec_down=down,
            push_filter=trusting,
            expire_s=5,
            lease_samples=20,
            limits=LimitConfig(nodes=4),
            staleness=StalenessConfig(rule="constant", cutoff=4),
        )
        self.exact = quorum == 1 and down == "fp32"
        quantiser = None if down == "fp32" else Int8(levels=7, feedback=True)
        self.world = World(plan(hub, AVERAGE, steps=200), quantiser)
        self.ledger, self.noted = Ledger(), 0
        self.snapshot = None
        self.past = {}
        """The last push of each node and unit, to be sent again."""
        for name in NAMES[:members]:
            self.world.join(name)
        if members:
            self.world.found()

    # -- what happens

    @rule(i=NODES)
    def join(self, i):
        self.join_or_be_denied(NAMES[i])

    @rule(i=NODES)
    def join_again_in_the_same_process(self, i):
        node = self.node(i)
        if node is not None:
            self.join_or_be_denied(NAMES[i], session=self.ledger.sessions[node])

    def join_or_be_denied(self, name, session=0):
        live = self.world.hub.state.live.values()
        full = len([member for member in live if member.name != name]) == 4
        node = self.world.hub.state.names.get(name)
        if full or (node is not None and self.world.hub.state.members[node].excluded):
            with pytest.raises(Denied, match=r"excluded|takes 4 nodes"):
                self.world.join(name, session=session)
        else:
            self.world.join(name, session=session)

    @rule(i=NODES, unit=UNITS, value=st.integers(-9, 9), steps=st.integers(0, 5), back=st.integers(0, 8))
    def push(self, i, unit, value, steps, back):
        self.pushes(i, unit, value, steps, back)

    @rule(count=st.integers(2, 12), unit=UNITS, value=st.integers(-9, 9), back=st.integers(0, 3))
    def some_train_on(self, count, unit, value, back):
        for i in range(count):
            self.pushes(i, (unit + i) % 2, value + i, 1 + i % 3, back)
            if i % 3 == 2:
                self.world.tick(0.3)

    @rule(count=st.integers(2, 5), unit=UNITS)
    def some_train_on_and_all_is_merged(self, count, unit):
        for i in range(count):
            self.pushes(i, unit, i, 2, 0)
        self.world.settle()

    def pushes(self, i, unit, value, steps, back):
        node = self.live(i)
        if node is None:
            return
        version = self.world.hub.state.units[unit].version
        if version == 0 and steps < 4 and self.world.hub.state.founder in self.world.hub.state.live:
            node = self.world.hub.state.founder
        base = max(1, version - back) if version else 0
        made = self.world.make(node, value, unit, base=base, steps=steps, tokens=10 * steps)
        self.past[node, unit] = made
        decided = self.offer(made)
        assert len(decided) == 1 or kinds(decided) == [Refused, Left], "the last violation puts a node out"
        if isinstance(decided[0], Refused) and base and version - base < 4:
            first = self.world.hub.state.units[unit].history.anchor_norm
            is_crude = push_norm(made) > 9.99 * first  # all that a hub can go by that knows one node
            assert decided[0].reason.startswith(("early", "norm") if is_crude else "early")

    @rule(i=NODES, unit=UNITS)
    def push_once_more(self, i, unit):
        node = self.live(i)
        if (node, unit) in self.past:
            assert self.offer(self.past[node, unit]) == []

    @rule(i=NODES, unit=st.integers(0, 3))
    def push_garbage(self, i, unit):
        """Send bytes that are no push at all."""
        node = self.live(i)
        if node is not None:
            self.world.do(self.world.hub.garbled(node, unit, "damaged: chunk at byte 0"))

    @rule(
        i=NODES,
        unit=st.integers(0, 3),
        ahead=st.integers(-3, 3),
        base=st.integers(0, 30),
        bad=st.sampled_from([math.nan, math.inf, 1.0]),
    )
    def push_nonsense(self, i, unit, ahead, base, bad):
        """Send a push with an invalid unit, number, base or value."""
        node = self.live(i)
        if node is None:
            return
        fair = self.world.make(node, 1.0, unit % 2)
        norms = (bad,) * len(fair.norms)
        wild = replace(fair, unit=unit, seq=max(1, fair.seq + ahead), base=base, norms=norms)
        if unit > 1:
            with pytest.raises(Denied, match="no unit"):
                self.offer(wild)
            return
        if wild.seq > fair.seq:
            with pytest.raises(Denied, match="join again"):
                self.offer(wild)
            return
        if ahead == 0 and math.isfinite(bad):
            self.past[node, unit] = wild  # it may be fair by chance
        decided = self.offer(wild)
        if not math.isfinite(bad):
            assert not any(isinstance(record, Accepted) for record in decided)

    @rule(i=NODES)
    def heartbeat(self, i):
        node = self.live(i)
        if node is not None:
            self.world.heartbeat(node, steps_per_s=float(i))
            said = run_news(self.world.hub, node, self.world.now)
            assert 0 <= said.pace_steps <= 10
            for unit, last in self.world.hub.state.members[node].decisions.items():
                if last.verdict == Verdict.MERGED:
                    assert self.ledger.merged[node, unit, last.seq] == 1

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.5, 2.0, 6.0]))
    def time_passes(self, seconds):
        self.world.tick(seconds)

    @rule()
    def time_passes_while_all_are_heard(self):
        self.world.now += 4.0
        for node in self.world.hub.state.live:
            self.world.heartbeat(node)
        self.world.tick()

    @rule(i=NODES)
    def leave(self, i):
        node = self.node(i)
        if node is not None:
            self.world.do(self.world.hub.leave(node))

    @rule(i=NODES, samples=st.integers(0, 30))
    def lease(self, i, samples):
        node = self.live(i)
        if node is not None:
            blocks = self.world.lease(node, samples)
            assert sum(end - start for start, end in blocks) == (min(samples, 20) or 20)

    @rule(i=NODES, which=st.integers(0, 5), share=st.integers(0, 12))
    def use(self, i, which, share):
        node = self.live(i)
        blocks = self.ledger.unused.get(node)
        if blocks:
            start, _ = blocks[which % len(blocks)]
            self.world.do(self.world.hub.use(node, [(start, start + share)]))

    @rule(count=st.integers(1, 8), samples=st.integers(1, 20), share=st.integers(0, 20))
    def some_draw_data(self, count, samples, share):
        for i in range(count):
            self.lease(i, samples + i)
            self.the_ledger_agrees()
            self.use(i, i, share)
            self.the_ledger_agrees()

    @rule()
    def take_a_snapshot(self):
        self.snapshot = (through_a_file(self.world.hub.saved()), len(self.world.journal))

    @precondition(lambda self: self.snapshot)
    @rule()
    def the_hub_dies_and_comes_back_from_its_snapshot(self):
        saved, since = self.snapshot
        self.comes_back(self.world.replayed(through_a_file(saved), since))

    @rule()
    def the_hub_dies_and_comes_back_from_its_journal(self):
        self.comes_back(self.world.replayed())

    def comes_back(self, hub):
        assert picture(hub) == picture(self.world.hub), "other bits after a restart"
        self.world.hub = hub
        self.world.now = 7.0 + len(self.world.journal)  # another clock

    # -- what is always true

    @invariant()
    def the_ledger_agrees(self):
        if not hasattr(self, "world"):
            return
        for record in self.world.journal[self.noted :]:
            self.ledger.note(record)
        self.noted = len(self.world.journal)
        state = self.world.hub.state
        waiting = {(n, index, s) for index, unit in state.units.items() for n, s in unit.pending}
        assert waiting == self.ledger.accepted.keys() - self.ledger.merged.keys(), "an accepted push is lost"
        assert [unit.version for unit in state.units.values()] == self.ledger.versions[: len(state.units)]
        self.every_position_is_somewhere()
        self.anchors_are_as_they_must_be()

    def every_position_is_somewhere(self):
        pool, owner = self.world.hub.state.pool, self.ledger.owner
        assert set(owner) == set(range(pool.watermark))
        assert {p for p, who in owner.items() if who == FREE} == positions(pool.returned)
        for node in self.world.hub.state.live:
            mine = {p for p, who in owner.items() if who == node}
            assert positions(pool.outstanding(node)) == mine

    def anchors_are_as_they_must_be(self):
        for index, unit in self.world.hub.state.units.items():
            if unit.anchor is None:
                continue
            wanted = self.ledger.anchors[index]
            if self.exact:
                assert (unit.anchor.values == wanted).all()
            else:
                np.testing.assert_allclose(unit.anchor.values, wanted, atol=1e-3)

    def teardown(self):
        """Check that nothing is left waiting when all nodes have left."""
        if not hasattr(self, "world"):
            return
        for node in list(self.world.hub.state.live):
            self.world.do(self.world.hub.leave(node))
        self.world.settle()
        self.the_ledger_agrees()
        assert self.ledger.accepted.keys() == self.ledger.merged.keys()
        hub_status(self.world.hub, self.world.now)

    # -- inside

    def node(self, i):
        return self.world.hub.state.names.get(NAMES[i])

    def live(self, i):
        """Return a live member, if there is one."""
        live = list(self.world.hub.state.live)
        return live[i % len(live)] if live else None

    def offer(self, push):
        return self.world.do(self.world.hub.offer(push, self.world.now))


def positions(blocks):
    return {position for start, end in blocks for position in range(start, end)}


def hunt(sequences, events):
    plain = settings(
        max_examples=sequences,
        stateful_step_count=events,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_machine(Machine, settings=plain)


def test_nothing_is_lost_or_counted_twice_whatever_happens():
    hunt(sequences=80, events=50)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_counted_twice_in_a_hundred_thousand_events():
    hunt(sequences=1000, events=100)
