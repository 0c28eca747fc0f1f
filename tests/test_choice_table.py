"""Tests the measured table against simulated machines and drafters of known costs and acceptance."""

import math

import numpy as np
import pytest
import torch

from aedit.spec_rollout.choose import EngineView, StepObservation, accepted_nodes, score_bins
from aedit.spec_rollout.choose.table import (
    COST_DEVIATION,
    MAX_SPEED_VARIANCE,
    NUM_BINS,
    SPEED_DEVIATION,
    STEP_DEVIATION,
    UNKNOWN_DEVIATION,
    Acceptance,
    RelativeCosts,
    StepCost,
)
from aedit.spec_rollout.drafters import OFF, Draft, parse_arm

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


def measured(table, seen, steps, seed=0):
    """Return the table after steps at places `seen`, each for a few steps before the next, as in a run."""
    rng = np.random.default_rng(seed)
    cost = StepCost()
    for i in range(steps):
        if i % 8 == 0:
            rows, verified = seen[rng.integers(len(seen))]
        context = int(rows * rng.uniform(64, 512))
        cost.learn(step(rows, verified - 1, context, noisy(rng, true_s(table, rows, verified, context))))
    return cost


def errors(cost, table, where):
    return [
        abs(
            cost.slowdown
            * cost.verify_s(rows, verified - 1, rows * each)
            / true_s(table, rows, verified, rows * each)
            - 1
        )
        for rows, verified in where
        for each in (80, 200, 400, 500)
    ]


@pytest.mark.parametrize("table", [SMALL, LARGE])
def test_measured_passes_are_known_within_12_percent_and_others_by_their_neighbours(table):
    where = places(table)
    hidden = where[3::4]
    cost = measured(table, [place for place in where if place not in hidden], 1600)
    assert np.mean(errors(cost, table, [place for place in where if place not in hidden])) <= 0.12
    assert np.mean(errors(cost, table, hidden)) <= 0.30


def test_before_anything_is_measured_more_work_takes_longer():
    cost = StepCost()
    assert cost.verify_s(1, 0, 100) < cost.verify_s(1, 8, 100) < cost.verify_s(8, 8, 100)
    shallow, deep = (cost.draft_s(parse_arm(arm), 1) for arm in ("layer:2", "layer:8"))
    assert 0 < shallow < deep < cost.verify_s(1, 0, 100)
    assert cost.draft_s(OFF, 1) == 0


def test_the_first_plain_steps_already_scale_all_other_costs():
    cost = StepCost()
    for _ in range(4):
        cost.learn(step(1, 0, 100, 30e-3))
    assert cost.verify_s(1, 0, 100) == pytest.approx(30e-3, rel=0.05)
    assert 30e-3 < cost.verify_s(1, 4, 100) < 60e-3
    assert 0.5e-3 < cost.draft_s(parse_arm("layer:2"), 1) < 15e-3


def test_a_step_that_took_ten_times_as_long_changes_little():
    cost = measured(SMALL, places(SMALL), 1600)
    before = cost.verify_s(1, 3, 256)
    cost.learn(step(1, 3, 256, 10 * before))
    for _ in range(20):
        cost.learn(step(1, 3, 256, before))
    assert cost.verify_s(1, 3, 256) == pytest.approx(before, rel=0.06)


def test_an_outlier_before_all_other_measurements_is_forgotten_at_once():
    cost = StepCost()
    for seconds in (30e-3, 3e-3, 3e-3):
        cost.learn(step(1, 0, 100, seconds))
    assert cost.verify_s(1, 0, 100) == pytest.approx(3e-3, rel=0.05)


