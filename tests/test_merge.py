"""Tests the merge of pseudo-gradients: against float64, in any order, and without those of weight zero."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aedit.async_sgd.rules import MergePart, Push, merge, norm
from aedit.async_sgd.rules.merge_rules import GRAIN, SLICE
from aedit.types import TensorLayout, UnitLayout

SMALL = UnitLayout("u", (TensorLayout("m", (3, 4)), TensorLayout("b", (5,)), TensorLayout("s", ())))
LARGE = UnitLayout(
    "u",
    (
        TensorLayout("b", (7,)),
        TensorLayout("m", (300, 401)),
        TensorLayout("n", (401,)),
        TensorLayout("o", (2, 50, 3)),
    ),
)
RULES = ["mean", "rda", "trimmed", "median", "geometric-median", "multi-krum", "centered-clip"]


class Held:
    """Values that allow only the reads that `Values` permits."""

    def __init__(self, array):
        self.array = array

    def read(self, start, stop):
        assert start % GRAIN == 0
        assert stop % GRAIN == 0 or stop == len(self.array)
        assert 0 <= start < stop <= len(self.array)
        assert stop - start <= SLICE
        return self.array[start:stop].copy()


def pieces(layout, x):
    return np.split(np.asarray(x, np.float64), np.cumsum([t.numel for t in layout.tensors])[:-1])


def push(node, x, layout):
    norms = tuple(float(np.sqrt((piece**2).sum())) for piece in pieces(layout, np.asarray(x, np.float32)))
    values = Held(np.asarray(x, np.float32))
    return Push(node=node, unit=0, seq=1, base=1, steps=4, tokens=40, values=values, norms=norms)


def pairs(layout, xs, weights, scales=None):
    scales = scales or [1.0] * len(xs)
    return [
        (push(i, x, layout), MergePart(i, 1, w, s))
        for i, (x, w, s) in enumerate(zip(xs, weights, scales, strict=True))
    ]


def vectors(layout, count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=layout.numel) * 10 ** rng.uniform(-3, 1) for _ in range(count)]


def mean_by_hand(xs, w, s):
    return sum(a * b * x for a, b, x in zip(w, s, xs, strict=True)) / sum(w)


def rda_by_hand(layout, xs, w, s):
    mean = pieces(layout, mean_by_hand(xs, w, s))
    columns = list(zip(*(pieces(layout, x) for x in xs), strict=True))
    found = []
    for tensor, plain, vs in zip(layout.tensors, mean, columns, strict=True):
        if len(tensor.shape) < 2:
            found.append(plain)
            continue
        lengths = [np.sqrt((v**2).sum()) for v in vs]
        cosines = [
            (w[i] * w[j], vs[i] @ vs[j] / lengths[i] / lengths[j])
            for i in range(len(vs))
            for j in range(len(vs))
            if i != j
        ]
        total = sum(a for a, _ in cosines)
        if sum(a * c for a, c in cosines) / total <= 2 / np.sqrt(tensor.numel):
            found.append(plain)
            continue
        direction = sum(a * v / n for a, v, n in zip(w, vs, lengths, strict=True))
        length = sum(a * b * n for a, b, n in zip(w, s, lengths, strict=True)) / sum(w)
        found.append(length * direction / np.sqrt((direction**2).sum()))
    return np.concatenate(found)


def trimmed_by_hand(xs, w, s, cut):
    found = []
    for values in zip(*(b * x for b, x in zip(s, xs, strict=True)), strict=True):
        kept = sorted(zip(values, w, strict=True))[cut : len(xs) - cut]
        found.append(sum(v * a for v, a in kept) / sum(a for _, a in kept))
    return np.array(found)


W, S = [1.0, 2.0, 0.5, 3.0], [1.0, 0.5, 1.0, 0.9]


@pytest.mark.parametrize("layout", [SMALL, LARGE])
def test_the_mean_by_hand(layout):
    xs = vectors(layout, 4)
    got = merge(pairs(layout, xs, W, S), layout, "mean")
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, mean_by_hand(xs, W, S), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [SMALL, LARGE])
@pytest.mark.parametrize("common", [0.0, 0.3, 3.0])
def test_mean_norm_times_mean_direction_by_hand(layout, common):
    xs = [x + common * np.abs(x).mean() for x in vectors(layout, 4)]
    got = merge(pairs(layout, xs, W, S), layout, "rda")
    np.testing.assert_allclose(got, rda_by_hand(layout, xs, W, S), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("count", "cut"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2), (8, 2)])
def test_a_trimmed_mean_by_hand(count, cut):
    xs = vectors(SMALL, count)
    w, s = (W * 2)[:count], (S * 2)[:count]
    got = merge(pairs(SMALL, xs, w, s), SMALL, "trimmed")
    np.testing.assert_allclose(got, trimmed_by_hand(xs, w, s, cut), rtol=1e-5, atol=1e-6)


def test_a_trimmed_mean_over_several_slices():
    xs = vectors(LARGE, 4)
    expected = np.sort(np.stack(xs), axis=0)[1:3].mean(0)
    got = merge(pairs(LARGE, xs, [1.0] * 4), LARGE, "trimmed")
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [SMALL, LARGE])
@pytest.mark.parametrize("rule", RULES)
def test_one_push_is_its_own_merge_whatever_it_weighs(layout, rule):
    (x,) = vectors(layout, 1)
    np.testing.assert_allclose(merge(pairs(layout, [x], [0.3]), layout, rule), x, rtol=2e-6)
    if rule != "rda":
        np.testing.assert_array_equal(merge(pairs(layout, [x], [1.0]), layout, rule), x.astype(np.float32))


@pytest.mark.parametrize("rule", RULES)
@settings(deadline=None, max_examples=40)
@given(st.data())
def test_the_order_of_arrival_changes_not_a_bit(rule, data):
    count = data.draw(st.integers(2, 6))
    parts = pairs(SMALL, vectors(SMALL, count), (W * 2)[:count], (S * 2)[:count])
    shuffled = data.draw(st.permutations(parts))
    np.testing.assert_array_equal(merge(shuffled, SMALL, rule), merge(parts, SMALL, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_what_weighs_nothing_leaves_no_trace(rule, bad):
    xs = vectors(LARGE, 4)
    clean = merge(pairs(LARGE, xs, W), LARGE, rule)
    with np.errstate(over="ignore", invalid="ignore"):
        dirty = pairs(LARGE, [*xs, np.full(LARGE.numel, bad)], [*W, 0.0])
    np.testing.assert_array_equal(merge(dirty, LARGE, rule), clean)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=6), st.integers(0, 100))
def test_mean_direction_keeps_the_mean_norm_of_every_matrix_where_directions_agree(weights, seed):
    common = np.random.default_rng(seed + 1).normal(size=SMALL.numel)
    xs = [
        (0.2 * x / np.linalg.norm(x) + common) * np.linalg.norm(x) for x in vectors(SMALL, len(weights), seed)
    ]
    got = pieces(SMALL, merge(pairs(SMALL, xs, weights), SMALL, "rda"))[0]
    lengths = [np.linalg.norm(pieces(SMALL, x)[0]) for x in xs]
    assert np.linalg.norm(got) == pytest.approx(np.average(lengths, weights=weights), rel=1e-4)


def test_directions_that_cancel_fall_back_to_the_mean():
    (x,) = vectors(LARGE, 1)
    got = merge(pairs(LARGE, [x, -3 * x], [1.0, 1.0]), LARGE, "rda")
    np.testing.assert_allclose(got, -x, rtol=1e-5)
    mixed = [x, np.concatenate([*pieces(LARGE, -x)[:2], *pieces(LARGE, x)[2:]])]  # only one matrix cancels
    expected = [*[0 * piece for piece in pieces(LARGE, x)[:2]], *pieces(LARGE, x)[2:]]
    got = merge(pairs(LARGE, mixed, [1.0, 1.0]), LARGE, "rda")
    np.testing.assert_allclose(got, np.concatenate(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_zeros_merge_to_zeros(rule):
    zeros = np.zeros(LARGE.numel)
    assert not merge(pairs(LARGE, [zeros, zeros], [1.0, 1.0]), LARGE, rule).any()
    (x,) = vectors(LARGE, 1)
    assert np.isfinite(merge(pairs(LARGE, [zeros, x, x], [1.0, 1.0, 1.0]), LARGE, rule)).all()


def test_a_merge_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([], SMALL, "mean")
    with pytest.raises(ValueError, match="nothing to merge"):
        merge(pairs(SMALL, vectors(SMALL, 2), [0.0, 0.0]), SMALL, "mean")


def test_norms_are_those_of_double_precision():
    x = np.random.default_rng(1).normal(size=200_000).astype(np.float32)
    assert norm(x) == pytest.approx(float(np.linalg.norm(x.astype(np.float64))), rel=1e-12)
