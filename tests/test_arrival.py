"""Tests landing on arrival: no node waits, no step is lost, none is counted twice."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.deferred import Late, alone, anchors, move, node, round_numbers, step
from kit.nodes import Script, batches, furthest, in_threads, parameters, plain_training, tower

from aedit.async_sgd.rules import Average
from aedit.types import Round


def keep_moving(model, transport, steps, left, seed, config):
    """Take scripted inner steps; return what they added and the anchors at the end."""
    sync, _ = node(model, transport, schedule=Script(steps), landing="arrival", **config)
    rng, x = torch.Generator().manual_seed(seed), torch.ones(1, 5)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with sync:
        for _ in range(sum(steps) + left):
            model(x)
            for name, moved in move(model, rng).items():
                total[name] += moved
            sync.step()
    return total, anchors(sync), parameters(model)


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.parametrize("fragments", [1, 3])
def test_on_arrival_the_anchors_move_by_what_all_inner_steps_added(fragments, data):
    """Uneven nodes, late answers, steps left over at the end: the sum is exact, bit for bit."""
    nodes = data.draw(st.sampled_from([1, 2, 4]), "nodes")
    rounds = data.draw(st.integers(3, 7), "rounds")
    paces = st.lists(st.integers(1, 4), min_size=rounds, max_size=rounds)
    steps = [data.draw(paces, f"steps of {n}") for n in range(nodes)]
    left = data.draw(st.sampled_from([[0] * nodes, [1 + n % 3 for n in range(nodes)]]), "left")
    seed = data.draw(st.integers(0, 1000), "seed")
    model = round_numbers(tower())

    def job(transport, n):
        config = {"fragments": fragments, "every": 300}
        return keep_moving(deepcopy(model), transport, steps[n], left[n], 10 * seed + n, config)

    results = in_threads(nodes, job, wrap=lambda transport, n: Late(transport, 7 * seed + n))
    start = parameters(model)
    for _, anchor, ended in results:
        for name in start:
            added = sum(total[name] for total, _, _ in results) / nodes
            assert torch.equal(anchor[name] - start[name], added)
            assert torch.equal(ended[name], anchor[name])


def test_on_arrival_training_goes_on_while_answers_are_withheld():
    held, model, data = alone(), tower(), batches(0, 9)
    sync, inner = node(model, held, every=3, landing="arrival")
    with sync:
        for batch in data[:3]:
            step(sync, inner, batch)
        held.open = False
        for batch in data[3:5]:
            step(sync, inner, batch)
        assert sync.in_flight
        assert sync.waited_s == 0
        held.open = True
        for batch in data[5:]:
            step(sync, inner, batch)
        assert sync.round_id == 2
    # Alone and with plain averaging, the anchors are where the steps have gone.
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), data)
    assert furthest(parameters(model), expected) <= 1e-6


def test_on_arrival_an_answer_is_added_to_the_steps_made_meanwhile():
    held, model = alone(), round_numbers(tower())
    sync, _ = node(model, held, landing="arrival", outer=Average(0.5))
    rng, x, start = torch.Generator().manual_seed(0), torch.ones(1, 5), parameters(model)
    with sync:
        before = move(model, rng)
        sync.step()
        sync.begin(Round(1, 1))
        held.open = False
        meanwhile = move(model, rng)
        sync.step()
        model(x)
        held.open = True
        model(x)
        assert torch.equal(model.scale, start["scale"] + before["scale"] + meanwhile["scale"]), "not seen yet"
        sync.step()  # here the opening's answer is seen and the units are sent
        sync.step()  # here theirs
        model(x)
        for name, p in model.named_parameters():
            assert torch.equal(p, start[name] + before[name] / 2 + meanwhile[name])
        sync.schedule.last_id = 1


def test_a_node_that_ends_early_answers_on_and_weighs_nothing():
    start = round_numbers(tower())
    steps = [[1, 2], [1, 2, 1, 3, 1]]

    def job(transport, n):
        return keep_moving(deepcopy(start), transport, steps[n], 0, n, {})

    (short, anchor, _), (long, same, ended) = in_threads(2, job)
    rng = torch.Generator().manual_seed(1)
    shared = {name: torch.zeros_like(p) for name, p in start.named_parameters()}
    for _ in range(3):  # what the longer node added while both took part
        for name, moved in move(deepcopy(start), rng).items():
            shared[name] += moved
    for name, p in start.named_parameters():
        both, alone = short[name] + shared[name], long[name] - shared[name]
        assert torch.equal(anchor[name], p + both / 2 + alone)
        assert torch.equal(anchor[name], same[name])
        assert torch.equal(ended[name], same[name])
