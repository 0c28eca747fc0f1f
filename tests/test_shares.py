"""Tests the share of a round that a push counts as, where pushes are merged as they come."""

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from kit.hub_machine import AVERAGE, World, config, plan, through_a_file, values, world

from aedit.async_sgd.rules import (
    MOST_CLAIM,
    Contribution,
    Merged,
    OuterConfig,
    PenaltyConfig,
    PushFilterConfig,
    StalenessConfig,
    counted,
    round_shares,
)

PENALTY = PenaltyConfig(step_weight=0.5)


def brought(version, interval=4.0, steps=10, tokens=100, norm=1.0):
    return Contribution(version, interval, steps, tokens, norm)


# --- the pure function against its equation


def test_by_steps_a_share_is_the_nodes_part_of_all_steps_per_version():
    there = {0: brought(10, 1.2, 6), 1: brought(9, 6.0, 6), 2: brought(8, 3.0, 12)}
    rate = np.array([6 / 1.2, 6 / 6.0, 12 / 3.0])
    found = round_shares(there, 10, "steps", PENALTY)
    np.testing.assert_allclose([found[n] for n in range(3)], rate / rate.sum(), rtol=1e-12)


def test_by_tokens_a_share_is_tokens_squared_by_steps_per_version():
    there = {0: brought(10, 2.0, 10, 100), 1: brought(9, 2.0, 10, 200), 2: brought(9, 4.0, 20, 200)}
    rate = np.array([100**2 / 10 / 2, 200**2 / 10 / 2, 200**2 / 20 / 4])
    found = round_shares(there, 10, "tokens", PENALTY)
    np.testing.assert_allclose([found[n] for n in range(3)], rate / rate.sum(), rtol=1e-12)


def test_by_the_penalty_a_share_is_edits_weight_over_the_last_push_of_each():
    there = {0: brought(10, 3.0, 30, norm=5.0), 1: brought(9, 3.0, 10, norm=10.0), 2: brought(8, 3.0, 20)}
    softmax = np.exp([0.0, -1.0, 0.8])  # norms 5, 10, 1 around their median 5
    expected = 0.5 * softmax / softmax.sum() + 0.5 * np.array([30, 10, 20]) / 60
    found = round_shares(there, 10, "penalty", PENALTY)
    np.testing.assert_allclose([found[n] for n in range(3)], expected, rtol=1e-12)


def test_whose_pushes_are_not_known_yet_counts_as_the_mean_of_the_others():
    there = {0: brought(10, 2.0, 30), 1: brought(9, 2.0, 10), 2: Contribution(9)}
    found = round_shares(there, 10, "steps", PENALTY)
    assert found == pytest.approx({0: 2 / 3 * 0.75, 1: 2 / 3 * 0.25, 2: 1 / 3})


def test_a_node_that_is_silent_for_longer_than_usual_brings_less_and_then_nothing():
    there = {0: brought(100, 1.0), 1: brought(92, 4.0)}
    found = round_shares(there, 100, "steps", PENALTY)
    assert found[1] == pytest.approx((10 / 8) / (10 / 8 + 10))
    assert [n in counted(there, {0, 1}, 108) for n in (0, 1)] == [True, True]
    assert [n in counted(there, {0, 1}, 109) for n in (0, 1)] == [False, False]


def test_one_that_has_left_counts_until_it_would_have_pushed_again():
    there = {0: brought(10, 2.0), 1: brought(9, 2.0)}
    assert [counted(there, {0}, version).keys() == {0, 1} for version in (10, 11, 12)] == [True, True, False]


@pytest.mark.parametrize("rule", ["uniform", "steps", "penalty", "tokens"])
def test_a_node_alone_is_a_whole_round(rule):
    assert round_shares({3: brought(7, 1.0, 4)}, 7, rule, PENALTY, 8) == {3: 1.0}
    assert round_shares({}, 7, rule, PENALTY) == {}


# --- in a run: what all shares together do


