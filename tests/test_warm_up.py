"""Tests that the warm-up (and the method `ddp`) equals one large batch, however nodes begin and step."""

from copy import deepcopy

import pytest
import torch
from kit.deferred import node, step
from kit.nodes import batches, furthest, in_threads, loss, parameters, tower
from torch import nn

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, LayerSync, MeanExchange


def warm(model, inner, transport, warmup_steps="all", every=1000, **config):
    """Return `model` as a node that averages gradients at every step."""
    exchange = MeanExchange(transport, outer=Average())
    config = EditConfig(warmup_steps=warmup_steps, every=every, **config)
    return LayerSync.of(model, inner, exchange=exchange, config=config)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def large_batch(model, data, make_inner=sgd, loss=loss):
    """Train in plain torch on the mean over nodes of each step's loss; data: per node its batches."""
    model = deepcopy(model)
    inner = make_inner(model)
    for parts in zip(*data, strict=True):
        inner.zero_grad()
        (sum(loss(model, part) for part in parts) / len(parts)).backward()
        inner.step()
    return parameters(model)


# -- where nodes begin


class Frozen(nn.Module):
    """Model with a frozen first layer, a counter, an unsaved table, and tied weights."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 5).requires_grad_(False)
        self.body = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.body[1].weight = self.body[0].weight
        self.last = nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor(2**40 + seed))
        self.register_buffer("flags", torch.tensor([seed == 0, True]))
        self.register_buffer("wide", torch.randn(3, dtype=torch.float64))
        self.register_buffer("table", torch.randn(4), persistent=False)

    def forward(self, x):
        for layer in self.body:
            x = layer(self.first(x)).tanh()
        return self.last(x)


@pytest.mark.parametrize("warmup_steps", [0, 2, "all"])
def test_nodes_with_other_weights_start_from_the_first_ones_bits(warmup_steps):
    models = [Frozen(seed) for seed in range(3)]
    first = {name: value.clone() for name, value in everything(models[0]).items()}
    assert any(not torch.equal(value, everything(models[2])[name]) for name, value in first.items())

    def job(transport, n):
        with warm(models[n], sgd(models[n]), transport, warmup_steps):
            return {name: value.clone() for name, value in everything(models[n]).items()}

    for found in in_threads(3, job):
        assert all(torch.equal(value, first[name]) for name, value in found.items())


def everything(model):
    return dict(model.named_parameters()) | dict(model.named_buffers())


@pytest.mark.parametrize("warmup_steps", [4, "all"])
def test_nodes_with_other_weights_train_as_one_from_the_first_step(warmup_steps):
    models, data = [tower(seed) for seed in range(2)], [batches(n, 4) for n in range(2)]
    expected = large_batch(models[0], data)

    def job(transport, n):
        inner = sgd(models[n])
        with warm(models[n], inner, transport, warmup_steps) as sync:
            for batch in data[n]:
                step(sync, inner, batch)
        return parameters(models[n])

    for found in in_threads(2, job):
        assert furthest(found, expected) < 1e-6


# -- whose gradients


class Branches(nn.Module):
    """Model in which a node runs one branch or the other, depending on its data."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.never = nn.Linear(5, 1), nn.Linear(5, 1), nn.Linear(5, 1)

    def forward(self, x):
        return self.one(x) if x.sum() > 0 else self.other(x)


def test_a_parameter_with_a_gradient_on_one_node_only_is_stepped_on_all():
    torch.manual_seed(0)
    model = Branches()
    data = [[x.abs() for x in batches(0, 3)], [-x.abs() for x in batches(1, 3)]]
    decaying = lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)  # noqa: E731
    expected = large_batch(model, data, decaying)

    def job(transport, n):
        own = deepcopy(model)
        inner = decaying(own)
        with warm(own, inner, transport) as sync:
            for batch in data[n]:
                step(sync, inner, batch)
        return parameters(own)

    for found in in_threads(2, job):
        assert furthest(found, expected) < 1e-6
        assert torch.equal(found["never.weight"], model.never.weight), "without a gradient there is no decay"


