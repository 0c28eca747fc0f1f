"""Tests nodes that join and leave: anchors do not jump, leases add up, and no node waits."""

from dataclasses import replace

import numpy as np
import pytest
from benchmarks import elastic, joining, soak
from benchmarks.elastic import PHASES, Audit, Curve
from benchmarks.kit import tun_link
from kit.hub_machine import AVERAGE, LAYOUT, Numbers, World, config, plan, values

from aedit.async_sgd.rules import Accepted, Founded, Joined, Leased, Left, OuterConfig, Push, Used

DELAYED = OuterConfig(kind="delayed-nesterov", lr=1.0, momentum=0.0, delay=2)


@pytest.mark.parametrize("nodes", [1, 2, 4, 6])
@pytest.mark.parametrize("outer", [DELAYED, AVERAGE, replace(DELAYED, delay=16)])
def test_all_nodes_together_move_the_anchor_by_one_mean_whatever_their_number_and_the_delay(nodes, outer):
    world = World(plan(config(), outer=outer))
    for node in range(nodes):
        world.join(f"node{node}")
    world.found()
    for node in range(nodes):
        world.push(node, 1.0)
        world.settle()
    np.testing.assert_allclose(values(world), -1.0, rtol=1e-6)


def test_a_quorum_is_one_mean_however_many_it_has():
    world = World(plan(config(quorum="all"), outer=replace(DELAYED, delay=1)))
    for node in range(4):
        world.join(f"node{node}")
    world.found()
    for node in range(4):
        world.push(node, 1.0)
    world.settle()
    np.testing.assert_allclose(values(world), -1.0, rtol=1e-6)


def joined(*nodes):
    return [Joined(f"n{node}", node, node + 1, "", 0.0) for node in nodes]


STORY = [
    Founded(LAYOUT, (), 10),
    *joined(0, 1),
    Leased(0, 0, 6),
    Leased(1, 6, 12),
    Used(0, 0, 4),
    Left(0, "silent"),
    Leased(1, 4, 6),
    Used(1, 6, 10),
    Used(1, 6, 12),
    Used(1, 4, 6),
]


def test_the_audit_finds_a_whole_epoch_in_good_books():
    audit = Audit(STORY)
    assert (audit.complete, audit.wrong, audit.at_two, audit.not_held) == (1, 0, 0, 0)


@pytest.mark.parametrize(
    ("place", "record", "found"),
    [
        (3, Leased(1, 5, 7), (2, 0)),  # 5 is leased to 1 before 0 has it, then 6 again to 1
        (7, Leased(1, 3, 4), (1, 0)),  # used already
        (8, Used(1, 4, 5), (0, 0)),  # its own
        (4, Used(1, 6, 8), (0, 2)),  # of no node
    ],
)
def test_the_audit_finds_what_is_wrong(place, record, found):
    audit = Audit([*STORY[:place], record, *STORY[place:]])
    assert (audit.at_two, audit.not_held) == found


def test_a_jump_is_measured_from_the_last_loss_before_the_change():
    curve = Curve((0.0, 10.0, 20.0, 30.0, 40.0), (9.0, 2.0, 1.0, 1.5, 3.0))
    assert curve.jump(20.0, window_s=10.0) == pytest.approx(0.5)
    assert curve.jump(25.0, window_s=20.0) == pytest.approx(2.0)
    assert curve.jump(10.0, window_s=10.0) == pytest.approx(-0.5)
    assert curve.largest_rise == pytest.approx(1.0)


@pytest.mark.slow
def test_one_to_four_to_two_to_six_to_three_nodes_draw_every_sample_once():
    story = elastic.walk(replace(elastic.PLAN, num_samples=400, expire_s=1.0), phase_s=2.0)
    assert [change.members for change in story.changes] == [len(phase.nodes) for phase in PHASES]
    assert story.failed == 0
    audit = story.audit
    assert audit["complete"] >= 2
    assert (audit["wrong"], audit["at_two"], audit["not_held"]) == (0, 0, 0)
    assert audit["again"] <= story.kills * audit["push"]


@pytest.mark.slow
def test_a_hundred_rounds_of_coming_and_going_leave_no_descriptor_open():
    soaked = soak.soak(replace(soak.QUICK, rounds=100))
    assert soaked.failed == 0
    assert soaked.killed >= 3
    assert soaked.left >= 3
    # A guest that has just gone may still have its connections: one more for each that went would show.
    few, warm = 4, 2
    assert len(soaked.hub) > warm + few + 1
    assert soaked.hub[-1].descriptors <= soaked.hub[warm].descriptors + few
    for before, after in zip(soaked.agents[warm], soaked.agents[-1], strict=True):
        assert after.descriptors <= before.descriptors + few


def test_without_a_network_of_its_own_the_joining_benchmark_says_so(monkeypatch):
    monkeypatch.setattr(tun_link, "why_not", lambda: "needs root: not run")
    assert joining.measure(quick=True) == "needs root: not run"


def test_the_audit_counts_what_two_nodes_have_learned_from():
    def pushed(node, steps):
        numbers = {"seq": 1, "base": 1, "steps": steps, "tokens": 0}
        return Accepted(Push(node=node, unit=0, values=Numbers([0.0]), norms=(0.0,), **numbers))

    story = [Founded(LAYOUT, (), 10), *joined(0, 1), Leased(0, 0, 6), pushed(0, 4), Left(0, "silent")]
    counts = Audit([*story, Leased(1, 0, 6), pushed(1, 3)]).drawn(0, samples_per_step=1)
    assert counts[:7].tolist() == [2, 2, 2, 1, 0, 0, 0]
