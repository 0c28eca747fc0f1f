"""Tests a swarm that is cut in two: on real processes, and the parts of that comparison by themselves."""

import numpy as np
import pytest
from benchmarks.chaos_parts import accounts, swarm_partition
from benchmarks.chaos_parts.swarm import mistakes
from benchmarks.chaos_parts.swarm_partition import PartsLink, Wires
from benchmarks.kit import netns
from kit.hub_machine import AVERAGE, config, plan

from aedit.async_sgd.inprocess import InProcessHub
from aedit.clock import VirtualClock
from aedit.types import Layout, TensorLayout, UnitLayout, Verdict


def seen(unit, version, sha256):
    return {"event": "received", "unit": unit, "version": version, "sha256": sha256}


def test_two_answers_under_one_version_are_found_and_one_that_the_history_has_not():
    told = {(0, 2): "a", (0, 3): "b"}
    assert accounts.conflicts(accounts.received([[seen(0, 2, "a")], [seen(0, 3, "b")]], range(1)), told) == 0
    twice = accounts.received([[seen(0, 2, "a"), seen(1, 9, "z")], [seen(0, 2, "c")]], range(1))
    assert twice == {(0, 2): {"a", "c"}}
    assert accounts.conflicts(twice, told) == 1
    assert accounts.conflicts(accounts.received([[seen(0, 4, "d")]], range(1)), told) == 1


LAYOUT = Layout(tuple(UnitLayout(f"u{i}", (TensorLayout("w", (4,)),)) for i in range(3)))


def test_a_node_that_a_part_gave_up_trains_on_and_brings_what_it_has_when_it_is_reached_again():
    clock, wires = VirtualClock(), Wires([0, 0, 1], seed=0)
    parts = [
        InProcessHub(plan(config(expire_s=5.0), AVERAGE, part=(k, 3)), LAYOUT, clock=clock) for k in range(3)
    ]
    links = [PartsLink(parts, index, wires) for index in range(3)]
    for link in links:
        link.join(0.0)
    away = next((n, k) for n in range(3) for k in range(3) if not _reaches_when_cut(wires, n, k))
    link, unit = links[away[0]], away[1]
    wires.is_cut = True
    link.outbox[unit][:] = -8.0
    link.send(unit, 1, base=1, steps=8, tokens=8)
    for _ in range(10):
        clock.advance(1.0)
        for one in links:
            one.heartbeat(1.0)
        for part in parts:
            part.tick()
        assert link.answer(unit, 1) is None
    assert not parts[unit].hub.state.members[link.node].live, "the part has given it up"
    wires.is_cut = False
    link.heartbeat(1.0)
    assert link.answer(unit, 1).verdict == Verdict.MERGED
    assert link.longest == 8
    assert np.all(link.anchors[unit] > 0)


def _reaches_when_cut(wires, node, part):
    wires.is_cut = True
    found = wires.reaches(node, part)
    wires.is_cut = False
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(netns.why_not() is not None, reason="needs network namespaces")
@pytest.mark.parametrize("sizes", ["3,3", "2,4"])
def test_a_swarm_cut_in_two_gives_one_answer_per_version_and_counts_all_steps_when_it_is_healed(sizes):
    found = swarm_partition.tell(sizes, 30.0, seed=2, patience_s=120.0)
    assert found.versions > 50
    assert found.conflicts == 0, "a unit had two answers under one version"
    assert sum(found.by_minority) == 0, "a part has acknowledged pushes at both sides"
    assert 0 not in found.by_majority, "a part stood still"
    assert found.trained, "no node was cut off from any part"
    assert found.owed == 0, "steps of a node are lost"
    assert found.unequal == 0, "replicas of a part differ"
    assert found.owners == [1] * len(found.owners)
    wrong = {text: number for text, number in mistakes(found.story).items() if not text.startswith("calls")}
    assert wrong == dict.fromkeys(wrong, 0), found.story.died
