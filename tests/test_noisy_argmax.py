"""Tests that the search for the best token gives what computing all noise gives.

The oracle adds the whole noise to the whole input. It is shared with `test_noise`, which tests it.
"""

import numpy as np
import pytest
import torch

from aedit.spec_rollout.sampling import NoiseKeys, coupled_tokens, gumbel, noise, noisy_best_two
from aedit.spec_rollout.sampling.noisy_argmax import _limits, noisy_argmax

NOTHING = -torch.inf


def keys_of(num_rows, q, seed=0):
    draw = np.random.default_rng(seed)
    ids = draw.integers(-(2**62), 2**62, (2, num_rows)).repeat(q, axis=1)
    return NoiseKeys(*ids, draw.integers(0, 2**32, num_rows * q))


def all_noise(keys, shape, dtype):
    rollouts, samples, positions = map(torch.from_numpy, (keys.rollouts_N, keys.samples_N, keys.positions_N))
    return gumbel(rollouts, samples, positions[:, None], shape[-1], dtype).view(shape)


def peaked(x):
    x[..., 7 % x.shape[-1]] += 40
    return x


def few(count):
    def masked(x):
        below = x < x.topk(min(count, x.shape[-1]), dim=-1).values[..., -1:]
        return x.masked_fill(below, NOTHING)

    return masked


INPUTS = {
    "normal": lambda x: x,
    "flat": torch.zeros_like,
    "steep": lambda x: 30 * x,
    "one likely token": peaked,
    "one possible token": few(1),
    "three possible tokens": few(3),
    "half of the tokens": lambda x: x.masked_fill(torch.arange(x.shape[-1]) % 2 == 0, NOTHING),
    "rounded to equals": lambda x: 2.0**24 + (4 * x).round(),
    "rounded to few values": lambda x: (4 * x).round() * 2.0**21,
    "near the largest float": lambda x: x.clamp(-3, 3) * 1e38,
    "low temperature": lambda x: x * 1e6,
    "high temperature": lambda x: x * 1e-6,
    "far below zero": lambda x: x - 1e7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INPUTS)
def test_the_token_is_that_of_the_whole_noise(name, dtype):
    for seed, shape in enumerate([(1, 1, 20_003), (3, 1, 16_384), (2, 5, 16_389), (4, 3, 9), (1, 2, 1)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        x, keys = INPUTS[name](x), keys_of(*shape[:2], seed)
        assert torch.equal(noisy_argmax(x, keys), (x + all_noise(keys, shape, dtype)).argmax(-1)), shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", INPUTS)
def test_the_two_best_sums_are_those_of_the_whole_noise(name, dtype):
    for seed, shape in enumerate([(1, 1, 20_003), (3, 1, 16_384), (10, 1, 16_389), (12, 1, 9), (2, 1, 2)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        x, keys = INPUTS[name](x), keys_of(*shape[:2], seed)
        sums = (x + all_noise(keys, shape, dtype))[:, 0]
        token, best, second = noisy_best_two(x[:, 0], keys)
        assert torch.equal(token, sums.argmax(-1)), shape
        assert torch.equal(torch.stack((best, second), -1), sums.topk(2).values), shape


@pytest.mark.parametrize("num_arrivals", [1, 6, 50])
@pytest.mark.parametrize("name", INPUTS)
def test_tokens_that_arrive_more_than_once_have_their_first_time(name, num_arrivals, monkeypatch):
    """In a small vocabulary most tokens have arrivals, and most of these several."""
    monkeypatch.setattr(noise, "num_arrivals", lambda vocabulary: num_arrivals)
    for dtype in (torch.float32, torch.float64):
        shape = (80, 1, 9)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
        x, keys = INPUTS[name](x), keys_of(80, 1)
        sums = (x + all_noise(keys, shape, dtype))[:, 0]
        assert torch.equal(noisy_argmax(x, keys)[:, 0], sums.argmax(-1))
        token, best, second = noisy_best_two(x[:, 0], keys)
        assert torch.equal(token, sums.argmax(-1))
        assert torch.equal(torch.stack((best, second), -1), sums.topk(2).values)


def test_many_positions_draw_what_the_whole_noise_draws():
    shape = (700, 1, 16_384)
    x, keys = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)), keys_of(700, 1)
    wanted = (x + all_noise(keys, shape, x.dtype)).argmax(-1)
    assert len(wanted.unique()) > 300
    assert torch.equal(noisy_argmax(x, keys), wanted)


def test_the_padding_of_the_last_token_block_draws_nothing():
    for seed in range(400):
        assert noisy_argmax(torch.zeros(1, 1, 1), keys_of(1, 1, seed)).item() == 0


def test_tokens_below_the_limit_lose_whatever_their_words_are():
    for dtype in (torch.float32, torch.float64):
        best = torch.tensor([-1e6, -3.0, 0.0, 1.0, 40.0, 1e6], dtype=dtype)
        for last in (0.1, 0.0039, 1e-5):
            limits = _limits(best, torch.full((6,), last, dtype=torch.float64))
            below = limits.nextafter(torch.tensor(-torch.inf, dtype=dtype))
            most = -torch.tensor(last, dtype=torch.float64).to(dtype).log()
            assert (below + most < best).all()
            assert (limits + most > best - 2e-3 - 1e-5 * best.abs()).all()


def test_greedy_rows_ignore_their_keys():
    x, keys = torch.randn(3, 2, 17_000, generator=torch.Generator().manual_seed(4)), keys_of(3, 2)
    temperature = torch.tensor([1.0, 0.0, 0.3])
    wanted = coupled_tokens(x, all_noise(keys, x.shape, x.dtype), temperature)
    assert torch.equal(coupled_tokens(x, keys, temperature), wanted)
    assert torch.equal(wanted[1], x[1].argmax(-1))


def test_a_row_that_is_not_a_number_gives_its_first_such_token_and_harms_no_other():
    x, keys = torch.randn(3, 1, 17_000, generator=torch.Generator().manual_seed(4)), keys_of(3, 1)
    x[1] = torch.nan
    wanted = (x + all_noise(keys, x.shape, x.dtype)).argmax(-1)
    assert wanted[1] == 0
    assert torch.equal(noisy_argmax(x, keys), wanted)
