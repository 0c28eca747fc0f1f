"""Tests the expected acceptance of an arm, estimated from what was accepted of others."""

import numpy as np
import pytest

from aedit.spec_rollout.choose.calibration import Survival
from aedit.spec_rollout.drafters import parse_arm

EIGHT, FOUR, TREE = map(parse_arm, ("layer:8", "layer:4", "layer:4x2x8"))


def lines(*lengths, nodes=8):
    """Return rows with these numbers of accepted nodes."""
    return (np.arange(nodes) < np.array(lengths)[:, None]).astype(float)


def taught(arm, survived, times=200):
    survival = Survival()
    for _ in range(times):
        survival.learn(arm, survived)
    return survival


def test_a_long_chain_tells_what_a_short_one_would_bring():
    survival = taught(EIGHT, lines(0, 2, 6, 8))
    assert survival.expected(EIGHT) == pytest.approx(1 + (0 + 2 + 6 + 8) / 4, rel=0.02)
    assert survival.expected(FOUR) == pytest.approx(1 + (0 + 2 + 4 + 4) / 4, rel=0.02)


def test_nodes_that_were_never_drafted_are_supposed_to_be_as_good_as_the_last():
    survival = taught(parse_arm("layer:2"), lines(2, 2, 1, 0, nodes=2))
    # 3 of 4 first ones, 2 of 3 second ones, and so on as the second.
    path = [0.75 * (2 / 3) ** j for j in range(8)]
    assert survival.expected(EIGHT) == pytest.approx(1 + sum(path), rel=0.02)


def test_a_tree_starts_from_the_chain_of_its_depth_and_soon_has_a_mean_of_its_own():
    survival = taught(FOUR, lines(2, nodes=4))
    assert survival.expected(FOUR) < survival.expected(TREE) < 1.2 * survival.expected(FOUR)
    for _ in range(100):
        survival.learn(TREE, lines(4))
    assert survival.expected(TREE) == pytest.approx(5.0, rel=0.03)
    assert survival.expected(FOUR) == pytest.approx(3.0, rel=0.02), "a tree says nothing of chains"


def test_hope_is_larger_the_less_is_known():
    knows, hardly = taught(EIGHT, lines(2)), taught(EIGHT, lines(2), times=2)
    nothing = Survival()
    assert nothing.expected(EIGHT, optimistic=True) == 9
    extra = [
        each.expected(EIGHT, optimistic=True) - each.expected(EIGHT) for each in (knows, hardly, nothing)
    ]
    assert 0 < extra[0] < 0.3 < extra[1] < extra[2]


def test_what_was_long_ago_weighs_less_than_what_is_new():
    survival = taught(EIGHT, lines(8), times=1000)
    for _ in range(1000):
        survival.learn(EIGHT, lines(0))
    assert survival.expected(EIGHT) < 1.2


def test_rows_that_are_learnt_together_fade_as_one_by_one():
    one, other = Survival(), Survival()
    rows = lines(*(n % 9 for n in range(16)))
    for _ in range(40):
        one.learn(EIGHT, rows, steps=16)
        for row in rows:
            other.learn(EIGHT, row[None])
    assert one.num_rows == pytest.approx(other.num_rows, rel=0.1)
    assert one.expected(EIGHT) == pytest.approx(other.expected(EIGHT), rel=0.03)


def test_a_new_version_is_doubted_and_the_same_one_is_not():
    survival = taught(EIGHT, lines(8))
    survival.set_version(3)
    known = survival.num_rows
    survival.set_version(3)
    assert survival.num_rows == known, "the first version that is seen is that of all so far"
    survival.set_version(4)
    assert 0.05 * known < survival.num_rows < 0.2 * known
    for _ in range(30):
        survival.learn(EIGHT, lines(0))
    assert survival.expected(EIGHT) < 3
    unannounced = taught(EIGHT, lines(8))
    for _ in range(30):
        unannounced.learn(EIGHT, lines(0))
    assert unannounced.expected(EIGHT) > 5


def test_at_rest_trust_fades_and_the_estimate_stays():
    survival = taught(EIGHT, lines(2))
    known, expected = survival.num_rows, survival.expected(EIGHT)
    survival.decay_idle(3000)
    assert survival.num_rows == pytest.approx(known / np.e)
    assert survival.expected(EIGHT) == pytest.approx(expected, rel=0.05)
    survival.decay_idle(100_000)
    assert survival.expected(EIGHT, optimistic=True) == pytest.approx(9, rel=0.01)
