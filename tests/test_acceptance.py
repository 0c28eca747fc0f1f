"""Tests the expected acceptance of an arm, estimated from what was accepted of others."""

import numpy as np
import pytest

from aedit.spec_rollout.choose.table import Acceptance
from aedit.spec_rollout.drafters import parse_arm

EIGHT, FOUR, TREE = map(parse_arm, ("layer:8", "layer:4", "layer:4x2x8"))


def lines(*lengths, nodes=8):
    """Return rows with these numbers of accepted nodes."""
    return (np.arange(nodes) < np.array(lengths)[:, None]).astype(float)


def count(acceptance, arm, survived, steps=1):
    acceptance.count(arm, len(survived), survived.sum(axis=0).tolist(), steps)


def taught(arm, survived, times=200):
    acceptance = Acceptance()
    for _ in range(times):
        count(acceptance, arm, survived)
    return acceptance


def test_a_long_chain_tells_what_a_short_one_would_bring():
    acceptance = taught(EIGHT, lines(0, 2, 6, 8))
    assert acceptance.expected(EIGHT) == pytest.approx(1 + (0 + 2 + 6 + 8) / 4, rel=0.02)
    assert acceptance.expected(FOUR) == pytest.approx(1 + (0 + 2 + 4 + 4) / 4, rel=0.02)


def test_nodes_that_were_never_drafted_are_supposed_to_be_as_good_as_the_last():
    acceptance = taught(parse_arm("layer:2"), lines(2, 2, 1, 0, nodes=2))
    # 3 of 4 first ones, 2 of 3 second ones, and so on as the second.
    path = [0.75 * (2 / 3) ** j for j in range(8)]
    assert acceptance.expected(EIGHT) == pytest.approx(1 + sum(path), rel=0.02)


def test_a_tree_starts_from_the_chain_of_its_depth_and_soon_has_a_mean_of_its_own():
    acceptance = taught(FOUR, lines(2, nodes=4))
    assert acceptance.expected(FOUR) < acceptance.expected(TREE) < 1.2 * acceptance.expected(FOUR)
    for _ in range(100):
        count(acceptance, TREE, lines(4))
    assert acceptance.expected(TREE) == pytest.approx(5.0, rel=0.03)
    assert acceptance.expected(FOUR) == pytest.approx(3.0, rel=0.02), "a tree says nothing of chains"


def test_hope_is_larger_the_less_is_known():
    knows, hardly = taught(EIGHT, lines(2)), taught(EIGHT, lines(2), times=2)
    nothing = Acceptance()
    assert nothing.expected(EIGHT, optimistic=True) == 9
    extra = [
        each.expected(EIGHT, optimistic=True) - each.expected(EIGHT) for each in (knows, hardly, nothing)
    ]
    assert 0 < extra[0] < 0.3 < extra[1] < extra[2]


def test_what_was_long_ago_weighs_less_than_what_is_new():
    acceptance = taught(EIGHT, lines(8), times=1000)
    for _ in range(1000):
        count(acceptance, EIGHT, lines(0))
    assert acceptance.expected(EIGHT) < 1.2


def test_each_fourth_draft_gives_the_estimate_of_all_drafts_and_fades_as_fast():
    every, fourth = Acceptance(), Acceptance()
    rows = lines(*(n % 9 for n in range(16)))
    for step in range(200):
        count(every, EIGHT, rows)
        if step % 4 == 0:
            count(fourth, EIGHT, rows, steps=4)
    assert fourth.expected(EIGHT) == pytest.approx(every.expected(EIGHT), rel=0.03)
    for step in range(40):
        count(every, EIGHT, 0 * rows)
        if step % 4 == 0:
            count(fourth, EIGHT, 0 * rows, steps=4)
    assert fourth.expected(EIGHT) == pytest.approx(every.expected(EIGHT), rel=0.06)


def test_a_new_version_is_doubted_and_the_same_one_is_not():
    acceptance = taught(EIGHT, lines(8))
    acceptance.begin_step(3, 0, is_off=True)
    known = acceptance.num_rows
    acceptance.begin_step(3, 1, is_off=True)
    assert acceptance.num_rows == known, "the first version that is seen is that of all so far"
    acceptance.begin_step(4, 2, is_off=True)
    assert 0.05 * known < acceptance.num_rows < 0.2 * known
    for _ in range(30):
        count(acceptance, EIGHT, lines(0))
    assert acceptance.expected(EIGHT) < 3
    unannounced = taught(EIGHT, lines(8))
    for _ in range(30):
        count(unannounced, EIGHT, lines(0))
    assert unannounced.expected(EIGHT) > 5


def test_at_rest_all_is_forgotten_each_time_after_twice_as_many_steps():
    acceptance, forgotten = taught(EIGHT, lines(2)), []
    acceptance.last_used, acceptance.last_gain = 30, 10
    for step in range(31, 3000):
        count(acceptance, EIGHT, lines(2))
        acceptance.begin_step(0, step, is_off=True)
        if not acceptance.num_rows:
            forgotten.append(step)
            assert acceptance.expected(EIGHT, optimistic=True) == 9
    assert forgotten == [94, 178, 346, 682, 1354, 2698]
