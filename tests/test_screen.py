"""Tests the push filter: coarse norms from the first round on, and directions against all other nodes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from aedit.async_sgd.rules import MergePart, Push, PushFilterConfig, SizeHistory, directions
from aedit.async_sgd.rules.push_filter import judge_push, log_size, outliers, shortening
from aedit.launch.config import load
from aedit.types import TensorLayout, UnitLayout

SCREEN = PushFilterConfig()
NODES = 8
UNIT = UnitLayout("u", (TensorLayout("m", (100, 90)),))


class Held:
    def __init__(self, array):
        self.array = array

    def read(self, start, stop):
        return self.array[start:stop].copy()


def push(node, length, *, steps=16, base=1, values=None):
    held = None if values is None else Held(values.astype(np.float32))
    return Push(node=node, unit=0, seq=1, base=base, steps=steps, tokens=0, values=held, norms=(length,))


def honest(rng, node, round, steps=16):
    """Return a push with a norm as of small Llamas.

    Growing with the learning rate, decaying later, 15 % noise.
    """
    usual = 3.0 * min(1.0, 0.2 + 0.3 * round) * math.exp(-round / 60)
    return push(
        node, usual * (steps / 16) ** rng.uniform(0.6, 0.9) * math.exp(0.15 * rng.normal()), steps=steps
    )


def seen(pushes, history=None):
    history = history or founded()
    for one in pushes:
        history = history.with_push(one)
    return history


def founded(anchor_norm=10.0):
    return SizeHistory().with_push(push(0, anchor_norm, base=0, steps=0))


def rounds_of(seed, count=60, steps=(16, 16, 16, 16, 12, 8, 4, 2)):
    rng = np.random.default_rng(seed)
    return [[honest(rng, n, r, steps[n]) for n in range(NODES)] for r in range(count)]


def test_honest_nodes_are_refused_less_than_once_in_a_hundred_pushes():
    refused = total = 0
    for seed in range(10):
        history = founded()
        for pushes in rounds_of(seed):
            for one in pushes:
                total += 1
                if judge_push(one, history, SCREEN) is None:
                    history = history.with_push(one)
                else:
                    refused += 1
                    history = history.with_refusal(one.node)
    assert refused <= 0.01 * total
    assert refused == 0


@pytest.mark.parametrize(("times", "share"), [(1000.0, 1.0), (100.0, 1.0), (10.0, 0.97)])
def test_a_node_far_too_long_is_refused_by_its_size_from_the_second_round_on(times, share):
    caught = total = 0
    for seed in range(5):
        history = founded()
        for round, pushes in enumerate(rounds_of(seed)):
            for one in pushes:
                if one.node == 3:
                    bad = push(3, times * one.norms[0], steps=one.steps)
                    total += round >= 2
                    caught += round >= 2 and judge_push(bad, history, SCREEN) is not None
                else:
                    history = history.with_push(one)
    assert caught >= share * total


@pytest.mark.parametrize("first_to_come", range(NODES))
def test_a_thousand_times_too_long_is_refused_in_the_very_first_round(first_to_come):
    pushes = rounds_of(1, 1)[0]
    history = seen(pushes[:first_to_come])
    assert judge_push(push(7, 1000 * pushes[7].norms[0]), history, SCREEN) is not None


@pytest.mark.parametrize("round", [0, 1])
def test_ten_times_too_long_is_refused_as_soon_as_four_nodes_are_known(round):
    caught = 0
    for seed in range(50):
        pushes = rounds_of(seed, 2, [16] * NODES)
        history = seen([*pushes[0], *pushes[1]][: 4 + NODES * round])
        caught += judge_push(push(7, 10 * pushes[round][7].norms[0]), history, SCREEN) is not None
    assert caught >= 45


def test_honest_sizes_may_treble_from_the_first_round_to_the_second():
    history = seen(push(n, 1.0) for n in range(4))
    for node in range(4):
        assert judge_push(push(node, 3.0 * 1.5), history, SCREEN) is None
        assert shortening(push(node, 3.0), history, SCREEN) == 1
    assert shortening(push(0, 8.0), history, SCREEN) == pytest.approx(0.5)
    assert shortening(push(0, 8.0), seen(push(n, 1.0) for n in range(3)), SCREEN) == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_never_believed(bad):
    for history in (SizeHistory(), founded(), seen(rounds_of(0, 2)[1])):
        assert judge_push(push(0, bad), history, SCREEN) == "not finite"


def test_short_ones_are_believed():
    history = seen(rounds_of(0, 3)[2])
    assert judge_push(push(0, 0.0), history, SCREEN) is None
    assert judge_push(push(0, 1e-9), history, SCREEN) is None


def test_after_an_outage_a_node_may_bring_all_its_steps_at_once():
    history = seen(one for pushes in rounds_of(0, 8) for one in pushes)
    rng = np.random.default_rng(5)
    assert judge_push(honest(rng, 0, 8, steps=16 * 40), history, SCREEN) is None


def test_one_node_cannot_make_tiny_or_huge_norms_usual():
    for length in (1e-9, 30.0):
        liar = [push(0, length) for _ in range(500)]
        history = seen([*liar, *(one for pushes in rounds_of(0, 4) for one in pushes[1:])])
        assert judge_push(push(3, 3.0), history, SCREEN) is None
        assert judge_push(push(0, 3000.0), history, SCREEN) is not None


def test_when_most_nodes_are_refused_what_was_usual_is_forgotten():
    history = seen(one for pushes in rounds_of(0, 8) for one in pushes)
    for node in range(5):
        assert judge_push(push(node, 90.0), history, SCREEN) is not None
        history = history.with_refusal(node)
    assert judge_push(push(5, 90.0), history, SCREEN) is None


def test_a_few_nodes_alone_cannot_make_the_hub_forget():
    history = seen(one for pushes in rounds_of(0, 8) for one in pushes)
    for _ in range(50):
        history = history.with_refusal(1).with_refusal(2)
    assert judge_push(push(1, 900.0), history, SCREEN) is not None


def test_a_node_alone_is_judged_by_its_own_past_and_not_locked_out():
    history = seen(push(0, 3.0) for _ in range(6))
    for _ in range(3):
        assert judge_push(push(0, 60.0), history, SCREEN) is not None
        history = history.with_refusal(0)
    assert judge_push(push(0, 60.0), history, SCREEN) is None


def test_what_is_long_is_shortened_to_twice_what_is_usual_for_its_steps():
    history = seen(push(n, 3.0) for _ in range(3) for n in range(4))
    assert shortening(push(0, 5.9), history, SCREEN) == 1
    assert shortening(push(0, 12.0), history, SCREEN) == pytest.approx(0.5)
    assert shortening(push(0, 12.0 * 16**0.75, steps=256), history, SCREEN) == pytest.approx(0.5)
    assert shortening(push(0, 12.0), history, PushFilterConfig(clip=None)) == 1
    assert shortening(push(0, 12.0), founded(), SCREEN) == 1
    assert shortening(push(0, 0.0), history, SCREEN) == 1


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize(("times", "is_out"), [(1000.0, True), (10.0, True), (2.0, False), (0.001, False)])
def test_within_a_merge_the_others_are_the_measure(count, times, is_out):
    pushes = rounds_of(2, 1, steps=[16] * NODES)[0][:count]
    pushes[1] = push(1, times * 0.6)
    assert outliers(pushes, SCREEN) == tuple(i == 1 and is_out for i in range(count))


def test_three_pushes_cannot_be_told_apart():
    assert outliers([push(0, 1.0), push(1, 1.0), push(2, 1e6)], SCREEN) == (False,) * 3
    assert outliers([push(n, 0.0) for n in range(4)], SCREEN) == (False,) * 4


def merge_of(common, count, seed=0, numel=9000):
    rng = np.random.default_rng(seed)
    shared = rng.normal(size=numel)
    return [common * shared + rng.normal(size=numel) for _ in range(count)]


def away(vectors, weights=None, config=SCREEN, unit=UNIT):
    weights = weights or [1.0] * len(vectors)
    pushes = [push(n, float(np.linalg.norm(x)), values=x) for n, x in enumerate(vectors)]
    parts = [(one, MergePart(one.node, 1, w)) for one, w in zip(pushes, weights, strict=True)]
    return directions(parts, unit, config)


@pytest.mark.parametrize("count", [4, 8])
@pytest.mark.parametrize("common", [0.3, 1.0])
def test_a_push_with_its_sign_flipped_points_away(count, common):
    vectors = merge_of(common, count)
    assert away(vectors) == (False,) * count
    vectors[2] = -10 * vectors[2]
    assert away(vectors) == tuple(i == 2 for i in range(count))


def test_nodes_with_nothing_in_common_do_not_point_away():
    assert not any(any(away(merge_of(0.0, 4, seed))) for seed in range(50))


def test_nodes_of_two_kinds_that_pull_against_each_other_are_all_believed():
    for seed in range(20):
        ours, theirs = merge_of(0.6, 2, seed), merge_of(0.6, 2, seed)
        assert not any(away([*ours, *(-x + 0.1 * y for x, y in zip(theirs, ours, strict=True))]))


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_liars_who_agree_with_each_other_are_found_by_the_majority(liars):
    honest = merge_of(1.0, 8 - liars)
    lies = [-np.mean(honest, axis=0)] * liars
    assert away([*honest, *lies]) == (False,) * (8 - liars) + (True,) * liars


def test_two_camps_of_equal_size_are_both_kept():
    ours = merge_of(3.0, 4)
    assert away([*ours, *(-x for x in ours)]) == (False,) * 8


def test_directions_need_four_with_weight_and_may_be_ignored():
    vectors = merge_of(1.0, 4)
    vectors[2] = -vectors[2]
    assert away(vectors[:3]) == (False,) * 3
    assert away(vectors, [1.0, 0.0, 1.0, 1.0]) == (False,) * 4
    assert away(vectors, config=PushFilterConfig(cosine=False)) == (False,) * 4
    nans = [*vectors, np.full(9000, np.nan)]
    assert away(nans, [1.0] * 4 + [0.0]) == (False, False, True, False, False)


def test_a_large_unit_is_compared_on_a_sample():
    numel = 3_000_000
    vectors = merge_of(1.0, 4, numel=numel)
    vectors[0] *= -1
    assert away(vectors, unit=UnitLayout("u", (TensorLayout("m", (numel,)),))) == (True, False, False, False)


def test_a_push_of_zeros_points_nowhere():
    assert away([*merge_of(1.0, 4), np.zeros(9000)]) == (False,) * 5


def test_a_history_survives_as_json():
    history = seen(one for pushes in rounds_of(0, 3) for one in pushes).with_refusal(2)
    assert SizeHistory.of(json.loads(json.dumps(history.numbers()))) == history
    assert SizeHistory.of(json.loads(json.dumps(SizeHistory().numbers()))) == SizeHistory()


def test_sizes_far_beyond_what_floats_hold_are_judged_all_the_same():
    history = seen(push(n, 1e-300) for n in range(4))
    assert judge_push(push(0, 1e300), history, SCREEN) is not None
    assert shortening(push(0, 1e-300), seen(push(n, 1e300) for n in range(4)), SCREEN) == 1
    assert log_size(push(0, 0.0)) == -math.inf


def test_in_tiny_rl_a_rare_step_with_signal_is_no_violation_and_counts_as_two_usual_ones():
    rule = load([Path(__file__).parents[1] / "configs" / "tiny-rl.toml"], []).config.hub.push_filter
    history = seen([push(0, 0.02) for _ in range(20)])
    rare, broken = push(0, 40 * 0.02), push(0, 1e8 * 0.02)
    assert judge_push(rare, history, SCREEN) is not None
    assert judge_push(rare, history, rule) is None
    assert shortening(rare, history, rule) * 40 == pytest.approx(2.0)
    assert judge_push(broken, history, rule) is not None
