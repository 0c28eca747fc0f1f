"""Loops of one's own, as PyTorch users write them: averages, inference mode, wrappers, unequal lengths."""

import warnings
from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
from kit.deferred import Slow, round_numbers
from kit.hubs import Hub, HubLink, anchors_of, hub_node
from kit.local_sgd import furthest, local_sgd, trainable
from kit.nodes import batches, in_threads, loss, tower
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from aedit import EditConfig, EverySteps, LayerSync, MeanExchange, PenaltyConfig
from aedit.async_sgd import Average
from aedit.edit import OwnPace
from aedit.proto import MemoryWorld

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=1e9)


class Normed(nn.Module):
    """A tower with buffers that change."""

    def __init__(self):
        super().__init__()
        self.tower, self.norm = tower(), nn.BatchNorm1d(5)

    def forward(self, x):
        return self.tower(self.norm(x))


def plain_step(model, inner, batch):
    inner.zero_grad()
    loss(model, batch).backward()
    inner.step()


def train(transport, model, data, evaluate=lambda model, batch: None, *, step=plain_step, **config):
    """Train `model` as a node that evaluates after each step; return its parameters."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    with LayerSync.of(model, inner, exchange=exchange, config=EditConfig(**{"every": 2, **config})) as sync:
        for batch in data:
            step(model, inner, batch)
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


def quantised(put):
    """Return a step that computes gradients on rounded weights, and puts the exact ones back."""

    def step(model, inner, batch):
        inner.zero_grad()
        kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            put(p, (p.detach() * 16).round() / 16)
        loss(model, batch).backward()
        for p, value in zip(model.parameters(), kept, strict=True):
            put(p, value)
        inner.step()

    return step


def perturbed(model, inner, batch):
    """Compute gradients on weights with noise, and take the noise away again."""
    inner.zero_grad()
    noise = [0.1 * torch.full_like(p, batch.sum().sin()) for p in model.parameters()]
    for sign in (1, -1):
        with torch.no_grad():
            for p, n in zip(model.parameters(), noise, strict=True):
                p.add_(sign * n)
        if sign > 0:
            loss(model, batch).backward()
    inner.step()


@torch.no_grad()
def zeroth_order(model, inner, batch):
    """Estimate a gradient by two passes without autograd, as MeZO does, through new `p.data`."""
    losses = []
    for shift in (0.01, -0.02):
        for p in model.parameters():
            p.data = p.data + shift * torch.full_like(p, batch.sum().cos())
        losses.append(loss(model, batch))
    for p in model.parameters():
        direction = torch.full_like(p, batch.sum().cos())
        p.data = p.data + 0.01 * direction - 1e-3 * (losses[0] - losses[1]) / 0.02 * direction


def put_back_later(model, inner, batch):
    """Step twice, then go back halfway to the weights that were saved before the first pass (Reptile)."""
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    for _ in range(2):
        plain_step(model, inner, batch)
    now = model.state_dict()
    model.load_state_dict({name: (value + now[name]) / 2 for name, value in kept.items()})


def functional_gradient(model, inner, batch):
    """Take the gradient by torch.func.grad, so that no pass is an ordinary one."""
    values = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.grad(lambda v: loss(lambda x: functional_call(model, v, (x,)), batch))(values)
    for name, p in model.named_parameters():
        p.grad = found[name]
    inner.step()


def per_sample(model, inner, batch):
    """Look at gradients of each sample by vmap in each step, before the ordinary pass."""
    values = {name: p.detach() for name, p in model.named_parameters()}

    def of_one(v, x):
        return loss(lambda x: functional_call(model, v, (x,)), x.unsqueeze(0))

    torch.func.vmap(torch.func.grad(of_one), (None, 0))(values, batch)
    plain_step(model, inner, batch)


def traced(model, inner, batch):
    """Trace a part, and run it on fake tensors, before the ordinary pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(model.last, torch.ones(2, 3), check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.last(torch.ones(2, 3))
    plain_step(model, inner, batch)


def put(p, value):
    with torch.no_grad():
        p.copy_(value)


def put_data(p, value):
    p.data.copy_(value)


STEPS = {
    "quantised": quantised(put),
    "quantised through p.data": quantised(put_data),
    "perturbed": perturbed,
    "zeroth order": zeroth_order,
    "put back later": put_back_later,
    "torch.func.grad": functional_gradient,
    "vmap before the pass": per_sample,
    "traced before the pass": traced,
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_weights_that_are_changed_for_a_pass_and_put_back_change_nothing_in_local_sgd(step, every):
    data = [batches(i, 8) for i in range(2)]
    models = [tower() for _ in data]
    found = in_threads(2, lambda t, i: train(t, models[i], data[i], step=step, every=every))
    assert furthest(found[0], found[1]) == 0
    assert furthest(found[0], local_sgd(tower(), data, loss, every=every, train=step)) < 1e-6


def put_one(p, value):
    """Write one element, which is not among those that are compared."""
    with torch.no_grad():
        if p.numel() > 64:
            p.view(-1)[1] = value.reshape(-1)[1]


def scaled(put):
    """Return a function that runs the model on scaled weights and puts the exact ones back."""

    def run(model, x):
        kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            put(p, p.detach() * 0.5)
        model(x).sum().backward()
        for p, value in zip(model.parameters(), kept, strict=True):
            put(p, value)

    return run


@pytest.mark.parametrize("run", [scaled(p) for p in (put, put_data, put_one)], ids=["all", "data", "one"])
@pytest.mark.parametrize("landing", ["forward", "arrival"])
@pytest.mark.parametrize("since", [0, 6])
def test_no_step_of_a_node_of_a_hub_is_lost_in_passes_on_changed_weights(run, landing, since):
    """The case is a hub that adds up what its nodes push. since: first step with such passes."""
    wide = nn.Sequential(nn.Linear(5, 40), nn.Linear(40, 40, bias=False))
    hub, start, rng = Hub(), round_numbers(wide), torch.Generator().manual_seed(0)
    total, syncs = {name: torch.zeros_like(p) for name, p in start.named_parameters()}, []
    for _ in range(2):
        model = deepcopy(start)
        link, inner = HubLink(hub, model), torch.optim.SGD(model.parameters(), lr=1.0)
        sync, _ = hub_node(model, link, inner=inner, schedule=OwnPace(3), landing=landing)
        syncs.append(sync.__enter__())
    for step in range(12):
        for sync in syncs:
            (run if step >= since else nn.Module.__call__)(sync.model, torch.ones(1, 5))
            for name, p in sync.model.named_parameters():
                p.grad = torch.randint(-512, 512, p.shape, generator=rng) / 1024
                total[name] -= p.grad
            sync.inner.step()
            sync.step()
            assert landing == "arrival" or step != 6 or not sync.in_flight, "the round of the step before"
    for sync in syncs:
        sync.__exit__(None, None, None)
    ended = anchors_of(hub, syncs[0])
    for name, p in start.named_parameters():
        assert torch.equal(ended[name], p + total[name])
        assert torch.equal(ended[name], dict(syncs[1].model.named_parameters())[name])


class Adapted(nn.Module):
    """A frozen layer with an adapter that can be merged into it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))

    @torch.no_grad()
    def evaluate_merged(self, x):
        for sign in (1, -1):
            self.base.weight.add_(sign * self.up.weight @ self.down.weight)
            self(x) if sign > 0 else None


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_a_frozen_layer_stays_while_adapters_are_merged_into_it_for_an_evaluation(landing):
    torch.manual_seed(0)
    start, data = (
        nn.Sequential(Adapted(), nn.Tanh(), Adapted(), nn.Linear(5, 1)),
        [batches(i, 9) for i in (0, 1)],
    )
    models = [deepcopy(start) for _ in data]

    def merged(model, batch):
        model[0].evaluate_merged(batch), model[2].evaluate_merged(batch)

    in_threads(2, lambda t, i: train(t, models[i], data[i], merged, every=3, landing=landing))
    for model in models:
        for i in (0, 2):
            assert (model[i].base.weight - start[i].base.weight).abs().max() < 1e-6
    assert furthest(dict(models[0].named_parameters()), dict(models[1].named_parameters())) < 1e-6


class Lora(nn.Linear):
    """A frozen layer with an adapter that is merged into it in evaluation, as loralib has it."""

    def __init__(self):
        super().__init__(5, 5)
        self.weight.requires_grad_(False)
        self.lora_A, self.lora_B = (nn.Parameter(0.3 * torch.randn(shape)) for shape in ((2, 5), (5, 2)))
        self.merged = False

    def forward(self, x):
        return super().forward(x) if self.merged else super().forward(x) + x @ (self.lora_B @ self.lora_A).T

    def train(self, mode=True):
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.lora_B.data @ self.lora_A.data
            self.merged = not mode
        return super().train(mode)


@pytest.mark.parametrize("landing", ["forward", "arrival"])
def test_nothing_lands_in_adapters_while_they_are_merged_into_their_layer(landing):
    """Otherwise what is subtracted again is not what was added."""
    torch.manual_seed(0)
    start, data = nn.Sequential(Lora(), nn.Tanh(), nn.Linear(5, 1)), [batches(i, 9) for i in (0, 1)]
    message = r"^0 has adapters that are merged into its weights.*model\.unmerge_adapter\(\)"

    def merged(model, batch):
        with torch.no_grad():
            model.eval()(batch)
        model.train()

    models = [deepcopy(start) for _ in data]
    in_threads(2, lambda t, i: train(t, models[i], data[i], merged, every=3, landing=landing))
    for model in models:
        assert (model[0].weight - start[0].weight).abs().max() < 1e-6
    for act in (LayerSync.step, LayerSync.finish, LayerSync.land, lambda sync: sync.update_engine(None)):
        model = deepcopy(start)
        inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        exchange = MeanExchange(MemoryWorld(1).node(0), outer=Average(), penalty=PLAIN)
        sync = LayerSync.of(model, inner, exchange=exchange, config=EditConfig(every=1, landing=landing))

        def enter(sync=sync, act=act):
            with sync:
                plain_step(sync.model, sync.inner, data[0][0])
                sync.step()
                sync.model.eval()
                with pytest.raises(ValueError, match=message):
                    act(sync)

        with pytest.raises(ValueError, match=message):  # and at the end
            enter()


def test_older_values_that_are_put_back_after_a_landing_between_steps_are_an_error():
    """The case is a copy from before `finish`, put back after it; nothing was ready at the last step."""
    model = tower()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(Slow(MemoryWorld(1).node(0)), outer=Average(0.5), penalty=PLAIN)
    config = EditConfig(every=6, landing="arrival")
    sync = LayerSync.of(model, inner, exchange=exchange, config=config)
    message = r"unit rest, first, middle, last has landed .* call sync\.finish\(\)"
    with sync:
        for batch in batches(0, 6):
            plain_step(model, inner, batch)
            sync.step()
        kept = [p.detach().clone() for p in model.parameters()]
        sync.finish()
        for p, value in zip(model.parameters(), kept, strict=True):
            p.data.copy_(value)
        with pytest.raises(RuntimeError, match=message):
            sync.step()


def test_older_values_in_place_of_what_has_landed_are_an_error():
    """The case is a copy from before a pass in which a unit lands, put back after it for the first time."""

    def step(model, inner, batch):
        steps.append(batch)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        loss(model, batch).backward()
        if len(steps) == 7:  # the first pass after the round
            model.load_state_dict(kept)
        inner.step()

    steps = []
    with pytest.raises(
        RuntimeError, match=r"unit rest, first, middle, last has landed .* call sync\.finish\(\)"
    ):
        in_threads(1, lambda t, i: train(t, tower(), batches(0, 9), step=step, every=6))


class Listed(nn.ParameterList):
    """A root without a forward pass."""


@pytest.mark.parametrize("every", [1, 3])
def test_parameters_without_modules_that_run_land_on_time(every, recwarn):
    torch.manual_seed(0)
    start = Listed([nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1))])

    def step(model, inner, batch):
        inner.zero_grad()
        (batch @ model[0] + model[1] - batch.sin().sum(-1)).square().mean().backward()
        inner.step()

    models, data = [deepcopy(start) for _ in range(2)], [batches(i, 8) for i in range(2)]
    found = in_threads(2, lambda t, i: train(t, models[i], data[i], step=step, every=every))
    assert furthest(found[0], found[1]) == 0
    assert furthest(found[0], local_sgd(start, data, None, every=every, train=step)) < 1e-6
    assert [str(w.message) for w in recwarn if w.category is UserWarning] == []


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
        config = EditConfig(every=6, landing="arrival")  # answers come between rounds
        with LayerSync.of(model, inner, exchange=exchange, config=config) as sync:
            for batch in batches(i, 24):
                model(batch)
                with torch.no_grad():
                    for p in model.parameters():
                        p.add_(0.25 + 0.5 * i)
                sync.step()
                with_average(model, batch)

    models = [tower() for _ in range(2)]
    in_threads(2, node)
    for p, began in zip(models[0].parameters(), tower().parameters(), strict=True):
        assert (p - (began + 24 * 0.5)).abs().max() < 1e-5, "24 steps, each 0.25 on one node and 0.75"


class WritesLater:
    """A transport that writes into what it was given after the evaluation, as collectives do."""

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def channel(self, name=None):
        return self

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


class Interrupting:
    """Transport that raises KeyboardInterrupt once, at its call or answer of this number."""

    def __init__(self, transport, at):
        self.transport, self.left = transport, at

    def count(self):
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt

    def channel(self, name=None):
        self.transport = self.transport.channel(name)
        return self

    def gather(self, key, row):
        self.count()
        return InterruptingAnswer(self, self.transport.gather(key, row))

    def weighted_mean(self, key, value, weight):
        self.count()
        return InterruptingAnswer(self, self.transport.weighted_mean(key, value, weight))

    def __getattr__(self, name):
        return getattr(self.transport, name)


class InterruptingAnswer:
    def __init__(self, transport, pending):
        self.transport, self.pending = transport, pending

    def done(self):
        return self.pending.done()

    def result(self):
        self.transport.count()
        return self.pending.result()


def train_on(transport, model, data, seen, warmup_steps):
    """Train as a notebook does that catches Ctrl-C: finish, look at the state, and go on."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    config = EditConfig(every=2, warmup_steps=warmup_steps)
    with LayerSync.of(model, inner, exchange=exchange, config=config) as sync:
        seen.append("began")
        for batch in data:
            while True:
                try:
                    plain_step(model, inner, batch)
                    break
                except KeyboardInterrupt:
                    seen.append("pass")
                    sync.finish()
                    sync.state_dict()
            try:
                sync.step()
            except KeyboardInterrupt:
                seen.append("step")
        seen.append("ended")
    return {name: p.detach().clone() for name, p in trainable(model)}


@pytest.mark.parametrize("warmup_steps", [0, 2])
def test_after_an_interrupt_a_run_goes_on_with_no_bit_changed_or_says_that_it_cannot(warmup_steps):
    """At each message and at each answer of one node. Waits can go on; what was half sent cannot."""
    data, results = [batches(i, 4 + warmup_steps) for i in range(2)], {"same": set(), "refused": set()}

    def job(transport, i):
        transport = Interrupting(transport, at if i == 0 else 0)
        return train_on(transport, models[i], data[i], seen if i == 0 else [], warmup_steps)

    def run():
        return in_threads(2, job, timeout_s=5)

    at, seen, models = 0, [], [Normed() for _ in data]
    expected = run()[0]
    if not warmup_steps:
        assert furthest(expected, local_sgd(Normed(), data, loss, every=2)) < 1e-6
    while "ended" not in results["same"]:
        at, seen, models = at + 1, [], [Normed() for _ in data]
        try:
            found = run()
        except KeyboardInterrupt:
            assert seen in ([], ["began", "ended"]), "it enters the block, or leaves it"
        except RuntimeError as error:
            if "an exception has cut" not in str(error):
                raise
            results["refused"].add(seen[1])
        else:
            assert max(furthest(each, expected) for each in found) == 0, (at, seen)
            results["same"].update(seen[1:2])
    assert results == {"same": {"pass", "ended"}, "refused": {"pass", "step"}}
