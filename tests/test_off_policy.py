"""Tests the benchmark of old rollouts: what is stale is stale, nothing held out is trained on."""

import argparse
import math

import pytest
import torch
from benchmarks import off_policy
from benchmarks.off_policy import ARMS, DPPO, UNCORRECTED, problems, report, trained, warmed_up


@pytest.fixture(scope="module")
def start():
    return warmed_up(0)


def test_a_batch_of_staleness_s_was_drawn_s_steps_ago(start):
    """The mismatch is 0 for the first step, and then that of exactly s steps."""
    seen = {}
    for staleness in (0, 1, 3):
        mismatch = seen[staleness] = []

        def loss(inputs, settings, mismatch=mismatch):
            found = (inputs.logp_BT - inputs.behaviour_BT).abs().max().item()
            mismatch.append(found)
            return UNCORRECTED.loss(inputs, settings)

        trained(start, off_policy.Arm("seen", loss, DPPO.settings), staleness, 6, seed=0)
    assert max(seen[0]) < 1e-5
    assert seen[1][0] < 1e-5 < min(seen[1][1:])
    assert seen[3][0] < 1e-5
    assert seen[3][1] == pytest.approx(seen[1][1], rel=1e-3), "after one step both are one step old"
    assert seen[3][3] > seen[1][3]


def test_on_policy_all_losses_train_alike(start):
    found = {round(trained(start, arm, 0, 5, seed=1).solved, 1) for arm in ARMS}
    assert max(found) - min(found) < 0.5


def test_nothing_held_out_is_trained_on_and_answers_are_sorted():
    generator = torch.Generator().manual_seed(0)
    shown, right = problems(5000, generator)
    held, _ = problems(5000, generator, held_out=True)
    shown_rows, held_rows = (set(map(tuple, x.tolist())) for x in (shown, held))
    assert not shown_rows & held_rows
    assert len(held_rows) > 900
    assert [sorted(row) for row in shown.tolist()] == right.tolist()


def test_a_run_has_a_row_per_arm_and_a_short_one_decides_nothing(monkeypatch):
    monkeypatch.setattr(off_policy, "ARMS", (UNCORRECTED, DPPO))
    found = off_policy.measure(argparse.Namespace(quick=False, steps=2, seeds=2))
    assert [row[0] for row in found.rows] == ["uncorrected", "dppo-tv"]
    assert len(found.rows[0]) == 1 + 5 + 2
    assert all(math.isfinite(one["solved"]) for group in found.figures.values() for one in group)
    assert all(bar.passed is not None for bar in found.bars)
    grid = {(arm.name, s): [off_policy.Trained(50.0, {})] for arm in off_policy.ARMS for s in (0, 8)}
    monkeypatch.setattr(off_policy, "train_all", lambda *rest: grid)
    quick = off_policy.measure(argparse.Namespace(quick=True, steps=2, seeds=2))
    assert all(bar.passed is None for bar in quick.bars)


def test_the_bars_compare_with_the_same_loss_on_policy():
    grid = {
        (arm.name, s): [off_policy.Trained(value, {}) for value in values]
        for arm, s, values in [
            (UNCORRECTED, 0, (90.0, 92.0)),
            (UNCORRECTED, 8, (79.0, 85.0)),
            (DPPO, 0, (90.0, 92.0)),
            (DPPO, 8, (88.0, 86.0)),
        ]
    }
    found = report(grid, (UNCORRECTED, DPPO), (0, 8), decided=True)
    assert [bar.passed for bar in found.bars] == [False, False]
    assert "9.0 points" in found.bars[0].text
    assert "4.0 points" in found.bars[1].text
