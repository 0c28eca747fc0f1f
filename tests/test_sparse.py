"""Tests the simulated rounds of `benchmarks.sparse`: what travels, is averaged, and stays at a node."""

import argparse

import numpy as np
import pytest
from benchmarks import sparse
from benchmarks.sparse import AVERAGE, NESTEROV, RECIPES, Exchange, Recipe, Wire, payload_bytes, published

NUMELS = (5000, 300, 4096)
TOTAL = sum(NUMELS)


def some(seed, spread=1.0, numel=TOTAL):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(numel) * np.exp(spread * rng.standard_normal(numel)) * 1e-2).astype(
        np.float32
    )


def test_the_published_compression_keeps_the_64_largest_of_each_chunk_as_means_of_two_groups():
    x = some(0)
    found = published(x)
    for start in range(0, x.size, 4096):
        chunk = np.pad(x[start : start + 4096].astype(np.float64), (0, max(0, start + 4096 - x.size)))
        largest = sorted(range(4096), key=lambda i: -abs(chunk[i]))[:64]
        size = np.abs(chunk[largest])
        low, high = size[size <= size.mean()].mean(), size[size > size.mean()].mean()
        expected = np.zeros(4096)
        expected[largest] = np.sign(chunk[largest]) * np.where(size > size.mean(), high, low)
        part = found[start : start + 4096]
        np.testing.assert_allclose(part, expected[: part.size], rtol=1e-5)


@pytest.mark.parametrize("name", ["e3m0", "ternary", "topk", sparse.PUBLISHED])
def test_all_that_arrived_and_what_is_kept_is_all_that_was_given(name):
    wire, given = Wire(name, TOTAL, 1.0), np.zeros(TOTAL)
    arrived = np.zeros(TOTAL)
    for i in range(5):
        given += some(i)
        arrived += wire(some(i))
    np.testing.assert_allclose(arrived + wire.residual, given, atol=1e-5)
    assert np.abs(wire.residual).max() > 1e-3


def test_error_that_decays_is_forgotten_by_a_share_each_round():
    wire = Wire("ternary", 512, 0.95)
    wire.residual[:] = owed = some(1, numel=512)
    arrived = wire(some(2, numel=512))
    np.testing.assert_allclose(arrived + wire.residual, 0.95 * owed + some(2, numel=512), atol=1e-6)


def test_a_round_of_fp32_is_the_outer_step_with_the_mean_and_moves_its_units_only():
    first, local_N = some(0), [some(1), some(2), some(3)]
    exchange = Exchange(Recipe(name="x", outer=NESTEROV, parts=3), NUMELS, 3, first)
    before = [local.copy() for local in local_N]
    exchange.round(local_N, [1])
    at = slice(5000, 5300)
    D = first[at].astype(np.float64) - np.mean([local[at] for local in before], axis=0)
    expected = first.astype(np.float64)
    expected[at] -= 0.7 * (D + 0.9 * D)
    np.testing.assert_allclose(exchange.held, expected, atol=1e-7)
    for local, was in zip(local_N, before, strict=True):
        np.testing.assert_array_equal(local[at], exchange.held[at])
        np.testing.assert_array_equal(np.delete(local, np.r_[at]), np.delete(was, np.r_[at]))


def test_an_element_is_averaged_over_its_senders_only_where_the_recipe_says_so():
    local_N = [np.zeros(4096, np.float32) for _ in range(2)]
    local_N[0][7], local_N[1][9] = 1.0, 3.0
    for senders, share in ((True, 1.0), (False, 0.5)):
        recipe = Recipe(name="x", up=sparse.PUBLISHED, outer=AVERAGE, senders=senders)
        exchange = Exchange(recipe, (4096,), 2, np.zeros(4096, np.float32))
        exchange.round([local.copy() for local in local_N], [0])
        assert exchange.held[[7, 9]] == pytest.approx([share, 3 * share])


def test_nodes_come_to_one_model_when_nothing_is_trained_any_more():
    local_N = [some(1), some(2)]
    mean = np.mean(local_N, axis=0, dtype=np.float64)
    recipe = Recipe(name="x", up="ternary", down="ternary", outer=AVERAGE)
    exchange = Exchange(recipe, NUMELS, 2, some(0))
    for _ in range(40):
        exchange.round(local_N, range(3))
    assert np.linalg.norm(exchange.held - mean) < 0.05 * np.linalg.norm(mean)


def test_bytes_are_per_parameter_and_round():
    by_name = {recipe.name: payload_bytes(recipe, [10**6, 10**6]) for recipe in RECIPES}
    assert by_name["DiLoCo"] == (4.0, 4.0)
    assert by_name["top-k"] == pytest.approx((0.0498, 0.0498), abs=1e-4)
    assert by_name["ternary, 7 fragments"] == pytest.approx((0.2080 / 7, 0.2080 / 7), abs=1e-5)
    assert max(by_name["ternary, 7 fragments"]) < 0.03


def test_the_benchmark_prints_a_row_per_recipe(capsys):
    parser = argparse.ArgumentParser()
    sparse._options(parser)
    args = parser.parse_args(["--recipes", "1", "8"])
    args.quick = True
    report = sparse.measure(args)
    assert [row[0] for row in report.rows] == ["DiLoCo", "ternary, 7 fragments"]
    assert report.rows[0][-1] == "+0.00"
    assert capsys.readouterr().out.count("seed 0") == 2
