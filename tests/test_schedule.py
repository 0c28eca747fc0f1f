"""Tests when rounds are due, in simulated time."""

import time
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise

import pytest

from aedit.edit import AtMultiples, EditConfig, EverySeconds, EverySteps
from aedit.edit.schedule import make_schedule
from aedit.types import Round


@dataclass
class World:
    """True time, and notes that other nodes see only after a delay."""

    now: float = 0.0
    latency_s: float = 0.0
    posts: dict = field(default_factory=dict)

    def notes_of(self, node):
        return Notes(self, node)


@dataclass
class Notes:
    world: World
    node: int

    def post(self, key, text):
        self.world.posts.setdefault(key, []).append((self.world.now, self.node, text))

    def read(self, key):
        for at, author, text in self.world.posts.get(key, ()):
            seen_at = at if author == self.node else at + self.world.latency_s
            if seen_at <= self.world.now:
                return text


@dataclass(frozen=True)
class Machine:
    """Simulated machine; step_s: length of an inner step. Its clock shows `offset + rate * true time`."""

    step_s: float
    offset: float = 0.0
    rate: float = 1.0


def run(machines, every, until_s, latency_s=0.0):
    """Return for each machine the rounds it opened, as (true time, Round)."""
    world = World(latency_s=latency_s)
    schedules, opened, events = [], [[] for _ in machines], []
    for n, m in enumerate(machines):
        schedule = EverySeconds(every, clock=lambda m=m: m.offset + m.rate * world.now)
        schedule.listen(world.notes_of(n))
        schedules.append(schedule)
        heappush(events, (m.step_s, n, 1))
    while events[0][0] < until_s:
        world.now, n, step = heappop(events)
        if round := schedules[n].due(step):
            opened[n].append((world.now, round))
        heappush(events, (world.now + machines[n].step_s, n, step + 1))
    return opened


MIXED = [
    [Machine(0.3)],
    [Machine(0.31, offset=1e9), Machine(0.07, offset=-50.0), Machine(2.0, offset=3.0)],
    [Machine(0.11, rate=1 + 5e-4), Machine(0.13, rate=1 - 5e-4), Machine(0.9, offset=7.0)],
    [Machine(0.03), Machine(0.041, rate=1 + 1e-4)],
    [Machine(12.0), Machine(0.5), Machine(25.0)],
]


@pytest.mark.parametrize("machines", MIXED)
def test_every_interval_is_the_wanted_one_whatever_the_clocks_show(machines):
    every = 30.0
    for machine, opened in zip(machines, run(machines, every, 40 * every), strict=True):
        assert len(opened) >= 20
        times = [at for at, _ in opened]
        slack = max(machine.step_s, 0.05) + 1e-6
        for earlier, later in pairwise(times):
            assert abs(later - earlier - every) <= slack


@pytest.mark.parametrize("latency_s", [0.0, 0.04, 3.0])
@pytest.mark.parametrize("machines", MIXED)
def test_all_nodes_open_the_same_rounds_each_once(machines, latency_s):
    opened = run(machines, 30.0, 900.0, latency_s)
    ids = [[round.id for _, round in rounds] for rounds in opened]
    least = min(len(of_node) for of_node in ids)
    assert least >= 15
    for of_node in ids:
        assert of_node == list(range(1, len(of_node) + 1))
        assert len(of_node) - least <= 1


@pytest.mark.parametrize("machines", MIXED)
def test_a_round_says_how_many_steps_the_node_has_taken_since_its_last(machines):
    for machine, opened in zip(machines, run(machines, 30.0, 900.0), strict=True):
        done = 0
        for at, round in opened:
            done += round.steps
            assert done == pytest.approx(at / machine.step_s, abs=1e-3)


def test_the_interval_starts_at_the_first_local_step():
    now = 1000.0  # a long warm-up has gone by
    schedule = EverySeconds(10, clock=lambda: now)
    assert schedule.due(1) is None
    now = 1009.9
    assert schedule.due(2) is None
    now = 1010.0
    assert schedule.due(3) == Round(1, 3)


def test_the_wall_clock_is_never_asked(monkeypatch):
    ticks = iter(range(100, 200))
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the wall clock may jump"))
    monkeypatch.setattr(time, "time_ns", lambda: pytest.fail("the wall clock may jump"))
    schedule = EverySeconds(5, clock=lambda: next(ticks))
    assert [step for step in range(1, 21) if schedule.due(step)] == [6, 11, 16]
    real = EverySeconds(1e-9)
    assert real.clock is time.monotonic
    real.due(1)
    while not real.due(2):
        pass


def test_a_node_opens_a_round_that_another_has_decided():
    world = World()
    schedule = EverySeconds(1000.0, clock=lambda: 0.0)
    schedule.listen(world.notes_of(0))
    assert schedule.due(1) is None
    world.notes_of(1).post("round/1", "due")
    assert schedule.due(2) == Round(1, 2)
    assert schedule.due(3) is None


def test_rounds_after_every_so_many_steps():
    schedule = EverySteps(4)
    rounds = {step: round for step in range(1, 13) if (round := schedule.due(step))}
    assert rounds == {4: Round(1, 4), 8: Round(2, 4), 12: Round(3, 4)}


def test_a_schedule_goes_on_from_where_another_stopped():
    schedule = EverySteps(4)
    schedule.last_id, schedule.last_step = 7, 30
    assert schedule.due(31) is None
    assert schedule.due(32) == Round(8, 2)


def test_the_configuration_chooses_the_schedule_and_fragments_come_more_often():
    steps = make_schedule(EditConfig(schedule="steps", every=12, fragments=3))
    assert isinstance(steps, EverySteps)
    assert steps.every == 4
    seconds = make_schedule(EditConfig(schedule="seconds", every=9, fragments=2))
    assert isinstance(seconds, EverySeconds)
    assert seconds.every == 4.5


def test_peers_that_share_a_clock_open_rounds_at_the_same_multiples():
    begins, clocks = (3.0, 8.9), [0.0, 0.0]
    peers = [AtMultiples(10, clock=lambda i=i: clocks[i]) for i in range(2)]
    opened = [[], []]
    for step in range(1, 41):
        for i, peer in enumerate(peers):
            clocks[i] = begins[i] + step * (1.0 + i)  # the second one is slower
            if peer.due(step):
                opened[i].append(clocks[i] // 10)
    assert opened[0] == [1, 2, 3, 4]
    assert opened[1] == [2, 3, 4, 5, 6, 7, 8]
    assert (peers[1].last_id, peers[1].last_step) == (7, 36)


def test_several_multiples_that_have_passed_are_one_round_and_a_clock_set_back_only_delays():
    now = [0.0]
    schedule = AtMultiples(10, clock=lambda: now[0])
    due = []
    for step, now[0] in enumerate([5, 9, 45, 46, 12, 19, 21], 1):
        if round := schedule.due(step):
            due.append((now[0], round))
    assert due == [(45, Round(1, 3)), (21, Round(2, 4))]
