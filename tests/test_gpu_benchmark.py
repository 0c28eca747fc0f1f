"""Tests the benchmark of one GPU, as far as it runs without one. No test asserts a timing."""

import json
from dataclasses import replace

import pytest
import torch
from benchmarks import gpu
from benchmarks.gpu import report, run_part
from benchmarks.programs import gpu_parts
from benchmarks.programs.gpu_parts import TINY, Job, Length, Row, decode_one, random_model

CPU = torch.device("cpu")
SHORT = Length(prompt=8, new=6, repeats=2, copied_bytes=1 << 20)


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([])
    wanted = "gpu: needs a CUDA device: not run; --device cpu runs the same lines with small sizes\n"
    assert capsys.readouterr().out == wanted


@pytest.fixture(scope="module")
def decoded():
    return decode_one(random_model(TINY, CPU), SHORT)


def test_every_contestant_decodes_and_the_bound_is_all_bytes_over_the_copy_speed(decoded):
    width, inside, vocabulary, head = 64, 96, 257, 32
    attention = width * 4 * head + 2 * head * width + 2 * head  # q and o of two heads, k and v of one, norms
    layer = attention + 3 * width * inside + 2 * width
    assert decoded.parameters == vocabulary * width + 2 * layer + width, "a tied head is read once"
    kv_bytes = (8 + 6 / 2) * 2 * 2 * head * 2
    assert decoded.token_bytes == pytest.approx(2 * decoded.parameters + kv_bytes)
    assert decoded.most == decoded.copy_bytes_per_s / decoded.token_bytes
    assert {name: len(rates) for name, rates in decoded.rates.items()} == dict.fromkeys(
        ["graphs", "graphs again", "no graphs", "graphs, T = 1", "the pass alone"], 2
    )
    assert all(rate > 0 for rates in decoded.rates.values() for rate in rates)


@pytest.mark.parametrize(("share", "passed"), [(0.61, True), (0.59, False)])
def test_the_bar_of_one_row_is_three_fifths_of_the_bound(decoded, share, passed):
    rates = dict.fromkeys(decoded.rates, (share * decoded.most,) * 3)
    rows = {row.what: row for row in replace(decoded, rates=rates).rows()}
    assert rows["decode 1 row, graphs"].passed is passed
    assert rows["decode 1 row, graphs"].beside.startswith(f"{100 * share:.1f} % of {decoded.most:,.0f}/s")
    assert [row.passed for row in rows.values() if row.what != "decode 1 row, graphs"].count(None) == 5
    assert rows["graphs beside graphs"].passed is True


def test_a_missed_bar_and_a_part_that_failed_are_shown_and_a_trial_decides_nothing():
    rows = [Row("a", "1", "b", "2", True), Row("c", "1", "", "2", False), Row("edit", "failed", "no memory")]
    found = report(rows, "cpu", quick=False)
    assert [row[-1] for row in found.rows] == ["PASS", "MISS", ""]
    assert [(bar.text, bar.passed) for bar in found.bars] == [
        ("1 of 2 bars", False),
        ("edit did not come to its end", False),
    ]
    assert [row[-1] for row in report(rows[:2], "cpu", quick=True).rows] == ["", ""]
    assert report(rows[:2], "cpu", quick=True).bars == ()


def test_a_part_that_fails_and_one_that_is_ended_have_a_row_with_the_reason(tmp_path):
    job = Job(part="none", device="cpu", small=True, root=str(tmp_path))
    (row,) = run_part(job, 100.0)
    assert (row.what, row.value, row.beside) == ("none", "failed", "KeyError: 'none'")
    (row,) = run_part(replace(job, part="device"), 0.1)
    assert (row.what, row.value, row.beside) == ("device", "failed", "ended after 0 s")


def test_a_part_without_time_is_not_begun(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "run_part", lambda job, limit_s: [Row(job.part, "run")])
    job = Job(part="", root=str(tmp_path))
    assert [row.value for row in gpu.measure(job, ["device", "decode"], 0.1)] == ["not run"] * 2
    assert [row.value for row in gpu.measure(job, ["device", "vllm"], 5.0)] == ["run"] * 2


@pytest.mark.parametrize("part", ["device", "edit"])
def test_a_part_runs_on_a_cpu(part):
    rows = list(gpu_parts.PARTS[part](Job(part=part, device="cpu", small=True)))
    assert len(rows) >= 3
    assert all(row.figure is None or row.figure > 0 for row in rows)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_of_it_runs_to_its_end_on_a_cpu(tmp_path, capsys):
    words = ["--device", "cpu", "--minutes", "8", "--root", str(tmp_path), "--json", str(tmp_path / "found")]
    gpu.main([*words, *(f"--only={part}" for part in gpu_parts.PARTS if part != "vllm")])
    rows = json.loads((tmp_path / "found").read_text())["figures"]["rows"]
    assert not [row for row in rows if row["value"].startswith("failed")], rows
    names = " ".join(row["what"] for row in rows)
    for name in (
        "copy within",
        "decode 1 row",
        "16 x 4",
        "prefill 2 x 9",
        "EDiT, a step",
        "window",
        "3 rows",
    ):
        assert name in names
    assert "no figure means anything" in capsys.readouterr().out