def test_a_thousand_steps_of_one_arm_leave_the_cells_of_others():
    cost = measured(SMALL, places(SMALL), 1600)
    rng = np.random.default_rng(1)
    for i in range(1000):
        cost.learn(step(1, 3, 256 + i // 4, noisy(rng, true_s(SMALL, 1, 4, 256))))
    elsewhere = [place for place in places(SMALL) if place != (1, 4)]
    assert np.mean(errors(cost, SMALL, elsewhere)) <= 0.12


def test_a_slow_minute_of_the_machine_slows_all_arms():
    cost = measured(SMALL, places(SMALL), 1600)
    plain, chain = cost.verify_s(1, 0, 256), cost.verify_s(1, 7, 256)
    for _ in range(30):
        cost.learn(step(1, 7, 256, 2.5 * chain))
    assert cost.slowdown > 1.5
    assert cost.verify_s(1, 7, 256) / cost.verify_s(1, 0, 256) == pytest.approx(chain / plain, rel=0.4)
    for _ in range(90):
        cost.learn(step(1, 7, 256, chain))
    assert cost.slowdown == pytest.approx(1, abs=0.12)
    assert cost.verify_s(1, 0, 256) == pytest.approx(plain, rel=0.1)


def test_a_cost_that_has_changed_for_good_is_known_once_others_are_seen_to_be_as_before():
    cost = measured(SMALL, places(SMALL), 1600)
    plain, chain = cost.verify_s(1, 0, 256), cost.verify_s(1, 7, 256)
    for i in range(160):
        cost.learn(step(1, 0, 256, plain) if i % 4 == 0 else step(1, 7, 256, 2 * chain))
    found = cost.verify_s(1, 7, 256) / cost.verify_s(1, 0, 256)
    assert found == pytest.approx(2 * chain / plain, rel=0.15)


def test_drafts_are_measured_by_arm_and_rows_and_missing_tokens_by_their_number():
    cost, rng = StepCost(), np.random.default_rng(2)

    def drafting(depth, rows, missing):
        return 1e-4 + 3e-4 * depth + 2e-5 * depth * rows + 5e-6 * missing

    for _ in range(800):
        depth, rows = int(rng.choice([1, 2, 4, 8])), int(rng.choice([1, 4, 16]))
        missing = int(rng.choice([0, 0, 0, 1000]))
        draft_s = drafting(depth, rows, missing) * math.exp(0.1 * rng.normal())
        arm = parse_arm(f"layer:{depth}")
        cost.learn(step(rows, depth, 100, 5e-3 + draft_s, arm=arm, draft_s=draft_s), missing)
    for depth, rows, missing in ((2, 1, 0), (8, 16, 0), (4, 4, 500)):
        found = cost.draft_s(parse_arm(f"layer:{depth}"), rows, missing)
        assert found == pytest.approx(drafting(depth, rows, missing), rel=0.25)
    assert cost.verify_s(1, 4, 100) == pytest.approx(5e-3, rel=0.15)


def test_the_same_steps_give_the_same_costs():
    one, other = (measured(SMALL, places(SMALL), 300) for _ in range(2))
    assert [one.verify_s(r, q, 99) for r in range(1, 40) for q in range(9)] == [
        other.verify_s(r, q, 99) for r in range(1, 40) for q in range(9)
    ]


def test_a_cached_token_costs_what_steps_of_one_cell_show():
    """Arms are tried one after the other while the context grows.

    Neither longer drafts nor the jump from one token more may be attributed to the context.
    """
    cost, rng, takes_s = StepCost(), np.random.default_rng(3), {0: 5e-3, 1: 8e-3, 3: 9.5e-3, 7: 11.5e-3}
    for i, nodes in enumerate([0] * 12 + [1] * 4 + [3] * 4 + [7] * 16):
        context = 50 + 5 * i
        seconds = (takes_s[nodes] + 1.5e-6 * context) * math.exp(0.1 * rng.normal())
        cost.learn(step(2, nodes, context, seconds))
    for context in (60, 200, 400):
        assert cost.verify_s(2, 0, context) == pytest.approx(5e-3 + 1.5e-6 * context, rel=0.1)


# --- acceptance by score


def overconfident(chance):
    return 0.9 * chance**1.7


def chains(rng, rows, depth, short=False):
    """Return a draft of chains with random scores."""
    chance = rng.beta(2, 1, size=(rows, depth))
    scores = torch.tensor(np.log(chance).cumsum(1), dtype=torch.float32)
    counts = torch.tensor(rng.integers(0, depth + 1, rows)) if short else None
    return Draft(torch.zeros(rows, depth, dtype=torch.int64), None, counts, scores)


def outcome(rng, draft, verified, agrees):
    """Return how many nodes of each row a policy accepts that agrees with probability agrees(score)."""
    said = np.exp(np.diff(draft.scores_BN.double().numpy(), axis=1, prepend=0.0))
    says = rng.random(said.shape) < agrees(said)
    if draft.counts_B is not None:
        says &= np.arange(says.shape[1]) < draft.counts_B.numpy()[:, None]
    says &= np.arange(says.shape[1]) < verified[:, None]
    return np.cumprod(says, axis=1).sum(1)


@pytest.mark.parametrize("agrees", [overconfident, np.sqrt])
@pytest.mark.parametrize("least", [1, 6])
def test_scores_become_chances_whatever_is_verified(agrees, least):
    rng, acceptance, arm = np.random.default_rng(0), Acceptance(), parse_arm("layer:6")
    for _ in range(800):
        draft, verified = chains(rng, 4, 6, short=True), rng.integers(least, 7, 4)
        accepted = outcome(rng, draft, verified, agrees).tolist()
        acceptance.learn(arm, score_bins(draft), verified.tolist(), accepted)
    unseen = chains(np.random.default_rng(1), 20_000, 6)
    promised = acceptance.chances(arm, score_bins(unseen))
    came = np.arange(6) < outcome(np.random.default_rng(2), unseen, np.full(20_000, 6), agrees)[:, None]
    assert abs(promised.mean(0) - came.mean(0)).max() <= 0.06


def test_before_anything_is_known_scores_are_taken_for_chances():
    draft = chains(np.random.default_rng(0), 3, 4)
    chances = Acceptance().chances(parse_arm("layer:4"), score_bins(draft))
    assert chances == pytest.approx(draft.scores_BN.exp().numpy(), abs=0.51 / NUM_BINS)


def test_padding_counts_for_nothing_whatever_its_scores_are():
    scores = torch.tensor([[-0.1, -torch.inf, -torch.inf], [-torch.inf] * 3])
    draft = Draft(torch.zeros(2, 3, dtype=torch.int64), None, torch.tensor([1, 0]), scores)
    bins = score_bins(draft)
    assert (bins != NUM_BINS).tolist() == [[True, False, False], [False] * 3]
    assert (Acceptance().chances(parse_arm("suffix:3"), bins) > 0).tolist() == (bins != NUM_BINS).tolist()


def test_bins_do_not_change_with_the_draft_that_is_used_again():
    draft = chains(np.random.default_rng(0), 2, 3)
    bins = score_bins(draft)
    before = bins.copy()
    draft.scores_BN.zero_()
    assert (bins == before).all()


def test_a_tree_has_chances_of_its_own():
    acceptance, tree, chain = Acceptance(), parse_arm("layer:2x2x4"), parse_arm("layer:4")
    draft = chains(np.random.default_rng(0), 4, 4)
    bins = score_bins(draft)
    before = acceptance.chances(chain, bins)
    for _ in range(50):
        acceptance.learn(tree, bins, [4] * 4, [0] * 4, [[0]] * 4)
    assert (acceptance.chances(chain, bins) == before).all()
    assert acceptance.chances(tree, bins).max() < 0.1


def test_accepted_nodes_of_a_tree_are_those_of_its_path():
    accepted = accepted_nodes((1, 6), [2], [[0, 1, 2, 5]])
    assert accepted[0].tolist() == [True, True, False, False, False, False]
    assert accepted_nodes((3, 4), [2, 4, 0], None).sum(1).tolist() == [2, 4, 0]


def test_costs_of_other_numbers_of_rows_are_begun_with_as_they_change():
    arm, other = parse_arm("layer:8"), parse_arm("layer:4")
    many = RelativeCosts()
    for step in range(12):
        many.learn(arm if step % 2 else OFF, 4.0 if step % 2 else 1.0, step, 0.0)
    few = RelativeCosts(many, {arm: math.log(0.5), other: 7.0})
    assert many.difference(arm, OFF)[0] == pytest.approx(math.log(4), abs=0.02)
    assert few.difference(arm, OFF)[0] == pytest.approx(many.difference(arm, OFF)[0] + math.log(0.5))
    assert few.difference(arm, OFF)[1] > many.difference(arm, OFF)[1] + 0.1
    assert not few.knows(other)


def test_costs_beside_each_other_are_those_of_the_exact_posterior():
    """The oracle conditions the joint Gaussian of all unknowns on all measurements at once."""
    arms = [OFF, parse_arm("suffix:2"), parse_arm("suffix:4")]
    played = [0, 0, 0, 1, 1, 0, 2, 2, 1, 0, 0, 2]
    draw = np.random.default_rng(0)
    truth, slow = np.array([0.0, 0.3, 0.5]), np.cumsum(draw.normal(0, 0.03, len(played))) - 6
    seen = [slow[i] + truth[arm] + draw.normal(0, 0.05) for i, arm in enumerate(played)]
    filtered = RelativeCosts()
    filtered._scale = 1.0
    scales = []
    for step, (arm, log_s) in enumerate(zip(played, seen, strict=True)):
        scales.append(filtered._scale)
        filtered.learn(arms[arm], math.exp(log_s), step, 0.1 * (arm > 0))
    # Unknowns: slowness at each step, then the cost of each arm at each step.
    num = len(played)
    prior = np.concatenate([np.full(num, seen[0]), *(np.full(num, 0.1 * (arm > 0)) for arm in range(3))])
    spread = np.zeros((4 * num, 4 * num))
    steps = np.array([0.0, *(scales[1:])]).cumsum() * SPEED_DEVIATION**2
    spread[:num, :num] = MAX_SPEED_VARIANCE + np.minimum.outer(steps, steps)
    for arm in range(3):
        walked, variance = np.zeros(num), 0.0 if arm == 0 else UNKNOWN_DEVIATION**2
        last, total = None, 0.0
        for step in range(num):  # a cost changes with the steps since the last measurement, of any arm
            if played[step] == arm:
                total += 0.0 if last is None and step == 0 else COST_DEVIATION**2
                last = step
            walked[step] = total
        at = slice(num * (1 + arm), num * (2 + arm))
        spread[at, at] = variance + np.minimum.outer(walked, walked)
    reads = np.zeros((num, 4 * num))
    for step, arm in enumerate(played):
        reads[step, step] = reads[step, num * (1 + arm) + step] = 1
    noise = np.diag(np.array(scales) * STEP_DEVIATION**2)
    gain = spread @ reads.T @ np.linalg.inv(reads @ spread @ reads.T + noise)
    mean = prior + gain @ (np.array(seen) - reads @ prior)
    left = spread - gain @ reads @ spread
    for arm in (1, 2):
        read = np.zeros(4 * num)
        read[num * (2 + arm) - 1], read[2 * num - 1] = 1, -1
        found = filtered.difference(arms[arm], OFF)
        assert found[0] == pytest.approx(read @ mean, abs=1e-6)
        assert found[1] == pytest.approx(math.sqrt(read @ left @ read), rel=1e-6)
