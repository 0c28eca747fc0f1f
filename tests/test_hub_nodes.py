"""Tests two nodes of one and two ranks, their agents and a hub over a real network."""

import threading

import numpy as np
import pytest
import torch
from dist_jobs.hub_node_jobs import agent_plan
from kit.agents import MemoryHub, node
from kit.hub_journal import by_name, check_journal
from kit.hub_process import real_hub
from kit.nodes import UNITS, tower
from kit.waiting import until

from aedit.proto.rpc import hub_pb2 as pb

SETTINGS = {"codec": "fp32", "heartbeat_s": 0.05, "expire_s": 2.0, "call_timeout_s": 2.0, "lease_samples": 64}
JOBS = "tests/dist_jobs/hub_node_jobs.py"


def shapes():
    parameters = dict(tower().named_parameters())
    return [[tuple(parameters[name].shape) for name in names] for names in UNITS.values()]


def whole(anchors):
    """Return the hub's anchors by parameter name."""
    found = {}
    for names, unit_shapes, anchor in zip(UNITS.values(), shapes(), anchors, strict=True):
        parts = torch.from_numpy(np.array(anchor)).split([int(np.prod(shape)) for shape in unit_shapes])
        found |= {n: part.view(shape) for n, part, shape in zip(names, parts, unit_shapes, strict=True)}
    return found


def start():
    return {name: (p.detach() * 256).round() / 256 for name, p in tower().named_parameters()}


def run_with(world, hub, rounds):
    address = hub.serve()
    try:
        settings = SETTINGS | {"rounds": rounds, "addresses": [address], "steps_ahead": 50}
        return world.run(JOBS, "train", size=3, args=settings, timeout_s=90)
    finally:
        hub.kill()


def check_books(anchors, results):
    """Check that the anchors have all nodes' steps, to the last bit, and that no sample was drawn twice."""
    one, two, _ = results
    ended = whole(anchors)
    for name, first in start().items():
        assert torch.equal(ended[name] - first, one[0][name] + two[0][name])
    check_samples(results)


def check_samples(results):
    """Check that the ranks of a node draw the same samples, and two nodes different ones."""
    one, two, other_rank = results
    assert two[2] == other_rank[2], "the ranks of a node draw alike"
    assert len(set(one[2] + two[2])) == len(one[2] + two[2])


def test_nodes_of_one_and_two_ranks_learn_together_over_the_wire(world):
    hub = MemoryHub(shapes=shapes(), slow=True)
    hub.refuse = {(1, 2): pb.REFUSED, (3, 3): pb.REFUSED}
    results = run_with(world, hub, rounds=6)
    check_books(hub.anchors, results)
    assert hub.left == {0, 1}
    assert len({(node, unit, seq) for node, unit, seq, _ in hub.pushed}) == len(hub.pushed)


def test_nodes_train_on_while_their_hub_is_away_and_nothing_is_lost(world):
    hub = MemoryHub(shapes=shapes())
    hub.broken = ["push after"]

    def outage():
        until(lambda: len(hub.pushed) > 20, "twenty pushes", limit_s=60)
        address = hub.server.address
        hub.kill()
        hub.serve(address)

    breaker = threading.Thread(target=outage)
    breaker.start()
    try:
        results = run_with(world, hub, rounds=12)
    finally:
        breaker.join(70)
    check_books(hub.anchors, results)


@pytest.mark.slow
def test_a_hub_that_is_killed_twice_has_lost_nothing_that_it_had_accepted(world, tmp_path):
    settings = SETTINGS | {"expire_s": 5.0}
    with real_hub(tmp_path) as hub:
        killer = threading.Thread(target=_kill_twice, args=(hub,))
        killer.start()
        try:
            args = settings | {"rounds": 25, "addresses": [hub.address], "steps_ahead": 50}
            results = world.run(JOBS, "train", size=3, args=args, timeout_s=90)
        finally:
            killer.join(70)
        plan = agent_plan(tower(), [hub.address], name="reader", **settings)
        with node(plan, mode="thread") as link:
            link.join(30)
            found = whole(link.anchors)
            link.leave(30)
        folder = hub.folder / "hub"
        pushed = by_name(folder, check_journal(folder))
        for name in start():
            added = results[0][0][name] + results[1][0][name]
            torch.testing.assert_close(-torch.from_numpy(pushed[name]).float(), added)
            assert not torch.equal(found[name], start()[name])
        check_samples(results)


def _kill_twice(hub):
    journal = hub.folder / "hub"

    def grown():
        return sum(file.stat().st_size for file in journal.rglob("*") if file.is_file())

    for _ in range(2):
        before = grown()
        until(lambda before=before: grown() > before + 5000, "the journal to grow", limit_s=60)
        hub.kill()
        hub.start()
