"""Tests the weight of a push against the others of its merge."""

import math

import numpy as np
import pytest

from aedit.async_sgd.rules import PenaltyConfig, Push, effective_nodes, merge_weights, push_norm


def push(*norms, steps=10, tokens=100):
    return Push(node=0, unit=0, seq=1, base=1, steps=steps, tokens=tokens, values=None, norms=norms)


def test_equal_shares_for_all_who_did_something():
    assert merge_weights([push(1.0), push(9.0, steps=1), push(0.0, steps=0)], "uniform") == (1, 1, 0)


def test_by_steps():
    assert merge_weights([push(1.0, steps=30), push(1.0, steps=10), push(1.0, steps=0)], "steps") == (
        30,
        10,
        0,
    )


def test_tokens_times_tokens_per_step():
    pushes = [push(1.0, steps=10, tokens=100), push(1.0, steps=5, tokens=100), push(1.0, steps=0, tokens=7)]
    assert merge_weights(pushes, "tokens") == (1000, 2000, 0)


@pytest.mark.parametrize("step_weight", [0.0, 0.5])
def test_the_penalty_is_edits_over_the_whole_units_norm(step_weight):
    config = PenaltyConfig(step_weight=step_weight)
    pushes = [push(3.0, 4.0, steps=30), push(6.0, 8.0, steps=10), push(0.6, 0.8, steps=20)]
    softmax = np.exp([0.0, -1.0, 0.8])  # norms 5, 10, 1 around their median 5
    expected = (1 - step_weight) * softmax / softmax.sum() + step_weight * np.array([30, 10, 20]) / 60
    assert merge_weights(pushes, "penalty", config) == pytest.approx(tuple(expected))
    assert merge_weights(pushes, "penalty") == pytest.approx(tuple(softmax / softmax.sum()))


def test_a_norm_that_is_not_finite_weighs_nothing():
    pushes = [push(1.0), push(1.0, math.nan), push(math.inf, 1.0), push(1.0)]
    assert merge_weights(pushes, "penalty") == pytest.approx((0.5, 0, 0, 0.5))


@pytest.mark.parametrize("rule", ["uniform", "steps", "tokens", "penalty"])
def test_no_pushes_no_weights(rule):
    assert merge_weights([], rule) == ()


def test_a_units_norm_is_that_of_all_its_tensors():
    assert push_norm(push(2.0, 3.0, 6.0)) == 7
    assert not math.isfinite(push_norm(push(2.0, math.nan)))


def test_effective_nodes_counts_who_the_average_is_over():
    w_NL = np.array([[1.0, 0.5, 0.75, 0], [0, 0.5, 0.25, 0]])
    assert effective_nodes(w_NL).tolist() == pytest.approx([1, 2, 1.6, 0])
