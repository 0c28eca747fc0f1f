"""Tests that the benchmarks run and print their tables and bars. No test asserts a timing."""

import json
import os
import runpy
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from benchmarks import quality, run_cost
from benchmarks.bandwidth import Row
from benchmarks.kit import netns
from benchmarks.kit import tables as table
from benchmarks.kit.paced import Pace, Walk
from benchmarks.kit.small_llama import corpus, llama
from benchmarks.kit.statistics import mean_and_half_width
from benchmarks.overhead import Interval, bootstrap, cost
from benchmarks.programs.gloo_node import Seen
from benchmarks.programs.metered_node import Line, Meter
from benchmarks.quality import BAD_NODE, METHODS, NODES, Setting, held_out_loss, train
from benchmarks.run_cost import Reading
from kit.waiting import until

from aedit.launch.data.order import permutation

ROOT = Path(__file__).parent.parent
SMALL = Setting(steps=12, warmup_steps=4, every=4, hidden_size=32, num_layers=1, held_out=16)


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs `python -m benchmarks.NAME FLAGS` in this process and returns output."""

    def call(name, *flags):
        monkeypatch.setattr(sys, "argv", [name, *flags])
        monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        return capsys.readouterr().out

    return call


def printed_rows(text):
    lines = [line.split("\u2502")[1:-1] for line in text.splitlines() if line.startswith("\u2502")]
    return [[cell.strip() for cell in line] for line in lines]


def test_a_benchmark_is_started_from_the_root_of_the_repository():
    command = [sys.executable, "-m", "benchmarks.soak", "--help"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stderr
    assert "python -m benchmarks.soak" in ended.stdout
    assert "--quick" in ended.stdout
    assert "--json" in ended.stdout


STARTER = """
import time
from benchmarks.kit.processes import in_parallel, start
start("http.server", "--bind=127.0.0.1", "0")
print("started", flush=True)
in_parallel(time.sleep, [(600,), (600,)])
"""


def test_a_benchmark_that_is_ended_leaves_no_process(tmp_path):
    with (tmp_path / "log").open("w") as log:
        benchmark = subprocess.Popen(
            [sys.executable, "-c", STARTER], cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert benchmark.stdout.readline() == "started\n", (tmp_path / "log").read_text()
        parallel = "multiprocessing.spawn"
        children = until(lambda: running(benchmark.pid, "http.server", parallel, parallel), "the workers")
        benchmark.send_signal(signal.SIGTERM)
        benchmark.communicate(timeout=30)
        assert psutil.wait_procs(children, timeout=30)[1] == []
    finally:
        benchmark.kill()
        benchmark.communicate()


def running(parent, *names):
    """Return the children of a process, once there is one whose command line has each of the names."""
    children = psutil.Process(parent).children()
    lines = [" ".join(child.cmdline()) for child in children]
    counts = {name: sum(name in line for line in lines) for name in names}
    return children if all(counts[name] >= names.count(name) for name in names) else []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_prints_what_it_writes_as_json(run, tmp_path):
    file = tmp_path / "straggler.json"
    text = run("straggler", "--quick", "--json", str(file))
    told, lines = json.loads(file.read_text()), text.splitlines()
    assert lines[:2] == told["method"]
    assert lines[2] == told["machine"]
    assert "load" in told["machine"]
    assert printed_rows(text) == told["rows"]
    assert [line for line in lines if line.startswith("too short to tell")] == [
        f"too short to tell: {bar['text']}" for bar in told["bars"]
    ]
    slow = told["figures"]["speeds 1, 1, 1, 0.25"]
    steps = {method: [len(node["ends_s"]) for node in slow[method]["nodes"]] for method in METHODS}
    assert len(set(steps["ddp"])) == len(set(steps["diloco"])) == len(set(steps["edit"])) == 1
    assert steps["a-edit"][3] < min(steps["a-edit"][:3])


def test_a_missed_bar_is_printed_and_is_no_error(monkeypatch, capsys):
    missed = table.Bar("too slow", passed=False)
    report = table.Report("t", ("how", "where"), ("a",), (("1",),), (missed, table.Bar("fine", True)), {})
    monkeypatch.setattr(sys, "argv", ["t"])
    table.main("t", "about", lambda quick: report)
    assert capsys.readouterr().out.splitlines()[-2:] == ["MISS: too slow", "PASS: fine"]


def test_a_wide_table_is_printed_whole_and_written_as_json(monkeypatch, capsys, tmp_path):
    row, columns = tuple(f"{i:04} +- 0.123456789" for i in range(9)), tuple(f"column {i}" for i in range(9))
    report = table.Report("t", ("how", "where"), columns, (row,), (), {"seen": [1]})
    monkeypatch.setattr(sys, "argv", ["t", "--quick", "--json", str(tmp_path / "t.json")])
    table.main("t", "about", lambda quick: report)
    told, text = json.loads((tmp_path / "t.json").read_text()), capsys.readouterr().out
    assert printed_rows(text) == [list(row)] == told["rows"]
    assert text.splitlines()[2] == told["machine"]
    assert (told["quick"], told["figures"]) == (True, {"seen": [1]})


def test_the_overhead_benchmark_runs_plain_and_sharded(run):
    rows = printed_rows(run("overhead", "--quick"))
    assert [row[0] for row in rows] == ["plain module"] * 6 + ["FSDP2, one rank"] * 6


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_memory_benchmark_finds_every_process_of_the_plan(run):
    rows = printed_rows(run("memory", "--quick"))
    names = ["node", "agent", "hub", "worker", "drafter's trainer", "torchrun", "aedit run"]
    assert [row[0] for row in rows] == names
    assert all(int(row[2]) > 20 for row in rows), "MiB of a Python process"


def test_the_quality_benchmark_compares_all_methods(monkeypatch):
    """All runs in this process, which has torch already, and with one round each."""
    monkeypatch.setattr(quality, "in_parallel", lambda call, jobs: [call(*job) for job in jobs])
    monkeypatch.setattr(quality, "QUICK", replace(quality.QUICK, steps=4, held_out=4))
    rows = quality.measure(True).rows
    assert [row[0] for row in rows] == list(METHODS)
    assert rows[0][2] == "+0.00 +- 0.00 %"


def test_the_cost_of_a_round_is_spread_over_its_interval():
    # Made up: a bare step takes 10, a quiet step 10.1, landing 4 more, opening 3 more.
    intervals = [Interval((10.0,) * 6, (14.1, 10.1, 10.1, 10.1, 10.1, 13.1))] * 5
    found = cost(intervals)
    assert found.round_s == pytest.approx(7.0)
    assert found.overhead(16) == pytest.approx((0.1 + 7 / 16) / 10)
    assert bootstrap(intervals, 16) == pytest.approx((found.overhead(16),) * 2)


def test_the_cost_of_a_run_is_all_but_the_training_between_two_readings():
    before = Reading(Line(60, 100.0, 10.0, {"training": 6.0, "rounds": 1.0}), {"hub": 3.0, "agent": 2.0})
    after = Reading(Line(160, 150.0, 35.0, {"training": 26.0, "rounds": 3.0}), {"hub": 4.0, "agent": 4.0})
    found = run_cost.window(before, after)
    assert found.training_s == pytest.approx(20.0 / 100)
    assert found.by_step_s == pytest.approx({"rounds": 2.0 / 100, "other threads": 3.0 / 100})
    assert found.by_clock_s == pytest.approx({"hub": 1.0 / 100, "agent": 2.0 / 100})
    assert found.core_share == pytest.approx(25.0 / 50.0)
    assert found.beyond(with_a_core=False) == pytest.approx((2 + 3 + 1 + 2) / 20)
    assert found.beyond() == pytest.approx((2 + 3 + (1 + 2) / 2) / 20), (
        "half the time for what goes by the clock"
    )


def test_the_time_of_a_part_is_without_that_of_the_parts_that_it_calls():
    now_s = [0.0]

    def works(seconds):
        now_s[0] += seconds

    meter = Meter(lambda: now_s[0])
    inner = meter.part("rounds", works)

    def outer():
        works(1.0)
        inner(2.0)
        works(4.0)
        raise KeyError

    works(8.0)
    with pytest.raises(KeyError):
        meter.part("training", outer)()
    works(16.0)
    assert meter.parts_s() == {"training": 5.0, "rounds": 2.0, "rest": 24.0}


def test_solo_speed_is_that_of_the_very_steps_taken_in_company():
    alone = Walk(wall_s=9.0, waited_s=0.0, ends_s=(1.0, 2.0, 7.0, 8.0), late=0)
    assert alone.speed(2) == 1.0
    assert alone.speed(3) == pytest.approx(3 / 7)
    assert alone.speed(99) == pytest.approx(4 / 8)


def test_random_delays_are_the_same_for_the_same_seed_and_as_frequent_as_said():
    pace = Pace(0.02, chance=0.1, factor=5.0)
    durations_s = pace.durations_s(seed=3, num_steps=20_000)
    assert durations_s == pace.durations_s(seed=3, num_steps=20_000)
    assert durations_s != pace.durations_s(seed=4, num_steps=20_000)
    assert set(durations_s) == {0.02, 0.1}
    assert durations_s.count(0.1) / 20_000 == pytest.approx(0.1, abs=0.01)


def test_the_ddp_baseline_is_plain_training_with_the_joined_batch():
    # Oracle in plain torch: all nodes' samples at once, AdamW, a cosine with a rise of 2 %.
    found = train("ddp", SMALL).loss
    data, size = corpus(SMALL.seq_len), SMALL.batch_size
    model = llama(SMALL.hidden_size, SMALL.num_layers, SMALL.seq_len, SMALL.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    inner = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    order = permutation(len(data.train), SMALL.seed, 0)
    for step in range(SMALL.steps):
        done = step / SMALL.steps
        rising = (done + 1e-3) / 0.021
        falling = 0.1 + 0.45 * (1 + torch.cos(torch.tensor(torch.pi * (done - 0.02) / 0.98)).item())
        for group in groups:
            group["lr"] = SMALL.lr * (rising if done < 0.02 else falling)
        for kept, given in zip(inner.param_groups, groups, strict=True):
            kept["lr"] = given["lr"]
        drawn = order[step * size * NODES : (step + 1) * size * NODES]
        samples = torch.from_numpy(data.train[drawn].astype("int64"))
        logits = model(input_ids=samples[:, :-1]).logits.flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, samples[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        inner.zero_grad()
    assert found == pytest.approx(held_out_loss(model, data, SMALL.held_out), abs=1e-4)


def test_a_run_by_the_clock_has_the_same_bits_twice_and_as_many_tokens_as_the_others():
    setting = replace(SMALL, steps=20)
    first, second, by_steps = train("a-edit", setting), train("a-edit", setting), train("edit", setting)
    assert first == second
    tokens = NODES * setting.steps * setting.batch_size * setting.seq_len
    assert first.tokens == by_steps.tokens == tokens
    assert first.waiting < by_steps.waiting
    # 16 local steps: every 4, and once more to leave. By the clock, 64 steps at up to 3.5 a second last 18.3
    # seconds or a little longer; rounds are due every 16 / 3.5 seconds, noticed at whole ones: every 5.
    assert by_steps.rounds == 16 // 4 + 1
    assert first.rounds == 18 // 5 + 1


def test_bad_data_reaches_one_node_and_changes_the_run():
    assert 0 <= BAD_NODE < NODES
    clean = train("diloco", SMALL)
    bad = train("diloco", replace(SMALL, bad=True))
    assert bad.loss != clean.loss


def test_intervals_are_students_t():
    mean, half = mean_and_half_width([1.0, 2.0, 3.0])
    assert mean == 2.0
    assert half == pytest.approx(4.303 / 3**0.5, rel=1e-3)  # columns of a printed table


def test_a_wire_is_enough_if_it_needs_less_than_the_interval():
    seen = Seen(wall_s=10.0, waited_s=1.0, wire_bytes=0, payload_bytes=0, rounds=1, params=0)
    assert Row(10, "edit", seen, interval_s=2.0, wire_s=1.9, lost=0.0).fits
    assert not Row(10, "edit", seen, interval_s=2.0, wire_s=2.1, lost=0.0).fits
    assert Row(10, "edit", seen, interval_s=2.0, wire_s=2.1, lost=0.0).stall == 0.1


def test_without_root_the_bandwidth_benchmark_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in netns.why_not()


@pytest.mark.net
def test_the_network_is_gone_after_use_also_after_an_error():
    if reason := netns.why_not():
        pytest.skip(reason)

    def namespaces():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10).stdout

    places = []

    def break_down():
        with netns.network(2, 100) as found:
            places.extend(found)
            assert all(place.namespace in namespaces() for place in places)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        break_down()
    assert len(places) == 2
    assert not any(place.namespace in namespaces() for place in places)


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.timeout(300)
def test_the_bandwidth_benchmark_runs_or_says_why_not(run):
    text = run("bandwidth", "--only", "wires", "--quick")
    rows = printed_rows(text)
    hub = ["hub e3m0"] * 2  # over a switch and over a long wire
    assert [row[1] for row in rows] == ["ddp", "edit", "streaming", *hub] or "not run" in text
