"""Tests predicted step times against simulated machines of known times."""

import math

import numpy as np
import pytest
from scipy.optimize import nnls

from aedit.spec_rollout.choose import EngineView, StepObservation
from aedit.spec_rollout.choose.cost import WINDOW, StepCost, TimeModel, nonnegative
from aedit.spec_rollout.drafters import OFF, parse_arm

# Measured on two CPU cores: by rows, milliseconds of a plain step, then its multiples for 2, 4, 8, 16 and 32
# verified tokens of a row.
SMALL = {
    1: (3.2, 1.13, 1.28, 1.33, 1.57, 2.03),
    4: (4.9, 1.05, 1.21, 1.53, 2.04, 3.12),
    16: (7.4, 1.35, 1.80, 2.45, 3.67, 6.07),
    32: (11.4, 1.43, 1.95, 2.72, 4.32),
}
LARGE = {
    1: (30.3, 1.7, 1.53, 1.56, 1.88, 2.73),
    4: (47.0, 1.12, 1.33, 1.81, 2.68, 4.44),
    16: (67.7, 1.49, 2.04, 3.25, 5.31, 9.27),
    32: (102.6, 1.51, 2.38, 3.65, 6.33),
}
VERIFIED = (1, 2, 4, 8, 16, 32)


def true_s(table, rows, verified, context):
    times = (1.0, *table[rows][1:])
    by_context = 1 + 2e-4 * (context / rows - 256)
    return 1e-3 * table[rows][0] * times[VERIFIED.index(verified)] * by_context


def places(table):
    return [(rows, verified) for rows in table for verified in VERIFIED[: len(table[rows])]]


def step(rows, nodes, context, total_s, *, arm=None, draft_s=0.0):
    arm = arm or (parse_arm(f"suffix:{nodes}") if nodes else OFF)
    return StepObservation(EngineView(rows, context), arm, rows, total_s, draft_s, nodes)


def noisy(rng, seconds):
    """Return the seconds with 10 % of noise and occasional slow steps, as on a shared machine."""
    return seconds * math.exp(0.1 * rng.normal()) * (10.0 if rng.random() < 0.03 else 1.0)


def learnt(table, seen, steps, seed=0):
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for _ in range(steps):
        rows, verified = seen[rng.integers(len(seen))]
        context = int(rows * rng.uniform(64, 512))
        seconds = noisy(rng, true_s(table, rows, verified, context))
        cost.learn(step(rows, verified - 1, context, seconds))
    return cost


def errors(cost, table, where):
    return [
        abs(cost.verify_s(rows, verified - 1, rows * each) / true_s(table, rows, verified, rows * each) - 1)
        for rows, verified in where
        for each in (80, 200, 400, 500)
    ]


@pytest.mark.parametrize("table", [SMALL, LARGE])
def test_steps_are_foreseen_within_15_percent_also_where_nothing_was_measured(table):
    where = places(table)
    hidden = where[3::4]
    cost = learnt(table, [place for place in where if place not in hidden], 800)
    assert np.mean(errors(cost, table, [place for place in where if place not in hidden])) <= 0.08
    assert np.mean(errors(cost, table, hidden)) <= 0.15


def test_the_jump_from_one_token_to_two_of_a_single_row_is_seen():
    cost = learnt(LARGE, places(LARGE), 800)
    one, two, eight = (cost.verify_s(1, verified - 1, 256) for verified in (1, 2, 8))
    assert two / one == pytest.approx(1.7, rel=0.15)
    assert eight / two == pytest.approx(1.56 / 1.7, rel=0.15)


def test_before_anything_is_measured_more_work_takes_longer():
    cost = StepCost()
    assert cost.verify_s(1, 0, 100) < cost.verify_s(1, 8, 100) < cost.verify_s(8, 8, 100)
    shallow, deep = (cost.draft_s(parse_arm(arm), 1) for arm in ("layer:2", "layer:8"))
    assert 0 < shallow < deep < cost.verify_s(1, 0, 100)
    assert cost.draft_s(OFF, 1) == 0


def test_the_first_plain_steps_already_scale_what_is_supposed_of_the_rest():
    cost = StepCost()
    for _ in range(4):
        cost.learn(step(1, 0, 100, 30e-3))
    assert cost.verify_s(1, 0, 100) == pytest.approx(30e-3, rel=0.05)
    assert 30e-3 < cost.verify_s(1, 4, 100) < 60e-3
    assert 0.5e-3 < cost.draft_s(parse_arm("layer:2"), 1) < 15e-3


def test_a_step_that_took_ten_times_as_long_changes_nothing():
    cost = learnt(SMALL, places(SMALL), 600)
    before = cost.verify_s(1, 4, 256)
    cost.learn(step(1, 4, 256, 10 * before))
    for _ in range(20):
        cost.learn(step(1, 4, 256, before))
    assert cost.verify_s(1, 4, 256) == pytest.approx(before, rel=0.05)


