"""Tests the penalty weights against values computed by hand."""

import math

import numpy as np
import pytest
import torch

from aedit.async_sgd.rules import PenaltyConfig
from aedit.async_sgd.rules.push_weights import effective_nodes, penalty_weights
from aedit.edit.mean_exchange import clip_scale

INF = math.inf


def column(*values):
    return np.array(values)[:, None]


def weigh(norms, steps=None, **config):
    steps = steps or [1.0] * len(norms)
    return penalty_weights(column(*norms), column(*steps), PenaltyConfig(**config))[:, 0].tolist()


def test_scale_free_weights_by_hand():
    # norms 1, 2, 4 around their median 2 score 0.5, 0, -1
    total = math.exp(0.5) + 1 + math.exp(-1)
    expected = [math.exp(0.5) / total, 1 / total, math.exp(-1) / total]
    assert weigh([1.0, 2.0, 4.0]) == pytest.approx(expected)
    assert weigh([1e6, 2e6, 4e6]) == pytest.approx(expected)
    assert weigh([1e-6, 2e-6, 4e-6]) == pytest.approx(expected)


def test_paper_weights_by_hand():
    assert weigh([0.8, 1.0, 1.2, 1.5], weights="paper") == pytest.approx(
        [0.335, 0.274, 0.225, 0.166], abs=1e-3
    )
    assert weigh([8.0, 10, 12, 15], weights="paper") == pytest.approx([0.866, 0.117, 0.016, 0.001], abs=1e-3)


def test_a_higher_temperature_moves_the_weights_towards_uniform():
    total = math.exp(0.25) + 1 + math.exp(-0.5)
    assert weigh([1.0, 2.0, 4.0], temperature=2.0) == pytest.approx(
        [math.exp(0.25) / total, 1 / total, math.exp(-0.5) / total]
    )
    assert weigh([1.0, 2.0, 4.0], weights="paper", temperature=1e6) == pytest.approx([1 / 3] * 3, abs=1e-5)


def test_the_paper_s_weights_do_not_overflow():
    assert weigh([1e4, 2e4], weights="paper") == [1, 0]


@pytest.mark.parametrize("kind", ["uniform", "scale-free", "paper"])
@pytest.mark.parametrize("bad", [INF, math.nan])
def test_a_norm_that_is_not_finite_weighs_nothing_and_changes_no_other_weight(kind, bad):
    got = weigh([1.0, bad, 4.0, 2.0], weights=kind)
    assert got[1] == 0
    assert got[:1] + got[2:] == pytest.approx(weigh([1.0, 4.0, 2.0], weights=kind))


@pytest.mark.parametrize("kind", ["uniform", "scale-free", "paper"])
def test_when_nobody_is_trusted_every_weight_is_zero(kind):
    assert weigh([INF, math.nan], weights=kind, step_weight=0.5) == [0, 0]


@pytest.mark.parametrize("kind", ["scale-free", "paper"])
def test_nodes_that_did_not_move_share_evenly(kind):
    assert weigh([0.0, 0.0], weights=kind) == pytest.approx([0.5, 0.5])
    assert sum(weigh([0.0, 0.0, 5.0], weights=kind)) == pytest.approx(1)


def test_step_weights_by_hand():
    assert weigh([1.0, 1.0], [30.0, 10.0], step_weight=1.0) == [0.75, 0.25]
    assert weigh([1.0, 1.0], [30.0, 10.0], step_weight=0.5) == [0.625, 0.375]
    assert weigh([1.0, 1.0], [30.0, 10.0]) == [0.5, 0.5]


def test_a_distrusted_node_s_steps_count_for_nothing():
    assert weigh([1.0, INF, 1.0], [10.0, 1000.0, 30.0], step_weight=1.0) == [0.25, 0, 0.75]


@pytest.mark.parametrize("step_weight", [0.0, 0.5, 1.0])
def test_a_node_without_steps_weighs_nothing(step_weight):
    assert weigh([1.0, 0.0], [5.0, 0.0], step_weight=step_weight) == [1, 0]
    assert weigh([1.0, 1.0], [0.0, 0.0], step_weight=step_weight) == [0, 0]


def test_every_unit_is_weighed_by_itself():
    G_NL = np.array([[1.0, INF], [1.0, 2.0]])
    steps_NL = np.array([[1.0, 1.0], [3.0, 1.0]])
    w_NL = penalty_weights(G_NL, steps_NL, PenaltyConfig(step_weight=1.0))
    assert w_NL.tolist() == [[0.25, 0], [0.75, 1]]


def test_effective_nodes_counts_who_the_average_is_over():
    w_NL = np.array([[1.0, 0.5, 0.75, 0], [0, 0.5, 0.25, 0]])
    assert effective_nodes(w_NL).tolist() == pytest.approx([1, 2, 1.6, 0])


def test_the_clip_shortens_what_is_too_long_and_nothing_else():
    assert clip_scale(torch.tensor(20.0), 10.0) == 0.5
    assert clip_scale(torch.tensor(10.0), 10.0) == 1
    assert clip_scale(torch.tensor(3.0), 10.0) == 1
    assert clip_scale(torch.tensor(0.0), 10.0) == 1
    assert clip_scale(torch.tensor(1e9), None) == 1
