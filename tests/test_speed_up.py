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
    assert ratio(figures) > 1.2


def test_plain_steps_alone_are_as_fast_as_plain_steps():
    meter = SpeedUp()
    for rows in (1, 2, 3, 64, 63, 7):
        meter.add(rows, rows, plain_s(rows), plain=True)
    assert ratio(meter.figures()) == pytest.approx(1)


def test_steps_without_a_plain_time_at_as_many_rows_are_left_out():
    meter = SpeedUp()
    meter.add(1, 4, 0.02, plain=False)
    assert meter.figures() == {"compared_s": 0, "as_plain_s": 0}
    meter.add(64, 64, 0.5, plain=True)
    meter.add(0, 0, 9.0, plain=True)
    assert meter.figures() == {"compared_s": 0.5, "as_plain_s": 0.5}
    meter.add(1, 1, 0.01, plain=True)
    assert meter.figures() == {"compared_s": pytest.approx(0.53), "as_plain_s": pytest.approx(0.55)}