def test_a_gradient_that_is_finite_on_no_node_is_seen_on_all():
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        with warm(own, inner, transport) as sync:
            loss(own, batches(n, 1)[0]).backward()
            own.first.weight.grad[n, n] = float("inf")
            if n == 1:
                own.last.bias.grad[0] = float("nan")
            sync.average_gradients()
            return {name: p.grad.isfinite().all().item() for name, p in own.named_parameters()}

    for finite in in_threads(2, job):
        assert {name for name, yes in finite.items() if not yes} == {"first.weight", "first.bias"}


# -- however a loop steps


def test_a_closure_is_averaged_each_time_the_optimizer_calls_it():
    """L-BFGS calls it several times a step, and decides by loss and gradients how often."""
    model, data = tower(), [batches(n, 3, rows=16) for n in range(2)]

    def lbfgs(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    expected = deepcopy(model)
    plain = lbfgs(expected)
    for parts in zip(*data, strict=True):

        def both(parts=parts):
            plain.zero_grad()
            mean = sum(loss(expected, part) for part in parts) / 2
            mean.backward()
            return mean

        plain.step(both)

    def job(transport, n):
        own = deepcopy(model)
        inner, calls = lbfgs(own), []
        with warm(own, inner, transport) as sync:
            for batch in data[n]:

                def mine(batch=batch):
                    inner.zero_grad()
                    value = loss(own, batch)
                    value.backward()
                    calls.append(value)
                    return value

                inner.step(closure=mine) if n else inner.step(mine)
                sync.step()
        assert len(calls) > 5
        return parameters(own)

    ours, theirs = in_threads(2, job)
    assert furthest(ours, theirs) == 0
    assert furthest(ours, parameters(expected)) < 1e-4
    assert furthest(ours, parameters(model)) > 0.05


def test_gradients_that_are_averaged_before_the_last_backward_pass_are_averaged_again():
    model, data = tower(), [batches(n, 6) for n in range(2)]
    expected = large_batch(
        model,
        [list(zip(mine[::2], mine[1::2], strict=True)) for mine in data],
        loss=lambda model, pair: loss(model, pair[0]) + loss(model, pair[1]),
    )

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        with warm(own, inner, transport) as sync:
            for first, second in zip(data[n][::2], data[n][1::2], strict=True):
                sync.average_gradients()
                loss(own, first).backward()
                sync.average_gradients()
                loss(own, second).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
        return parameters(own)

    for found in in_threads(2, job):
        assert furthest(found, expected) < 1e-6


def test_clipping_after_averaging_stays():
    model, data = tower(), [batches(n, 2) for n in range(2)]

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        with warm(own, inner, transport) as sync:
            for batch in data[n]:
                before = parameters(own)
                loss(own, batch).backward()
                sync.average_gradients()
                nn.utils.clip_grad_norm_(own.parameters(), 1e-3)
                inner.step()
                inner.zero_grad()
                sync.step()
                moved = torch.cat([(p - before[name]).flatten() for name, p in own.named_parameters()])
                assert moved.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-2)

    in_threads(2, job)


def test_a_step_that_was_not_averaged_is_an_error_that_says_what_to_do():
    def job(transport, n):
        own = tower()
        inner = sgd(own)
        sync = warm(own, inner, transport)

        def run():
            with sync:
                step(sync, inner, batches(n, 1)[0])
                loss(own, batches(n, 1)[0]).backward()
                sync.step()  # the optimizer has not stepped: a GradScaler skipped it, say

        with pytest.raises(RuntimeError, match="step 2 of the warm-up was not averaged") as told:
            run()
        assert sync.steps == 1
        assert "GradScaler" in str(told.value)
        assert not inner._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in own.parameters())

    in_threads(1, job)


class Scaler:
    """Loss scaler like torch.amp.GradScaler: scaled losses, and no step where a gradient is inf."""

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def unscale(self):
        grads = [p.grad for group in self.inner.param_groups for p in group["params"]]
        for grad in grads:
            grad.div_(self.scale)
        self.found_inf = not all(grad.isfinite().all() for grad in grads)

    def step(self):
        if self.found_inf:
            self.scale /= 2
        else:
            self.inner.step()
        self.inner.zero_grad()
        return not self.found_inf


