"""Tests that a hub that waits for all nodes computes the same anchors as nodes that average."""

from copy import deepcopy

import numpy as np
import pytest
from benchmarks.kit.paced import layout_of
from kit.nodes import UNITS, follow_script, in_threads, tower

from aedit.async_sgd.hub import NodeReport
from aedit.async_sgd.inprocess import InProcessHub, make_push
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig, PushFilterConfig, make_outer
from aedit.clock import VirtualClock

NODES, ROUNDS = 3, 5
STEPS = [[3, 1, 2, 4, 2], [1, 1, 5, 4, 1], [2, 3, 2, 1, 2]]
OUTERS = [
    OuterConfig(kind="nesterov", lr=0.8, momentum=0.85),
    OuterConfig(kind="delayed-nesterov", lr=0.7, momentum=0.9, delay=2),
    OuterConfig(kind="average", lr=1.0),
]


def moves():
    """Return what each node adds to its parameters in each round; some nodes move further than others."""
    rng = np.random.default_rng(7)
    shapes = {name: tuple(p.shape) for name, p in tower().named_parameters()}
    return [
        [
            {
                name: (0.02 * (node + 1) * rng.normal(size=shape)).astype(np.float32)
                for name, shape in shapes.items()
            }
            for _ in range(ROUNDS)
        ]
        for node in range(NODES)
    ]


def by_mean(model, script, outer, penalty):
    """Return the parameters after each round of a mean exchange, by name."""

    def job(transport, n):
        own = deepcopy(model)
        return follow_script(own, transport, script[n], STEPS[n], outer=make_outer(outer), penalty=penalty)

    return [seen.parameters for seen in in_threads(NODES, job)[0]]


def by_hub(model, script, outer, penalty):
    hub_config = HubConfig(quorum="all", weights="penalty", push_filter=PushFilterConfig(clip=None))
    steps = sum(STEPS[0]) * NODES
    plan = HubPlan(hub=hub_config, outer=outer, penalty=penalty, every=4, pace="steps", steps=steps)
    clock = VirtualClock()
    hub = InProcessHub(plan, layout_of(model), clock=clock)
    nodes = [hub.join(f"node-{n}") for n in range(NODES)]
    named = dict(model.named_parameters())
    for i, unit in enumerate(hub.layout.units):
        first = np.concatenate([named[t.name].detach().numpy().reshape(-1) for t in unit.tensors])
        hub.offer(make_push(first, unit, node=nodes[0], unit=i, seq=1, base=0, steps=0, tokens=0))
    for node in nodes:
        hub.heartbeat(node, NodeReport(state="training"))
    for r in range(ROUNDS):
        clock.advance(1.0)  # steps take time
        for i, unit in enumerate(hub.layout.units):
            anchor = hub.hub.anchor(i)[1]
            for n, node in enumerate(nodes):
                local = anchor + np.concatenate([script[n][r][t.name].reshape(-1) for t in unit.tensors])
                facts = {"node": node, "unit": i, "seq": r + 1 + (n == 0), "base": r + 1, "tokens": 0}
                hub.offer(make_push(anchor - local, unit, steps=STEPS[n][r], **facts))
        yield {
            tensor.name: part.reshape(tensor.shape)
            for i, unit in enumerate(hub.layout.units)
            for tensor, part in zip(
                unit.tensors,
                np.split(hub.hub.anchor(i)[1], np.cumsum([t.numel for t in unit.tensors])[:-1]),
                strict=True,
            )
        }


@pytest.mark.parametrize("step_weight", [0.0, 0.5])
@pytest.mark.parametrize("outer", OUTERS, ids=lambda outer: outer.kind)
def test_a_hub_with_everybody_there_is_a_mean_exchange(outer, step_weight):
    penalty = PenaltyConfig(step_weight=step_weight, detector="off", clip=0.5)
    model, script = tower(), moves()
    rounds = list(
        zip(by_mean(model, script, outer, penalty), by_hub(model, script, outer, penalty), strict=True)
    )
    assert len(rounds) == ROUNDS
    for parameters, anchors in rounds:
        assert parameters.keys() == anchors.keys() == {name for names in UNITS.values() for name in names}
        for name, value in parameters.items():
            assert np.abs(value.numpy() - anchors[name]).max() <= 1e-6, name
    moved = max(np.abs(anchors[name] - p.detach().numpy()).max() for name, p in model.named_parameters())
    assert moved > 0.05
