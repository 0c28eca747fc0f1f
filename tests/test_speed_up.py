"""Tests the speed-up over plain decoding against simulated steps whose plain times are known."""

import random

import pytest

from aedit.spec_rollout.engine.meters import SpeedUp


def ratio(figures):
    return figures["as_plain_s"] / figures["compared_s"]


def plain_s(rows):
    """Return the time of a plain step."""
    return 0.01 + 0.001 * rows


def test_a_batch_with_plain_steps_at_many_rows_and_drafts_at_few_has_the_speed_up_of_its_drafts():
    draw, meter, total_s, as_plain_s = random.Random(0), SpeedUp(), 0.0, 0.0
    for _ in range(300):
        rows = draw.choice((1, 2, 64))
        drafts = rows < 64 and draw.random() < 0.9
        tokens = 3 * rows if drafts else rows
        step_s = (1.5 if drafts else 1.0) * plain_s(rows)
        meter.add(rows, tokens, step_s, plain=not drafts)
        total_s, as_plain_s = total_s + step_s, as_plain_s + tokens / rows * plain_s(rows)
    figures = meter.figures()
    assert figures["compared_s"] == pytest.approx(total_s)
    assert figures["as_plain_s"] == pytest.approx(as_plain_s)
    assert figures["as_plain_error_s"] == pytest.approx(0.0, abs=1e-6 * total_s), "all pairs are equal"
    assert ratio(figures) > 1.2


def test_plain_steps_alone_are_as_fast_as_plain_steps():
    meter = SpeedUp()
    for rows in (1, 2, 3, 64, 63, 7):
        meter.add(rows, rows, plain_s(rows), plain=True)
    assert ratio(meter.figures()) == pytest.approx(1)


def test_choosing_and_collecting_make_an_engine_that_never_drafts_slower_than_one_without_drafters():
    meter = SpeedUp()
    for _ in range(10):
        meter.add(4, 4, 0.011, plain=True, overhead_s=0.001)
    assert ratio(meter.figures()) == pytest.approx(10 / 11)


def test_steps_without_a_plain_time_at_as_many_rows_are_left_out():
    meter = SpeedUp()
    meter.add(1, 4, 0.02, plain=False)
    assert meter.figures() == {"compared_s": 0, "as_plain_s": 0, "as_plain_error_s": 0}
    meter.add(64, 64, 0.5, plain=True)
    meter.add(0, 0, 9.0, plain=True)
    assert meter.figures() == {"compared_s": 0.5, "as_plain_s": 0.5, "as_plain_error_s": 0}
    meter.add(1, 1, 0.01, plain=True)
    figures = meter.figures()
    assert figures["compared_s"] == pytest.approx(0.53)
    assert figures["as_plain_s"] == pytest.approx(0.55)


def test_stretches_are_compared_with_their_neighbours_as_the_machine_becomes_slower():
    """Each stretch is twice as fast as plain decoding then; a mean over all plain steps would differ."""
    meter = SpeedUp()
    for slow in (1, 2, 4, 8):
        for _ in range(4):
            meter.add(1, 1, 0.01 * slow, plain=True)
        for _ in range(20 // slow):
            meter.add(1, 4, 0.02 * slow, plain=False)
        for _ in range(4):
            meter.add(1, 1, 0.01 * slow, plain=True)
        meter.add(1, 4, 0.02 * slow, plain=False)
        for _ in range(100):  # the next stretch must not look back so far
            meter.add(1, 1, 0.01 * slow, plain=True)
    drafted_s = sum(0.02 * slow * (20 // slow + 1) for slow in (1, 2, 4, 8))
    plain_steps_s = sum(0.01 * slow * 108 for slow in (1, 2, 4, 8))
    figures = meter.figures()
    assert figures["compared_s"] == pytest.approx(drafted_s + plain_steps_s)
    assert figures["as_plain_s"] == pytest.approx(2 * drafted_s + plain_steps_s, rel=0.06)


def test_the_standard_error_is_that_of_many_runs():
    """The oracle is the spread of the figure over independent runs of the same engine."""

    def run(seed):
        draw, meter = random.Random(seed), SpeedUp()
        for _ in range(30):
            for _ in range(6):
                meter.add(1, 1, draw.uniform(0.008, 0.012), plain=True)
            speed = draw.uniform(1.0, 2.0)
            for _ in range(6):
                meter.add(1, 2, 0.02 / speed, plain=False)
        figures = meter.figures()
        return ratio(figures), figures["as_plain_error_s"] / figures["compared_s"]

    ratios, errors = zip(*map(run, range(300)), strict=True)
    mean = sum(ratios) / len(ratios)
    spread = (sum((each - mean) ** 2 for each in ratios) / len(ratios)) ** 0.5
    assert sum(errors) / len(errors) == pytest.approx(spread, rel=0.25)
