"""Tests what a node may claim: steps, tokens, speed, how often it pushes; no honest node is refused.

One hub in virtual time; eight nodes of which one lies, or nodes of very unequal speed that do not.
"""

import math

import numpy as np
import pytest
from kit.hub_machine import TRUSTING, Training, World, kinds, through_a_file, values, world

from aedit.async_sgd.hub import Hub
from aedit.async_sgd.hub.members import Ranking
from aedit.async_sgd.rules import (
    MOST_CLAIM,
    Accepted,
    Led,
    Merged,
    PenaltyConfig,
    PushFilterConfig,
    PushTimes,
    Refused,
    is_early,
    least_gap,
    limited,
    made_until,
    merge_weights,
    possible_speed,
    possible_steps,
)
from aedit.async_sgd.rules.push_weights import MOST_SHARE
from aedit.proto.rpc import last_term_before

LIAR = 7
SCREEN = {"push_filter": PushFilterConfig(), "expire_s": 1e9}


def fleet(step_s=(1.0,) * 8, steps=16, more=None, **settings):
    """Return nodes at a hub that screens pushes."""
    made = world(len(step_s), more={"every": steps, "steps": 10**6, **(more or {})}, **(SCREEN | settings))
    return Training(made, step_s, steps)


def reasons(training):
    return [record.reason for record in training.decided if isinstance(record, Refused)]


def merges(made, node):
    parts = [(r, part) for r in made.journal if isinstance(r, Merged) and r.version > 1 for part in r.parts]
    return [(r, part) for r, part in parts if part.node == node]


# --- lies


@pytest.mark.parametrize("quorum", [1, "all"])
def test_a_claim_of_many_steps_does_not_let_a_long_push_pass(quorum):
    training = fleet(quorum=quorum)
    training.run(65.0)
    long = 40 * 16**0.75 / 4096**0.75  # 40 times as long as the others
    (refused,) = training.push(LIAR, 4096, times=long)
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("norm: ")
    assert refused.violation


def test_steps_count_as_many_as_the_time_allows_and_the_journal_says_so():
    training = fleet()
    training.run(65.0)
    steps = training.made.hub.state.steps
    (accepted,) = training.push(LIAR, 4096, times=(16 / 4096) ** 0.75)
    assert isinstance(accepted, Accepted)
    assert 16 <= accepted.push.steps <= 64
    assert training.made.hub.state.steps == steps + accepted.push.steps
    assert accepted.push.tokens == 40960 * accepted.push.steps // 4096


@pytest.mark.parametrize("others", [0, 7])
def test_one_push_does_not_end_a_run_on_the_clock(others):
    more = {"every": 10.0, "pace": "seconds", "steps": 10**6, "seconds": 1e6}
    made = world(others + 1, more=more, **SCREEN)
    training = Training(made, (1.0,) * (others + 1), 10)
    training.run(55.0)
    before = made.hub.progress(made.now)
    training.push(others, 2**32 - 1, times=(10 / (2**32 - 1)) ** 0.75)
    training.push(others, 4096, times=(10 / 4096) ** 0.75)
    assert made.hub.progress(made.now) - before < 0.01


@pytest.mark.parametrize("others", [0, 1, 7])
@pytest.mark.parametrize("every", [16, 128])
def test_pushes_right_after_the_join_do_not_end_a_run(others, every):
    """As found: two pushes of 4,096 steps within 0.3 s of joining ended a run of 2,000 steps."""
    made = world(max(others, 1), more={"every": every, "steps": 2000}, **SCREEN)
    liar = made.join("liar") if others else 0
    training, counted = Training(made, (1.0,) * (others + 1)), []
    for seconds in (0.1, 0.2, 0.0, 0.0, 0.001):
        made.tick(seconds)
        made.heartbeat(liar, steps_per_s=1e9)
        decided = training.push(liar, 4096, times=(16 / 4096) ** 0.75)
        counted += [record.push.steps for record in decided if isinstance(record, Accepted)]
    # An inner step takes a millisecond or more; one local phase may have been made before the join.
    assert every <= sum(counted) <= every + 2 * 301 + 5
    assert made.hub.progress(made.now) < 0.4
    again = made.replayed()
    assert again.state.steps == made.hub.state.steps == sum(counted)


