"""Tests the detectors in simulation and against a loop in NumPy: what they catch and what they pass.

The units of one history are independent, so a simulation gives every trial its own unit.
"""

import math

import numpy as np
import pytest
import torch
from kit.oracle import Detector, Rules

from aedit.edit import PenaltyConfig
from aedit.edit.detector import NormHistory, judge

TRIALS = 4000
ROUNDS = 60
JUDGED = (*range(5, 17), 40)


def decaying_norms(noise, rounds=ROUNDS, trials=TRIALS, seed=0):
    """Return 5 / (1 + t / 40) with Gaussian noise, one column per trial."""
    rng = np.random.default_rng(seed)
    mean = 5 / (1 + np.arange(1, rounds + 1) / 40)
    return torch.from_numpy(mean[:, None] * np.maximum(1 + noise * rng.normal(size=(rounds, trials)), 0.05))


def told_apart(G_L, history, config):
    return ~judge(G_L, history, config)[0].isfinite()


def simulate(noise, config, factors=(2.0, 3.0)):
    """Return the share of false alarms, and the share of spikes caught by (round, factor)."""
    history, alarms, power = NormHistory.empty(TRIALS, config.window), 0.0, {}
    for t, G_L in enumerate(decaying_norms(noise), 1):
        for factor in factors if t in JUDGED else ():
            power[t, factor] = told_apart(factor * G_L, history, config).double().mean().item()
        believed_L, history = judge(G_L, history, config)
        alarms += believed_L.isinf().double().mean().item()
    return alarms / ROUNDS, power


def test_spikes_on_decaying_norms_are_caught_from_the_fifth_round_on():
    alarms, power = simulate(0.1, PenaltyConfig())
    assert min(power[t, 3.0] for t in JUDGED) >= 0.95
    assert min(power[t, 2.0] for t in JUDGED) >= 0.8
    assert alarms <= 0.005


def test_noisier_norms_raise_no_more_false_alarms():
    alarms, _ = simulate(0.2, PenaltyConfig())
    assert alarms <= 0.005


def test_the_paper_s_detector_sleeps_on_decaying_norms():
    """It is not the default, because its mean lags behind: by round 40 a doubled norm passes."""
    alarms, power = simulate(0.1, PenaltyConfig(detector="ema", threshold=3.0, warmup_rounds=10, window=16))
    assert power[40, 2.0] <= 0.05
    assert power[40, 3.0] <= 0.8
    assert alarms <= 0.005


# -- against the oracle


