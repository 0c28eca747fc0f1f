"""Tests that a hub answers as if it looked at every member, and that it does not look at every member.

The oracle here is the plain computation over the list of all members.
"""

import json
import random
import statistics
import sys
import threading

import numpy as np
import pytest
from benchmarks.hub import CrowdedHub
from kit.hub_machine import World, config, kinds, picture, plan, poison, through_a_file

from aedit.async_sgd.hub import Denied, Hub, frozen, save_state
from aedit.async_sgd.hub import state as hub_state
from aedit.async_sgd.hub.members import Ranking
from aedit.async_sgd.hub.status import MOST_GONE, MOST_SHOWN, hub_status, listed_members, run_news
from aedit.async_sgd.hub.step_bounds import pushed, speed
from aedit.async_sgd.journal.snapshot import snapshot_json
from aedit.async_sgd.rules import Accepted, Left, Merged, PushFilterConfig, StalenessConfig, least_gap
from aedit.async_sgd.rules.push_shares import _possible
from aedit.async_sgd.rules.push_weights import median_of_others
from aedit.async_sgd.service.messages import MOST_DONORS
from aedit.launch.hub import overview

EXPIRE_S = 40.0


class Plain:
    """The answers of a hub, computed from the list of all members."""

    def __init__(self, hub):
        self.hub = hub
        self.speeds = {}
        """Speed of each node at its last heartbeat or push."""

    def heard(self, node):
        state, reports = self.hub.state, self.hub.clocks.reports
        is_shown = state.members[node].live and pushed(state, node) is not None
        self.speeds[node] = speed(state, reports, node) if is_shown else 0.0

    def live(self):
        return {member.node: member for member in self.hub.state.members if member.live}

    def left(self, now):
        hub, left = self.hub, []
        for node, member in self.live().items():
            if member.violations >= hub.config.push_filter.violations:
                left.append(Left(node, f"excluded after {member.violations} violations", excluded=True))
            elif now - hub.clocks.seen.get(node, now) > hub.config.expire_s:
                left.append(Left(node, f"silent for {hub.config.expire_s:g} s"))
        return left

    def due(self, now):
        gone = {record.node for record in self.left(now)}
        units = self.hub.state.units.items()
        return [index for index, unit in units if unit.pending and self.is_due(index, unit, gone, now)]

    def is_due(self, index, unit, gone, now):
        hub, settings = self.hub, self.hub.config
        if unit.anchor is None or settings.each_alone:
            return True
        awaited = {
            node
            for node, member in self.live().items()
            if node not in gone
            and not member.is_refused(index)
            and unit.missed.get(node, 0) < 2
            and (node not in hub.clocks.reports or hub.clocks.reports[node].state == "training")
        }
        came_s = {node: hub.clocks.came_s.get((index, node, seq), now) for node, seq in unit.pending}
        if awaited <= came_s.keys():
            return True
        times = sorted(came_s.values())
        usual_s = unit.usual_s
        if usual_s is None:
            usual_s = times[0] + (hub.clocks.offset_s or 0.0) - unit.merged_at_s
        usual_s = max(0.0, usual_s)
        if settings.quorum != "all":
            wanted = min(settings.quorum, max(1, len(awaited)))
            if len(times) >= wanted:
                return now >= times[wanted - 1] + min(settings.grace_cap_s, settings.grace * usual_s)
        return now >= times[0] + max(3 * usual_s, settings.expire_s)

    def pace(self, node):
        state, reports, every = self.hub.state, self.hub.clocks.reports, int(self.hub.plan.every)
        known = [self.speeds[n] for n in self.live() if self.speeds.get(n)]
        own = speed(state, reports, node)
        if not own or not known:
            return every
        fastest = min(max(known), 64.0 * statistics.median(known))
        return max(1, min(every, int(every * own / fastest)))

    def gap(self, unit, node):
        others = [self.hub.state.units[unit].times.get(other) for other in self.live() if other != node]
        gaps = [times.gap_s for times in others if times is not None and times.gap_s is not None]
        return statistics.median_low(gaps) / 64.0 if len(gaps) > 1 else 0.0

    def shown(self):
        live = list(self.live())[:MOST_SHOWN]
        gone = [m.node for m in self.hub.state.members if m.excluded] + list(self.hub.state.departed)
        return sorted({*live, *gone[-min(MOST_GONE, MOST_SHOWN - len(live)) :]})


