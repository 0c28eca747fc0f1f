"""Tests landing in the forward pass: exactly once, whatever else runs modules."""

from copy import deepcopy

import pytest
import torch
from kit.deferred import PLAIN, add_one, alone, anchors, node, step
from kit.nodes import Tower, batches, furthest, in_threads, parameters, plain_training, tower, train
from torch.utils.checkpoint import checkpoint

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, MeanExchange, PenaltyConfig
from aedit.proto.transports import MemoryWorld
from aedit.types import Round

NAMES = ["rest", "first", "middle", "last"]


def test_the_last_round_takes_the_mean_without_momentum():
    """After the last half interval the anchor of one node with a fast outer momentum is its parameters."""
    model, transport = tower(), alone()
    sync, inner = node(model, transport, outer=Nesterov(0.8, 0.85), every=4)
    with sync:
        for batch in batches(0, 6):
            step(sync, inner, batch)
        before = parameters(model)
    assert furthest(parameters(model), before) <= 1e-6
    assert furthest(anchors(sync), parameters(model)) == 0
    assert all(sync.exchange.store.read(i)[1].momentum.abs().max() > 0 for i in range(len(sync.units)))


def run_forward(prefetch, nodes=2):
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = torch.optim.AdamW(own.parameters(), lr=0.01)
        exchange = MeanExchange(transport, outer=Nesterov(), penalty=PenaltyConfig(clip=0.05))
        train(own, inner, exchange, batches(n, 20), EditConfig(every=4, prefetch=prefetch))
        return parameters(own)

    return in_threads(nodes, job)


def test_prefetch_changes_no_bit():
    plain = run_forward(0)
    assert furthest(plain[0], parameters(tower())) > 0.01
    for prefetch in (1, 2, 99):
        for ours, theirs in zip(run_forward(prefetch), plain, strict=True):
            assert furthest(ours, theirs) == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2, 99])
def test_as_many_units_as_asked_for_are_under_way_ahead_of_the_one_that_runs(prefetch):
    held, model, sent_at = alone(), tower(), {}
    sync, _ = node(model, held, prefetch=prefetch)
    with sync:
        for name in NAMES[1:]:

            def note(module, args, name=name):
                sent_at[name] = list(held.asked)

            model.get_submodule(name).register_forward_pre_hook(note)
        sync.begin(Round(1, 1))
        assert held.asked == [], "a unit is sent when its turn comes"
        model(torch.ones(1, 5))
        sync.schedule.last_id = 1
    assert sent_at == {name: NAMES[: i + 1 + prefetch] for i, name in enumerate(NAMES) if i}


def test_a_module_runs_on_its_new_anchor():
    model = tower()
    sync, _ = node(model, alone(), outer=Average(0.5))
    start = parameters(model)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        ran_on = []
        model.last.register_forward_pre_hook(lambda *_: ran_on.append(model.last.weight.detach().clone()))
        model(torch.ones(1, 5))
        torch.testing.assert_close(ran_on[0], start["last.weight"] + 0.5)
        sync.schedule.last_id = 1


class Checkpointed(Tower):
    """Tower whose blocks run again in the backward pass."""

    reentrant = False

    def forward(self, x):
        for block in (self.first, self.middle):
            x = checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=self.reentrant)
        return self.last(x * self.scale)


class Stored(Checkpointed):
    """The same Tower, computed once."""

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()).tanh() * self.scale)


def train_twice_computed(kind, reentrant, landing):
    torch.manual_seed(0)
    model = kind()
    model.reentrant = reentrant
    outer = Counting(Nesterov())
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(MemoryWorld(1).node(0), outer=outer, penalty=PLAIN)
    data = [batch.requires_grad_() for batch in batches(0, 12)]
    train(model, inner, exchange, data, EditConfig(every=3, landing=landing, prefetch=0))
    return parameters(model), [batch.grad for batch in data], outer.updates


class Counting:
    def __init__(self, outer):
        self.outer, self.updates = outer, 0

    def init(self, anchor):
        return self.outer.init(anchor)

    def update(self, *args, **kwargs):
        self.updates += 1
        return self.outer.update(*args, **kwargs)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_no_gradient_and_lands_nothing_twice(reentrant, landing):
    ours, our_grads, our_updates = train_twice_computed(Checkpointed, reentrant, landing)
    theirs, their_grads, their_updates = train_twice_computed(Stored, reentrant, landing)
    assert furthest(ours, theirs) == 0
    assert all(torch.equal(a, b) for a, b in zip(our_grads, their_grads, strict=True))
    assert our_updates == their_updates == 4 * 4  # four rounds, four units; the leaving one only averages


