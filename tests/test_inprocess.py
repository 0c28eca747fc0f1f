"""Tests a hub in the caller's process.

Nodes train through it as over a network, on any clock, without torch.
"""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from benchmarks.kit.paced import layout_of
from kit.nodes import batches, furthest, parameters, plain_training, tower, train

from aedit.async_sgd.hub import Denied
from aedit.async_sgd.inprocess import InProcessHub
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig
from aedit.clock import VirtualClock
from aedit.edit import EditConfig, HubExchange
from aedit.proto.agent import Progress
from aedit.types import Verdict


def hub(model, clock=None, outer=None, **config):
    plan = HubPlan(
        hub=HubConfig(**{"weights": "uniform", **config}),
        outer=outer or OuterConfig(kind="average", lr=1.0),
        penalty=PenaltyConfig(),
        every=4,
        pace="steps",
        steps=100,
    )
    return InProcessHub(plan, layout_of(model), **({"clock": clock} if clock else {}))


def test_one_node_of_an_averaging_hub_trains_as_plain_torch():
    model, data = tower(3), batches(1, 14)
    expected = plain_training(model, lambda m: torch.optim.AdamW(m.parameters(), lr=0.01), data)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    exchange = HubExchange(hub(model).link("alone"))
    train(model, inner, exchange, data, EditConfig(every=4, landing="arrival"))
    assert furthest(parameters(model), expected) < 1e-5


def test_a_node_that_was_silent_for_too_long_before_it_joins_is_told_so():
    clock = VirtualClock()
    here = hub(tower(), clock)
    late = here.link("late")
    clock.advance(here.hub.config.expire_s + 1)
    here.tick()
    with pytest.raises(TimeoutError, match=r"node 'late' was silent for longer than hub.expire_s = 15 s"):
        late.join(1.0)
    assert here.link("late").join(1.0)


def test_a_node_that_joins_before_the_first_one_has_founded_the_run_waits_for_it(monkeypatch):
    here = hub(tower())
    first, second = here.link("first"), here.link("second")
    wait_for = here.lock.wait_for
    founding = threading.Thread(target=first.join, args=[30.0], daemon=True)

    def found_meanwhile(predicate, timeout):
        if not predicate():
            founding.start()
        return wait_for(predicate, timeout)

    for values in first.anchors:
        values[:] = 7.0
    monkeypatch.setattr(here.lock, "wait_for", found_meanwhile)
    assert set(second.join(30.0)) == {1}
    founding.join(30.0)
    assert all((values == 7.0).all() for values in second.anchors)


def test_a_first_node_that_does_not_found_the_run_in_time_is_named():
    here = hub(tower())
    here.link("first")
    with pytest.raises(TimeoutError, match=r"node 'first', the first of this run, has not called `join`"):
        here.link("second").join(0.0)


def test_pushes_of_two_nodes_are_merged_at_the_quorum_and_both_get_the_mean():
    clock = VirtualClock()
    here = hub(tower(), clock, quorum="all")
    first, second = here.link("first"), here.link("second")
    for anchor in first.anchors:
        anchor[:] = 1.0
    versions = first.join(1.0)
    assert second.join(1.0) == versions == (1,) * len(first.anchors)
    for link, value in ((first, 0.5), (second, 0.25)):
        link.heartbeat(1.0)
        for unit, outbox in enumerate(link.outbox):
            outbox[:] = value
            link.send(unit, 1, base=1, steps=4, tokens=40)
            assert (link.answer(unit, 1) is None) == (link is first)
    for link in (first, second):
        found = link.answer(0, 1)
        assert (found.version, found.verdict) == (2, Verdict.MERGED)
        np.testing.assert_allclose(link.anchors[0], 1.0 - 0.375, atol=1e-7)
    assert here.tally.accepted == [0] * 2 * len(versions) + [1] * len(versions)
    assert (first.news().nodes, first.news().total_tokens) == (2, 80)


def test_blocks_of_samples_are_disjoint_and_more_come_as_they_are_drawn():
    here = hub(tower(), VirtualClock(), lease_samples=32)
    links = [here.link(name) for name in ("first", "second")]
    for link in links:
        link.join(1.0)
    assert [list(link.leases(upto=8)) for link in links] == [[(0, 8)], [(8, 16)]]
    links[0].tell(Progress(steps=2, drawn=8, used=6))
    assert list(links[0].leases(upto=48)) == [(0, 8), (16, 48), (48, 56)], "a lease has at most 32 samples"
    links[0].leave(1.0)
    again = here.link("third")
    assert list(again.leases(upto=50)) == [(6, 8), (16, 46), (46, 56), (56, 64)], (
        "first what the first node had leased and not used"
    )


def test_speed_is_measured_on_the_hubs_clock():
    clock = VirtualClock()
    here = hub(tower(), clock)
    link = here.link("node")
    for _ in range(3):
        clock.advance(0.5)
        link.tell(Progress(steps=int(clock() * 4)))
    assert here.hub.clocks.reports[link.node].steps_per_s == 4.0


def test_a_node_that_was_silent_for_too_long_is_no_member_and_cannot_push():
    clock = VirtualClock()
    here = hub(tower(), clock)
    link = here.link("node")
    link.join(1.0)
    clock.advance(here.hub.config.expire_s + 1)
    here.tick()
    assert not link.is_member
    link.send(0, 1, base=1, steps=1, tokens=1)
    assert link.answer(0, 1) is None
    with pytest.raises(Denied, match="silent"):
        here.lease(link.node, 1)


def test_the_hub_in_process_needs_no_torch():
    program = "import sys, aedit.async_sgd.inprocess; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
