"""Tests a hub's anchors in transfer to nodes, between hubs, and over restarts."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from kit.hub_machine import (
    AVERAGE,
    Int8,
    Numbers,
    World,
    config,
    joiner,
    picture,
    plan,
    poison,
    through_a_file,
    values,
    world,
)

from aedit.async_sgd.hub import Denied, parent_hub
from aedit.async_sgd.hub.status import hub_status, run_news
from aedit.async_sgd.rules import Led, Left, Merged, OuterConfig, PushFilterConfig, Ticked, make_outer
from aedit.proto.agent.unit_transfers import add_chain
from aedit.proto.codecs import codec
from aedit.proto.rpc import PullHead
from aedit.proto.rpc.hub_pb2 import Link
from aedit.types import Layout, TensorLayout, UnitLayout

# --- the way down


@pytest.mark.parametrize("feedback", [False, True])
def test_a_chain_of_deltas_leads_to_the_bits_that_the_hub_hands_out(feedback):
    codec = Int8(feedback=feedback)
    made = World(plan(config(codec_down="e3m0" if feedback else "int8")), codec)
    made.join()
    made.found(value=1.0)
    rng, held = np.random.default_rng(0), values(made)
    for _ in range(20):
        base = made.hub.anchor(0)[0]
        made.push(0, rng.normal(size=8))
        made.settle()
        for _, delta in made.hub.chain(0, base):
            held = held + codec.decode(delta, 8, 0, 8)
        assert held.tobytes() == values(made).tobytes()
    assert made.hub.chain(0, 1) is None
    assert made.hub.chain(0, 0) is None
    assert made.hub.chain(0, 99) is None
    assert made.hub.chain(0, 21) == ()


def test_nodes_that_follow_in_sparse_steps_have_the_hubs_bits_and_miss_nothing_over_time():
    numel = 70_001
    how, layout = codec("topk"), Layout((UnitLayout("big", (TensorLayout("w", (numel,)),)),))
    made = World(plan(config(codec_down="topk")), how, layout)
    made.join()
    rng = np.random.default_rng(0)
    x = rng.normal(size=numel).astype(np.float32)
    made.push(0, x, base=0, steps=0), made.settle()
    held, exact = values(made).copy(), x.astype(np.float64)
    for number in range(60):
        g = (rng.normal(size=numel) if number < 20 else np.zeros(numel)).astype(np.float32)
        made.push(0, g), made.settle()
        exact -= g
        ((_, delta),) = made.hub.chain(0, made.hub.anchor(0)[0] - 1)
        assert len(delta) <= 0.05 * numel
        add_chain(held, memoryview(delta), PullHead(chain=[Link(num_bytes=len(delta))]), how)
        assert held.tobytes() == values(made).tobytes()
        if number == 19:
            behind = np.linalg.norm(held - exact)
    assert np.linalg.norm(held - exact) < 0.1 * behind


def test_what_a_coarse_step_leaves_out_is_made_up_for_by_the_next():
    made = World(plan(config(codec_down="e3m0")), Int8(levels=1, feedback=True))
    made.join()
    made.found()
    exact = np.zeros(8)
    rng = np.random.default_rng(0)
    for _ in range(200):
        pushed = rng.normal(size=8).astype(np.float32)
        exact -= pushed
        made.push(0, pushed)
        made.settle()
        assert np.abs(values(made) - exact).max() < 25.0
    made.push(0, np.zeros(8))
    for _ in range(30):
        made.settle()
        made.push(0, np.zeros(8))
    np.testing.assert_allclose(values(made), exact, atol=1e-3)


def test_what_is_handed_out_looks_ahead_when_told_to():
    made = world(1, more={"outer": OuterConfig(kind="nesterov", lr=0.5, momentum=0.5, look_ahead=True)})
    made.push(0, 1.0)
    made.settle()
    assert (made.hub.state.units[0].anchor.values == -0.75).all()  # 0.5 * (1 + 0.5 * 1)
    assert (values(made) == -1.0).all()  # and 0.5 * 0.5 * 1 further


@pytest.mark.parametrize("down", ["fp32", "int8", "e3m0"])
def test_a_unit_of_many_slices_steps_as_one(down):
    numel = 200_001
    layout = Layout((UnitLayout("big", (TensorLayout("w", (numel,)),)),))
    outer = OuterConfig(kind="delayed-nesterov", lr=0.7, momentum=0.9, delay=3, activation=0.2)
    codec = None if down == "fp32" else Int8(feedback=down == "e3m0")
    made = World(plan(config(codec_down=down), outer=outer), codec, layout)
    made.join()
    rng = np.random.default_rng(0)
    x = rng.normal(size=numel).astype(np.float32)
    made.push(0, x, base=0, steps=0), made.settle()
    rule, state = make_outer(outer), make_outer(outer).init(x)
    for _ in range(7):
        g = rng.normal(size=numel).astype(np.float32)
        step, state = rule.update(outer.delay * g, state)  # the node is alone: each push is a round
        x = x - step
        made.push(0, g), made.settle()
    error = {"fp32": 1e-6, "int8": 0.2, "e3m0": 0.05}[down]
    np.testing.assert_allclose(values(made), x, atol=error)
    np.testing.assert_allclose(made.hub.state.units[0].anchor.outer.momentum, state.momentum, atol=1e-6)


def test_arrays_of_a_version_never_change():
    made = world(1, more={"outer": OuterConfig(kind="delayed-nesterov")})
    for _ in range(6):
        seen = [values(made), *made.hub.state.units[0].anchor.outer.arrays]
        copies = [array.copy() for array in seen]
        made.push(0, 1.0)
        made.settle()
        assert all((a == b).all() for a, b in zip(seen, copies, strict=True))
        assert not any(array.flags.writeable for array in seen)


# --- several hubs


def test_two_hubs_split_the_units():
    made = World(plan(part=(1, 2)))
    made.join()
    made.found(value=2.0)
    assert list(made.hub.state.units) == [1]
    with pytest.raises(Denied, match="no unit 0"):
        made.hub.offer(replace(made.make(0, 1.0, 1), unit=0), made.now)
    made.push(0, 1.0, 1, steps=8)
    made.settle()
    assert run_news(made.hub, 0, made.now).total_steps == 8
    assert (values(made, 1) == 1.0).all()


def test_a_region_tells_the_parent_its_progress_once_and_none_is_lost_on_the_way():
    a = 0.25
    made = World(plan(config(parent="p:1", parent_every=2, parent_mix=a)))
    made.join()
    made.found(value=4.0)
    assert parent_hub.due(made.hub) == []
    made.push(0, 1.0), made.settle()
    made.push(0, 1.0), made.settle()
    assert parent_hub.due(made.hub) == [0]
    made.do([parent_hub.send(made.hub, 0)])
    assert (parent_hub.owed(made.hub, 0) == 2.0).all()
    assert parent_hub.due(made.hub) == []
    made.push(0, 1.0), made.settle()  # while it is on its way: params 1, sent 2
    made.do([parent_hub.mix(made.hub, 0, Numbers([10.0] * 8))])
    assert (values(made) == 0.75 * 1 + 0.25 * 10).all()
    made.push(0, 1.0), made.settle()
    made.push(0, 1.0), made.settle()
    made.do([parent_hub.send(made.hub, 0)])
    np.testing.assert_allclose(parent_hub.owed(made.hub, 0), 0.75 * 1 + 2)  # HALoS would say 2


def test_what_the_parent_does_not_believe_is_still_owed():
    made = World(plan(config(parent="p:1", parent_every=1, parent_mix=0.5)))
    made.join()
    made.found(value=4.0)
    made.push(0, 1.0), made.settle()
    made.do([parent_hub.send(made.hub, 0)])
    made.do([parent_hub.withdraw(0)])
    made.do([parent_hub.mix(made.hub, 0, Numbers([4.0] * 8))])
    assert (values(made) == 3.5).all()
    made.push(0, 1.0), made.settle()
    made.do([parent_hub.send(made.hub, 0)])
    np.testing.assert_allclose(parent_hub.owed(made.hub, 0), 0.5 * 1 + 1)


def test_a_region_can_take_the_parents_anchor_as_it_is():
    made = World(plan(config(parent="p:1")))
    made.join()
    made.found(value=4.0)
    made.do([parent_hub.mix(made.hub, 0, Numbers([9.0] * 8), share=1.0)])
    assert (values(made) == 9.0).all()
    assert (made.hub.state.units[0].up == 9.0).all()


# --- restarts


def busy(outer=AVERAGE, quantiser=None, **settings):
    """Return a hub with pushes, leases and votes in progress."""
    made = World(plan(config(**settings), outer=outer), quantiser)
    made.join("a"), made.join("b")
    made.found()
    made.do([Led(3)])
    rng = np.random.default_rng(0)
    for turn in range(12):
        made.tick(1.3)
        made.heartbeat(0), made.heartbeat(1)
        made.push(turn % 2, rng.normal(size=8))
        made.push(1, rng.normal(size=5), 1)
        made.lease(turn % 2, 5 + turn)
        made.do(made.hub.use(0, [(0, turn)]))
    poison(made, 0)
    made.do(made.hub.leave(0))
    made.push(1, 1.0, 1)
    return made


@pytest.mark.parametrize(
    "settings",
    [
        {"outer": OuterConfig()},
        {"outer": OuterConfig(kind="delayed-nesterov", delay=4, activation=0.1)},
        {"quorum": 2, "weights": "penalty", "push_filter": PushFilterConfig(violations=3)},
        {"codec_down": "int8", "quantiser": Int8()},
        {"codec_down": "e3m0", "quantiser": Int8(levels=7, feedback=True)},
        {"parent": "p:1", "parent_every": 2},
    ],
)
def test_replay_and_snapshot_give_the_same_bits(settings):
    made = busy(**settings)
    if "parent" in settings:
        made.do([parent_hub.send(made.hub, 0)])
    saved, since = through_a_file(made.hub.saved()), len(made.journal)
    assert picture(made.replayed()) == picture(made.hub)
    assert picture(made.replayed(saved, since)) == picture(made.hub)
    made.push(1, 3.0), made.tick(5), made.settle()
    if "parent" in settings:
        made.do([parent_hub.mix(made.hub, 0, Numbers(range(8)))])
    assert picture(made.replayed()) == picture(made.hub)
    assert picture(made.replayed(saved, since)) == picture(made.hub)


def test_a_snapshot_says_the_same_whatever_was_leased_and_used_up_before():
    made = world(2)
    made.lease(0, 5), made.lease(1, 5)
    made.do(made.hub.use(0, [(0, 5)]))
    saved, since = through_a_file(made.hub.saved()), len(made.journal)
    made.lease(0, 5)
    assert picture(made.replayed(saved, since)) == picture(made.hub)


def test_after_a_restart_nobody_is_given_up_before_he_could_have_been_heard():
    made = world(2, expire_s=15)
    again = made.replayed()
    assert [r for r in again.tick(1e6) if isinstance(r, Left)] == []
    assert [r for r in again.tick(1e6 + 14) if isinstance(r, Left)] == []
    assert len([r for r in again.tick(1e6 + 16) if isinstance(r, Left)]) == 2


def test_deciding_changes_nothing_that_is_journaled():
    made = busy(quorum=2)
    before = picture(made.hub)
    made.hub.tick(made.now + 100)
    made.hub.join(joiner("new"), made.now)
    made.hub.offer(made.make(1, 1.0), made.now)
    made.hub.lease(1, 3, made.now)
    made.hub.use(1, [(0, 3)])
    made.hub.leave(1)
    run_news(made.hub, 1, made.now)
    assert picture(made.hub) == before


def test_a_merge_may_be_computed_while_others_push():
    made = world(3, quorum=2, grace=0.0)
    made.push(0, 1.0), made.push(1, 3.0)
    decided = made.hub.tick(made.now)
    (record,) = [record for record in decided if isinstance(record, Merged)]
    computed = made.hub.compute(record)
    made.push(2, 5.0)
    made.hub.apply(record, computed)
    np.testing.assert_allclose(values(made), -2.0 * 2 / 3, rtol=1e-6)
    assert len(made.hub.state.units[0].pending) == 1


def test_a_merge_that_took_long_to_compute_does_not_turn_back_the_clock():
    made = world(1)
    made.push(0, 1.0)
    (record,) = [record for record in made.hub.tick(made.now) if isinstance(record, Merged)]
    made.now += 5
    made.do(record for record in made.hub.tick(made.now) if isinstance(record, Ticked))
    made.do([record])
    assert made.hub.state.elapsed_s == made.replayed().state.elapsed_s == 5.0


def test_the_status_can_be_written_as_json():
    made = busy(quorum=2)
    said = json.loads(json.dumps(hub_status(made.hub, made.now), allow_nan=False))
    assert [node["name"] for node in said["nodes"]] == ["a", "b"]
    assert said["nodes"][0]["state"] == "gone: left"
    assert said["units"][0]["version"] == made.hub.anchor(0)[0]


def test_the_age_of_the_run_is_written_down_once_a_second():
    made = world(1)
    found = [record for _ in range(100) for record in made.tick(0.05) if isinstance(record, Ticked)]
    assert 4 <= len(found) <= 5


def test_the_hub_needs_no_torch():
    words = (
        "import sys, aedit.async_sgd.hub.hub, aedit.async_sgd.hub.status; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", words], timeout=60).returncode == 0
