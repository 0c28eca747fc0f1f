"""Tests the views against a run directory written by the test, whose figures are known by arithmetic."""

import io
import json
import math
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import matplotlib.style
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from aedit.launch.records import RunFollower, read_run
from aedit.launch.views import live, plot, report
from aedit.launch.views.figures import held_out, pace, share_of_solo
from aedit.launch.views.panel import Fitted, panel, state
from aedit.launch.views.panel import line as plain_line
from aedit.launch.views.plots import bytes_per_round, loss_by_steps, plot_effective_nodes
from aedit.types import UserError

UNITS = ["layers.0", "layers.1", "layers.2", "rest"]
ALL_PLOTS = {
    "loss_by_steps.png",
    "loss_by_time.png",
    "time_per_node.png",
    "norms.png",
    "bytes_per_round.png",
    "effective_nodes.png",
}


class Writer:
    """Writes one node's files as a node does: one line per record, closed by its newline."""

    def __init__(self, run_dir, index):
        self.dir = run_dir / "nodes" / str(index)
        self.dir.mkdir(parents=True)
        self.index = index

    def event(self, event, t, **fields):
        self._append("events.jsonl", json.dumps({"t": t, "event": event, **fields}) + "\n")

    def start(self, t=0.0, attempt=0, step=0):
        extra = {"resumed_round": None, "pid": 1, "params": 4000, "params_per_unit": [1000] * 4}
        common = {"node": self.index, "nodes": 3, "ranks": 1, "device": "cpu", "units": UNITS}
        self.event("start", t, attempt=attempt, step=step, **common, **extra)

    def metric(self, t, step, **fields):
        line = {
            "t": t,
            "step": step,
            "round": 0,
            "tokens": 100 * step,
            "loss": 2.0,
            "lr": 1e-3,
            "grad_norm": 1.0,
        }
        times = {"busy_s": t, "wait_s": 0.0, "idle_used_s": 0.0, "other_s": 0.0, "progress": t / 100}
        self._append("metrics.jsonl", json.dumps({**line, **times, **fields}) + "\n")

    def round(self, t, id, step, **fields):
        judged = {
            "norms": [0.1 * id] * 4,
            "weights": [0.5] * 4,
            "distrusted": [],
            "effective_nodes": [2.0] * 4,
        }
        rest = {
            "rolled_back": [],
            "nodes": 2,
            "total_steps": 2 * step,
            "steps": 10,
            "wait_s": 0.1,
            "bytes": 16000,
        }
        self.event("round", t, id=id, step=step, **{**judged, **rest, **fields})

    def torn(self, name, text):
        self._append(name, text)

    def _append(self, name, text):
        with (self.dir / name).open("a") as file:
            file.write(text)


def new_run(tmp_path, name="tiny"):
    run_dir = tmp_path / name
    run_dir.mkdir()
    (run_dir / "run.toml").write_text(f'name = "{name}"\n[edit]\nwarmup_steps = 20\n')
    return run_dir


