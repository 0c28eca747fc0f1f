"""Tests reading rows of unequal length in pieces: each row as far as needed, no piece without use."""

import itertools
import random

import pytest

from aedit.spec_rollout.model.kv_storage import KVExtent, kv_extents


def slots_read(found):
    return sum(reach.num_rows * reach.context for reach in found)


def least_cost(lengths, q, price):
    """Return the lowest cost over all ways to cut."""
    best = None
    for cuts in itertools.product((False, True), repeat=len(lengths) - 1):
        ends = [i for i, cut in enumerate(cuts, 1) if cut]
        pieces = [lengths[a:b] for a, b in zip([0, *ends], [*ends, len(lengths)], strict=True)]
        cost = sum(len(piece) * (max(piece) + q) for piece in pieces) + price * (len(pieces) - 1)
        best = cost if best is None else min(best, cost)
    return best


@pytest.mark.parametrize("seed", range(30))
def test_all_rows_are_looked_at_once_and_far_enough(seed):
    rng = random.Random(seed)
    lengths, q = [rng.randint(0, 400) for _ in range(rng.randint(1, 33))], rng.randint(1, 9)
    found = kv_extents(lengths, q, 64)
    assert [row for r in found for row in range(r.first_row, r.first_row + r.num_rows)] == [
        *range(len(lengths))
    ]
    for reach in found:
        mine = lengths[reach.first_row : reach.first_row + reach.num_rows]
        assert reach.context == max(mine) + q
        assert reach.needs_mask == (q > 1 or len(set(mine)) > 1)


@pytest.mark.parametrize("seed", range(30))
def test_it_is_no_worse_than_one_piece_and_near_the_best_of_all_cuts(seed):
    rng = random.Random(seed)
    lengths = [min(600, int(rng.lognormvariate(4.6, 0.8))) for _ in range(10)]
    found = kv_extents(lengths, 1, 64)
    cost = slots_read(found) + 64 * (len(found) - 1)
    assert cost <= len(lengths) * (max(lengths) + 1)
    assert cost <= 1.15 * least_cost(lengths, 1, 64)


def test_one_long_row_among_short_ones_is_read_apart():
    assert kv_extents([50, 50, 50, 600, 50, 50], 1, 64) == [
        KVExtent(0, 3, 51, needs_mask=False),
        KVExtent(3, 1, 601, needs_mask=False),
        KVExtent(4, 2, 51, needs_mask=False),
    ]


def test_rows_of_like_length_are_one_piece():
    assert kv_extents([100, 110, 105, 108], 3, 64) == [KVExtent(0, 4, 113)]


def test_a_cut_that_spares_too_little_is_not_made():
    assert kv_extents([100, 100, 160, 100], 1, 150) == [KVExtent(0, 4, 161)], "any one cut spares 120"
    assert len(kv_extents([100, 100, 160, 100], 1, 110)) == 2