def rough_stream(seed, rounds=80):
    """Return decaying norms with spikes, lasting shifts, zeros, NaN and Inf."""
    rng = np.random.default_rng(seed)
    norms = 5 / (1 + np.arange(rounds) / 40) * (1 + 0.15 * rng.normal(size=rounds))
    norms[rounds // 2 :] *= rng.choice([1.0, 6.0])
    for value, share in ((math.nan, 0.05), (math.inf, 0.03), (0.0, 0.04)):
        norms[rng.random(rounds) < share] = value
    return np.where(rng.random(rounds) < 0.1, 20 * norms, norms)


@pytest.mark.parametrize("detector", ["robust", "ema", "off"])
@pytest.mark.parametrize(("ema", "patience", "window"), [(0.02, 3, 16), (0.3, 2, 6)])
def test_a_detector_says_what_a_plain_loop_says(detector, ema, patience, window):
    settings = {"detector": detector, "ema": ema, "patience": patience, "window": window}
    units = 50
    streams = np.stack([rough_stream(seed) for seed in range(units)])
    loops = [Detector(Rules(**settings)) for _ in range(units)]
    history = NormHistory.empty(units, window)
    for G in streams.T:
        believed_L, history = judge(torch.from_numpy(G), history, PenaltyConfig(**settings))
        expected = [loop.trusts(norm) for loop, norm in zip(loops, G, strict=True)]
        assert believed_L.isfinite().tolist() == expected
        assert torch.equal(believed_L[expected], torch.from_numpy(G)[expected])
    np.testing.assert_allclose(history.mean_L, [loop.mean for loop in loops], rtol=1e-9)
    np.testing.assert_allclose(history.var_L, [loop.var for loop in loops], rtol=1e-9, atol=1e-12)


# -- one property each


def after(norms, config, units=1):
    """Return the history after `norms`, the same for every unit, and the trusted units of each round."""
    history, believed = NormHistory.empty(units, config.window), []
    for norm in norms:
        G_L, history = judge(torch.full((units,), norm, dtype=torch.float64), history, config)
        believed.append(bool(G_L[0].isfinite()))
    return history, believed


def bits(history):
    return [tensor.view(torch.int64).tolist() for tensor in remembered(history)]


def remembered(history):
    return (history.norms_WL, history.mean_L, history.var_L, history.rounds_L)


@pytest.mark.parametrize("detector", ["robust", "ema", "off"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rounds", [0, 1, 3, 20])
def test_norms_that_are_not_finite_are_caught_at_once_and_never_learned(detector, bad, rounds):
    config = PenaltyConfig(detector=detector)
    history, _ = after(1 + 0.1 * np.sin(np.arange(rounds)), config)
    for _ in range(10):
        G_L, next_history = judge(torch.tensor([bad], dtype=torch.float64), history, config)
        assert G_L.item() == math.inf
        assert bits(next_history) == bits(history)


@pytest.mark.parametrize("detector", ["robust", "ema"])
def test_a_spike_teaches_nothing(detector):
    config = PenaltyConfig(detector=detector)
    history, _ = after([1.0, 1.1, 0.9, 1.05, 0.95, 1.0], config)
    G_L, next_history = judge(torch.tensor([50.0], dtype=torch.float64), history, config)
    assert G_L.item() == math.inf
    assert bits(next_history) == bits(history)


def test_judging_leaves_its_arguments_as_they_were():
    config = PenaltyConfig()
    history, _ = after([1.0, 1.1, 0.9, 1.05], config)
    before, G_L = bits(history), torch.tensor([9.0], dtype=torch.float64)
    judge(G_L, history, config)
    assert bits(history) == before
    assert G_L.item() == 9


@pytest.mark.parametrize("detector", ["robust", "ema"])
def test_a_lasting_shift_is_the_new_normal_after_three_rounds(detector):
    config = PenaltyConfig(detector=detector)
    usual = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.01, 1.0]
    _, believed = after([*usual, *[5.0] * 8], config)
    assert believed == [True] * 8 + [False] * 2 + [True] * 6


def test_outliers_that_are_not_in_a_row_are_never_the_new_normal():
    config = PenaltyConfig()
    usual = [1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 1.01, 1.0]
    _, believed = after([*usual, *[5.0, 5.0, 1.0] * 4], config)
    assert believed == [True] * 8 + [False, False, True] * 4


def test_nan_in_between_does_not_count_as_an_outlier_in_a_row():
    _, believed = after([*[1.0, 1.02, 0.98, 1.01] * 2, math.nan, 5.0, math.nan, 5.0], PenaltyConfig())
    assert believed[8:] == [False] * 4


@pytest.mark.parametrize("detector", ["robust", "ema"])
def test_small_norms_are_never_distrusted(detector):
    norms = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1e-9, 0.0, 1e-3]
    _, believed = after(norms, PenaltyConfig(detector=detector, warmup_rounds=6))
    assert all(believed)


def test_a_unit_that_did_not_move_teaches_nothing():
    config = PenaltyConfig()
    moving, _ = after([1.0, 1.1, 0.9], config)
    still, believed = after([1.0, 0.0, 1.1, 0.0, 0.9, 0.0], config)
    assert all(believed)
    assert bits(still) == bits(moving)


def test_nobody_is_judged_by_size_before_the_warm_up_is_over():
    _, believed = after([1.0, 1.0, 1.0, 1000.0], PenaltyConfig(warmup_rounds=4))
    assert all(believed)
    _, believed = after([1.0, 1.0, 1.0, 1000.0], PenaltyConfig(warmup_rounds=3))
    assert believed == [True, True, True, False]


def test_units_are_judged_each_by_its_own_history():
    config = PenaltyConfig()
    history = NormHistory.empty(2, config.window)
    for scale in (1.0, 1.1, 0.9, 1.0, 1.05):
        _, history = judge(torch.tensor([scale, 100 * scale], dtype=torch.float64), history, config)
    G_L, _ = judge(torch.tensor([100.0, 100.0], dtype=torch.float64), history, config)
    assert G_L.tolist() == [math.inf, 100]
