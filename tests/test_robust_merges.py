"""Tests merges that a minority of liars cannot move far: each against another way to compute it."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from aedit.async_sgd.inprocess import make_push
from aedit.async_sgd.rules import MergePart, merge
from aedit.async_sgd.rules.merge_rules import centered_clip, geometric_median, multi_krum
from aedit.types import TensorLayout, UnitLayout

SHAPES = {"small": 6, "of two slices": 70_000}
ROBUST = ["trimmed", "median", "geometric-median", "multi-krum", "centered-clip"]


def layout(numel):
    return UnitLayout("u", (TensorLayout("w", (numel,)),))


def merged(xs, rule, weights=None, scales=None, cut=1 / 3):
    """Return what the hub makes of these pushes."""
    numel = len(xs[0])
    weights, scales = weights or [1.0] * len(xs), scales or [1.0] * len(xs)
    parts = []
    for node, (x, weight, scale) in enumerate(zip(xs, weights, scales, strict=True)):
        facts = {"node": node, "unit": 0, "seq": 1, "base": 1, "steps": 4, "tokens": 40}
        parts.append(
            (make_push(x.astype(np.float32), layout(numel), **facts), MergePart(node, 1, weight, scale))
        )
    return merge(parts, layout(numel), rule, cut).astype(np.float64)


def drawn(count, numel, seed=0, common=1.0):
    """Return vectors that have a direction in common, as pushes of one training have."""
    rng = np.random.default_rng(seed)
    return list(common * rng.normal(size=numel) + rng.normal(size=(count, numel)))


def products(xs):
    return np.stack(xs) @ np.stack(xs).T


@pytest.mark.parametrize("numel", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_the_median_of_each_element_is_numpys(count, numel):
    xs = drawn(count, numel)
    np.testing.assert_allclose(merged(xs, "median"), np.median(xs, axis=0), rtol=1e-5, atol=1e-6)
    twice = merged(xs, "median", scales=[2.0] * count)
    np.testing.assert_allclose(twice, 2 * np.median(xs, axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("cut", "dropped"), [(0.0, 0), (0.125, 1), (0.2, 1), (0.25, 2), (0.4, 3), (0.49, 3)])
def test_the_share_that_is_cut_is_that_of_the_configuration_up_to_half(cut, dropped):
    xs = drawn(8, 50)
    expected = np.sort(np.stack(xs), axis=0)[dropped : 8 - dropped].mean(0)
    np.testing.assert_allclose(merged(xs, "trimmed", cut=cut), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_geometric_median_has_the_least_sum_of_distances_by_scipy(seed):
    xs, weights = drawn(7, 6, seed), [1.0, 2.0, 0.5, 1.0, 3.0, 1.0, 1.0]

    def distances(v):
        return sum(w * np.linalg.norm(x - v) for w, x in zip(weights, xs, strict=True))

    best = minimize(distances, np.mean(xs, axis=0), method="BFGS", options={"gtol": 1e-10})
    got = merged(xs, "geometric-median", weights)
    assert distances(got) == pytest.approx(best.fun, rel=1e-4)
    np.testing.assert_allclose(got, best.x, atol=0.05)


def test_the_geometric_median_of_a_line_is_its_median_and_of_equal_pushes_that_push():
    line = [t * np.ones(5) for t in (0.0, 1.0, 2.0, 10.0, 1000.0)]
    np.testing.assert_allclose(merged(line, "geometric-median"), 2.0, atol=0.01)
    np.testing.assert_allclose(merged([line[1]] * 3, "geometric-median"), 1.0, rtol=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("count", "cut", "liars"), [(5, 0.2, 1), (8, 0.125, 1), (8, 0.25, 2), (8, 0.49, 2), (4, 0.3, 0)]
)
def test_multi_krum_is_the_one_of_the_paper_by_enumeration(seed, count, cut, liars):
    xs = drawn(count, 20, seed)

    def score(i):
        others = [j for j in range(count) if j != i]
        sets = combinations(others, max(1, count - liars - 2))
        return min(sum(((xs[i] - xs[j]) ** 2).sum() for j in nearest) for nearest in sets)

    chosen = sorted(range(count), key=score)[: count - liars]
    expected = np.mean([xs[i] for i in chosen], axis=0)
    np.testing.assert_allclose(merged(xs, "multi-krum", cut=cut), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_centered_clipping_is_the_papers_iteration_on_vectors(seed):
    xs, w = [*drawn(6, 9, seed), 50 * np.ones(9)], np.array([1.0, 2.0, 1.0, 0.5, 1.0, 1.0, 1.0])
    v = np.zeros(9)
    for _ in range(3):
        far = [np.linalg.norm(x - v) for x in xs]
        tau = np.median(far)
        v = v + sum(
            share * (x - v) * min(1.0, tau / d) for share, x, d in zip(w / w.sum(), xs, far, strict=True)
        )
    np.testing.assert_allclose(merged(xs, "centered-clip", w.tolist()), v, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ROBUST)
@pytest.mark.parametrize("length", [10.0, 1e4, 1e12])
@pytest.mark.parametrize("liars", [1, 2])
def test_however_long_the_lies_are_the_merge_stays_among_the_honest(rule, length, liars):
    honest = drawn(8 - liars, 400)
    lie = np.random.default_rng(9).normal(size=400)
    lies = [length * lie / np.linalg.norm(lie) * np.linalg.norm(honest[0])] * liars
    mean = np.mean(honest, axis=0)
    spread = max(np.linalg.norm(x - mean) for x in honest)
    got = merged([*honest, *lies], rule)
    assert np.linalg.norm(got - mean) < 1.1 * spread
    plain = merged([*honest, *lies], "mean")
    assert np.linalg.norm(plain - mean) > spread


@pytest.mark.parametrize("rule", ROBUST)
@settings(deadline=None, max_examples=30)
@given(st.integers(1, 9), st.integers(0, 1000), st.floats(0.01, 100.0))
def test_the_merge_of_scaled_and_turned_pushes_is_scaled_and_turned(rule, count, seed, factor):
    xs = drawn(count, 5, seed)
    got = merged(xs, rule)
    np.testing.assert_allclose(
        merged([factor * x for x in xs], rule), factor * got, rtol=1e-3, atol=1e-4 * factor
    )
    np.testing.assert_allclose(merged([-x[::-1] for x in xs], rule), -got[::-1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rule", [geometric_median, multi_krum, centered_clip])
@pytest.mark.parametrize("count", range(1, 10))
def test_what_weighs_nothing_has_no_coefficient_and_zeros_are_no_trouble(rule, count):
    w_N = np.ones(count)
    w_N[count // 2] = 0.0 if count > 1 else 1.0
    found = rule(products(drawn(count, 12)), w_N, count // 3)
    assert found[count // 2] == 0 or count == 1
    assert np.isfinite(found).all()
    assert np.isfinite(rule(np.zeros((count, count)), w_N, count // 3)).all()