def test_pushes_of_a_local_phase_in_rapid_succession_count_by_the_time():
    made = world(1, more={"every": 128, "steps": 2000}, **SCREEN)
    training, began = Training(made, (1.0,)), made.now
    for _ in range(100):
        made.tick(0.01)
        training.push(0, 512)
    assert made.hub.state.steps <= 128 + 2 * 1000 * (made.now - began)


@pytest.mark.parametrize("steps_per_s", [1.0, 100.0, 900.0])
@pytest.mark.parametrize("others", [0, 1, 7])
def test_an_honest_node_counts_in_full_from_its_first_push(steps_per_s, others):
    made = world(max(others, 1), more={"every": 128, "steps": 10**6}, **SCREEN)
    node = made.join("new") if others else 0
    training = Training(made, (1 / steps_per_s,) * (others + 1), 128)
    for seconds, late_s in ((1.0, 0.0), (0.5, 0.4), (0.3, 0.0), (0.5, 2.0), (0.7, 0.0)):
        steps = max(1, int(steps_per_s * seconds))
        made.tick(seconds + late_s)  # the push was long on its way; the node trains on meanwhile
        (accepted,) = training.push(node, steps)
        assert isinstance(accepted, Accepted), accepted.reason
        assert accepted.push.steps == steps


@pytest.mark.parametrize("claim", [10.0, 64.0, 1e30])
def test_a_false_speed_changes_nobodys_pace(claim):
    training = fleet(more={"every": 128, "pace": "dylu"}, steps=128)
    made = training.made
    training.run(520.0)
    assert [made.hub.pace_steps(node) for node in range(8)] == [128] * 8
    made.heartbeat(LIAR, steps_per_s=claim)
    assert all(made.hub.pace_steps(node) >= 102 for node in range(7))  # 128 / 1.25, whatever is claimed


def test_a_node_that_has_pushed_nothing_sets_no_pace():
    training = fleet((1.0, 2.0, 4.0, 1.0), more={"every": 128, "pace": "dylu"}, steps=64)
    made = training.made
    training.run(600.0, but=(3,))
    before = made.hub.paces()
    made.heartbeat(3, steps_per_s=1000.0)
    assert (
        {n: made.hub.paces()[n] for n in range(3)}
        == {n: before[n] for n in range(3)}
        == {0: 128, 1: 64, 2: 32}
    )
    made.now += 4000.0  # whoever was fast and falls silent holds nobody back either
    made.tick(), training.beat()
    made.heartbeat(0, steps_per_s=1.0)
    assert made.hub.pace_steps(2) > 32


@pytest.mark.parametrize("weights", ["uniform", "steps", "tokens", "penalty"])
def test_a_hundred_pushes_in_a_second_move_the_anchor_by_a_few_lengths(weights):
    training = fleet((1 / 16,) * 8, weights=weights)
    made = training.made
    training.run(5.0)
    before, direction = values(made).astype(np.float64), training.vector(16)
    length = np.linalg.norm(direction)
    for _ in range(100):
        made.now += 0.009
        made.tick()
        training.decided += made.push(LIAR, direction, steps=16, tokens=160)
        made.settle()
    moved = (before - values(made)) @ direction / length**2
    assert moved < 2 * MOST_CLAIM
    assert any(reason.startswith("early: ") for reason in reasons(training))
    assert not made.hub.state.members[LIAR].violations
    made.now += 1.0
    assert kinds(training.push(LIAR, 32)) == [Accepted]  # nothing is lost by having come too soon


def test_a_node_that_pushes_often_does_not_make_the_others_silent():
    training = fleet((1 / 16,) * 8)
    made = training.made
    training.run(5.0)
    for _ in range(400):
        made.now += 0.016
        made.tick(), made.push(LIAR, training.vector(16), steps=16), made.settle()
        if made.now > 107.5:
            break
    share = merges(made, LIAR)[-1][0].share
    assert share <= 0.25