def full_run(tmp_path, seconds=60, num_rounds=12):
    """Write a run of three nodes: node 2 three times slower, node 1 distrusted twice, once for a NaN norm."""
    run_dir = new_run(tmp_path)
    for index, slowdown in enumerate((1, 1, 3)):
        node = Writer(run_dir, index)
        node.start()
        for t in range(1, seconds + 1):
            step = max(1, 10 * t // slowdown)
            wait_s = 0.03 * t * (3 - slowdown)
            loss = 2 + 3.5 * math.exp(-step / 150) + 0.05 * math.sin(7 * t + index)
            spent = {
                "busy_s": 0.93 * t - wait_s,
                "wait_s": wait_s,
                "idle_used_s": wait_s / 3,
                "other_s": 0.07 * t,
            }
            node.metric(t, step, loss=loss, round=t * num_rounds // seconds, progress=t / seconds, **spent)
        for id in range(1, num_rounds + 1):
            t = id * seconds / num_rounds
            step = int(10 * t // slowdown)
            norms = [(4 - unit) * math.exp(-id / 6) * (1 + 0.2 * index) for unit in range(4)]
            distrusted, effective = [], [2.7, 2.8, 2.9, 2.4]
            if index == 1 and id == 6:
                norms[2], distrusted = 30.0, [2]
            if index == 1 and id == 9:
                norms[0], distrusted = None, [0, 3]
                effective[0] = None
            spread = {"norms": norms, "distrusted": distrusted, "effective_nodes": effective, "nodes": 3}
            node.round(t, id, step, **spread, rolled_back=[3] if id == 9 else [])
            node.event("eval", t + 0.2, step=step, round=id, loss=2.05 + 3.4 * math.exp(-10 * t / 170))
            node.event("checkpoint", t + 0.4, step=step, round=id, seconds=0.1, bytes=64000)
        node.event("stop", seconds + 0.5, reason="done", step=step, tokens=100 * step)
    return run_dir


def shown(run_dir, nodes, starting=()):
    console = Console(file=io.StringIO(), width=110)
    console.print(panel(read_run(run_dir), nodes, starting))
    return console.file.getvalue()


def ascii_console(**settings):
    raw = io.BytesIO()
    return Console(
        file=io.TextIOWrapper(raw, encoding="ascii", write_through=True), width=110, **settings
    ), raw


def test_a_directory_that_is_no_run_is_a_users_error(tmp_path):
    for view in (live.status_command, live.top_command, plot.plot_command, report, read_run):
        with pytest.raises(UserError, match="not a run directory"):
            view(tmp_path)
        with pytest.raises(UserError, match="not a run directory"):
            view(tmp_path / "missing")


def test_the_bare_name_of_a_run_is_answered_with_its_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    (tmp_path / "runs" / "tiny" / "run.toml").write_text("")
    with pytest.raises(UserError, match=r"tiny: not a run directory.*did you mean runs/tiny\?"):
        live.status_command("tiny")


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    run = read_run(full_run(tmp_path))
    assert [node.index for node in run.nodes] == [0, 1, 2]
    assert run.name == "tiny"
    node = run.nodes[1]
    assert (len(node.metrics), len(node.rounds), len(node.evaluations)) == (60, 12, 12)
    assert node.metrics[29].step == 300
    assert node.rounds[5].distrusted == (2,)
    assert math.isnan(node.rounds[8].norms[0])
    assert node.starts[0].units == tuple(UNITS)


def test_torn_and_foreign_lines_are_skipped(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start()
    node.metric(1.0, 10)
    for line in (
        '{"t": 2.0, "st\n',
        "\n",
        "null\n",
        "[1]\n",
        '{"t": 2.5}\n',
        '{"t": 2.6, "step": null, "tokens": 1}\n',
    ):
        node.torn("metrics.jsonl", line)
        node.torn("events.jsonl", line)
    node.torn("metrics.jsonl", "\x00\x00\x00\n")
    node.metric(3.0, 30)
    node.torn("metrics.jsonl", '{"t": 4.0, "step": 40')
    assert [metric.step for metric in read_run(run_dir).nodes[0].metrics] == [10, 30]


def test_a_start_written_behind_a_torn_line_is_found(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start()
    node.torn("events.jsonl", '{"t": 5.0, "event": "round", "norms": [0.1, ')
    node.start(t=6.0, attempt=1, step=20)
    assert [start.attempt for start in read_run(run_dir).nodes[0].starts] == [0, 1]


def test_after_a_resume_the_later_lines_win_and_lost_work_is_left_out(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start()
    for t, step in ((1, 10), (2, 20), (3, 30), (4, 40)):
        node.metric(t, step, loss=9.0)
    for id, step in ((1, 10), (2, 20), (3, 30), (4, 40)):
        node.round(id, id, step, bytes=1)
        node.event("eval", id + 0.1, step=step, round=id, loss=9.0)
        node.event("checkpoint", id + 0.2, step=step, round=id, seconds=0.1, bytes=1)
    follower = RunFollower(run_dir)
    assert len(follower.poll().nodes[0].metrics) == 4
    node.start(t=7.0, attempt=1, step=20)  # killed at step 40, resumed at the checkpoint of step 20
    assert len(follower.poll().nodes[0].metrics) == 2
    node.metric(8, 45, loss=1.0)
    node.round(8, 3, 31, bytes=7)
    node.event("eval", 8.1, step=31, round=3, loss=1.0)
    read = read_run(run_dir).nodes[0]
    assert [(metric.step, metric.loss) for metric in read.metrics] == [(10, 9.0), (20, 9.0), (45, 1.0)]
    assert [(landed.id, landed.step, landed.bytes) for landed in read.rounds] == [
        (1, 10, 1),
        (2, 20, 1),
        (3, 31, 7),
    ]
    assert [(e.step, e.loss) for e in read.evaluations] == [(10, 9.0), (20, 9.0), (31, 1.0)]


def test_a_repeated_step_without_a_start_event_keeps_the_later_line(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    for t, step, loss in ((1, 10, 9.0), (2, 20, 9.0), (3, 30, 9.0), (6, 20, 1.0), (7, 31, 1.0)):
        node.metric(t, step, loss=loss)
    metrics = read_run(run_dir).nodes[0].metrics
    assert [(metric.step, metric.loss) for metric in metrics] == [(10, 9.0), (20, 1.0), (31, 1.0)]


def test_following_a_run_gives_what_reading_it_anew_gives(tmp_path):
    whole = full_run(tmp_path)
    grown = new_run(tmp_path, "grown")
    follower = RunFollower(grown)
    for index in range(3):
        (grown / "nodes" / str(index)).mkdir(parents=True)
        for name in ("metrics.jsonl", "events.jsonl"):
            data = (whole / "nodes" / str(index) / name).read_bytes()
            for begin in range(0, len(data), 1777):  # cuts lines anywhere
                with (grown / "nodes" / str(index) / name).open("ab") as file:
                    file.write(data[begin : begin + 1777])
                follower.poll()
    for followed, read in zip(follower.poll().nodes, read_run(whole).nodes, strict=True):
        assert followed.metrics == read.metrics
        assert followed.evaluations == read.evaluations
        assert repr(followed.rounds) == repr(read.rounds)  # they hold NaN, which is unequal to itself


def test_the_share_of_the_solo_speeds_is_the_one_worked_out_by_hand(tmp_path):
    run_dir = new_run(tmp_path)
    fast, slow = Writer(run_dir, 0), Writer(run_dir, 1)
    fast.metric(2.0, 1, tokens=500, busy_s=1.5, wait_s=0.5, other_s=0.0)
    fast.metric(14.0, 9, tokens=8500, busy_s=9.5, wait_s=2.5, other_s=2.0)
    slow.metric(4.0, 1, tokens=1000, busy_s=4.0, wait_s=0.0, other_s=0.0)
    slow.metric(25.0, 9, tokens=3000, busy_s=24.0, wait_s=0.0, other_s=1.0)
    nodes = read_run(run_dir).nodes
    # fast: 8000 tokens in 14 - 2 - 2 = 10 s, 8 s of them busy: 800 of 1000 tokens/s
    # slow: 2000 tokens in 25 - 4 - 1 = 20 s, all of them busy: 100 of 100 tokens/s
    speed, solo, waited = zip(*map(pace, nodes), strict=True)
    assert (speed, solo) == ((800.0, 100.0), (1000.0, 100.0))
    assert waited == (pytest.approx(0.2), 0.0)
    assert share_of_solo(nodes) == pytest.approx(900 / 1100)
    assert "81.8 % of the sum of the nodes' solo speeds" in report(run_dir)
    rows = [re.split(r"\s{2,}", row.strip()) for row in report(run_dir).splitlines()]
    waited = next(row.index("waited") for row in rows if "solo tokens/s" in row)
    assert [row[waited] for row in rows if len(row) == 9 and row[0].isdecimal()] == ["2.5 s", "0.0 s"]


def test_the_report_counts_rounds_bytes_and_what_was_distrusted(tmp_path):
    text = report(full_run(tmp_path))
    first, last = 2.05 + 3.4 * math.exp(-50 / 170), 2.05 + 3.4 * math.exp(-600 / 170)
    assert f"held-out loss  {first:.3f} -> {last:.3f} nats/token" in text
    train = re.search(r"train loss +([\d.]+) -> ([\d.]+) nats/token", text)
    assert float(train[1]) > 5 > 2.7 > float(train[2])
    assert f"{3 * 12 * 16000 / 1000:.1f} kB in 12 rounds" in text
    assert "3 pseudo-gradients distrusted, 1 unit rolled back" in text  # one unit, seen by three nodes


def test_nodes_that_evaluated_the_same_round_are_averaged(tmp_path):
    run_dir = new_run(tmp_path)
    for index, loss in ((0, 2.0), (1, 4.0)):
        node = Writer(run_dir, index)
        node.event("eval", 1 + index, step=0, round=0, loss=6.0)
        node.event("eval", 3 + index, step=20, round=0, loss=5.0)
        node.event("eval", 5 + index, step=30 + 10 * index, round=1, loss=loss)
    merged = [(e.t, e.step, e.round, e.loss) for e in held_out(read_run(run_dir))]
    assert merged == [(2, 0, 0, 6.0), (4, 20, 0, 5.0), (6, 35, 1, 3.0)]


def test_the_report_names_every_figure_and_plot(tmp_path):
    run_dir = full_run(tmp_path)
    text = report(run_dir)
    assert text.isascii()
    assert "held-out loss" in text
    assert "576.0 kB in 12 rounds" in text
    assert "3 pseudo-gradients distrusted, 1 unit rolled back" in text
    paths = [Path(row.strip()) for row in text.splitlines() if row.endswith(".png")]
    assert {path.name for path in paths} == ALL_PLOTS
    assert all(path.is_file() for path in paths)


def test_every_plot_is_a_real_image_with_something_on_it(tmp_path):
    run_dir = full_run(tmp_path)
    paths = plot.plot_command(run_dir)
    assert {path.name for path in paths} == ALL_PLOTS
    assert set(run_dir.glob("plots/*")) == set(paths)
    for path in paths:
        image = matplotlib.image.imread(path)
        assert image.shape[0] > 200
        assert image.shape[1] > 600
        assert image[..., :3].std() > 0.02


def test_a_run_without_rounds_has_only_the_plots_it_can_fill(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    for t in range(1, 5):
        node.metric(t, 10 * t)
    assert {path.name for path in plot.plot_command(run_dir)} == {
        "loss_by_steps.png",
        "loss_by_time.png",
        "time_per_node.png",
    }


def test_ticks_of_a_flat_loss_and_of_few_steps_can_be_read(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    for step in (1, 2, 3):
        node.metric(float(step), step, loss=2.3 + 1e-9 * step)
    node.round(3.0, 1, 3, bytes=0)
    run = read_run(run_dir)
    with matplotlib.style.context(["default", plot.STYLE]):
        loss, sent, listened = loss_by_steps(run), bytes_per_round(run), plot_effective_nodes(run)
        for figure in (loss, sent, listened):
            FigureCanvasAgg(figure).draw()
    assert loss.axes[0].yaxis.get_offset_text().get_text() == ""
    for axis in (loss.axes[0].xaxis, sent.axes[0].xaxis, listened.axes[0].xaxis, listened.axes[0].yaxis):
        assert all(float(at).is_integer() for at in axis.get_majorticklocs())
    assert sent.axes[0].get_ylim() == (0, 1000), "zero bytes are not thousandths of a byte"


def test_an_empty_run_is_shown_and_reported_but_cannot_be_plotted(tmp_path, capsys):
    run_dir = new_run(tmp_path)
    live.status_command(run_dir)
    assert "no node has started yet" in capsys.readouterr().out
    assert "0 nodes" in report(run_dir)
    with pytest.raises(UserError, match="nothing to plot"):
        plot.plot_command(run_dir)
    assert not (run_dir / "plots").exists()


def test_a_plots_folder_that_cannot_be_written_is_a_users_error(tmp_path):
    run_dir = full_run(tmp_path, seconds=3, num_rounds=1)
    (run_dir / "plots").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        plot.plot_command(run_dir)
    assert "cannot write" in report(run_dir)
    assert "held-out loss" in report(run_dir)


def test_values_that_are_not_finite_break_no_view(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start()
    for t in range(1, 6):
        bad = {
            "loss": math.nan,
            "grad_norm": math.inf,
            "busy_s": None,
            "wait_s": math.nan,
            "progress": math.inf,
        }
        node.metric(t, t, **(bad if t > 2 else {}))
    node.round(5, 1, 5, norms=[None, math.nan, math.inf, 0.0], effective_nodes=[None] * 4, bytes=None)
    node.event("eval", 5.1, step=5, round=1, loss=math.inf)
    assert "nan" not in shown(run_dir, [0]).lower()
    assert math.isnan(share_of_solo(read_run(run_dir).nodes))
    assert "2.000 -> - nats/token" in report(run_dir)
    assert {path.name for path in plot.plot_command(run_dir)} == ALL_PLOTS - {"effective_nodes.png"}


def test_a_node_that_has_written_nothing_is_starting_and_harms_nobody(tmp_path):
    run_dir = full_run(tmp_path)
    (run_dir / "nodes" / "1" / "metrics.jsonl").unlink()
    (run_dir / "nodes" / "1" / "events.jsonl").unlink()
    (run_dir / "nodes" / "2.old").mkdir()
    rows = {row.split()[1]: row for row in shown(run_dir, range(4)).splitlines() if len(row.split()) > 4}
    assert "done" in rows["0"]
    assert "starting" in rows["1"]
    assert "starting" in rows["3"]
    assert len(read_run(run_dir).nodes) == 3
    assert report(run_dir)


def seen_state(tmp_path, *happenings, quiet_s=0.0):
    """Return the displayed state of a node after `happenings`, each a call on its writer."""
    run_dir = new_run(tmp_path, f"run{len(list(tmp_path.iterdir()))}")
    node = Writer(run_dir, 0)
    node.start()
    node.metric(1.0, 10)
    for happen in happenings:
        happen(node)
    (read,) = read_run(run_dir).nodes
    for path in node.dir.iterdir():
        os.utime(path, (path.stat().st_atime, path.stat().st_mtime - quiet_s))
    (read,) = read_run(run_dir).nodes
    return state(read, warmup_steps=20)


def test_the_state_of_a_node_follows_from_its_files(tmp_path):
    def trained(node):
        node.event("warmup_end", 1.5, step=20)
        node.metric(2.0, 30)

    def stepped(node):
        node.metric(2.0, 30)

    def waited(node):
        node.metric(3.0, 31, busy_s=2.1, wait_s=0.9)

    def evaluated(node):
        node.event("eval", 2.9, step=31, round=1, loss=2.0)
        node.metric(3.0, 31, busy_s=2.1, other_s=0.9)

    def landed(node):
        node.round(2.5, 1, 30)

    def evaluated_in_wait(node):
        node.event("eval", 9.0, step=20, round=1, loss=2.0, in_wait=True)

    def stopped(reason):
        return lambda node: node.event("stop", 9.0, reason=reason, step=30, tokens=1)

    def failed(node):
        node.event("error", 9.0, message="out of memory")

    def restarted(node):
        node.start(t=10.0, attempt=1)

    assert seen_state(tmp_path, lambda node: node.event("warmup_begin", 1.0)) == "warm-up"
    assert seen_state(tmp_path, trained) == "training"
    assert seen_state(tmp_path, stepped) == "training"  # no event has come since its start
    assert seen_state(tmp_path, trained, waited) == "waiting"
    assert seen_state(tmp_path, trained, quiet_s=20) == "waiting"
    assert seen_state(tmp_path, trained, landed, quiet_s=20) == "evaluating"
    assert seen_state(tmp_path, trained, evaluated_in_wait, quiet_s=20) == "waiting"
    assert seen_state(tmp_path, trained, quiet_s=1000) == "silent"
    assert seen_state(tmp_path, trained, evaluated) == "saving"
    assert seen_state(tmp_path, trained, stopped("done")) == "done"
    assert seen_state(tmp_path, trained, stopped("signal")) == "left"
    assert seen_state(tmp_path, trained, failed) == "failed"
    assert seen_state(tmp_path, trained, failed, restarted) == "first step"


def test_after_a_resume_nothing_is_reckoned_across_the_time_between_the_attempts(tmp_path):
    def left(node):
        node.metric(2.0, 30)
        node.event("stop", 2.5, reason="signal", step=30, tokens=1)

    def resumed(node):
        node.start(t=60.0, attempt=1, step=30)

    def goes_on(node):
        node.metric(61.0, 31, wait_s=50.0)

    assert seen_state(tmp_path, left) == "left"
    assert seen_state(tmp_path, left, resumed) == "first step", "it has started, and trains"
    assert seen_state(tmp_path, left, resumed, lambda n: n.event("heal", 60.5, round=1)) == "first step"
    assert seen_state(tmp_path, left, resumed, goes_on) == "training"
    assert seen_state(tmp_path, left, resumed, goes_on, quiet_s=20) == "waiting"
    run_dir = new_run(tmp_path, "speeds")
    node = Writer(run_dir, 0)
    node.start()
    for act in (lambda n: n.metric(1.0, 20), left, resumed, goes_on):
        act(node)
    assert "- tokens/s" in plain_line(read_run(run_dir), [0]), "no speed from lines of two attempts"
    node.metric(62.0, 36)
    assert " 500 tokens/s" in plain_line(read_run(run_dir), [0])


def test_status_shows_an_error_in_words(tmp_path, capsys):
    run_dir = full_run(tmp_path)
    Writer(run_dir, 3).event("error", 75.0, message="out of memory")
    live.status_command(run_dir)
    out = capsys.readouterr().out
    assert "node 3 at 1:15: error: out of memory" in out
    assert "failed" in out


def test_every_text_is_ascii_where_the_terminal_is(tmp_path):
    run_dir = full_run(tmp_path)
    console, raw = ascii_console(force_terminal=True, color_system=None)
    console.print(panel(read_run(run_dir), [0, 1, 2]))
    assert raw.getvalue().isascii()
    assert b"node" in raw.getvalue()


class Child:
    """Child process that lives for some seconds of a clock that only sleeping moves."""

    def __init__(self, lifetime_s, run_dir=None):
        self.now_s, self.lifetime_s, self.looked = 0.0, lifetime_s, []

    def alive(self):
        return self.now_s < self.lifetime_s

    def now(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds

    def watch(self, run_dir, console, nodes=3):
        live.watch(run_dir, nodes, self.alive, console=console, now=self.now, sleep=self.sleep)


def test_without_a_terminal_there_is_a_plain_line_every_ten_seconds_and_not_the_same_one_at_the_end(tmp_path):
    console = Console(file=io.StringIO(), width=60)
    child = Child(35)
    child.watch(full_run(tmp_path), console)
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 4  # at 0, 10, 20, 30 s
    assert child.now_s == pytest.approx(35, abs=0.3)
    assert all("\x1b" not in row for row in lines)


def test_without_a_terminal_the_end_has_a_line_of_its_own_if_there_is_news(tmp_path):
    run_dir = full_run(tmp_path)

    class Training(Child):
        def sleep(self, seconds):
            if self.now_s < 12 <= self.now_s + seconds:
                node = Writer.__new__(Writer)
                node.dir, node.index = run_dir / "nodes" / "0", 0
                node.metric(61.0, 777, progress=0.9)
            super().sleep(seconds)

    console = Console(file=io.StringIO(), width=60)
    Training(15).watch(run_dir, console)
    *before, last = console.file.getvalue().splitlines()
    assert len(before) == 2  # at 0 and 10 s
    assert last.startswith("1:01")


def screen_of(run_dir, num_lines=24, width=80):
    """Return what `top` shows, line by line."""
    run = read_run(run_dir)
    console = Console(file=io.StringIO(), width=width, height=num_lines)
    shape = console.options.update_dimensions(width, num_lines)
    picture = Fitted(run, run.indices, subtitle="q ends")
    lines = console.render_lines(picture, shape, pad=False)
    return "\n".join("".join(segment.text for segment in line) for line in lines).rstrip().splitlines()


@pytest.mark.parametrize("num_nodes", [1, 5, 16, 17, 40])
def test_top_fits_a_terminal_of_80_by_24_and_counts_the_nodes_it_leaves_out(tmp_path, num_nodes):
    run_dir = new_run(tmp_path)
    for index in range(num_nodes):
        node = Writer(run_dir, index)
        node.start()
        node.metric(40_000.0, 1_234_000, tokens=10**11, wait_s=36_000.0)
        spent = {"busy_s": 41_000.0, "wait_s": 37_000.0, "round": 123_456}
        node.metric(50_000.0, 1_234_567, tokens=2 * 10**11, **spent)
    lines = screen_of(run_dir)
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    rows = [line for line in lines if "1,234,567" in line]
    assert all("123456" in row and "10,000,000" in row and "47.4 %" in row for row in rows)
    left_out = [int(line.split("and ")[1].split()[0]) for line in lines if " more node" in line]
    assert len(rows) + sum(left_out) == num_nodes
    assert len(rows) >= min(num_nodes, 15)
    assert any("held-out loss" in line for line in lines)
    assert "q ends" in lines[-1]
    assert "\u2026" not in "".join(lines), "nothing is cut off"


def test_a_line_without_a_new_step_keeps_the_last_training_loss(tmp_path):
    """At its end a node writes a line although no step followed the last one."""
    from types import SimpleNamespace

    from aedit.launch.node.train import StepMeter, TrainingNode

    told = []
    shards = SimpleNamespace(sum=lambda value: value, size=1)
    sync = SimpleNamespace(steps=4, round_id=1, waited_s=0.0, idle_used_s=0.0, shards=shards)
    node = SimpleNamespace(
        recorder=SimpleNamespace(
            clock=SimpleNamespace(busy_s=0, other_s=0), metrics=lambda **v: told.append(v)
        ),
        meter=StepMeter(loss=torch.tensor(6.0), num_steps=4),
        sync=sync,
        tokens=8,
        lr=0.1,
        budget=SimpleNamespace(progress=lambda: 1.0),
        objective=SimpleNamespace(metrics=dict),
        idle_used_s=0.0,
        newest_loss=float("nan"),
        alerts=None,
    )
    TrainingNode.record_metrics(node)
    TrainingNode.record_metrics(node)
    assert [line["loss"] for line in told] == [1.5, 1.5]


def test_time_between_two_attempts_is_no_training_time(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start(t=0.5)
    node.metric(2.0, 10, tokens=1000, busy_s=1.0)
    node.metric(12.0, 60, tokens=6000, busy_s=10.0)
    node.start(t=3600.0, attempt=1, step=60)
    node.metric(3605.0, 70, tokens=7000, busy_s=11.0)
    node.metric(3615.0, 120, tokens=12000, busy_s=20.0)
    ((speed, solo, _),) = map(pace, read_run(run_dir).nodes)
    # 5000 tokens in 10 s twice, 9 s of each busy
    assert speed == pytest.approx(500)
    assert solo == pytest.approx(10_000 / 18)
    assert "90.0 % of the sum" in report(run_dir)


def test_the_report_says_when_the_end_was_not_evaluated(tmp_path):
    run_dir = new_run(tmp_path)
    node = Writer(run_dir, 0)
    node.start()
    node.metric(1.0, 10)
    assert "held-out loss  - (no evaluation ran)" in report(run_dir)
    node.event("eval", 1.5, step=10, round=0, loss=3.0)
    assert "held-out loss  3.000 -> 3.000 nats/token\n" in report(run_dir)
    node.metric(9.0, 1230)
    assert "3.000 -> 3.000 nats/token at step 10 of 1,230; no evaluation ran at the end\n" in report(run_dir)
    node.event("eval", 9.5, step=1230, round=3, loss=2.0)
    assert "held-out loss  3.000 -> 2.000 nats/token\n" in report(run_dir)


def test_a_terminal_gets_a_panel_that_ends_with_the_newest_figures(tmp_path):
    console, raw = ascii_console(force_terminal=True, color_system=None)
    run_dir = full_run(tmp_path)
    Child(2.5).watch(run_dir, console, nodes=4)
    text = raw.getvalue().decode()
    assert "tiny" in text
    assert "100 %" in text
    assert text.count("starting") >= 4


def test_watching_survives_a_run_directory_that_never_comes(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    Child(1).watch(tmp_path / "missing", console, nodes=2)
    assert console.file.getvalue().splitlines()[-1].endswith("| node 0 starting | node 1 starting")


def test_a_resumed_node_is_starting_until_its_new_attempt_has(tmp_path):
    run_dir = full_run(tmp_path)

    class Restarting(Child):
        def sleep(self, seconds):
            if self.now_s < 15 <= self.now_s + seconds:
                node = Writer.__new__(Writer)
                node.dir, node.index = run_dir / "nodes" / "0", 0
                node.start(t=70.0, attempt=1, step=600)
                node.metric(71.0, 610)
                node.round(71.5, 13, 610)
            super().sleep(seconds)

    console = Console(file=io.StringIO(), width=300)
    Restarting(16).watch(run_dir, console)
    first, *_, last = console.file.getvalue().splitlines()
    assert "node 0 starting" in first
    assert "node 0 training step 610" in last
    assert "node 1 starting" in last


def test_top_without_a_terminal_ends_when_all_nodes_have(tmp_path, capsys):
    live.top_command(full_run(tmp_path))
    (row,) = capsys.readouterr().out.splitlines()
    assert row.count(" done ") == 3


@pytest.mark.timeout(30)
def test_top_on_a_terminal_shows_the_run_and_ends_at_q(tmp_path):
    run_dir = full_run(tmp_path)
    ours, theirs = pty.openpty()
    code = "import sys; from aedit.launch.views import live; live.top_command(sys.argv[1])"
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "LC_ALL": "C.UTF-8", "COLUMNS": "110", "LINES": "30"},
    )
    os.close(theirs)
    try:
        seen = b""
        while b"q ends" not in seen:
            seen += os.read(ours, 4096)
        os.write(ours, b"q")
        try:
            while more := os.read(ours, 4096):
                seen += more
        except OSError:
            pass  # the terminal is gone: the child has ended
        assert child.wait(timeout=20) == 0
    finally:
        child.kill()
        child.wait(timeout=20)
        os.close(ours)
    assert b"600" in seen
    assert b"\x1b[?1049l" in seen  # the screen as it was before
