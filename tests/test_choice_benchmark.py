"""Tests what `benchmarks.choice` measures: equal work, the best arm in hindsight, bars. No timing decides."""

from dataclasses import replace

from benchmarks import choice
from benchmarks.choice import AGAIN, AUTO, FIXED, OFF, QUICK, Cell


def spent(**others):
    return {name: [1.0, 1.0, 1.0] for name in (OFF, AGAIN, AUTO, *FIXED)} | others


def test_a_cell_compares_auto_with_off_and_with_the_cheapest_fixed_arm():
    times = spent(**{"suffix:4": [0.5, 0.5, 0.6], AUTO: [0.55, 0.5, 0.5]})
    cell = Cell("1m", 8, "repeating", times, 0.01, {"suffix:4": 9})
    assert cell.best == "suffix:4"
    assert cell.speed(AUTO, OFF).middle == 2.0
    assert cell.speed(AUTO, cell.best).middle == 1.0


def test_off_is_the_mean_of_two_equal_engines_whose_ratio_is_shown():
    cell = Cell("1m", 8, "random", spent(**{OFF: [0.9] * 3, AGAIN: [1.1] * 3}), 0.01, {"off": 9})
    assert cell.speed(AUTO, OFF).middle == 1.0
    assert cell.control.middle == 0.9 / 1.1
    report = choice.report([cell], quick=False)
    row = dict(zip(report.columns, report.rows[0], strict=True))
    assert row["off / off"].startswith("0.82")
    assert row[OFF] == "1000000"


def test_the_bars_are_those_of_the_worst_cells():
    good = Cell("1m", 1, "random", spent(), 0.001, {"off": 9})
    slow = Cell("1m", 8, "random", spent(**{AUTO: [1.1] * 3}), 0.03, {"off": 9})
    verdicts = [bar.passed for bar in choice.report([good, slow], quick=False).bars]
    assert verdicts == [False, False, False]
    assert [bar.passed for bar in choice.report([good], quick=False).bars] == [True] * 3
    assert [bar.passed for bar in choice.report([slow], quick=True).bars] == [None] * 3
    assert "8 rows" in choice.report([good, slow], quick=False).bars[0].text


def test_all_contestants_make_the_same_samples(monkeypatch):
    monkeypatch.setitem(choice.SHAPES, "tiny", (32, 32, 64, 2, 16))
    model = choice.sharp_policy("tiny")
    texts = []
    for name in (OFF, AGAIN, AUTO, "suffix:4"):
        racer = choice.contestant(model, 2, name, 0.0)
        assert racer.turn(100) > 0
        texts.append({r.prompt.rollout: tuple(r.tokens[:20]) for r in racer.source.engine.running})
    shared = set.intersection(*map(set, texts))
    assert shared
    assert all(texts[0][key] == text[key] for text in texts for key in shared)


def test_a_short_run_reports_every_cell(monkeypatch):
    monkeypatch.setitem(choice.SHAPES, "tiny", (32, 32, 64, 2, 16))
    plan = replace(
        QUICK, policies=("tiny",), rows=(2,), repeats=2, turn_tokens=4, warm_tokens=8, least_tokens=8
    )
    lines = []
    report = choice.measure(plan, lines.append, quick=True)
    assert [row[:3] for row in report.rows] == [("tiny", "2", "random"), ("tiny", "2", "repeating")]
    assert len(lines) == 2