@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_an_answer_between_forward_and_recompute_waits_for_the_next_forward(reentrant, landing):
    torch.manual_seed(0)
    held, model = alone(), Checkpointed()
    model.reentrant = reentrant
    sync, _ = node(model, held, landing=landing, outer=Average(0.5))
    x = torch.ones(2, 5, requires_grad=True)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        if landing == "arrival":
            sync.step()  # sends the units
            held.open = False
        out = model(x).sum()
        ran_on = parameters(model)
        held.open = True
        out.backward()
        assert sync.in_flight == (landing == "arrival")
        assert furthest(parameters(model), ran_on) == 0
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        sync.schedule.last_id = 1
    stored = Stored()
    stored.load_state_dict(ran_on)
    stored(x).sum().backward()
    assert furthest(grads, {name: p.grad for name, p in stored.named_parameters()}) == 0


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_accumulated_gradients_are_those_of_the_joined_batch(landing):
    model, data = tower(), batches(0, 24)
    exchange = MeanExchange(MemoryWorld(1).node(0), outer=Average(), penalty=PLAIN)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = train(model, inner, exchange, data, EditConfig(every=2, landing=landing), accumulate=3)
    joined = [torch.cat(data[i : i + 3]) for i in range(0, 24, 3)]
    expected = plain_training(tower(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), joined)
    assert furthest(parameters(model), expected) <= 1e-6
    assert (sync.steps, sync.round_id) == (8, 5)


def test_nothing_lands_in_a_pass_that_a_cuda_graph_records(monkeypatch):
    """A replay of the graph would write the anchor again. torch says here that it captures."""
    model, data = tower(), batches(0, 3)
    sync, inner = node(model, alone(), every=2, outer=Average(0.5))
    with sync:
        for batch in data[:2]:
            step(sync, inner, batch)
        before = parameters(model)
        with monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_initialized", lambda: True)
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            model(data[2])
        assert furthest(parameters(model), before) == 0
        model(data[2])
        assert not sync.in_flight


class Skipping(Tower):
    def forward(self, x):
        return self.last(self.first(x).tanh()[:, :3] * self.scale)


def test_a_unit_whose_module_does_not_run_lands_before_the_backward_pass():
    torch.manual_seed(0)
    model = Skipping()
    sync, _ = node(model, alone(), outer=Average(0.5), prefetch=0)
    start = parameters(model)
    with sync:
        add_one(model)
        sync.begin(Round(1, 1))
        out = model(torch.ones(2, 5)).sum()
        assert not sync.in_flight
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), start[name] + 0.5)
        out.backward()
        sync.schedule.last_id = 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_lands_what_is_under_way_and_training_goes_on(mode):
    model, data = tower(), batches(0, 4)
    sync, inner = node(model, alone(), every=2, outer=Nesterov())
    other = tower()
    plain_sync, plain_inner = node(other, alone(), every=2, outer=Nesterov())
    with sync, plain_sync:
        for batch in data:
            step(sync, inner, batch)
            model.eval()
            with mode():
                model(batch)
            assert not sync.in_flight
            model.train()
            step(plain_sync, plain_inner, batch)
    assert furthest(parameters(model), parameters(other)) == 0


def hooks_of(model, inner):
    on_modules = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    return on_modules, len(inner._optimizer_step_pre_hooks)


@pytest.mark.parametrize("error", [None, KeyError])
def test_the_hooks_are_gone_afterwards(error):
    model = tower()
    sync, inner = node(model, alone(), every=2)
    before = hooks_of(model, inner)

    def enter():
        with sync:
            assert hooks_of(model, inner) != before
            for batch in batches(0, 3):
                step(sync, inner, batch)
            if error:
                raise error

    if error:
        with pytest.raises(error):
            enter()
    else:
        enter()
    assert hooks_of(model, inner) == before
    before = parameters(model)
    model(torch.ones(1, 5))
    assert furthest(parameters(model), before) == 0
