"""Tests `LayerSync.land`: what has arrived lands between two training steps, and nothing waits."""

import random
import time
from copy import deepcopy
from threading import Barrier

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.deferred import PLAIN, Late, alone, move, node, round_numbers, step
from kit.hubs import Hub, HubLink, anchors_of, hub_node
from kit.nodes import UNITS, batches, furthest, in_threads, parameters, plain_training, tower

from aedit.edit import EditConfig, LayerSync, MeanExchange, OwnPace

X = torch.ones(1, 5)


def hub_of_one(every=3, **config):
    hub, model = Hub(), round_numbers(tower())
    link = HubLink(hub, model)
    return hub, link, hub_node(model, link, schedule=OwnPace(every), **config)[0]


def moved_steps(sync, count, rng):
    for _ in range(count):
        sync.model(X)
        move(sync.model, rng)
        sync.step()


def test_what_the_hub_has_answered_lands_at_once_and_the_next_forward_changes_nothing():
    hub, link, sync = hub_of_one()
    rng = torch.Generator().manual_seed(0)
    with sync:
        link.away = True
        moved_steps(sync, 4, rng)
        before = parameters(sync.model)
        assert sync.land() == 0
        assert furthest(parameters(sync.model), before) == 0
        with torch.no_grad():  # what another node has added meanwhile
            hub.anchors = [anchor + 0.5 for anchor in hub.anchors]
        link.away = False
        counts = [p._version for p in sync.model.parameters()]
        assert sync.land() == len(sync.units) == 4
        assert all(p._version > count for p, count in zip(sync.model.parameters(), counts, strict=True))
        landed = parameters(sync.model)
        for name, value in landed.items():
            assert torch.equal(value, before[name] + 0.5)
        assert (sync.land(), sync.in_flight, sync.round_id, sync.waited_s) == (0, False, 1, 0)
        sync.model(X)
        assert furthest(parameters(sync.model), landed) == 0


def test_landing_needs_the_block_and_does_nothing_during_the_warm_up():
    held, model = alone(), tower()
    sync, inner = node(model, held, every=2, landing="arrival", warmup_steps=3)
    with pytest.raises(ValueError, match=r"sync\.land\(\) outside the block"):
        sync.land()
    with sync:
        for batch in batches(0, 3):
            assert sync.land() == 0
            step(sync, inner, batch)
    with pytest.raises(ValueError, match=r"sync\.land\(\) outside the block"):
        sync.land()


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("prefetch", [0, 1, 9])
def test_landing_never_asks_for_an_answer_that_is_not_there(landing, prefetch):
    """The transport fails when an answer is asked for too early."""
    held, model, data = alone(), tower(), batches(0, 12)
    sync, inner = node(model, held, every=3, landing=landing, prefetch=prefetch)
    with sync:
        for batch in data[:3]:
            step(sync, inner, batch)
        held.open = False
        assert [sync.land() for _ in range(3)] == [0, 0, 0]
        assert sync.in_flight
        held.open = True
        assert sync.land() == 4
        assert not sync.in_flight
        for batch in data[3:]:
            step(sync, inner, batch)
            sync.land()
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest(parameters(model), expected) <= 1e-6


