"""Tests that late pushes weigh less, and from the cutoff on nothing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aedit.async_sgd.rules import StalenessConfig
from aedit.async_sgd.rules.push_weights import staleness_factor

RULES = ["constant", "polynomial", "exponential"]


@pytest.mark.parametrize("rule", RULES)
def test_what_is_not_late_counts_whole(rule):
    assert staleness_factor(StalenessConfig(rule=rule), 0) == 1


def test_the_rules_by_hand():
    polynomial = StalenessConfig(rule="polynomial", power=0.5, cutoff=10)
    assert staleness_factor(polynomial, 3) == 0.5
    assert staleness_factor(StalenessConfig(rule="polynomial", power=1.0), 3) == 0.25
    exponential = StalenessConfig(rule="exponential", rate=0.1, cutoff=10)
    assert staleness_factor(exponential, 5) == pytest.approx(math.exp(-0.5) * 0.5)
    assert staleness_factor(exponential, 9) == pytest.approx(
        math.exp(-0.9) * (1 + math.cos(0.9 * math.pi)) / 2
    )
    assert staleness_factor(StalenessConfig(rule="constant"), 63) == 1


@pytest.mark.parametrize("rule", RULES)
def test_from_the_cutoff_on_nothing_counts(rule):
    config = StalenessConfig(rule=rule, cutoff=8)
    assert staleness_factor(config, 7) > 0
    assert staleness_factor(config, 8) == 0
    assert staleness_factor(config, 1000) == 0


@given(st.sampled_from(RULES), st.integers(1, 100), st.floats(0, 3), st.floats(0, 2), st.integers(0, 120))
def test_later_never_counts_more(rule, cutoff, power, rate, s):
    config = StalenessConfig(rule=rule, cutoff=cutoff, power=power, rate=rate)
    assert 0 <= staleness_factor(config, s + 1) <= staleness_factor(config, s) <= 1
