"""Tests the history that a hub keeps in memory: small, but covering all of the run."""

import json
import math

import pytest

from aedit.launch.hub.leading import MOST_LINE_BYTES, MetricBuffer
from aedit.proto.rpc import MESSAGE_BYTES


def filled(num_lines, most_bytes=1000):
    lines = MetricBuffer(most_bytes)
    for i in range(num_lines):
        lines.add({"i": i})
    return lines


def test_lines_of_a_long_run_take_bounded_memory_and_still_span_it():
    lines = filled(10_000)
    kept = [json.loads(line)["i"] for line in lines.after(0)]
    assert sum(len(json.dumps({"i": i})) for i in kept) <= 1000
    assert len(kept) > 30
    assert kept[-1] == 9_999
    assert kept[:3] == [0, kept[1], 2 * kept[1]]
    assert kept[:-1] == list(range(0, 10_000, kept[1]))[: len(kept) - 1]
    assert lines.count == 10_000


def test_who_asks_again_gets_what_is_new():
    lines = filled(5)
    assert [json.loads(line)["i"] for line in lines.after(3)] == [3, 4]
    assert lines.after(lines.count) == []
    assert lines.after(2**62) == []


def test_a_line_that_is_too_long_is_kept_until_the_next_one():
    lines = MetricBuffer(10)
    lines.add({"i": "x" * 100})
    assert len(lines.after(0)) == 1
    lines.add({"i": 1})
    assert lines.after(0) == ['{"i": 1}']


def test_all_lines_and_as_many_bytes_again_fit_into_one_message():
    assert 2 * MOST_LINE_BYTES <= MESSAGE_BYTES


def test_a_line_has_no_number_that_json_has_not():
    lines = MetricBuffer()
    lines.add({"loss": math.nan, "norms": [1.0, math.inf]})
    assert json.loads(lines.after(0)[0], parse_constant=pytest.fail) == {"loss": None, "norms": [1.0, None]}
