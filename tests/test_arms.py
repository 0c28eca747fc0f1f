"""Tests the fixed arms of a step, and what a chooser knows before and after the step."""

import pytest
import torch

from aedit.spec_rollout.choose import EngineView, Fixed, bucket
from aedit.spec_rollout.drafters import OFF, Draft, parse_arm
from aedit.spec_rollout.engine.verification import truncate_draft, verified_nodes

VIEW = EngineView(rows=4, context=100, versions={"layer": 3})


def draft(*, rows=1, nodes=4, counts=None):
    tokens = torch.zeros(rows, nodes, dtype=torch.int64)
    return Draft(tokens, None, None if counts is None else torch.tensor(counts), torch.zeros(rows, nodes))


def test_a_fixed_arm_is_always_the_same():
    chooser = Fixed.of("layer:4")
    assert chooser.choose(VIEW) == parse_arm("layer:4")
    assert chooser.trim(VIEW, parse_arm("layer:4"), draft()) == 4


def test_nodes_that_no_row_has_are_not_verified():
    chooser = Fixed.of("suffix:4")
    assert chooser.trim(VIEW, chooser.arm, draft(rows=2, counts=[1, 3])) == [1, 3]
    assert chooser.trim(VIEW, chooser.arm, draft(rows=2, counts=[0, 0])) == [0, 0]


def test_a_draft_is_cut_to_what_is_kept_of_each_row_and_what_is_real():
    whole = draft(rows=3, counts=[4, 1, 2])
    assert verified_nodes(truncate_draft(whole, 4, 9)) == (4, 1, 2)
    assert verified_nodes(truncate_draft(whole, [3, 4, 0], 9)) == (3, 1, 0)
    assert verified_nodes(truncate_draft(whole, [3, 4, 0], 2)) == (2, 1, 0)
    assert verified_nodes(truncate_draft(draft(rows=3), [3, 9, 0], 9)) == (3, 4, 0)
    assert truncate_draft(draft(rows=3), [3, 2, 1], 9).tokens_BN.shape == (3, 3)
    assert truncate_draft(whole, [0, 0, 0], 9) is None


def test_without_its_drafter_a_fixed_arm_is_off():
    assert Fixed.of("suffix:4").choose(VIEW) == OFF
    assert Fixed.of("off").choose(VIEW) == OFF


def test_an_arm_that_is_none_is_refused():
    with pytest.raises(ValueError, match="'layer:x'"):
        Fixed.of("layer:x")


@pytest.mark.parametrize(
    ("rows", "first"), [(1, 1), (2, 2), (4, 2), (5, 5), (8, 5), (9, 9), (16, 9), (17, 17), (32, 17), (33, 33)]
)
def test_rows_belong_to_buckets(rows, first):
    assert bucket(rows) == first
