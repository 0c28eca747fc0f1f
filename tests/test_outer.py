"""Tests the outer optimizers, pure functions, against torch's in-place optimizers."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from aedit.async_sgd.rules import Average, DelayedNesterov, Nesterov, OuterConfig, OuterState, make_outer


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


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_the_momentum_decays_per_round_however_many_updates_make_it_up(parts):
    """Against a float64 recurrence, and its two sums: after a round without gradients, and in the end."""
    mu, s = 0.7, 1 / parts
    outer = Nesterov(0.9, mu).for_share(s)
    x, state = np.zeros(200, np.float32), outer.init(np.zeros(200, np.float32))
    th, m = np.zeros(200), np.zeros(200)
    for g32 in gradients(30):
        step, state = outer.update(g32.numpy() * np.float32(s), state)
        x = x - step
        m = mu**s * m + s * g32.numpy().astype(np.float64)
        th = th - 0.9 * (s * g32.numpy().astype(np.float64) + mu * (1 - mu**s) / (1 - mu) * m)
        np.testing.assert_allclose(x, th, rtol=1e-4, atol=1e-5)
    alone, zero = OuterState(np.zeros(1)), np.zeros(1)
    moved, alone = outer.update(np.ones(1), alone)
    before = alone.momentum
    for number in range(60 * parts):
        step, alone = outer.update(zero, alone)
        moved = moved + step
        if number + 1 == parts:
            np.testing.assert_allclose(alone.momentum, mu * before)
    np.testing.assert_allclose(moved, 0.9 / (1 - mu))


def test_a_whole_round_is_plain_nesterov_to_the_bit():
    whole, plain = Nesterov(0.7, 0.9).for_share(1.0), Nesterov(0.7, 0.9)
    state = theirs = plain.init(torch.zeros(200))
    for g in gradients(5):
        (step, state), (their_step, theirs) = whole.update(g, state), plain.update(g, theirs)
        assert torch.equal(step, their_step)
        assert torch.equal(state.momentum, theirs.momentum)


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


@pytest.mark.parametrize("outer", [Average(1.0), Average(0.5), Nesterov(), DelayedNesterov(delay=2)])
def test_an_update_changes_none_of_its_arguments_and_answers_the_same_again(outer):
    g = gradients(1)[0]
    state = outer.init(g).map(lambda zeros: zeros + 1)
    given, before = g.clone(), [array.clone() for array in state.arrays]
    step, after = outer.update(g, state)
    again, _ = outer.update(g, state)
    assert torch.equal(step, again)
    for tensor in (step, after.arrays[-1] if after.momentum.numel() else step):
        tensor.add_(1)  # the caller's own: nothing that went in may follow
    assert torch.equal(g, given)
    assert all(torch.equal(array, old) for array, old in zip(state.arrays, before, strict=True))


def test_a_state_can_be_moved_as_a_whole():
    assert OuterState(torch.ones(2)).map(lambda t: t * 3).momentum.tolist() == [3, 3]


def test_the_configuration_chooses_the_optimizer():
    average = make_outer(OuterConfig(kind="average", lr=0.5))
    assert isinstance(average, Average)
    assert average.lr == 0.5
    nesterov = make_outer(OuterConfig(kind="nesterov", lr=0.7, momentum=0.9))
    assert isinstance(nesterov, Nesterov)
    assert (nesterov.lr, nesterov.mu) == (0.7, 0.9)
    late = make_outer(OuterConfig(kind="delayed-nesterov", lr=0.6, momentum=0.8, delay=7, activation=0.1))
    assert isinstance(late, DelayedNesterov)
    assert (late.lr, late.mu, late.delay, late.c) == (0.6, 0.8, 7, 0.1)


# --- for NumPy and torch alike


KINDS = [Average(0.7), Nesterov(0.8, 0.85), DelayedNesterov(0.7, 0.9, 4), DelayedNesterov(0.7, 0.9, 3, 0.25)]


@pytest.mark.parametrize("outer", KINDS)
def test_numpy_and_torch_take_the_same_steps(outer):
    x, theirs = torch.ones(200), np.ones(200, np.float32)
    state, their_state = outer.init(x), outer.init(theirs)
    for g in gradients(9):
        step, state = outer.update(g, state)
        their_step, their_state = outer.update(g.numpy(), their_state)
        assert their_step.dtype == np.float32
        x, theirs = x - step, theirs - their_step
        assert np.abs(x.numpy() - theirs).max() <= 1e-6
        assert (
            np.abs(outer.look_ahead(x, state).numpy() - outer.look_ahead(theirs, their_state)).max() <= 1e-6
        )
    assert [a.shape for a in their_state.arrays] == [tuple(a.shape) for a in state.arrays]


@pytest.mark.parametrize(("delay", "activation"), [(1, 0.0), (4, 0.0), (4, 0.2), (7, 0.1)])
def test_delayed_nesterov_is_the_papers_recurrence(delay, activation):
    lr, beta, N, c = 0.7, 0.9, delay, activation
    outer = DelayedNesterov(lr, beta, N, c)
    x, state = np.zeros(200, np.float32), outer.init(np.zeros(200, np.float32))
    th, m, Delta = np.zeros(200), np.zeros(200), np.zeros(200)
    for t, g32 in enumerate(gradients(30)):
        step, state = outer.update(g32.numpy(), state)
        x = x - step
        g = g32.numpy().astype(np.float64)
        Delta = Delta + g  # arXiv:2401.09135, algorithm 3, as its authors' simulator has it
        if (t + 1) % N == 0:
            m = beta * m + Delta / N
            th = th - lr * ((1 - c * N + c) * beta * m + g / N)
            Delta = np.zeros(200)
        else:
            th = th - lr * (c * beta * m + g / N)
        assert np.abs(x - th).max() <= 2e-5 * max(1.0, np.abs(th).max())
        assert np.abs(state.pending - Delta).max() <= 1e-5
    assert np.abs(th).max() > 1


def test_delayed_nesterov_of_one_is_nesterov():
    one, plain = DelayedNesterov(0.7, 0.9, 1), Nesterov(0.7, 0.9)
    state, other = one.init(torch.zeros(200)), plain.init(torch.zeros(200))
    for g in gradients():
        step, state = one.update(g, state)
        expected, other = plain.update(g, other)
        torch.testing.assert_close(step, expected)


def test_n_equal_updates_of_a_delay_of_n_move_as_one_step_of_nesterov():
    delayed, plain = DelayedNesterov(0.7, 0.9, 5), Nesterov(0.7, 0.9)
    g, moved = torch.full((3,), 2.0), torch.zeros(3)
    state = delayed.init(g)
    for _ in range(5):
        step, state = delayed.update(g, state)
        moved += step
    torch.testing.assert_close(moved, plain.update(g, plain.init(g))[0])
    assert state.count == 0
    assert not state.pending.any()


def test_looking_ahead_is_where_an_update_without_gradient_would_lead():
    for outer in (Nesterov(0.7, 0.9), DelayedNesterov(0.7, 0.9, 1)):
        state = outer.update(gradients(1)[0], outer.init(torch.zeros(200)))[1]
        carried = outer.update(torch.zeros(200), state)[0]
        # the update itself decays the momentum once more before it is used
        torch.testing.assert_close(outer.look_ahead(torch.zeros(200), state) * 0.9, -carried)
    x = torch.ones(3)
    assert Average().look_ahead(x, Average().init(x)) is x


def test_slices_of_a_unit_go_the_way_of_the_whole():
    outer = DelayedNesterov(0.7, 0.9, 2)
    whole = outer.init(np.zeros(200, np.float32))
    for g in gradients(5):
        g = g.numpy()
        halves = [slice(0, 77), slice(77, 200)]
        parts = [outer.update(g[at], whole.map(lambda a, at=at: a[at])) for at in halves]
        step, whole = outer.update(g, whole)
        np.testing.assert_array_equal(step, np.concatenate([s for s, _ in parts]))
        for n, array in enumerate(whole.arrays):
            np.testing.assert_array_equal(array, np.concatenate([state.arrays[n] for _, state in parts]))


def test_a_first_state_is_zero_even_where_the_anchor_is_not_a_number():
    state = Nesterov().init(np.array([np.nan, np.inf, -1.0], np.float32))
    assert state.momentum.tolist() == [0, 0, 0]
    assert not np.signbit(state.momentum).any()


def test_the_numbers_of_a_hub_need_no_torch():
    code = "import sys, aedit.async_sgd.hub.hub; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
