"""One bad node of eight against a real hub: refused or bounded from the first round; the others are not."""

import numpy as np
import pytest
from benchmarks.attacks import attacks
from benchmarks.hub_in_process import HubInProcess, push_of

from aedit.async_sgd.config import HubConfig, OuterConfig, PenaltyConfig, StalenessConfig
from aedit.async_sgd.hub import Hub, HubPlan
from aedit.async_sgd.members import Report
from aedit.async_sgd.records import Layout, TensorLayout, UnitLayout

NODES, BAD, ROUNDS, NUMEL = 8, 7, 12, 6000
UNIT = UnitLayout("u", (TensorLayout("m", (50, 100)), TensorLayout("b", (1000,))))
LAYOUT = Layout((UNIT,))
PUT_OUT = {
    "nan",
    "inf",
    "1000 times",
    "10 times",
    "sign flipped, 10 times",
    "noise",
    "oversized",
    "other model",
}
GOAL = np.random.default_rng(0).normal(size=NUMEL)


def run(quorum, tamper=None, nodes=NODES):
    """Nodes that pull the anchor towards the goal, each with noise of its own; the anchor's way there."""
    weights = "penalty" if quorum == "all" else "uniform"
    staleness = StalenessConfig(rule="constant")
    hub_config = HubConfig(quorum=quorum, weights=weights, pace="steps", staleness=staleness)
    outer = OuterConfig(kind="average", lr=1.0 if quorum == "all" else 1 / NODES)
    penalty = PenaltyConfig(clip=None)
    plan = HubPlan(hub=hub_config, outer=outer, penalty=penalty, every=16, steps=16 * ROUNDS)
    hub = HubInProcess(Hub(plan), LAYOUT)
    for node in range(nodes):
        hub.join(f"node {node}")
    hub.offer(push_of(np.zeros(NUMEL, np.float32), UNIT, node=0, unit=0, seq=1, base=0, steps=0, tokens=0))
    rng = np.random.default_rng(1)
    for round in range(ROUNDS):
        hub.now_s += 1.0
        version, anchor = hub.hub.anchor(0)
        noise = rng.normal(size=(NODES, NUMEL))  # the same for the others, whatever one of them does
        for node in hub.hub.state.live:
            hub.hub.beat(node, Report(state="training"), hub.now_s)
        for node in list(hub.hub.state.live):
            D = 0.2 * (anchor - GOAL) + 0.1 * noise[node]
            facts = {"node": node, "unit": 0, "seq": round + 1 + (node == 0), "base": version}
            push = push_of(D.astype(np.float32), UNIT, steps=16, tokens=160, **facts)
            hub.offer(tamper(push, UNIT) if tamper and node == BAD else push)
    return hub, float(np.linalg.norm(hub.hub.anchor(0)[1] - GOAL))


@pytest.fixture(scope="module", params=["all", 1], ids=["quorum", "every arrival"])
def quorum(request):
    return request.param


@pytest.mark.parametrize("name", attacks())
def test_one_bad_node_of_eight_is_refused_or_bounded_and_the_others_are_not(name, quorum):
    hub, distance = run(quorum, attacks()[name])
    _, clean = run(quorum)
    blamed = {node for node, _ in hub.tally.refused} | set(hub.tally.away)
    assert blamed <= {BAD}
    start = float(np.linalg.norm(GOAL))
    assert clean < 0.2 * start
    assert distance - clean < 0.1 * start
    if name in PUT_OUT:
        assert blamed == {BAD}


@pytest.mark.parametrize("name", ["nan", "inf", "1000 times", "noise", "oversized", "other model"])
def test_what_is_crude_never_reaches_the_anchor(name, quorum):
    hub, distance = run(quorum, attacks()[name])
    without, expected = run(quorum, nodes=NODES - 1)
    if quorum == 1:
        np.testing.assert_array_equal(hub.hub.anchor(0)[1], without.hub.anchor(0)[1])
    else:
        assert distance == pytest.approx(expected, rel=0.05)