def test_tokens_are_at_most_those_of_the_configured_batch_a_few_times():
    training = fleet((1.0,) * 2, weights="tokens", quorum="all", more={"step_tokens": 10})
    made = training.made
    training.run(17.0)
    made.now += 16
    made.tick(), training.push(0, 16)
    (accepted,) = training.push(1, 16, tokens=2**39)
    assert accepted.push.tokens == MOST_CLAIM * 10 * 16


@pytest.mark.parametrize("nodes", [3, 4, 8])
@pytest.mark.parametrize("own", [0, 160])
def test_claimed_tokens_do_not_decide_a_merge(nodes, own):
    training = fleet((1.0,) * nodes, weights="tokens", quorum="all")
    made = training.made
    made.now += 16
    made.tick()
    for node in range(nodes - 1):
        training.push(node, 16, tokens=own)
    training.push(nodes - 1, 16, tokens=2**40)
    (record,) = [r for r in made.journal if isinstance(r, Merged) and r.version == 2 and r.unit == 0]
    weights = {part.node: part.weight for part in record.parts}
    assert weights[nodes - 1] <= MOST_SHARE * sum(weights.values()) * (1 + 1e-9)


def test_the_smallest_push_does_not_take_all_the_weight_of_papers_softmax():
    pushes = [fleet((1.0,) * 3).made.make(0, x, steps=16) for x in (1e-3, 300.0, 310.0)]
    w_N = np.array(merge_weights(pushes, "penalty", PenaltyConfig(weights="paper")))
    assert w_N.max() <= MOST_SHARE * w_N.sum() * (1 + 1e-9)


def test_no_push_makes_up_most_of_the_way_that_a_merge_moves():
    training = fleet((1.0,) * 3, quorum="all", push_filter=PushFilterConfig(threshold=1e9, clip=1e9))
    made = training.made
    made.now += 16
    made.tick()
    for node, times in enumerate((1.0, 1.0, 60.0)):
        training.push(node, 16, times=times)
    (record,) = [r for r in made.journal if isinstance(r, Merged) and r.version == 2 and r.unit == 0]
    moved = [part.weight * part.scale * times for part, times in zip(record.parts, (1, 1, 60), strict=True)]
    np.testing.assert_allclose(moved[2] / sum(moved), MOST_SHARE)


def test_samples_that_a_node_never_had_are_no_steps():
    training = fleet(more={"leases": True})
    made = training.made
    for node in range(8):
        made.lease(node, 4096)
    training.run(100 * 16.0)
    (accepted,) = training.push(LIAR, 16)
    assert accepted.push.steps == 16
    made.hub.state.members[LIAR].leased = made.hub.state.units[0].times[LIAR].total_steps + 5
    made.now += 16
    (accepted,) = training.push(LIAR, 16)
    assert accepted.push.steps == 5


# --- honest nodes


@pytest.mark.parametrize("pace", ["steps", "dylu", "seconds"])
@pytest.mark.parametrize("quorum", [1, 3, "all"])
def test_nodes_of_very_unequal_speed_are_never_refused(pace, quorum):
    """Fifty times, ten times and three times as fast as the slowest; all phases of one kind."""
    step_s = (1.0, 0.3, 0.1, 0.02, 0.5)
    every = 8.0 if pace == "seconds" else 16
    made = world(5, more={"every": every, "pace": pace, "steps": 10**9}, quorum=quorum, **SCREEN)
    training = Training(made, step_s)
    steps = {n: max(1, int(8.0 / s)) if pace == "seconds" else 16 for n, s in enumerate(step_s)}
    due = [(made.now + steps[n] * s, n) for n, s in enumerate(step_s)]
    claimed = 0
    while made.now < 220:
        at, node = min(due)
        due.remove((at, node))
        made.now = max(made.now, at)
        training.beat(), made.settle()
        told = made.hub.pace_steps(node) or steps[node]
        owed = round((made.now - at) / step_s[node])
        if any(n == node for n, _ in made.hub.state.units[0].pending):
            due.append((at + step_s[node], node))  # it trains on until it is answered
            steps[node] += 1
            continue
        training.push(node, steps[node] + owed)
        claimed += steps[node] + owed
        steps[node] = told if pace != "seconds" else max(1, int(8.0 / step_s[node]))
        due.append((made.now + steps[node] * step_s[node], node))
    assert reasons(training) == []
    assert made.hub.state.steps >= 0.8 * claimed  # the fastest is 19 times as fast as usual, 16 times count