class History:
    """A random run: nodes that join, push, lie, fall silent, leave, and a hub that dies."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        quorum, grace = self.rng.choice([(1, 0.0), (1, 0.5), (2, 0.5), (3, 0.5), (6, 0.5), ("all", 0.5)])
        screen = PushFilterConfig(threshold=1e9, cosine=False, clip=None, violations=3)
        stale = StalenessConfig(rule="constant")
        hub = config(quorum=quorum, grace=grace, push_filter=screen, expire_s=EXPIRE_S, staleness=stale)
        self.world = World(plan(hub, every=self.rng.choice([10, 100])))
        for i in range(self.rng.randint(1, 12)):
            self.world.join(f"node{i}")
        self.world.found()
        self.plain = Plain(self.world.hub)

    def step(self):
        rng, world = self.rng, self.world
        act = rng.choice(
            [self.push] * 8 + [self.beat] * 8 + [self.join] * 2 + [self.leave, self.lie, self.wait, self.wait]
        )
        act()
        if rng.random() < 0.02:
            self.die()
        world.hub._member_timeouts()  # also without a tick
        self.compare()
        left = [r.node for r in self.world.tick() if isinstance(r, Left)]
        for node in left:
            self.plain.heard(node)

    def member(self):
        live = list(self.plain.live())
        return self.rng.choice(live) if live else None

    def join(self):
        donor = self.rng.choice(["", f"127.0.0.1:{self.rng.randint(1000, 9999)}"])
        try:
            node = self.world.join(f"node{self.rng.randint(0, 40)}", donor=donor)
        except Denied:
            return
        self.plain.heard(node)

    def leave(self):
        if (node := self.member()) is not None:
            self.world.do(self.world.hub.leave(node))
            self.plain.heard(node)

    def push(self):
        if (node := self.member()) is None:
            return
        unit, state = self.rng.randrange(2), self.world.hub.state
        base = max(0, state.units[unit].version - self.rng.choice([0, 0, 1, 3]))
        x, steps = self.rng.uniform(-1, 1), self.rng.randint(1, 50)
        if kinds(self.world.push(node, x, unit, base=base, steps=steps)) == [Accepted]:
            self.plain.heard(node)

    def lie(self):
        if (node := self.member()) is not None:
            poison(self.world, node)
            if self.rng.random() < 0.5 and node in self.plain.live():
                self.world.do(self.world.hub.garbled(node, 0, "damaged: chunk"))
            if node not in self.plain.live():
                self.plain.heard(node)

    def beat(self):
        if (node := self.member()) is not None:
            state = self.rng.choice(["training"] * 6 + ["joining", "stalled"])
            self.world.heartbeat(node, state=state, steps_per_s=self.rng.choice([0.0, 0.5, 1.0, 5.0, 80.0]))
            self.plain.heard(node)

    def wait(self):
        self.world.now += self.rng.choice([0.1, 1.0, 3.0, 6.0, 25.0])

    def die(self):
        saved = through_a_file(save_state(frozen(self.world.hub.state)))
        again = Hub(self.world.plan)
        again.restore(saved)
        assert picture(again) == picture(self.world.hub)
        self.world.hub, self.plain = again, Plain(again)
        self.world.now = 7.0 + self.rng.random()

    def compare(self):
        hub, plain, now = self.world.hub, self.plain, self.world.now
        live = plain.live()
        assert hub.state.live == live
        assert hub.state.names == {m.name: m.node for m in hub.state.members if m.name}
        assert listed_members(hub.state) == plain.shown()
        hub.elapsed_s(now)  # the clock of a hub starts at its first call
        left, due = plain.left(now), plain.due(now)
        decided = hub.tick(now)
        assert [record for record in decided if isinstance(record, Left)] == left
        assert [record.unit for record in decided if isinstance(record, Merged)] == due
        assert hub.paces() == {node: plain.pace(node) for node in live}
        for node in live:
            told = run_news(hub, node, now)
            assert (told.nodes, told.evaluates) == (len(live), node == min(live))
            donors = {member.donor for member in live.values() if member.donor and member.node != node}
            given = hub.state.roster.donors(node, MOST_DONORS)
            assert set(given) == donors or len(given) == MOST_DONORS <= len(donors)
            for unit in hub.state.units:
                found = hub.state.units[unit].gaps.low_median_without(node)
                assert least_gap(found) == plain.gap(unit, node)


def test_a_hub_answers_as_if_it_looked_at_every_member(monkeypatch):
    monkeypatch.setattr(hub_state, "KEPT_MEMBERS", 6)
    for seed in range(20):
        history = History(seed)
        for _ in range(120):
            history.step()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_hub_answers_so_in_a_thousand_histories(monkeypatch):
    monkeypatch.setattr(hub_state, "KEPT_MEMBERS", 6)
    for seed in range(1000, 2000):
        history = History(seed)
        for _ in range(150):
            history.step()


def test_speeds_as_of_the_last_word_are_those_of_now_if_everybody_has_just_spoken():
    history = History(3)
    for _ in range(200):
        history.step()
    hub, reports = history.world.hub, history.world.hub.clocks.reports
    for node in hub.state.live:
        history.world.heartbeat(node, steps_per_s=1.0 + node)
    now = {n: speed(hub.state, reports, n) for n in hub.state.live if pushed(hub.state, n) is not None}
    history.plain.speeds = now
    assert hub.paces() == {node: history.plain.pace(node) for node in hub.state.live}


def test_medians_of_others_are_those_of_the_standard_library():
    rng = random.Random(0)
    for _ in range(300):
        numbers = [rng.choice([0.0, 1.0, 2.5, rng.random()]) for _ in range(rng.randint(1, 9))]
        ranking = Ranking()
        for node, number in enumerate(numbers):
            ranking.put(node, -1.0), ranking.put(node, number)
        assert ranking.median == statistics.median(numbers)
        x_N = np.array(numbers)
        others = [[*numbers[:i], *numbers[i + 1 :]] for i in range(len(numbers))]
        wanted = [statistics.median(other or [own]) for other, own in zip(others, numbers, strict=True)]
        assert median_of_others(x_N).tolist() == wanted
        steps = [
            8.0 * max(1.0, own / min(o)) if o and min(o) else None for own, o in zip(x_N, others, strict=True)
        ]
        if None not in steps:
            assert _possible(x_N, 8.0).tolist() == steps
        for node, other in enumerate(others):
            median_low = statistics.median_low(other) if len(other) > 1 else None
            assert ranking.low_median_without(node) == median_low


def test_a_snapshot_is_of_the_moment_at_which_it_began(tmp_path):
    history = History(5)
    for seed in range(12):
        history.rng.seed(seed)
        before, held = picture(history.world.hub), frozen(history.world.hub.state)
        for _ in range(25):
            history.step()
        saved = save_state(held)
        again = Hub(history.world.plan)
        again.restore(through_a_file(saved))
        assert picture(again) == before


def test_a_snapshot_is_the_json_of_its_numbers():
    history = History(6)
    numbers = history.world.hub.saved()[0] | {"long": [{"a": [1.5, None]}] * 200, "text": 'quo"te'}
    assert json.loads(snapshot_json(numbers)) == json.loads(json.dumps(numbers))


# --- what it costs, in operations of the interpreter: the same on every machine


class Operations:
    """Counts operations of the interpreter in this thread: in all, and while a lock is held."""

    def __init__(self):
        self.count, self.most_held, self._began, self._lock = 0, 0, 0, threading.RLock()

    def __enter__(self):
        self._lock.acquire()
        self._began = self.count

    def __exit__(self, *error):
        self.most_held = max(self.most_held, self.count - self._began)
        self._lock.release()

    def of(self, act):
        def trace(frame, event, arg):
            frame.f_trace_opcodes = True
            self.count += event == "opcode"
            return trace

        before, earlier = self.count, sys.gettrace()
        sys.settrace(trace)
        try:
            act()
        finally:
            sys.settrace(earlier)
        return self.count - before


@pytest.fixture(scope="module")
def crowds(tmp_path_factory):
    """Return hubs with few and with many members."""
    return {n: CrowdedHub(tmp_path_factory.mktemp(f"crowd{n}"), n) for n in (80, 400)}


def few_and_many(crowds, act):
    for hub in crowds.values():
        hub.hub.tick(hub.now)  # the first one looks at everybody
    return [Operations().of(lambda hub=hub: act(hub)) for hub in crowds.values()]


def test_a_beat_does_not_look_at_the_other_members(crowds):
    few, many = few_and_many(crowds, lambda hub: hub.beat(7))
    assert many <= 1.1 * few


def test_a_look_whether_something_is_due_does_not_look_at_all_members(crowds):
    few, many = few_and_many(crowds, lambda hub: hub.hub.tick(hub.now))
    assert many <= 1.1 * few


def test_a_push_is_judged_without_a_look_at_the_other_members(crowds):
    few, many = few_and_many(crowds, lambda hub: hub.hub.offer(hub.push(7, 1), hub.now))
    assert many <= 1.1 * few


def held(hub, act):
    operations, hub.ledger.lock = Operations(), Operations()
    hub.ledger.lock = operations
    operations.of(act)
    return operations.most_held


def test_a_status_and_a_snapshot_hold_the_lock_briefly(crowds):
    def whole_status(hub):
        return overview(hub.ledger, hub.engine, hub.directory, hub.leadership)

    few, many = (held(hub, lambda hub=hub: whole_status(hub)) for hub in crowds.values())
    assert many <= 2 * few  # at most 32 members at a time
    few, many = (held(hub, hub.ledger.snapshot) for hub in crowds.values())
    assert many <= 1.2 * few


def test_a_status_has_the_same_members_as_one_that_is_taken_at_once(crowds):
    hub = crowds[400]
    whole = hub_status(hub.hub, hub.now)
    pieces = overview(hub.ledger, hub.engine, hub.directory, hub.leadership)
    assert {name: pieces[name] for name in whole} == whole
    assert len(whole["nodes"]) == 400
