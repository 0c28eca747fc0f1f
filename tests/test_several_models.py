"""Tests several `LayerSync` in one process: what they may share, and what is refused."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import partial

import pytest
import torch
from kit.hubs import Hub, HubLink, hub_node
from kit.nodes import Script, furthest, in_threads, parameters
from torch import nn

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import (
    AtMultiples,
    EditConfig,
    EverySeconds,
    EverySteps,
    HubPace,
    LayerSync,
    MeanExchange,
    OwnPace,
    PenaltyConfig,
    SharedModule,
)
from aedit.proto.transports import MemoryWorld
from aedit.types import News, Round

JOBS = "tests/dist_jobs/library_jobs.py"
PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


def two_models():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(2)]


def node_of(model, transport, schedule, *, outer=None, name=None, **config):
    exchange = MeanExchange(transport, outer=outer or Average(), penalty=PLAIN, name=name)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    return LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=EditConfig(**config))


def enter(first, second):
    with first, second:
        pass


def steps(syncs, node, count=24):
    """Take steps of all models in turn, on data of this node."""
    rng = torch.Generator().manual_seed(node)
    for _ in range(count):
        x = torch.randn(8, 4, generator=rng)
        for sign, sync in enumerate(syncs):
            (sync.model(x).squeeze(1) - (1 - 2 * sign) * x.sum(1)).square().mean().backward()
            sync.inner.step()
            sync.inner.zero_grad()
            sync.step()


def train_both(models, transports, node, schedules, count=24, **config):
    """Train two models in turn; return their parameters and the steps of each one's rounds."""
    syncs = [node_of(m, t, s, **config) for m, t, s in zip(models, transports, schedules, strict=True)]
    rounds = [[], []]
    for sync, seen in zip(syncs, rounds, strict=True):
        sync.on_round = lambda outcome, waited_s, seen=seen: seen.append(outcome.round.steps)
    with syncs[0], syncs[1]:
        steps(syncs, node, count)
    return [parameters(model) for model in models], rounds, [sync.exchange.bytes_sent for sync in syncs]


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("make", [lambda: Average(), lambda: Nesterov()], ids=["average", "nesterov"])
def test_two_models_over_one_transport_train_as_over_one_each(make, landing):
    models = [[two_models() for _ in range(2)] for _ in range(2)]
    worlds = [MemoryWorld(2, timeout_s=10) for _ in range(3)]

    def job(shared, node):
        transports = [worlds[0].node(node)] * 2 if shared else [world.node(node) for world in worlds[1:]]
        schedules = [EverySteps(4), EverySteps(6)]
        return train_both(models[shared][node], transports, node, schedules, outer=make(), landing=landing)

    def run(shared):
        with ThreadPoolExecutor(2) as pool:
            return [done.result(30) for done in [pool.submit(job, shared, node) for node in range(2)]]

    if landing == "forward":
        (own, rounds, sent), (shared, shared_rounds, shared_sent) = run(0)[0], run(1)[0]
        assert all(furthest(mine, theirs) == 0 for mine, theirs in zip(own, shared, strict=True))
        assert (rounds, sent) == (shared_rounds, shared_sent)
        assert rounds == [[4] * 6 + [0], [6] * 4 + [0]]
    both = run(1) if landing == "arrival" else [(shared, None, None)] * 2
    assert all(furthest(*pair) == 0 for pair in zip(both[0][0], both[1][0], strict=True))


def test_a_round_that_is_due_for_one_model_is_not_due_for_the_other():
    place, now = MemoryWorld(2), [0.0, 0.0]
    schedules = []
    for node in range(2):
        transport = place.node(node)
        schedules.append([EverySeconds(every, partial(now.__getitem__, node)) for every in (4.0, 10.0)])
        for model, schedule in zip(two_models(), schedules[-1], strict=True):
            node_of(model, transport, schedule)
    for schedule in (*schedules[0], *schedules[1]):
        assert schedule.due(1) is None
    now[0] = 5.0  # the clock of node 1 stands still: it opens rounds by notes alone
    assert [schedule.due(2) for schedule in schedules[0]] == [Round(1, 2), None]
    assert [schedule.due(3) for schedule in schedules[1]] == [Round(1, 3), None]
    now[0] = 11.0
    assert [schedule.due(4) for schedule in schedules[0]] == [Round(2, 2), Round(1, 4)]
    assert [schedule.due(9) for schedule in schedules[1]] == [Round(2, 6), Round(1, 9)]