@pytest.mark.parametrize("overflowing", [{0}, {0, 1}])
def test_a_scaler_that_looks_at_averaged_gradients_decides_the_same_everywhere(overflowing):
    model = tower()

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        scaler, made = Scaler(inner, 1024.0), []
        with warm(own, inner, transport) as sync:
            for number, batch in enumerate(batches(n, 4)):
                (loss(own, batch) * scaler.scale).backward()
                if number == 1 and n in overflowing:
                    own.first.weight.grad.fill_(float("inf"))
                sync.average_gradients()
                scaler.unscale()
                made.append(scaler.step())
                sync.step()
        return parameters(own), made, scaler.scale

    (ours, our_steps, our_scale), (theirs, their_steps, their_scale) = in_threads(2, job)
    assert our_steps == their_steps == [True, overflowing == {0}, True, True]
    assert our_scale == their_scale == (1024.0 if overflowing == {0} else 512.0)
    assert furthest(ours, theirs) == 0


def test_a_skipped_step_that_is_not_counted_is_made_up_for():
    model, data = tower(), [batches(n, 4) for n in range(2)]

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        scaler = Scaler(inner, 1024.0)
        with warm(own, inner, transport) as sync:
            for batch in ([batches(9, 1)[0]] if n == 0 else []) + data[n]:
                (loss(own, batch) * scaler.scale).backward()
                if n == 0 and scaler.scale == 1024.0:
                    own.first.weight.grad.fill_(float("inf"))
                scaler.unscale()
                if scaler.step():
                    sync.step()
        return parameters(own)

    for found in in_threads(2, job):
        assert furthest(found, large_batch(model, data)) < 1e-6


def test_an_optimizer_that_steps_on_some_nodes_only_is_an_error_on_all():
    def job(transport, n):
        own = tower()
        inner = sgd(own)
        sync = warm(own, inner, transport)

        def run():
            with sync:
                for number, batch in enumerate(batches(n, 4)):
                    loss(own, batch).backward()
                    sync.average_gradients()
                    if (number, n) != (1, 1):  # this node's scaler had looked before
                        inner.step()
                    inner.zero_grad()
                    sync.step()

        with pytest.raises(RuntimeError, match="on some nodes and not on others") as told:
            run()
        assert sync.steps == 2
        assert "before scaler.unscale_()" in str(told.value)

    in_threads(2, job)


def test_several_forward_passes_accumulation_and_an_evaluation_between_are_one_step():
    model, data = tower(), [batches(n, 8) for n in range(2)]
    pairs = [list(zip(mine[::2], mine[1::2], strict=True)) for mine in data]

    def both(model, pair):
        return loss(model, pair[0]) * 0.5 + loss(model, pair[1]) * 0.5

    expected = large_batch(model, pairs, loss=both)

    def job(transport, n):
        own = deepcopy(model)
        inner = sgd(own)
        with warm(own, inner, transport, warmup_steps=4) as sync:
            for first, second in pairs[n]:
                (0.5 * loss(own, first)).backward()
                with torch.no_grad():
                    loss(own, second)
                (0.5 * loss(own, second)).backward()
                inner.step()
                inner.zero_grad()
                sync.step()
            assert sync.anchored
        return parameters(own)

    for found in in_threads(2, job):
        assert furthest(found, expected) < 1e-6


def test_hooks_of_the_warm_up_go_when_it_ends():
    own = tower()
    in_threads(1, lambda transport, n: run_past_the_warm_up(own, transport))


def run_past_the_warm_up(own, transport):
    sync, inner = node(own, transport, warmup_steps=1)
    with sync:
        assert all(p._post_accumulate_grad_hooks for p in own.parameters())
        step(sync, inner, batches(0, 1)[0])
        assert not any(p._post_accumulate_grad_hooks for p in own.parameters())
        assert not inner._optimizer_step_pre_hooks
        step(sync, inner, batches(0, 1)[0])
        assert sync.local_steps == 1
