"""Tests estimates of a sample's remaining length: against enumeration, and without data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.reallocate import (
    EngineLoad,
    LengthDistribution,
    UnfinishedSample,
    batch_drain_s,
)

sizes = st.integers(1, 60)


@given(st.lists(sizes, min_size=1, max_size=20), st.integers(0, 59), st.integers(1, 80))
def test_when_all_have_ended_it_is_the_mean_of_those_that_were_longer(ended, emitted, most):
    most = max(most, emitted)
    longer = [min(length, most) - emitted for length in ended if length > emitted]
    found = LengthDistribution.of(ended).expected_remaining(emitted, most)
    if longer:
        assert found == pytest.approx(np.mean(longer))
    else:
        assert found == min(emitted, most - emitted)


@given(st.lists(sizes, min_size=1, max_size=24), st.integers(0, 59), st.integers(1, 80), st.data())
def test_of_a_part_it_is_the_mean_of_that_part_of_those_that_were_longer(ended, emitted, most, data):
    most = max(most, emitted)
    longer = [min(length, most) - emitted for length in sorted(ended) if length > emitted]
    if not longer:
        return
    num = data.draw(st.sampled_from([num for num in range(1, len(longer) + 1) if len(longer) % num == 0]))
    lengths = LengthDistribution.of(ended)
    found = [lengths.expected_remaining(emitted, most, part=(i / num, (i + 1) / num)) for i in range(num)]
    assert found == pytest.approx([np.mean(part) for part in np.split(np.array(longer), num)])


@given(st.lists(sizes), st.lists(sizes), st.integers(0, 90), st.integers(1, 150), st.integers(1, 9))
def test_parts_ascend_and_their_mean_is_that_of_all(ended, growing, emitted, most, num):
    most, lengths = max(most, emitted), LengthDistribution.of(ended, growing)
    found = [lengths.expected_remaining(emitted, most, part=(i / num, (i + 1) / num)) for i in range(num)]
    assert np.mean(found) == pytest.approx(lengths.expected_remaining(emitted, most))
    assert found == pytest.approx(sorted(found))


@given(st.lists(sizes, min_size=1, max_size=12), st.floats(0.0, 2.0), st.floats(0.0, 2.0))
def test_a_batch_ends_with_its_longest_sample(ended, fixed_s, row_s):
    """The oracle takes the steps of a batch with just the lengths that were seen."""
    samples = tuple(UnfinishedSample((0, i), 9, 0, 100) for i in range(len(ended)))
    load = EngineLoad(samples, len(ended), EngineSpeed(fixed_s, row_s, 0.0))
    rows = [sum(length > step for length in ended) for step in range(max(ended))]
    assert batch_drain_s(load, LengthDistribution.of(ended)) == pytest.approx(
        sum(fixed_s + row_s * live for live in rows)
    )


@given(st.lists(sizes, min_size=1), st.lists(sizes))
def test_the_curve_is_the_product_over_the_ends_of_those_who_lived_on(ended, growing):
    lengths = LengthDistribution.of(ended, growing)
    for length in range(61):
        share = 1.0
        for end in sorted(set(ended)):
            if end <= length:
                at_risk = sum(one >= end for one in ended) + sum(one >= end for one in growing)
                share *= 1 - ended.count(end) / at_risk
        assert lengths._longer(length) == pytest.approx(share)


def test_those_that_are_still_growing_make_all_look_longer():
    ended = [10, 12, 15]
    assert LengthDistribution.of(ended, [80] * 3).expected_remaining(5, 100) > 2 * LengthDistribution.of(
        ended
    ).expected_remaining(5, 100)


def test_beyond_all_that_was_seen_it_is_as_many_again_within_the_limit():
    lengths = LengthDistribution.of([10, 20])
    assert lengths.expected_remaining(50, 1000) == 50
    assert lengths.expected_remaining(50, 60) == 10


def test_as_long_as_none_has_ended_it_is_half_of_what_is_allowed():
    assert (
        LengthDistribution.of([]).expected_remaining(10, 110)
        == LengthDistribution.of([], [3, 10]).expected_remaining(10, 110)
        == 50
    )


def test_samples_that_wait_change_nothing():
    assert LengthDistribution.of([4, 9], [0, 0]).expected_remaining(2, 50) == LengthDistribution.of(
        [4, 9]
    ).expected_remaining(2, 50)


def test_the_estimate_is_right_for_lengths_with_a_long_tail():
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.ceil(rng.lognormal(4, 0.8, 4000)), 1000).astype(int)
    limits = rng.integers(20, 1000, 4000)  # half of them are seen only so far
    lengths_seen = LengthDistribution.of(
        lengths[lengths <= limits].tolist(), limits[lengths > limits].tolist()
    )
    for emitted in (0, 50, 150):
        true = (lengths[lengths > emitted] - emitted).mean()
        assert lengths_seen.expected_remaining(emitted, 1000) == pytest.approx(true, rel=0.1)