def test_two_threads_of_a_node_train_a_model_each_over_one_transport():
    def one(exchange, node, place):
        model, clock = models[node][place], iter(range(10**6)).__next__
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySeconds((4, 10)[place], clock))
        with sync:
            steps([sync], node, (41, 23)[node])
        return parameters(model), sync.schedule.last_id, sync.total_steps

    models = [two_models() for _ in range(2)]

    def job(transport, node):
        exchanges = [MeanExchange(transport, outer=Average(), penalty=PLAIN) for _ in range(2)]
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(one, exchanges, [node] * 2, range(2)))

    ours, theirs = in_threads(2, job)
    assert [rest for _, *rest in ours] == [rest for _, *rest in theirs]
    assert [total for *_, total in ours] == [64, 64]
    assert all(furthest(mine[0], his[0]) == 0 for mine, his in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_two_blocks_at_once_with_a_schedule_by_time_are_refused_with_the_remedy(landing):
    """A node that ends the inner block would wait there for one that waits for it in the outer block."""
    (a, b), transport = two_models(), MemoryWorld(1).node(0)
    first = node_of(a, transport, EverySteps(4), landing=landing)
    second = node_of(b, transport, EverySeconds(4), landing=landing)
    with pytest.raises(ValueError, match=r"EverySeconds cannot be used in two.*as an nn\.ModuleDict"):
        enter(first, second)
    with first, ThreadPoolExecutor(1) as another:
        another.submit(enter, second, nullcontext()).result()
    for sync in (second, first):
        with sync:
            steps([sync], 0, 3)


def test_a_block_that_a_failed_trainer_has_left_open_goes_with_its_model():
    (a, b), transport = two_models(), MemoryWorld(1).node(0)
    abandoned = node_of(a, transport, EverySteps(4))
    abandoned.__enter__()
    second = node_of(b, transport, EverySeconds(4))
    with pytest.raises(ValueError, match="EverySeconds cannot be used in two"):
        second.__enter__()
    del abandoned, a
    with second:
        steps([second], 0, 3)


def test_two_models_in_one_layer_sync_may_meet_by_time_and_end_after_other_numbers_of_steps():
    models = [nn.ModuleDict(dict(zip("gd", two_models(), strict=True))) for _ in range(2)]

    def job(transport, node):
        parts = models[node].values()
        inners = [torch.optim.SGD(part.parameters(), lr=0.05) for part in parts]
        schedule = EverySeconds(5, iter(range(10**6)).__next__)
        exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
        rng = torch.Generator().manual_seed(node)
        with LayerSync.of(models[node], inners, exchange=exchange, schedule=schedule) as sync:
            for _ in range((20, 33)[node]):
                x = torch.randn(8, 4, generator=rng)
                for part, inner in zip(parts, inners, strict=True):
                    part(x).square().mean().backward()
                    inner.step()
                    inner.zero_grad()
                sync.step()
        return parameters(models[node]), sync.total_steps

    (ours, total), (theirs, same) = in_threads(2, job)
    assert total == same == 53
    assert furthest(ours, theirs) == 0


def test_folds_over_one_transport_train_as_over_one_each():
    def fold(transport, node, seed):
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 0.5 + seed)
        nn.init.zeros_(model.bias)
        sync = node_of(model, transport, EverySteps(5), outer=Nesterov())
        with sync:
            steps([sync], 10 * seed + node)
        return parameters(model)

    several = in_threads(2, lambda transport, node: [fold(transport, node, seed) for seed in range(3)])
    for seed in range(3):
        alone = in_threads(2, lambda transport, node, seed=seed: fold(transport, node, seed))
        assert furthest(alone[0], several[0][seed]) == furthest(alone[1], several[1][seed]) == 0


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_over_torch_two_models_over_one_transport_count_each_step_once(world, landing):
    args = {"landing": landing, "in_threads": False}
    found = world.run(JOBS, "train_two_over_one_transport", size=2, args=args)
    assert found == [[([-6.0] * 4, 7, 24), ([-12.0] * 4, 5, 24)]] * 2


