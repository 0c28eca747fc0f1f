"""Tests that nodes with different models or settings name every difference before they exchange data."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kit.nodes import tower
from torch import nn

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, EverySeconds, EverySteps, LayerSync, MeanExchange, PenaltyConfig
from aedit.proto.transports import MemoryWorld


class Recording:
    """Transport that records the keys it was asked for."""

    def __init__(self, transport):
        self._transport, self.keys = transport, []

    def channel(self, name=None):
        return self

    def gather(self, key, row):
        self.keys.append(key)
        return self._transport.gather(key, row)

    def weighted_mean(self, key, value, weight):
        self.keys.append(key)
        return self._transport.weighted_mean(key, value, weight)

    def __getattr__(self, name):
        return getattr(self._transport, name)


def errors(make, nodes=3):
    """Return each node's error on entering its `with` block, and the keys that it exchanged."""
    world = MemoryWorld(nodes, timeout_s=20.0)

    def run(node):
        transport = Recording(world.node(node))
        try:
            sync = make(node, transport)
            with pytest.raises(ValueError) as said, sync:  # noqa: PT011 - the caller looks at the text
                pass
            return str(said.value), transport.keys
        finally:
            transport.close()

    with ThreadPoolExecutor(nodes) as pool:
        return [future.result() for future in [pool.submit(run, node) for node in range(nodes)]]


def of(model, transport, *, schedule=None, config=None, **exchange):
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    config = config or EditConfig(every=4)
    made = MeanExchange(transport, **exchange)
    return LayerSync.of(model, inner, exchange=made, schedule=schedule, config=config)


DIFFERENCES = {
    "edit.fragments": ({}, {"config": EditConfig(every=4, fragments=2)}, "1", "2"),
    "schedule.every": ({}, {"schedule": EverySteps(5)}, "4", "5"),
    "schedule": ({}, {"schedule": EverySeconds(4)}, "EverySteps", "EverySeconds"),
    "edit.warmup_steps": ({}, {"config": EditConfig(every=4, warmup_steps=3)}, "0", "3"),
    "outer": ({"outer": Nesterov(lr=0.8)}, {"outer": Average(lr=0.8)}, "Nesterov", "Average"),
    "outer.lr": ({"outer": Nesterov(lr=0.8)}, {"outer": Nesterov(lr=0.7)}, "0.8", "0.7"),
    "outer.mu": ({}, {"outer": Nesterov(momentum=0.5)}, "0.85", "0.5"),
    "penalty.clip": ({}, {"penalty": PenaltyConfig(clip=None)}, "10.0", "None"),
    "penalty.step_weight": ({}, {"penalty": PenaltyConfig(step_weight=0.5)}, "0.0", "0.5"),
    "number of units": ({}, {"config": EditConfig(every=4, units="model")}, "4", "1"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_every_node_names_the_setting_that_differs_and_both_values(name):
    """Node 2 has another value; only the comparison is exchanged."""
    usual, other, here, there = DIFFERENCES[name]
    models = [tower() for _ in range(3)]
    said = errors(lambda node, transport: of(models[node], transport, **(other if node == 2 else usual)))
    for node, (text, keys) in enumerate(said):
        mine, theirs, them = (there, here, 0) if node == 2 else (here, there, 2)
        wanted = f"{name}: node {node} has {mine}, node {them} has {theirs}; give all nodes the same"
        assert text.replace("'", "").startswith(wanted)
        assert keys == ["settings/digest", "settings/texts"]


def test_every_node_names_the_parameter_that_differs():
    """The cases are a wider layer, a frozen parameter, and the same parameters in other units."""
    wider = tower()
    wider.middle = nn.Linear(7, 4)
    frozen = tower()
    frozen.first.bias.requires_grad_(False)
    for other, name, mine, theirs in (
        (wider, "parameter middle.weight", "shape (3, 7) in unit middle", "shape (4, 7) in unit middle"),
        (frozen, "parameter first.bias", "shape (7,) in unit first", "shape (7,), frozen"),
    ):
        models = [other, tower()]
        said = errors(lambda node, transport, models=models: of(models[node], transport), nodes=2)
        assert said[1][0].startswith(f"{name}: node 1 has {mine}, node 0 has {theirs};")
        assert said[0][0].startswith(f"{name}: node 0 has {theirs}, node 1 has {mine};")


def test_nodes_that_are_equal_exchange_digests_and_go_on():
    """Weights, per-node timeouts and prefetch may differ, because they are not settings of the run."""
    world = MemoryWorld(2, timeout_s=20.0)

    def run(node):
        transport = Recording(world.node(node))
        with of(models[node], transport, config=EditConfig(every=4, prefetch=node, timeout_s=5.0 + node)):
            pass
        return transport.keys

    models = [tower(), tower()]
    with ThreadPoolExecutor(2) as pool:
        for keys in pool.map(run, range(2)):
            assert keys[0] == "settings/digest"
            assert "settings/texts" not in keys
            assert "anchor" in keys