@pytest.mark.parametrize("silence", [40, 400, 1000])
def test_the_push_of_a_long_local_phase_counts_in_full(silence):
    training = fleet()
    training.run(100.0)
    training.run(float(silence), but=(3,))
    (accepted,) = training.push(3, silence)
    assert isinstance(accepted, Accepted)
    assert accepted.push.steps == silence
    assert reasons(training) == []


def test_pushes_that_were_long_on_their_way_count_in_full():
    """A push travels for a minute, and the next one, which holds that minute, for a second."""
    training = fleet()
    training.run(100.0)
    training.run(59.0, but=(3,))
    assert kinds(training.push(3, 16)) == [Accepted]
    training.run(1.0, but=(3,))
    (accepted,) = training.push(3, 60)
    assert accepted.push.steps == 60
    assert reasons(training) == []


def test_steps_made_while_a_hub_could_not_acknowledge_count_in_full():
    """A hub without its standbys: every node's push stands for 300 s, and the next one holds that time."""
    training = fleet()
    training.run(100.0)
    training.made.now += 300.0
    for node in range(8):
        assert kinds(training.push(node, 16)) == [Accepted]
    training.made.now += 1.0
    for node in range(8):
        (accepted,) = training.push(node, 300)
        assert accepted.push.steps == 300


class Outages:
    """Nodes of one speed, none of which stops for a hub that cannot be reached or a part that has no samples.

    A push that is sent in an outage arrives at its end. `failovers`: outages after which another hub leads,
    from the journal of the one before; its clock has not run meanwhile. No node trains in `starved`.
    """

    def __init__(self, nodes, steps_per_s, every, outages, failovers=(), starved=()):
        self.training = fleet((1 / steps_per_s,) * nodes, 20, push_filter=TRUSTING)
        self.speed, self.every, self.starved = steps_per_s, every, starved
        self.outages, self.failovers = sorted([*outages, *failovers]), sorted(failovers)
        self.now, self.offset_s = 0.0, self.training.made.now
        self.sent, self.counted = [], []

    def trained(self, at_s):
        """Return the steps of a node by this time."""
        idle_s = sum(max(0.0, min(at_s, end) - begin) for begin, end in self.starved)
        return int(self.speed * (at_s - idle_s) + 1e-6)

    def arrival(self, at_s):
        """Return when a push arrives that is sent then."""
        for begin, end in self.outages:
            at_s = end + 0.01 if begin <= at_s < end else at_s
        return at_s + 0.01

    def run(self, until_s):
        nodes = len(self.training.step_s)
        due = [(self.every / self.speed * (1 + node / nodes), node) for node in range(nodes)]
        brought = [0] * nodes
        while min(due)[0] < until_s:
            at_s, node = min(due)
            due.remove((at_s, node))
            if (steps := self.trained(at_s) - brought[node]) < self.every:
                due.append((at_s + 0.05, node))
                continue
            arrival_s = self.arrival(at_s)
            self.sent.append((arrival_s, node, steps))
            brought[node] += steps
            due.append((arrival_s, node))
        for arrival_s, node, steps in sorted(self.sent):
            self.go(arrival_s)
            (accepted,) = self.training.push(node, steps)
            assert isinstance(accepted, Accepted), accepted.reason
            self.counted.append((node, steps, accepted.push.steps))

    def go(self, at_s):
        """Let the hub's clock run until then; another hub takes over after a failover."""
        while self.failovers and at_s >= self.failovers[0][1]:
            begin, end = self.failovers.pop(0)
            self.tick_until(begin)
            before = self.training.made
            after = World(before.plan)
            after.hub.restore(through_a_file(before.hub.saved()))
            after.journal, after.now = before.journal, 5.0
            self.training.made, self.offset_s = after, 5.0 - end
            after.settle()
        self.tick_until(at_s)

    def tick_until(self, at_s):
        made = self.training.made
        while made.now + 1.0 < at_s + self.offset_s:
            made.tick(1.0)
            self.training.beat()
        made.now = max(made.now, at_s + self.offset_s)
        self.training.beat()

    def lowered(self):
        return [one for one in self.counted if one[2] != one[1]]