def test_over_torch_two_threads_train_a_model_each_by_time_and_end_apart(world):
    args = {"landing": "forward", "in_threads": True}
    ours, theirs = world.run(JOBS, "train_two_over_one_transport", size=2, args=args)
    assert ours == theirs
    assert [steps for *_, steps in ours] == [19, 14]


@pytest.mark.parametrize("numel", [5, 1])
@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_over_torch_own_sums_beside_rounds_are_right_and_so_is_the_training(world, landing, numel):
    args = {"landing": landing, "numel": numel}
    assert world.run(JOBS, "train_beside_own_sums", size=2, args=args) == [([-6.0] * 4, [])] * 2


# -- what is refused

SCHEDULES = {
    "EverySteps": lambda: EverySteps(4),
    "EverySeconds": lambda: EverySeconds(4.0),
    "AtMultiples": lambda: AtMultiples(4.0),
    "OwnPace": lambda: OwnPace(4),
    "HubPace": lambda: HubPace(4.0, lambda: News()),
    "Script": lambda: Script([4]),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_for_two_models_is_refused_at_once(name):
    (a, b), schedule, transport = two_models(), SCHEDULES[name](), MemoryWorld(1).node(0)
    node_of(a, transport, schedule)
    with pytest.raises(ValueError, match=f"this {name} has served another LayerSync.* make a new {name}"):
        node_of(b, transport, schedule)


def test_a_schedule_and_an_exchange_that_have_been_used_are_refused_with_the_remedy():
    model, schedule, transport = nn.Linear(4, 1), EverySteps(4), MemoryWorld(1).node(0)
    sync = node_of(model, transport, schedule)
    with sync:
        steps([sync], 0)
    with pytest.raises(ValueError, match="make a new EverySteps for each LayerSync"):
        node_of(model, transport, schedule)
    with pytest.raises(ValueError, match=r"this MeanExchange has served .*may share a transport"):
        LayerSync.of(model, sync.inner, exchange=sync.exchange)
    with sync:  # the same LayerSync goes on
        steps([sync], 0)


def test_what_a_layer_sync_has_refused_may_be_given_to_the_next():
    (a, b), schedule = two_models(), EverySteps(4)
    exchange = MeanExchange(MemoryWorld(1).node(0))
    with pytest.raises(ValueError, match="parameters that are not in the model"):
        LayerSync.of(a, torch.optim.SGD(b.parameters(), lr=0.1), exchange=exchange, schedule=schedule)
    LayerSync.of(a, torch.optim.SGD(a.parameters(), lr=0.1), exchange=exchange, schedule=schedule)


def test_a_link_to_a_hub_serves_one_model():
    model = nn.Linear(5, 1)
    link = HubLink(Hub(), model)
    hub_node(model, link)
    with pytest.raises(ValueError, match=r"HubLink has served another LayerSync.*call HubExchange\.join"):
        hub_node(deepcopy(model), link)


def test_a_module_trained_apart_belongs_to_one_exchange():
    transport = MemoryWorld(1).node(0)
    shared = SharedModule("drafter", {"w": torch.Size([3])})
    shared.attach(MeanExchange(transport))
    with pytest.raises(ValueError, match="this SharedModule has served another"):
        shared.attach(MeanExchange(transport))


def test_a_parameter_in_two_blocks_is_refused_until_the_first_is_over():
    body = nn.Linear(4, 4)
    actor, critic = (nn.Sequential(body, nn.Linear(4, 1)) for _ in range(2))
    transport = MemoryWorld(1).node(0)
    first, second = (node_of(m, transport, EverySteps(2)) for m in (actor, critic))
    with (
        first,
        pytest.raises(ValueError, match=r"parameter 0\.weight is in another `with sync:` block"),
        second,
    ):
        pass
    with first, pytest.raises(ValueError, match="in another `with sync:` block"), first:
        pass
    for sync in (second, first):
        with sync:
            steps([sync], 0, 3)
    with pytest.raises(RuntimeError, match="in the loop"), first:
        raise RuntimeError("in the loop")
    with second:
        pass