@pytest.mark.filterwarnings("ignore:unit .* lands only now, at the next round")
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
@pytest.mark.parametrize("fragments", [1, 3])
def test_nothing_is_lost_or_counted_twice_however_often_a_node_of_a_hub_lands(fragments, seed):
    chance, hub, start = random.Random(seed), Hub(), round_numbers(tower())
    total, syncs, rng = {}, [], torch.Generator().manual_seed(seed)
    first = parameters(start)
    for _ in range(2):
        model = deepcopy(start)
        link = HubLink(hub, model)
        sync, _ = hub_node(
            model, link, schedule=OwnPace(chance.randint(2, 4)), fragments=fragments, every=300
        )
        sync.__enter__()
        syncs.append((sync, link))
    for _ in range(chance.randint(5, 40)):
        sync, link = chance.choice(syncs)
        link.away = chance.random() < 0.5
        if chance.random() < 0.7:
            sync.land()
            landed = parameters(sync.model)
            sync.model(X)
            assert furthest(parameters(sync.model), landed) == 0
        for name, moved in move(sync.model, rng).items():
            total[name] = total.get(name, 0) + moved
        sync.step()
    for sync, link in syncs:
        link.away = False
        sync.__exit__(None, None, None)
    outstanding = {}
    for sync, link in syncs:
        taken = anchors_of(Hub(anchors=link.anchors), sync)
        for name, p in parameters(sync.model).items():
            outstanding[name] = outstanding.get(name, 0) + p - taken[name]
    ended = anchors_of(hub, syncs[0][0])
    for name, learned in total.items():
        assert torch.equal(ended[name] - first[name] + outstanding[name], learned)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_nodes_that_land_between_steps_and_nodes_that_do_not_agree(landing):
    """Late answers, two nodes, one of which lands after each step: equal anchors, as without landing."""
    start, data, both = tower(), [batches(n, 14) for n in range(2)], Barrier(2, timeout=20)

    def job(transport, n, lands):
        model = deepcopy(start)
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        exchange = MeanExchange(transport, penalty=PLAIN)
        config = EditConfig(every=3, landing=landing, timeout_s=10)
        sync, landed = LayerSync.of(model, inner, exchange=exchange, config=config), 0
        with sync:
            for batch in data[n]:
                step(sync, inner, batch)
                both.wait()
                until_s = time.monotonic() + 0.5  # the other node goes on meanwhile, and answers
                while lands and n == 0 and not landed and time.monotonic() < until_s:
                    landed += sync.land()
                landed += sum(sync.land() for _ in range(9)) if lands and n == 0 else 0
        return parameters(model), landed

    late = lambda transport, n: Late(transport, n)  # noqa: E731
    with_landing = in_threads(2, lambda transport, n: job(transport, n, True), wrap=late)
    without = in_threads(2, lambda transport, n: job(transport, n, False), wrap=late)
    assert with_landing[0][1] > 0
    assert furthest(with_landing[0][0], with_landing[1][0]) <= (0 if landing == "forward" else 1e-6)
    if landing == "forward":  # then nothing else than when a message travels can differ
        assert furthest(with_landing[0][0], without[0][0]) == 0


EACH = [name for names in UNITS.values() for name in names]


@pytest.mark.parametrize("replaced", [EACH, *([name] for name in EACH)], ids="+".join)
def test_landing_with_other_values_in_place_of_the_parameters_is_refused_and_loses_nothing(replaced):
    """Of all parameters or of any single one, also by writes that PyTorch does not count."""
    hub, link, sync = hub_of_one()
    rng = torch.Generator().manual_seed(0)
    with sync:
        sync.land()
        link.away = True
        moved_steps(sync, 4, rng)
        own = parameters(sync.model)
        link.away = False
        hub.anchors = [anchor + 0.5 for anchor in hub.anchors]
        for name in replaced:
            values = sync.model.get_parameter(name).data
            values.view(-1)[-1] += 1
        with pytest.raises(ValueError, match=r"not those of the last sync\.step\(\), such as their average"):
            sync.land()
        with torch.no_grad():
            for p, value in zip(sync.model.parameters(), own.values(), strict=True):
                p.copy_(value)
        assert sync.land() == 4
        for name, value in parameters(sync.model).items():
            assert torch.equal(value, own[name] + 0.5)


def test_the_ranks_of_a_node_land_the_same_units_at_the_same_step(world):
    """One rank sees each answer three looks later than the other."""
    job = ("tests/dist_jobs/hand_over_jobs.py", "land_between_steps")
    ((_, alone_values),) = world.run(*job, size=1)
    ranks = world.run(*job, size=2)
    assert ranks[0][0] == ranks[1][0]
    assert sum(ranks[0][0]) > 3
    for _, values in ranks:
        assert furthest(values, alone_values) == 0