@pytest.mark.parametrize("every", [20, 100])
@pytest.mark.parametrize("nodes", [2, 6])
def test_pushes_that_wait_for_one_outage_after_the_other_count_in_full(nodes, every):
    """Found in a swarm on a loaded machine: the push after the second outage holds the steps of that."""
    run = Outages(nodes, 20.0, every, outages=[(30.0, 50.0), (50.015, 60.0), (60.015, 64.0)])
    run.run(100.0)
    assert run.lowered() == []
    assert any(steps >= 190 for _, steps, _ in run.counted)


def test_a_push_that_waits_after_a_failover_counts_in_full():
    run = Outages(6, 20.0, 20, outages=[(50.015, 60.0)], failovers=[(30.0, 50.0)])
    run.run(100.0)
    assert run.lowered() == []


def test_a_node_that_had_no_samples_for_a_while_counts_in_full_again():
    """The pushes that it made meanwhile are slow, and local phases that are longer than usual need time."""
    run = Outages(6, 20.0, 100, outages=[], starved=[(30.0, 90.0)])
    run.run(150.0)
    assert run.lowered() == []


@pytest.mark.parametrize("seed", range(6))
def test_nodes_that_train_on_count_in_full_whatever_outages_and_failovers_follow_each_other(seed):
    chance = np.random.default_rng(seed)
    at_s, outages, failovers, starved = 20.0, [], [], []
    while at_s < 200.0:
        length_s = float(chance.exponential(6.0))
        kinds_of = (outages, outages, failovers, starved)
        kinds_of[chance.integers(4)].append((at_s, at_s + length_s))
        at_s += length_s + float(0.015 if chance.random() < 0.5 else chance.uniform(2, 20))
    run = Outages(
        int(chance.integers(2, 7)), 20.0, int(chance.choice([20, 100])), outages, failovers, starved
    )
    run.run(240.0)
    assert run.lowered() == []


def test_a_node_that_started_slowly_is_not_cut_to_the_speed_of_its_start():
    """Its first push holds few steps, since its membership began long before its first step."""
    training = fleet((1.0, 0.1))
    training.run(60.0, but=(1,))
    assert kinds(training.push(1, 16)) == [Accepted]
    training.run(30.0, but=(1,))
    (accepted,) = training.push(1, 300)
    assert accepted.push.steps == 300


def test_steps_made_while_the_hub_was_away_count_in_full():
    training = fleet()
    made = training.made
    training.run(100.0)
    again = World(made.plan)
    again.hub = Hub(made.plan)
    again.hub.restore(through_a_file(made.hub.saved()))
    again.journal, again.now = made.journal, 5.0  # the clock of another process
    training.made = again
    again.settle(), training.beat()
    for node in range(8):
        again.now += 0.5
        (accepted,) = training.push(node, 1000)
        assert accepted.push.steps == 1000
    for most in (1000, 500):  # one that was on its way then, and what was made meanwhile; later ones not
        again.now += 4
        (accepted,) = training.push(LIAR, 1000, times=0.05)
        assert accepted.push.steps <= most