class Fleet:
    """Nodes that push in virtual time, each along a direction of its own, at a hub of a quorum of one.

    nodes: (seconds between pushes, steps in a push) of each.
    """

    def __init__(self, nodes, outer=AVERAGE, **settings):
        self.nodes = nodes
        self.world = World(plan(config(**settings), outer=outer, every=max(steps for _, steps in nodes)))
        for node in range(len(nodes)):
            self.world.join(f"node{node}")
        self.world.found()
        self.due = [(seconds, node) for node, (seconds, _) in enumerate(nodes)]
        heapq.heapify(self.due)
        self.gone, self.now_s = set(), 0.0

    def run(self, seconds):
        """Return how far the anchor has moved along each node's direction, and each node's steps."""
        before, steps = values(self.world).copy(), np.zeros(len(self.nodes))
        end = self.now_s + seconds
        while self.due[0][0] <= end:
            at_s, node = heapq.heappop(self.due)
            self.world.now += at_s - self.now_s  # steps take time
            self.now_s = at_s
            if node in self.gone:
                continue
            D = np.zeros(8, np.float32)
            D[node] = self.nodes[node][1]
            self.world.push(node, D, steps=self.nodes[node][1])
            self.world.settle()
            steps[node] += self.nodes[node][1]
            heapq.heappush(self.due, (self.now_s + self.nodes[node][0], node))
        self.world.now += end - self.now_s
        self.now_s = end
        return (before - values(self.world))[: len(self.nodes)].astype(np.float64), steps


SPEEDS = {
    "equal": [(1.0, 4)] * 4,
    "one is six times as fast": [(1.0, 4), (6.0, 4)],
    "dylu": [(6.0, 24), (6.1, 8), (6.2, 4)],
    "many speeds": [(0.6, 8), (0.75, 8), (1.5, 8), (3.3, 8)],
}


@pytest.mark.parametrize("nodes", SPEEDS.values(), ids=SPEEDS)
@pytest.mark.parametrize("rule", ["uniform", "steps"])
@pytest.mark.parametrize(
    "outer", [AVERAGE, OuterConfig(kind="delayed-nesterov", lr=1.0, momentum=0.0, delay=4)], ids=str
)
def test_the_anchor_moves_by_the_weighted_mean_of_what_the_nodes_do_whatever_their_cadence(
    nodes, rule, outer
):
    fleet = Fleet(nodes, outer, weights=rule)
    fleet.run(40.0)
    moved, steps = fleet.run(240.0)
    weight = np.ones(len(nodes)) if rule == "uniform" else np.array([n / s for s, n in nodes])
    np.testing.assert_allclose(moved, weight / weight.sum() * steps, rtol=0.1)


def test_the_first_round_of_nodes_that_start_together_is_one_round():
    moved, steps = Fleet([(1.0, 4)] * 4, weights="uniform").run(1.5)
    np.testing.assert_allclose(moved, steps / 4, rtol=1e-6)


def test_when_nodes_leave_at_the_end_of_a_run_their_last_round_is_one_round():
    fleet = Fleet([(1.0, 4)] * 4, weights="uniform")
    fleet.run(10.5)
    last = [r for r in fleet.world.journal if isinstance(r, Merged)]
    for node in range(4):
        D = np.full(8, 1.0, np.float32)
        fleet.world.push(node, D), fleet.world.settle()
        fleet.world.do(fleet.world.hub.leave(node))
    found = [r.share for r in fleet.world.journal if isinstance(r, Merged)][len(last) :]
    assert found == pytest.approx([0.25] * 4)


def test_after_two_of_four_have_left_the_others_share_the_rounds():
    fleet = Fleet([(1.0, 4)] * 4, weights="uniform")
    fleet.run(10.5)
    for node in (2, 3):
        fleet.world.do(fleet.world.hub.leave(node))
        fleet.gone.add(node)
    fleet.run(3.0)
    moved, steps = fleet.run(10.0)
    np.testing.assert_allclose(moved[:2], steps[:2] / 2, rtol=1e-6)


def test_who_joins_counts_from_then_on():
    fleet = Fleet([(1.0, 4)] * 2, weights="uniform")
    fleet.run(5.5)
    fleet.world.join("late")
    fleet.nodes.append((1.0, 4))
    heapq.heappush(fleet.due, (fleet.now_s + 0.3, 2))
    moved, steps = fleet.run(10.0)
    np.testing.assert_allclose(moved, steps / 3, rtol=1e-6)


def test_a_member_whose_trainer_is_stuck_or_has_not_begun_does_not_count():
    made = world(3)
    made.heartbeat(1, state="stalled"), made.heartbeat(2, state="joining")
    made.push(0, 1.0), made.settle()
    assert (values(made) == -1.0).all()


def test_two_of_eight_are_a_quarter_of_a_round():
    made = world(8, quorum=2, grace=0.0, expire_s=1e6)
    for node in range(8):
        made.push(node, 1.0), made.settle()
    made.tick(1.0)
    np.testing.assert_allclose(values(made), -1.0, rtol=1e-6)
    assert [r.share for r in made.journal if isinstance(r, Merged) and r.version > 1] == [0.25] * 4


# --- together with everything else that scales a push


