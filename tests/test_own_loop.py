"""Loops of one's own, as PyTorch users write them: averages, inference mode, wrappers, unequal lengths."""

import pytest
import torch
import torch.distributed as dist
from kit.local_sgd import furthest, local_sgd, trainable
from kit.nodes import batches, in_threads, loss, tower
from torch import nn

from aedit import EditConfig, EverySteps, LayerSync, MeanExchange, PenaltyConfig
from aedit.async_sgd import Average
from aedit.proto import MemoryWorld

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=1e9)


class Normed(nn.Module):
    """A tower with buffers that change."""

    def __init__(self):
        super().__init__()
        self.tower, self.norm = tower(), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.tower(self.norm(x))


def train(transport, model, data, evaluate, **config):
    """Train `model` as a node that evaluates after each step; return its parameters."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    with LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=2, **config)) as sync:
        for batch in data:
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
            evaluate(model, batch)
    return {name: p.detach().clone() for name, p in trainable(model)}


def with_average(model, batch):
    """Evaluate other values in place of the parameters, written as libraries for moving averages do."""
    kept = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(0.5 * p.data)
    with torch.no_grad():
        loss(model, batch)
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)


@torch.inference_mode()
def in_inference_mode(model, batch):
    model.eval()
    loss(model, batch)
    model.train()


def test_an_average_may_take_the_place_of_the_parameters_while_a_round_is_under_way():
    data = [batches(i, 6) for i in range(2)]
    models = [tower() for _ in data]
    found = in_threads(2, lambda transport, i: train(transport, models[i], data[i], with_average))
    expected = local_sgd(tower(), data, loss, every=2)
    assert max(furthest(each, expected) for each in found) < 1e-6


def test_on_arrival_too_no_step_is_lost_when_an_average_is_evaluated():
    def node(transport, i):
        model = models[i]
        inner = torch.optim.SGD(model.parameters(), lr=0.0)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        config = EditConfig(every=2, landing="arrival")
        with LayerSync.of(model, inner, exchange=exchange, config=config) as sync:
            for batch in batches(i, 12):
                model(batch)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.25 + 0.5 * i)
                sync.step()
                with_average(model, batch)

    models = [tower() for _ in range(2)]
    in_threads(2, node)
    for p, began in zip(models[0].parameters(), tower().parameters(), strict=True):
        assert (p - (began + 12 * 0.5)).abs().max() < 1e-5, "twelve steps, each 0.25 on one node and 0.75"


class WritesLater:
    """A transport that writes into what it was given after the evaluation, as collectives do."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def weighted_mean(self, key, value, weight):
        assert not value.is_inference(), f"{key} cannot be written outside inference mode"
        return self._transport.weighted_mean(key, value, weight)


def evaluated(evaluate):
    """Return parameters and buffers of two nodes after training with evaluations in between."""
    data = [batches(i, 6) for i in range(2)]
    models = [Normed() for _ in data]
    in_threads(2, lambda transport, i: train(WritesLater(transport), models[i], data[i], evaluate))
    return [value for model in models for value in model.state_dict().values()]


def test_an_evaluation_in_inference_mode_changes_no_bit():
    expected = evaluated(lambda model, batch: None)
    assert all(map(torch.equal, evaluated(in_inference_mode), expected))


def test_nodes_that_end_in_the_warm_up_before_others_hear_it_at_once():
    def node(transport, i):
        with pytest.raises(ValueError, match="50% of the nodes end after 3 steps, in the warm-up"):
            train(transport, tower(), batches(i, 3 + 2 * i), lambda model, batch: None, warmup_steps=5)
        return True

    assert in_threads(2, node) == [True, True]


@pytest.mark.parametrize("told", ["the wrapper", "the module"])
def test_a_model_whose_gradients_are_averaged_at_every_step_is_refused(group, monkeypatch, told):
    model = tower()
    ddp = nn.parallel.DistributedDataParallel(model)
    monkeypatch.setattr(type(ddp.process_group), "size", lambda self: 2)
    given = ddp if told == "the wrapper" else model

    def run():
        inner = torch.optim.SGD(given.parameters(), lr=0.1)
        exchange = MeanExchange(MemoryWorld(1).node(0))
        with LayerSync.of(given, inner, exchange=exchange, schedule=EverySteps(2)):
            ddp(torch.ones(2, 5))

    with pytest.raises(ValueError, match="averages gradients over 2 processes"):
        run()


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
