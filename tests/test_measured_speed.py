"""Tests of the speed of a server as its trainer measures it, with an injected clock."""

import pytest

from aedit.spec_rollout.remote.session import HOPE_S, MeasuredSpeed


def measured(token_s=0.2, live=4):
    """Return the meter of a server with `live` samples and a token of each every `token_s`, and the time."""
    meter, now_s = MeasuredSpeed(), 0.0
    meter.advance(now_s, live)
    while now_s < 4.0:
        now_s += token_s
        meter.advance(now_s, live, live)
    return meter, now_s


def test_the_speed_is_that_of_the_tokens_that_arrive_whatever_the_server_claims():
    meter, _ = measured()
    assert meter.speed().token_s(4) == pytest.approx(0.2, rel=1e-6)
    meter.claim(1e-6, 0.0)
    assert meter.speed().token_s(4) == pytest.approx(0.2, rel=1e-6)


def test_a_server_that_gets_no_samples_is_taken_as_twice_as_fast_each_time_and_never_as_unknown():
    meter, now_s = measured()
    seen = []
    for _ in range(5):
        meter.advance(now_s, 0)
        seen.append(meter.speed().token_s(4))
        now_s += 0.6 * HOPE_S
    assert seen == pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05], rel=1e-6)


def test_a_server_without_a_measurement_stays_unknown():
    meter = MeasuredSpeed()
    for now_s in (0.0, 2 * HOPE_S, 4 * HOPE_S):
        meter.advance(now_s, 0)
    assert meter.speed() is None
