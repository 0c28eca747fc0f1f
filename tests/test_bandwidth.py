"""Tests the arithmetic of the bandwidth benchmark; tests/test_benchmarks.py tests the network itself."""

import numpy as np
import pytest
from benchmarks import bandwidth
from benchmarks.bandwidth import CoarsePushes, HubRow, Way, coarse, cost_of, long_way
from benchmarks.kit.netns import Place
from benchmarks.programs.bandwidth_node import HubSeen, Traffic

from aedit.async_sgd.rules import ArrayValues, Push
from aedit.proto.codecs import codec


def seen(before=(0, 0), after=(0, 0), pushed=1, waited_s=0.0):
    traffic = {"before": Traffic(*before), "after": Traffic(*after)}
    return HubSeen(wall_s=10.0, waited_s=waited_s, params=100, params_pushed=pushed, refused=0, **traffic)


def test_bytes_per_parameter_are_those_of_all_interfaces_over_all_pushes():
    places = [Place("a", "x", "1"), Place("b", "x", "2")]
    both = [seen((10, 20), (110, 220), pushed=100), seen((5, 5), (55, 155), pushed=200)]
    up, down = bandwidth._per_param(places, both)
    assert (up, down) == (150 / 300, 350 / 300)


def test_an_interface_that_nodes_share_is_counted_once():
    here = Place("a", "x", "1")
    both = [seen((10, 20), (100, 200), pushed=100), seen((15, 10), (110, 190), pushed=100)]
    assert bandwidth._per_param([here, here], both) == (100 / 200, 190 / 200)


def test_a_wire_is_enough_if_a_round_of_all_nodes_fits_into_the_interval():
    row = HubRow(Way(10), "e3m0", seen(waited_s=1.0), 2.0, wire_s=1.9, lost=0.0, up=0.5, down=0.5, refused=0)
    assert row.fits
    assert row.stall == 0.1


def test_ways_are_told_apart_by_name():
    ways = [Way(10), long_way(0.04), long_way(0.08), long_way(0.04, loss=0.005)]
    assert [way.name for way in ways] == ["10", "100, 40 ms", "100, 80 ms", "100, 40 ms, 0.5 % lost"]


def push(values, seq=1):
    held = ArrayValues(np.asarray(values, np.float32))
    return Push(node=0, unit=0, seq=seq, base=1, steps=1, tokens=1, values=held, norms=(1.0,))


def test_what_a_coarse_push_leaves_out_travels_with_later_ones():
    rng = np.random.default_rng(0)
    node = CoarsePushes("e3m0")
    given = [rng.standard_normal(1000).astype(np.float32) for _ in range(20)]
    arrived = [node(push(x, seq)).values.array for seq, x in enumerate(given, 1)]
    one_step = np.abs(arrived[0] - given[0]).max()
    assert one_step > 0.05  # it is coarse
    off = np.abs(np.sum(arrived, 0, dtype=np.float64) - np.sum(given, 0, dtype=np.float64)).max()
    assert off < 2 * one_step  # and does not add up


def test_a_codec_without_memory_arrives_as_it_decodes():
    x = np.linspace(-1, 1, 300, dtype=np.float32)
    coder = codec("int8")
    expected = coder.decode(coder.encode(x), x.size, 0, x.size)
    assert np.array_equal(CoarsePushes("int8")(push(x)).values.array, expected)


def test_exact_pushes_are_left_alone_and_nodes_share_no_memory():
    assert coarse(3, "fp32") == {}
    nodes = coarse(3, "e3m0")
    assert len({id(node.residuals) for node in nodes.values()}) == 3


def test_the_cost_is_a_share_of_the_loss_of_fp32():
    assert cost_of({"fp32": [2.0, 4.0], "e3m0": [2.1, 4.2]}, "e3m0") == pytest.approx(0.05)


def test_a_codec_is_compared_with_fp32_under_the_same_outer_optimizer_seed_by_seed():
    losses = {bandwidth.EXACT: (2.0, 4.0), bandwidth.BOTH: (2.2, 4.0), bandwidth.CASES[0]: (1.0, 1.0)}
    rows = {case: [bandwidth.Found(loss, 0) for loss in each] for case, each in losses.items()}
    assert bandwidth.costs_above_fp32(rows, bandwidth.BOTH) == pytest.approx([0.1, 0.0])