def test_staleness_and_the_limit_of_the_length_scale_the_push_and_not_its_share():
    staleness = StalenessConfig(rule="polynomial", power=0.5)
    made = world(2, staleness=staleness, more={"outer": AVERAGE})
    made.push(0, 1.0), made.settle()
    made.push(1, 1.0, base=1), made.settle()
    merges = [r for r in made.journal if isinstance(r, Merged) and r.version > 1]
    assert [(r.parts[0].scale, r.share) for r in merges] == [(1.0, 0.5), (pytest.approx(2**-0.5), 0.5)]


def test_the_limit_of_a_mean_holds_for_a_round_of_single_pushes():
    hub = config(weights="uniform")
    clipped = replace(plan(hub), penalty=PenaltyConfig(clip=1.0))
    made = World(clipped)
    for node in range(4):
        made.join(f"node{node}")
    made.found()
    for node in range(4):
        made.push(node, 100.0), made.settle()
    assert np.linalg.norm(values(made).astype(np.float64)) == pytest.approx(1.0, rel=1e-6)


def test_delayed_momentum_takes_in_the_mean_of_a_round_whatever_the_delay():
    made = World(plan(config(), outer=OuterConfig(kind="delayed-nesterov", lr=1.0, momentum=0.5, delay=8)))
    for node in range(4):
        made.join(f"node{node}")
    made.found()
    x, u, pending, rng = np.zeros(8), np.zeros(8), np.zeros(8), np.random.default_rng(0)
    for n in range(1, 25):
        g = rng.normal(size=8).astype(np.float32)
        made.push((n - 1) % 4, g), made.settle()
        x, pending = x - g / 4, pending + g / 4
        if n % 8 == 0:
            u, pending = 0.5 * u + pending, np.zeros(8)
            x = x - 0.5 * u
    np.testing.assert_allclose(values(made), x, atol=1e-5)


@pytest.mark.parametrize("weights", ["uniform", "steps", "tokens", "penalty"])
def test_a_restart_from_journal_or_snapshot_goes_on_with_the_same_shares(weights):
    made = world(3, weights=weights)
    rng = np.random.default_rng(1)

    def some():
        for node in rng.integers(0, 3, 12).tolist():
            steps, tokens = rng.integers(1, 20, 2).tolist()
            made.push(node, rng.normal(size=8), steps=steps, tokens=tokens), made.settle()

    some()
    saved, since = through_a_file(made.hub.saved()), len(made.journal)
    some()
    for again in (made.replayed(), made.replayed(saved, since)):
        assert again.state.units[0].brought == made.hub.state.units[0].brought
        assert again.anchor(0)[1].tobytes() == values(made).tobytes()


# --- what a node may claim


@pytest.mark.parametrize("claim", [64, 1000, 4000])
def test_a_claim_of_more_steps_than_the_pace_allows_brings_no_share(claim):
    honest = {n: brought(10 - n, 4.0, 8) for n in range(3)}
    there = honest | {3: brought(10, 4.0, claim)}
    assert round_shares(there, 10, "steps", PENALTY, 8)[3] == pytest.approx(0.25)


def test_a_node_that_was_away_may_bring_the_steps_of_that_time():
    there = {0: brought(10, 1.5, 8), 1: brought(9, 3.0, 16)}
    assert round_shares(there, 10, "steps", PENALTY, 8) == pytest.approx({0: 0.5, 1: 0.5})


@pytest.mark.parametrize("rule", ["steps", "tokens"])
def test_whatever_a_node_claims_it_counts_as_eight_of_the_others_at_most(rule):
    there = {n: brought(10 - n, 4.0, 8) for n in range(3)} | {3: brought(10, 4.0, 10**6, 10**12)}
    found = round_shares(there, 10, rule, PENALTY)
    assert found[3] == pytest.approx(MOST_CLAIM / (MOST_CLAIM + 3))


def test_pushing_all_the_time_moves_the_anchor_no_further_than_eight_nodes_would():
    fleet = Fleet([(1.0, 4), (1.03, 4), (1.06, 4), (0.05, 4)], weights="uniform")
    fleet.run(10.0)
    moved, steps = fleet.run(20.0)
    assert moved[3] < 1.1 * MOST_CLAIM * moved[0]
    assert steps[3] > 18 * steps[0]


def test_who_is_not_believed_is_nobody_to_share_with():
    made = world(2, push_filter=PushFilterConfig())
    made.push(0, 1.0), made.settle()
    made.push(1, math.nan), made.settle()
    made.push(0, 1.0), made.settle()
    merges = [r.share for r in made.journal if isinstance(r, Merged) and r.version > 1]
    assert merges == [0.5, 1.0]
