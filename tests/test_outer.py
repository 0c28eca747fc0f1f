"""Outer optimizers: pure functions that equal what torch's optimizers do in place."""

import pytest
import torch

from aedit.async_sgd.config import OuterConfig
from aedit.async_sgd.outer import Average, Nesterov, OuterState, make_outer


def gradients(count=20, size=200):
    rng = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=rng) for _ in range(count)]


@pytest.mark.parametrize(("lr", "momentum"), [(0.8, 0.85), (0.7, 0.9), (0.01, 0.0)])
def test_nesterov_is_torchs_over_twenty_updates(lr, momentum):
    x = torch.nn.Parameter(torch.zeros(200))
    theirs = torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=momentum > 0)
    ours, outer = torch.zeros(200), Nesterov(lr, momentum)
    state = outer.init(ours)
    for g in gradients():
        g = g / 1000
        x.grad = g.clone()
        theirs.step()
        step, state = outer.update(g, state)
        ours = ours - step
        assert (ours - x.detach()).abs().max() <= 1e-7
    assert x.abs().max() > lr / 1000


def test_the_first_nesterov_step_is_longer_than_the_gradient_by_the_momentum():
    step, state = Nesterov(0.8, 0.85).update(torch.tensor([1.0]), OuterState(torch.zeros(1)))
    torch.testing.assert_close(step, torch.tensor([0.8 * 1.85]))
    assert state.momentum == 1


def test_average_with_rate_one_lands_on_the_mean():
    anchor, mean = torch.tensor([3.0, -2.0]), torch.tensor([1.5, 4.0])
    step, state = Average().update(anchor - mean, Average().init(anchor))
    assert torch.equal(anchor - step, mean)
    assert state.momentum.numel() == 0
    half, _ = Average(0.5).update(anchor - mean, state)
    assert torch.equal(half, (anchor - mean) / 2)


@pytest.mark.parametrize("outer", [Average(1.0), Average(0.5), Nesterov()])
def test_an_update_changes_none_of_its_arguments_and_answers_the_same_again(outer):
    g = gradients(1)[0]
    state = OuterState(torch.ones(200)) if isinstance(outer, Nesterov) else outer.init(g)
    given, momentum = g.clone(), state.momentum.clone()
    step, after = outer.update(g, state)
    again, _ = outer.update(g, state)
    assert torch.equal(step, again)
    for tensor in (step, after.momentum if after.momentum.numel() else step):
        tensor.add_(1)  # the caller's own: nothing that went in may follow
    assert torch.equal(g, given)
    assert torch.equal(state.momentum, momentum)


def test_a_state_can_be_moved_as_a_whole():
    assert OuterState(torch.ones(2)).map(lambda t: t * 3).momentum.tolist() == [3, 3]


def test_the_configuration_chooses_the_optimizer():
    average = make_outer(OuterConfig(kind="average", lr=0.5))
    assert isinstance(average, Average)
    assert average.lr == 0.5
    nesterov = make_outer(OuterConfig(kind="nesterov", lr=0.7, momentum=0.9))
    assert isinstance(nesterov, Nesterov)
    assert (nesterov.lr, nesterov.mu) == (0.7, 0.9)
