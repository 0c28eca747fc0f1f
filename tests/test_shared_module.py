"""Tests that a module which is trained apart from the model is averaged over the nodes that trained it."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from kit.hubs import OFF, Hub, HubLink
from kit.nodes import batches, in_threads, loss, parameters, tower

from aedit.async_sgd.rules import DRAFTER, Average, UnitRule
from aedit.edit import EditConfig, HubExchange, LayerSync, MeanExchange, SharedModule

SHAPES = {"a": torch.Size([3]), "b": torch.Size([2, 2])}


class User:
    """Records what it is offered; takes it if `takes`."""

    def __init__(self, seed, takes=True):
        rng = torch.Generator().manual_seed(seed)
        self.own = {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}
        self.shared_steps, self.takes, self.offered = 0, takes, []

    def tensors(self):
        return self.own

    def take_shared(self, tensors):
        self.offered.append(tensors)
        if self.takes:
            self.own = dict(tensors)

    def train(self, steps, by=1.0):
        self.own = {name: value + by for name, value in self.own.items()}
        self.shared_steps += steps


def run(act, nodes=2, landing="forward", rounds=2, takes=True, sent=None):
    """Return the users and models after rounds of one inner step; `act(user, node, round)` before each.

    sent: takes node and key of each vector that is exchanged.
    """
    model = tower()

    def job(transport, n):
        own, user = deepcopy(model), User(n, takes)
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        exchange = MeanExchange(transport, outer=Average(), rules={DRAFTER: UnitRule()})
        if sent is not None:
            mean = exchange.channel.weighted_mean
            exchange.channel.weighted_mean = lambda key, *args: sent.append((n, key)) or mean(key, *args)
        shared = SharedModule(DRAFTER, SHAPES)
        shared.attach(exchange)
        sync = LayerSync.of(own, inner, exchange=exchange, config=EditConfig(every=1, landing=landing))
        assert [unit.name for unit in sync.units][-1] == DRAFTER
        shared.connect(user, sync.shards)
        with sync:
            for number, batch in enumerate(batches(n, rounds)):
                act(user, n, number)
                loss(own, batch).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
                sync.finish()
        return user, parameters(own)

    return in_threads(nodes, job)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_the_average_is_weighted_by_the_training_steps_and_goes_to_all(landing):
    before = [User(n) for n in range(3)]
    for user, steps in zip(before, (6, 2, 0), strict=True):
        user.train(steps)

    def act(user, n, number):
        if number == 0:
            user.train((6, 2, 0)[n])

    found = run(act, nodes=3, landing=landing)
    for name in SHAPES:
        values = [user.own[name].double().numpy() for user in before]
        expected = np.average(values, axis=0, weights=(6, 2, 0))
        for user, _ in found:
            np.testing.assert_allclose(user.own[name].double().numpy(), expected, atol=1e-6)
    assert all(len(user.offered) == 1 for user, _ in found), "the second round had nothing new"


def test_where_nobody_has_trained_nothing_is_offered():
    for user, _ in run(lambda user, n, number: None):
        assert user.offered == []


def test_nothing_of_it_is_sent_until_a_node_has_trained_it_and_then_all_take_part():
    sent = []
    found = run(lambda user, n, number: user.train(n) if number == 2 else None, rounds=4, sent=sent)
    drafter = sorted((n, key) for n, key in sent if key.endswith(DRAFTER))
    (key,) = {key for _, key in drafter}
    assert drafter == [(0, key), (1, key)], "in one round of four, and all nodes together"
    assert len(sent) == 2 * (4 * 4 + 1), "the units of the model are exchanged in each round"
    expected = User(1)
    expected.train(1)
    assert all(user.own[name].allclose(value) for user, _ in found for name, value in expected.own.items())


def test_a_node_that_refuses_keeps_its_own_and_brings_it_to_the_next_round():
    found = run(lambda user, n, number: user.train(1), takes=False)
    for name in SHAPES:
        mean = sum(user.own[name].double() for user, _ in found) / 2
        for user, _ in found:
            np.testing.assert_allclose(user.offered[-1][name].numpy(), mean.numpy(), atol=1e-6)
            assert not user.own[name].equal(user.offered[-1][name])


def test_values_that_are_not_finite_reach_nobody():
    def act(user, n, number):
        user.train(1, by=torch.nan if n == 1 else 1.0)

    honest, broken = (user for user, _ in run(act, rounds=1))
    for user in (honest, broken):
        assert all(torch.isfinite(value).all() for offered in user.offered for value in offered.values())
    expected = User(0)
    expected.train(1)
    assert all(broken.own[name].allclose(value) for name, value in expected.own.items())


def test_the_model_is_not_changed_by_what_is_trained_apart():
    trained = run(lambda user, n, number: user.train(100, by=1e6))
    not_trained = run(lambda user, n, number: None)
    for (_, one), (_, other) in zip(trained, not_trained, strict=True):
        assert all(value.equal(other[name]) for name, value in one.items())


def hub_member(hub, user):
    own = tower()
    link = HubLink(hub, own)
    for vectors in (link.anchors, link.outbox):
        vectors.append(np.full(sum(shape.numel() for shape in SHAPES.values()), np.nan, np.float32))
    exchange = HubExchange(link, penalty=OFF)
    shared = SharedModule(DRAFTER, SHAPES)
    shared.attach(exchange)
    config = EditConfig(every=1, landing="arrival", timeout_s=5)
    sync = LayerSync.of(own, torch.optim.SGD(own.parameters(), lr=0.1), exchange=exchange, config=config)
    shared.connect(user, sync.shards)
    return sync


def hub_round(sync):
    loss(sync.model, batches(0, 1)[0]).backward()
    sync.inner.step()
    sync.inner.zero_grad()
    sync.step()
    sync.land()


def test_over_a_hub_a_node_that_never_trained_gets_what_another_one_has_trained():
    hub, trainer, other, late = Hub(), User(0), User(1), User(2)
    trainer.train(5)
    expected = dict(trainer.own)
    first, second = hub_member(hub, trainer), hub_member(hub, other)
    with first, second:
        hub_round(second)
        assert other.offered == []
        hub_round(first)
        pushed = [push for push in hub.pushes if push.unit == len(first.units) - 1]
        assert [(push.node, push.steps) for push in pushed] == [(0, 5)]
        hub_round(second)
        assert [push.unit for push in hub.pushes if push.node == 1] == 2 * [*range(len(first.units) - 1)]
        assert all(other.own[name].allclose(value, atol=1e-6) for name, value in expected.items())
        third = hub_member(hub, late)
        with third:
            assert all(late.own[name].allclose(value, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_of_a_program_changes_no_bit_of_the_module(dtype):
    torch.set_default_dtype(dtype)
    try:
        shared = SharedModule(DRAFTER, SHAPES)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in shared.unit.params} == {torch.float32}
