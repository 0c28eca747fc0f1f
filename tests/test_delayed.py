"""Tests delayed Nesterov with averaging among the nodes: state, rollback, healing and resume."""

import copy
import io

import torch
from kit.nodes import UNITS, batches, in_threads, loss, parameters, tower

from aedit.async_sgd.rules import DelayedNesterov, OuterState
from aedit.edit import EditConfig, LayerSync, MeanExchange, snapshot
from aedit.edit.anchor_store import DeviceStore
from aedit.types import Round

MIDDLE = list(UNITS).index("middle")


def node(model, transport):
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    exchange = MeanExchange(transport, outer=DelayedNesterov(0.7, 0.9, delay=3))
    return LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=1))


def steps(sync, some):
    for batch in some:
        loss(sync.model, batch).backward()
        sync.inner.step()
        sync.inner.zero_grad()
        sync.step()
    sync.finish()


def kept(sync):
    return [sync.exchange.store.peek(i) for i in range(len(sync.units))]


def test_a_run_resumed_between_two_momentum_steps_goes_on_with_the_same_bits():
    model = tower()

    def job(transport, n):
        through, first, second = (node(copy.deepcopy(model), transport) for _ in range(3))
        data = batches(n, 7)
        with through:
            steps(through, data)
            straight = parameters(through.model)
        with first:
            steps(first, data[:4])
            saved, numbers = io.BytesIO(), snapshot.numbers(first, [])
            torch.save({k: v.clone() for k, v in snapshot.tensors(first).items()}, saved)
        second.model.load_state_dict(first.model.state_dict())
        named = snapshot.blank(second, numbers)
        loaded = torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        assert named.keys() == loaded.keys()
        snapshot.restore(second, loaded, numbers)
        counts = [state.count for _, state in kept(second)]
        with second:
            steps(second, data[4:])
            return straight, parameters(second.model), counts

    for straight, resumed, counts in in_threads(1, job):
        assert counts == [1] * len(UNITS)  # 4 updates, taken in by threes
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


def test_a_unit_that_nobody_trusts_keeps_momentum_sum_and_count():
    model = tower()

    def job(transport, n):
        sync = node(copy.deepcopy(model), transport)
        sync.config = EditConfig(every=1000)
        with sync:
            before = None
            for r, batch in enumerate(batches(n, 2)):
                loss(sync.model, batch).backward()
                sync.inner.step()
                before = kept(sync)
                if r == 1:
                    with torch.no_grad():
                        sync.model.middle.bias.fill_(float("nan"))
                sync.begin(Round(r + 1, 1))
                sync.model(torch.ones(1, 5))
            sync.schedule.last_id, sync.steps, sync.schedule.last_step = 2, 2, 2
            return before, kept(sync)

    for before, after in in_threads(2, job):
        for i in range(len(UNITS)):
            (_, old), (_, new) = before[i], after[i]
            assert (new.count, old.count) == ((1, 1) if i == MIDDLE else (2, 1))
            assert torch.equal(new.pending, old.pending) == (i == MIDDLE)


def test_a_node_that_differs_takes_sum_and_count_of_the_others():
    model = tower()

    def job(transport, n):
        sync = node(copy.deepcopy(model), transport)
        with sync:
            steps(sync, batches(n, 4))
            if n == 2:
                others = ((a + 1, OuterState(s.momentum, s.pending * 3, 0)) for a, s in kept(sync))
                sync.exchange.keep(list(others))
            steps(sync, batches(n, 5)[4:])
            return kept(sync)

    first, *rest = in_threads(3, job)
    for other in rest:
        for (anchor, state), (its_anchor, its_state) in zip(first, other, strict=True):
            assert torch.equal(anchor, its_anchor)
            assert torch.equal(state.momentum, its_state.momentum)
            assert torch.equal(state.pending, its_state.pending)
            assert state.count == its_state.count == 2


def test_a_store_gives_back_the_whole_state():
    state = OuterState(torch.ones(3), torch.full((3,), 2.0), 2)
    store = DeviceStore([(torch.zeros(3), state)])
    assert store.read(0)[1] is state