def test_a_thousand_steps_of_one_arm_do_not_wash_out_the_others():
    cost = learnt(SMALL, places(SMALL), 600)
    rng = np.random.default_rng(1)
    for i in range(1000):
        cost.learn(step(1, 4, 256 + i // 4, noisy(rng, true_s(SMALL, 1, 4, 256) * 1.3 / 1.28)))
    elsewhere = [place for place in places(SMALL) if place != (1, 4)]
    assert np.mean(errors(cost, SMALL, elsewhere)) <= 0.10


def test_a_slow_minute_of_the_machine_says_nothing_about_the_arm_it_met():
    cost = learnt(SMALL, places(SMALL), 600)
    plain, chain = cost.verify_s(1, 0, 256), cost.verify_s(1, 7, 256)
    for _ in range(30):
        cost.learn(step(1, 7, 256, 2.5 * chain))
    assert cost.slowdown > 1.8
    assert cost.verify_s(1, 7, 256) / cost.verify_s(1, 0, 256) == pytest.approx(chain / plain, rel=0.25)
    for _ in range(60):
        cost.learn(step(1, 7, 256, chain))
    assert cost.slowdown == pytest.approx(1, abs=0.1)
    assert cost.verify_s(1, 0, 256) == pytest.approx(plain, rel=0.1)


def test_a_cost_that_has_changed_for_good_is_learnt_once_others_are_seen_to_be_as_before():
    cost = learnt(SMALL, places(SMALL), 600)
    plain, chain = cost.verify_s(1, 0, 256), cost.verify_s(1, 7, 256)
    for i in range(6 * WINDOW):
        cost.learn(step(1, 0, 256, plain) if i % 4 == 0 else step(1, 7, 256, 2 * chain))
    found = cost.verify_s(1, 7, 256) / cost.verify_s(1, 0, 256)
    assert found == pytest.approx(2 * chain / plain, rel=0.1)


def test_drafting_is_learnt_by_depth_rows_and_what_is_to_catch_up():
    cost, rng = StepCost(), np.random.default_rng(2)

    def drafting(depth, rows, behind):
        return 1e-4 + 3e-4 * depth + 2e-5 * depth * rows + 5e-6 * behind

    for _ in range(800):
        depth, rows = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 4, 16]))
        behind = int(rng.choice([0, 0, 0, 100, 1000]))
        draft_s = noisy(rng, drafting(depth, rows, behind))
        arm = parse_arm(f"layer:{depth}")
        cost.learn(step(rows, depth, 100, 5e-3 + draft_s, arm=arm, draft_s=draft_s), behind)
    for depth, rows, behind in ((2, 1, 0), (8, 16, 0), (4, 4, 500), (6, 8, 0)):
        found = cost.draft_s(parse_arm(f"layer:{depth}"), rows, behind)
        assert found == pytest.approx(drafting(depth, rows, behind), rel=0.15)
    assert cost.verify_s(1, 4, 100) == pytest.approx(5e-3, rel=0.15)


def test_the_same_steps_give_the_same_predictions():
    one, other = (learnt(SMALL, places(SMALL), 300) for _ in range(2))
    assert [one.verify_s(r, q, 99) for r in range(1, 40) for q in range(9)] == [
        other.verify_s(r, q, 99) for r in range(1, 40) for q in range(9)
    ]


def test_what_a_step_took_is_told_in_terms_of_what_was_foreseen():
    cost = learnt(SMALL, places(SMALL), 800)
    assert cost.learn(step(1, 4, 256, 1.0)) is None, "what a new place takes more is the place's"
    foreseen_s = cost.verify_s(1, 3, 256) + cost.draft_s(parse_arm("suffix:3"), 1)
    assert cost.learn(step(1, 3, 256, 1.1 * foreseen_s)) == pytest.approx(1.1 / cost.slowdown)


def test_what_a_token_in_the_cache_takes_is_told_by_steps_of_one_place():
    """Arms are tried one after the other while the context grows.

    Neither longer drafts nor the jump from one token more (measured on two rows) may be attributed to the
    context.
    """
    cost, rng, takes_s = StepCost(), np.random.default_rng(3), {0: 5e-3, 1: 8e-3, 3: 9.5e-3, 7: 11.5e-3}
    for i, nodes in enumerate([0] * 12 + [1] * 4 + [3] * 4 + [7] * 16):
        context = 50 + 5 * i
        cost.learn(step(2, nodes, context, noisy(rng, takes_s[nodes] + 1.5e-6 * context)))
    for context in (60, 200, 400):
        assert cost.verify_s(2, 0, context) == pytest.approx(5e-3 + 1.5e-6 * context, rel=0.1)


@pytest.mark.parametrize("seed", range(20))
def test_coefficients_are_the_best_that_are_not_negative(seed):
    rng = np.random.default_rng(seed)
    matrix = rng.normal(size=(40, 7)) * rng.uniform(1e-4, 1e4, size=7)
    target = matrix @ np.where(rng.random(7) < 0.5, 0, 1 / np.abs(matrix).mean(0)) + 0.3 * rng.normal(size=40)
    expected, _ = nnls(matrix, target)
    assert nonnegative(matrix.T @ matrix, matrix.T @ target) == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_times_of_a_place_are_believed_more_the_more_there_are():
    times = TimeModel((1.0, 0.1), 1.0, inner=1)
    place, features = (1, 0, 0, 0), (1.0, 0.0)
    for _ in range(WINDOW):
        times.learn((2, 0, 0, 0), features, 1.0)
    times.learn(place, features, 2.0)
    once = times.predict(place, features)
    for _ in range(10):
        times.learn(place, features, 2.0)
    assert 1.0 < once < 1.6
    assert times.predict(place, features) == pytest.approx(2.0, rel=0.15)