def test_a_resumed_node_and_one_that_was_given_up_are_not_refused():
    training = fleet()
    made = training.made
    training.run(100.0)
    made.do(made.hub.leave(3))
    training.run(300.0, but=(3,))
    made.join("node3")
    training.run(16.0, but=(3,))
    (accepted,) = training.push(3, 16)
    assert accepted.push.steps == 16
    training.run(100.0)
    assert reasons(training) == []
    assert made.hub.state.units[0].times[3].speed(made.hub.state.elapsed_s) == pytest.approx(1.0, rel=0.3)


def test_a_region_of_many_nodes_is_not_refused_beside_single_ones():
    """A region's hub pushes the steps of all its nodes: forty times those of one node in the same time."""
    training = fleet((1.0,) * 3)
    made = training.made
    region = made.join("region")
    for _ in range(10):
        training.run(16.0)
        made.tick()
        (accepted,) = made.push(region, training.vector(16), steps=16 * 40, tokens=0)
        assert isinstance(accepted, Accepted), accepted.reason
        made.settle()
    assert reasons(training) == []


# --- the pure functions


def times(*pushes, since=0.0):
    """Return the times after pushes (at_s, steps)."""
    found = PushTimes.began(since)
    for at_s, steps in pushes:
        found = found.pushed(at_s, steps)
    return found


def possible(times, now_s, own, others, every):
    """Return the steps of a push after those of `times`, of a node that the hub knows since the first one."""
    speed = possible_speed(own, others, every)
    return possible_steps(times, now_s, made_until(times, times.before_s, speed), speed, every)


def test_a_node_alone_makes_a_step_per_millisecond_and_one_of_two_64_times_the_other():
    own = times((10.0, 16), (20.0, 16))
    assert possible(own, 30.0, 1.6, [], 4) == 1000 * 20 - 16
    assert possible(times((10.0, 16), (20.0, 9000)), 20.5, 1.6, [], 4) == 1000 * 10.5 - 9000
    assert possible(times((10.0, 16), (10.0, 16)), 10.0, 1.6, [1.0, 1.0], 4) == 1
    assert possible(times(since=10.0), 10.25, math.inf, [], 4) == 250
    assert possible(times(since=10.0), 10.0, math.inf, [], 4) == 4
    assert possible(times(since=10.0), 10.003, math.inf, [1.0, 1.0], 128) == 128
    assert possible(own, 30.0, 1e9, [1.0], 4) == 2 * 64 * 20 - 16
    assert possible(own, 30.0, 1e9, [1.0, 1.0], 4) == 2 * 8 * 20 - 16
    assert possible(own, 30.0, 0.1, [0.1, 1.0], 4) == 2 * 20 - 16
    assert possible(own, 120.0, 0.1, [1.0, 1.0], 4) == 2 * 110 - 16
    assert possible(times((10.0, 500), (20.0, 500)), 30.0, 0.1, [1.0, 1.0], 4) == 20
    assert possible(own, 20.0, 0.1, [1.0, 1.0], 16) == 4 * 16
    assert possible(own, 30.0, None, [1.0, 1.0], None) == 2 * 8 * 20 - 16


@pytest.mark.parametrize("seed", range(5))
def test_all_pushes_together_hold_no_more_than_the_time_since_the_join_allows(seed):
    """A liar that takes all it can, or nothing, or what is honest, at times of its choice."""
    chance, own, made_s, now_s, counted = np.random.default_rng(seed), times(), 0.0, 0.0, 0.0
    for _ in range(2000):
        now_s += float(chance.choice([0.001, 0.1, 1.0, 30.0]))
        most = possible_steps(own, now_s, made_s, 2.0, None)
        assert most <= max(1.0, 2.0 * (now_s - own.before_s))
        steps = math.floor(most * float(chance.choice([0.0, 0.1, 0.5, 1.0])))
        counted += steps if steps > 1 else 0  # one is always possible
        own = own.pushed(now_s, steps if steps > 1 else 0)
        made_s = made_until(own, made_s, 2.0)
        assert own.before_s <= made_s <= own.at_s
        assert counted <= 2.0 * now_s


