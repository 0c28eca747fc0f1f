"""Tests reinforcement learning of several nodes with a hub: prompts, versions, phase of the warm-up."""

import json
import threading
from pathlib import Path

import pytest
from kit.rl_hub import NodeThread, hub_of, node_of
from kit.rl_nodes import config_of

from aedit.async_sgd.inprocess import InProcessHub
from aedit.launch.node.rl_groups import GroupStream
from aedit.launch.node.train import TrainingNode

KEYS = {"drafter__kind": "off", "checkpoint__every": 0, "rl__groups": 2, "rl__group_size": 3}


@pytest.fixture
def trained(monkeypatch):
    """Return (node's thread, position) of each group that was trained."""
    found, original = [], GroupStream.trained

    def follow(stream, count):
        groups = original(stream, count)
        found.extend((threading.current_thread().name, each.position) for each in groups)
        return groups

    monkeypatch.setattr(GroupStream, "trained", follow)
    return found


def _rl(line):
    return line["rl"]


def lines(config, node, kind):
    path = Path(config.dir) / config.name / "nodes" / str(node) / f"{kind}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def told(monkeypatch):
    """Return the newest figures of reinforcement learning that the hub has of each node."""
    found, original = {}, InProcessHub.heartbeat

    def follow(hub, node, report):
        found[node] = report.rl or found.get(node)
        original(hub, node, report)

    monkeypatch.setattr(InProcessHub, "heartbeat", follow)
    return found


def test_two_nodes_share_the_prompts_and_their_engines_have_their_policies(tmp_path, trained, told):
    config = config_of(tmp_path, train__steps=12, **KEYS)
    hub = hub_of(config)
    both_are_there = threading.Barrier(2, timeout=60.0)
    nodes = [NodeThread(config, hub, name, lambda _: both_are_there.wait()) for name in ("a", "b")]
    for node in nodes:
        node.start()
    for node in nodes:
        node.end()
    positions = [position for _, position in trained]
    assert len(set(positions)) == len(positions) >= 2 * 12
    assert {name for name, _ in trained} == {"a", "b"}
    for node in (0, 1):
        last = lines(config, node, "metrics")[-1]["rl"]
        assert last["mismatch_kl"] < 1e-6
        assert last["staleness_max"] == 0
        written = [(rl["rollout_tokens"], rl["groups"]) for rl in map(_rl, lines(config, node, "metrics"))]
        assert (told[node]["rollout_tokens"], told[node]["groups"]) in written
    assert len(hub.tally.accepted) > 4, "nothing has landed"


def test_a_node_that_joins_after_the_warm_up_of_the_run_does_not_repeat_it(tmp_path, monkeypatch):
    config = config_of(tmp_path, train__steps=14, rl__supervised_steps=4, edit__every=1, **KEYS)
    hub = hub_of(config)
    late_is_there = threading.Event()
    late = NodeThread(config, hub, "late", lambda _: late_is_there.set())
    record_step = TrainingNode.record_step

    def recorded(node):
        record_step(node)
        if node.objective.started and late.ident is None:
            late.start()
            assert late_is_there.wait(60.0)

    monkeypatch.setattr(TrainingNode, "record_step", recorded)
    first = NodeThread(config, hub, "first")
    first.start()
    first.end()
    late.end()
    warm_ups = [lines(config, node, "metrics")[-1]["rl"]["supervised_steps"] for node in (0, 1)]
    assert 4 <= warm_ups[0] <= 6  # the hub's count lags behind by the push under way
    assert warm_ups[1] == 0
    assert lines(config, 1, "metrics")[-1]["step"] > 0


def test_the_rate_follows_the_live_nodes_and_the_rate_of_the_warm_up_does_not(tmp_path):
    rates = {"train__lr": 1e-3, "train__lr_by_nodes": 0.5, "train__lr_warmup": 0.0, "train__lr_final": 1.0}
    config = config_of(tmp_path, rl__supervised_steps=4, rl__supervised_lr=2e-3, **rates, **KEYS)
    hub = hub_of(config)

    def rate(node):
        node.inner_step()
        return node.lr, node.sync.inner.param_groups[0]["lr"]

    with node_of(config, hub, "a") as first:
        with node_of(config, hub, "b") as second:
            assert rate(second) == (2e-3, 2e-3)
            first.objective.started = second.objective.started = True
            assert rate(first) == rate(second) == pytest.approx((1e-3 * 2**0.5,) * 2)
            second.sync.close()
        assert rate(first) == (1e-3, 1e-3)
        first.sync.close()


def used_by(hub):
    """Return the positions that the hub knows as used."""
    pool = hub.hub.state.pool
    unused = [*pool.returned, *(block for blocks in pool.leases.values() for block in blocks.values())]
    return set(range(pool.watermark)) - {position for block in unused for position in range(*block)}


def test_pushes_alone_say_exactly_which_groups_their_steps_have_trained(tmp_path, trained, monkeypatch):
    """At every push, also while later groups are under way, and with several steps on each group."""
    config = config_of(tmp_path, train__steps=12, rl__batches=2, rl__epochs=2, edit__every=3, **KEYS)
    hub, seen = hub_of(config), []
    offer = InProcessHub.offer

    def offered(here, push, used=()):
        offer(here, push, used)
        if push.base:
            seen.append((used_by(here), {position for _, position in trained}))

    monkeypatch.setattr(InProcessHub, "offer", offered)
    monkeypatch.setattr(InProcessHub, "use", lambda *_: None)  # no report says it
    node = NodeThread(config, hub, "a")
    node.start()
    node.end()
    assert len(seen) >= 4
    assert all(used == known for used, known in seen)
    assert len(seen[0][1]) < len(seen[-1][1])
