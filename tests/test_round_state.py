"""Tests an exchange's state between rounds: norms and steps of units that a round leaves out or abandons."""

from copy import deepcopy

import pytest
import torch
from kit.deferred import move, node
from kit.hubs import Hub, HubLink, hub_node
from kit.nodes import batches, furthest, in_threads, loss, parameters, tower

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, LayerSync, MeanExchange, OwnPace, PenaltyConfig, snapshot
from aedit.proto.transports import MemoryWorld
from aedit.types import Round


def far(model, by):
    """Take an inner step of size `by` in every unit."""
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by)


def test_patience_counts_the_rounds_of_a_fragment_not_those_of_others():
    """Three normal rounds of each fragment come first, then norms a thousand times as large.

    The second of these in a row, of the same fragment, is accepted as the new normal.
    """
    model = tower()
    penalty = PenaltyConfig(warmup_rounds=2, patience=2, weights="uniform", clip=None)
    transport = MemoryWorld(1, timeout_s=5).node(0)
    sync, _ = node(model, transport, penalty=penalty, fragments=2, outer=Average())
    judged = []
    sync.on_round = lambda outcome, waited_s: judged.append((outcome.round.id, set(outcome.distrusted)))
    with sync:
        for number in range(1, 11):
            far(model, 1e-3 if number <= 6 else 1.0)
            sync.begin(Round(number, 1))
            sync.finish()
            sync.schedule.last_id = number
    all_units = [set(), {0, 2}, {1, 3}]
    suspects = {number: distrusted for number, distrusted in judged if number <= 10}
    assert [suspects[number] for number in range(1, 7)] == [set()] * 6
    assert suspects[7] == all_units[1]
    assert suspects[8] == all_units[2]
    assert suspects[9] == suspects[10] == set()


def test_a_round_given_up_leaves_no_trace_in_the_history_of_norms():
    model = tower()
    transport = MemoryWorld(2, timeout_s=5).node(0)  # the other node never comes
    exchange = MeanExchange(transport, outer=Average())
    sync = LayerSync.of(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
    exchange.allocate()
    far(model, 1e-2)
    before = {name: value.clone() for name, value in exchange.state_dict().items()}
    sync.begin(Round(1, 3))
    during = exchange.state_dict()
    assert not same(during, before, "history/norms_WL")
    assert not same(during, before, "history/steps_L")
    assert sync.abandon() == [Round(1, 3)]
    after = exchange.state_dict()
    assert after.keys() == before.keys()
    assert all(same(after, before, name) for name in before)


def same(ours, theirs, name):
    return torch.equal(ours[name].nan_to_num(-1.0), theirs[name].nan_to_num(-1.0))


def test_a_resume_between_two_fragments_weighs_the_steps_of_both():
    """The checkpoint has the second fragment's steps since its last round.

    Nodes with other numbers of steps are weighted as if nobody had stopped.
    """
    model = tower()
    penalty = PenaltyConfig(step_weight=1.0, weights="uniform", detector="off", clip=None)

    def begin(transport, own):
        inner = torch.optim.SGD(own.parameters(), lr=0.05)
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=penalty)
        config = EditConfig(every=1000, fragments=2)
        return LayerSync.of(own, inner, exchange=exchange, config=config), inner

    def rounds(sync, inner, data, ids):
        for id in ids:
            for batch in data[id]:
                loss(sync.model, batch).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
            sync.begin(Round(id, len(data[id])))
            sync.finish()
            sync.schedule.last_id, sync.schedule.last_step = id, sync.local_steps

    def job(transport, n, stop):
        own = deepcopy(model)
        data = {id: batches(10 * n + id, 1 + 3 * n if id == 1 else 2) for id in range(1, 5)}
        sync, inner = begin(transport, own)
        sync.__enter__()
        if stop:
            rounds(sync, inner, data, [1])
            saved = {name: value.clone() for name, value in snapshot.tensors(sync).items()}
            numbers = snapshot.numbers(sync, [])
            sync.__exit__(RuntimeError, None, None)
            sync, inner = begin(transport, own)
            snapshot.blank(sync, numbers)
            snapshot.restore(sync, saved, numbers)
            sync.__enter__()
        rounds(sync, inner, data, range(2 if stop else 1, 5))
        sync.__exit__(RuntimeError, None, None)
        return parameters(own)

    whole = in_threads(2, lambda transport, n: job(transport, n, False))
    resumed = in_threads(2, lambda transport, n: job(transport, n, True))
    for ours, theirs in zip(whole, resumed, strict=True):
        assert furthest(ours, theirs) == 0


def test_penalty_and_offload_of_the_configuration_are_refused_where_they_have_no_effect():
    model = tower()
    transport = MemoryWorld(1).node(0)
    for name, value in (("offload", True), ("penalty", PenaltyConfig(window=7))):
        config = EditConfig(**{name: value})
        with pytest.raises(ValueError, match=f"config.{name} has no effect here"):
            LayerSync.of(
                model,
                torch.optim.SGD(model.parameters(), lr=0.1),
                exchange=MeanExchange(transport),
                config=config,
            )


def test_a_node_says_which_samples_it_has_used_before_it_says_goodbye():
    """Samples not reported by then go to other nodes: the steps of the last push would be trained twice."""
    model, hub = tower(), Hub()
    link, told = HubLink(hub, model), []
    sync, _ = hub_node(model, link, schedule=OwnPace(3))
    sync.exchange.before_leaving = lambda: told.append((link.left, sync.exchange.used_steps))
    rng = torch.Generator().manual_seed(0)
    with sync:
        for _ in range(5):
            sync.model(torch.ones(1, 5))
            move(sync.model, rng)
            sync.step()
    assert told == [(False, 5)]
    assert link.left