def test_speed_is_that_of_the_pushes_and_falls_in_silence():
    regular = times(*((10.0 * n, 20) for n in range(1, 9)))
    assert regular.speed(80.0) == pytest.approx(2.0)
    assert regular.speed(90.0) == pytest.approx(2.0)
    assert regular.speed(190.0) < 0.6
    assert times().speed(5.0) is None
    assert regular.joined(1000.0).pushed(1010.0, 20).speed(1010.0) == pytest.approx(2.0)


def low_median_of_others(*gaps_s):
    """Return what the hub compares the gap of node 99 with, where other nodes have these."""
    gaps = Ranking()
    for node, gap_s in enumerate((*gaps_s, 1.0)):
        gaps.put(node if node < len(gaps_s) else 99, gap_s)
    return gaps.low_median_without(99)


def test_one_push_in_a_64th_of_the_usual_time_may_be_close_to_its_neighbour():
    assert least_gap(low_median_of_others()) == 0.0
    assert least_gap(low_median_of_others(64.0)) == 0.0
    assert least_gap(low_median_of_others(64.0, 1e9)) == 1.0  # who hardly ever pushes holds up nobody
    assert least_gap(low_median_of_others(64.0, 128.0, 1e9)) == 2.0
    usual, quick = times((10.0, 16), (20.0, 16)), times((1.0, 16), (2.0, 16))
    assert not is_early(usual, 0.1, 2.0)
    assert is_early(quick, 0.1, 2.0)
    assert not is_early(quick, 2.1, 2.0)
    assert not is_early(times(), 0.1, 2.0)


def test_the_largest_of_three_is_at_most_three_times_the_others():
    np.testing.assert_array_equal(limited(np.array([1.0, 9.0])), [1, 9])
    np.testing.assert_array_equal(limited(np.array([1.0, 9.0, 1.0])), [1, 6, 1])
    np.testing.assert_array_equal(limited(np.array([1.0, 5.0, 1.0])), [1, 5, 1])


def cut_off_and_back(made, node, taken_by=None):
    """Let a member fall silent until it is put out, another one take its samples, and it join again."""
    made.now += 11.0
    made.heartbeat(1 - node)
    made.tick()
    assert node not in made.hub.state.live
    if taken_by is not None:
        made.lease(taken_by, 64)
    made.join(f"node{node}", process=7)


def one_sample_per_step():
    made = world(0, more={"every": 16, "steps": 10**6, "leases": True}, **(SCREEN | {"expire_s": 10.0}))
    for node in range(2):
        made.join(f"node{node}", process=7 + node)
    made.found()
    return made


def test_steps_on_samples_of_a_node_that_was_put_out_as_silent_count():
    """It cannot know meanwhile that its samples went to another node, and trains on them."""
    made = one_sample_per_step()
    made.do(made.hub.use(0, made.lease(0, 8)))
    for _ in range(20):
        made.lease(0, 64)
        cut_off_and_back(made, 0, taken_by=1)
        for _ in range(4):
            made.now += 16.0
            made.heartbeat(1)
            (accepted,) = made.push(0, 0.1, steps=16)
            made.settle()
            assert accepted.push.steps == 16


def test_samples_that_a_node_is_given_again_allow_no_more_steps():
    made = one_sample_per_step()
    made.lease(0, 64)
    for _ in range(50):
        cut_off_and_back(made, 0)
    assert made.hub.state.pool.outstanding(0) == [(0, 64)]
    for steps in (40, 24):
        made.now += 100.0
        made.heartbeat(1)
        (accepted,) = made.push(0, 0.1, steps=40)
        made.settle()
        assert accepted.push.steps == steps
    (refused,) = made.push(0, 0.1, steps=40)
    assert refused.reason.endswith("what is usual for 0 steps")


def test_in_a_part_that_was_founded_again_leases_say_nothing_of_the_steps():
    """Its nodes go on with samples of before, of which its journal knows nothing."""
    made = one_sample_per_step()
    made.do([Led(last_term_before(1, b"founder") + 1)])
    made.lease(0, 8)
    made.now += 16.0
    (accepted,) = made.push(0, 0.1, steps=16)
    assert accepted.push.steps == 16
