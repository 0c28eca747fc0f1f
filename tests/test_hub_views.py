"""Tests the views of a run with a hub, from folders written by the test and from a real hub."""

import io
import json
import re
import socket
import urllib.request
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from kit.hub_processes import Client, HubProcess, ending, write_run
from kit.servers import Announcer
from kit.waiting import until
from matplotlib import style as look
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from aedit.launch.cli import main
from aedit.launch.records import HubRecords, HubSample, RunFollower, gained, read_run, totals
from aedit.launch.views import live, plot, report, sources
from aedit.launch.views.figures import held_out
from aedit.launch.views.panel import Fitted, panel
from aedit.launch.views.panel import line as plain_line
from aedit.launch.views.plots import bytes_per_round, hub_nodes, hub_traffic
from aedit.launch.views.sources import open_source
from aedit.types import UserError

HUB_PLOTS = {"hub_nodes.png", "hub_traffic.png"}


def node_at(index, steps, state="training", **changes):
    """Return a node's record as a hub writes it, with all counts computed from the steps."""
    told = {"busy_s": steps / 10, "wait_s": steps / 1000, "wire_s": steps / 20}
    told |= {"bytes_up": 100 * steps, "bytes_down": 300 * steps, "steps_per_s": 10.0, "pace_steps": 16}
    judged = {"weight": 0.5, "staleness": index, "accepted": steps // 8, "refused": {}, "loss": 2.0}
    return {
        "node": index,
        "name": f"box-{index}",
        "state": state,
        "steps": steps,
        **told,
        **judged,
        **changes,
    }


def line(t, nodes, versions, term=1, **changes):
    rest = {"progress": t / 100, "pending": 1, "journal_bytes": 5000, "round": 0, "standby": False}
    return {"t": t + 3, "elapsed_s": t, "term": term, "nodes": nodes, "versions": versions, **rest, **changes}


def write(folder, lines, events=()):
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("metrics", lines), ("events", events)):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(value) + "\n" for value in values)


def node_files(run_dir, index, evaluations=()):
    folder = run_dir / "nodes" / str(index)
    counts = {"tokens": 0, "loss": 2.0, "busy_s": 1.0, "wait_s": 0.0, "idle_used_s": 0.0, "other_s": 0.0}
    write(folder, [{"t": t, "step": 10 * t, "progress": t / 20, **counts} for t in (1, 2, 3)])
    judged = {
        "norms": [1.0, 2.0],
        "weights": [None, None],
        "distrusted": [1],
        "effective_nodes": [None, None],
    }
    sent = {"bytes": 700, "rolled_back": [], "refused": [0], "nodes": 2}
    write(folder, [], [{"t": 2.0, "event": "round", "id": 5, "step": 20, **judged, **sent}])
    write(folder, [], [{"event": "eval", "step": 20, "round": 5, **spec} for spec in evaluations])


def hub_run(tmp_path):
    """Write a run of two nodes over 20 s.

    The process of box-1 restarts at 10 s, box-2 is excluded, and both leave. In the middle the hub has just
    restarted and has no heartbeat yet.
    """
    run_dir = tmp_path / "wide"
    lines = [line(t, [node_at(0, 10 * t), node_at(1, 5 * t)], [t, t + 1]) for t in range(1, 10)]
    silent = dict.fromkeys(("busy_s", "wait_s", "wire_s", "bytes_up", "bytes_down", "steps_per_s"), 0)
    lines.append(line(10, [node_at(0, 0, "joining", **silent), node_at(1, 0, "joining", **silent)], [10, 11]))
    for t in range(11, 20):
        out = node_at(2, 0, "excluded: excluded after 8 violations", refused={"norm": 8}, **silent)
        late = node_at(1, 5 * (t - 10), refused={"stale": 2, "norm": 1})
        lines.append(line(t, [node_at(0, 10 * t), late, out], [t, t + 1]))
    gone = [node_at(i, 0, "gone: left", **{**silent, "accepted": 40, "refused": r}) for i, r in GONE]
    lines.append(line(20, [*gone, out], [20, 21]))
    write(run_dir / "hub", lines, [{"t": 0.1, "event": "lead", "term": 1}])
    (run_dir / "run.toml").write_text('name = "wide"\n[hub]\naddress = "127.0.0.1:0"\n')
    return run_dir


GONE = ((0, {}), (1, {"stale": 2, "norm": 1}))


def shown(show, *args):
    console = Console(file=io.StringIO(), width=80)
    console.print(show(*args))
    return console.file.getvalue()


def test_the_totals_of_a_run_are_those_worked_out_by_hand(tmp_path):
    found = totals(read_run(hub_run(tmp_path)).hubs)
    # box-0: 190 steps; box-1: 45 in its first process, 45 in its second.
    assert found.bytes_up == 100 * (190 + 45 + 45)
    assert found.bytes_down == 300 * (190 + 45 + 45)
    assert found.refused == {"norm": 9, "stale": 2}
    assert found.accepted == 80
    assert found.merges == 19 + 20
    assert found.excluded == (("box-2", "excluded after 8 violations"),)


def test_a_count_that_begins_anew_is_added_to_what_was_there():
    assert gained([]) == 0
    assert gained([3, 5, 5, 9]) == 9
    assert gained([3, 5, 2, 4]) == 5 + 4


def test_hubs_that_split_the_units_are_summed_but_for_what_nodes_tell_all_of_them(tmp_path):
    run_dir = tmp_path / "split"
    for k in (10, 2):  # not in the order of their names
        nodes = [node_at(0, 80, accepted=k, refused={"stale": 1})]
        write(run_dir / f"hub_{k}", [line(5, nodes, [k, k])])
    run = read_run(run_dir)
    assert [hub.last.versions for hub in run.hubs] == [(2, 2), (10, 10)]
    found = totals(run.hubs)
    assert (found.accepted, found.refused, found.versions) == (12, {"stale": 2}, (2, 2, 10, 10))
    assert found.bytes_up == 8000


def test_two_hubs_that_took_turns_are_told_as_one_story(tmp_path):
    run_dir = tmp_path / "taken"
    write(run_dir / "standby", [line(9, [node_at(0, 90)], [9], term=2)], [{"t": 8.5, "event": "lead"}])
    own = [line(8, [node_at(0, 80)], [8]), line(15, [node_at(0, 150)], [15], term=3)]
    write(run_dir / "hub", own, [{"t": t, "event": "lead"} for t in (0.0, 14.0)])
    (hub,) = read_run(run_dir).hubs
    assert [at.term for at in hub.lines] == [1, 2, 3]
    assert "another hub took over at 0:14" in shown_status(run_dir)


def shown_status(run_dir):
    return shown(panel, read_run(run_dir), [])


def test_following_a_hub_gives_what_reading_it_anew_gives(tmp_path):
    run_dir = hub_run(tmp_path)
    follower = RunFollower(run_dir)
    assert len(follower.poll().hubs[0].lines) == 20
    write(run_dir / "hub", [line(22, [], [22, 22])])
    with (run_dir / "hub" / "metrics.jsonl").open("a") as file:
        file.write('{"t": 23, "ter')  # torn, as by a kill
    assert follower.poll() == read_run(run_dir)
    assert len(follower.poll().hubs[0].lines) == 21


def test_status_of_a_run_directory_shows_what_its_hub_said_last_within_80_columns(tmp_path):
    text = shown_status(hub_run(tmp_path))
    assert "2 stale, 1 norm" in text
    assert "excluded after 8 violations" in text
    assert "versions 20 to 21" in text
    (row,) = (row for row in text.splitlines() if "box-0" in row)
    assert row.split()[1:8] == ["0", "box-0", "gone:", "left", "190", "10.00", "16"], "what it said last"
    assert all(len(row) <= 80 for row in text.splitlines())
    assert "\u2026" not in text, "nothing is cut off"


@pytest.mark.parametrize("num_nodes", [2, 12, 40])
@pytest.mark.parametrize("files", [False, True])
def test_top_of_a_hub_fits_a_terminal_of_80_by_24(tmp_path, num_nodes, files):
    run_dir = tmp_path / "busy"
    big = {"steps_per_s": 1234.56, "pace_steps": 12_345, "wait_s": 9e3, "busy_s": 1e5, "wire_s": 12_345.6}
    nodes = [node_at(k, 1_234_567, name=f"machine-of-lab-{k:03}", **big) for k in range(num_nodes)]
    write(run_dir / "hub", [line(90, nodes, [3, 4])])
    for k in range(num_nodes if files else 0):
        node_files(run_dir, k)
    run = read_run(run_dir)
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(Fitted(run, run.indices))
    lines = console.file.getvalue().splitlines()
    assert len(lines) <= 24
    assert all(len(row) <= 80 for row in lines)
    left_out = sum(int(row.split("and ")[1].split()[0]) for row in lines if " more node" in row)
    assert max(left_out, 0) < num_nodes
    assert (left_out > 0) == (num_nodes == 40)
    assert "versions 3 to 4" in "".join(lines)
    if not files:
        rows = [row for row in lines if "mac" in row and "1,234,567 1234.56 12,345" in row]
        assert all(" 8.3 % 12,345.6 s 27.1 %" in row for row in rows)
        assert len(rows) + left_out == num_nodes


def test_a_name_with_markup_in_it_is_shown_as_it_is(tmp_path):
    write(tmp_path / "odd" / "hub", [line(1, [node_at(0, 10, name="[red]x[/]")], [1])])
    assert "[red]x[/]" in shown_status(tmp_path / "odd")


def test_the_report_says_what_the_hub_counted_and_draws_it(tmp_path):
    run_dir = hub_run(tmp_path)
    for index in (0, 1):
        node_files(run_dir, index)
    text = report(run_dir)
    assert text.isascii()
    assert "2 nodes, 0:03, 39 merges" in text
    assert "80 accepted, 11 did not count (9 norm, 2 stale)" in text
    assert "28.0 kB up, 84.0 kB down\n" in text
    assert "39 merges, 2 units at version 20 to 21" in text
    assert "box-2: excluded after 8 violations" in text
    assert "2 pseudo-gradients distrusted by their own nodes" in text
    drawn = {Path(row.strip()).name for row in text.splitlines() if row.endswith(".png")}
    assert drawn >= HUB_PLOTS | {"norms.png", "bytes_per_round.png"}
    assert "effective_nodes.png" not in drawn, "a node of a hub does not know the others' weights"


def test_the_upload_of_the_initial_anchors_is_told_apart_from_pushes(tmp_path):
    write(tmp_path / "hub", [line(5, [node_at(0, 80)], [2], founder=0, anchor_bytes=6000)])
    node_files(tmp_path, 0)
    assert "8.0 kB up (6.0 kB of it the initial anchors, from box-0), 24.0 kB down" in report(tmp_path)
    assert "the first anchors of the run were 6.0 kB" in shown_status(tmp_path)
    label = bytes_per_round(read_run(tmp_path)).axes[0].get_xlabel()
    assert label == "round (the first of box-0 with the initial anchors, 6.0 kB)"
    gone, next_one = node_at(0, 80, "gone: left", reports=False), node_at(1, 8)
    write(tmp_path / "hub", [line(9, [gone, next_one], [2], founder=1, anchor_bytes=6000)])
    assert "(6.0 kB of it the initial anchors, from box-0)" in report(tmp_path), "who came next sent none"


def test_without_the_hubs_folder_a_report_says_what_its_nodes_know(tmp_path):
    run_dir = tmp_path / "far"
    node_files(run_dir, 3)
    (run_dir / "run.toml").write_text('name = "far"\n[hub]\naddress = "10.0.0.1:7000"\n')
    text = report(run_dir)
    assert "700 bytes to the hub" in text
    assert "1 push, sent once more" in text


def test_losses_of_nodes_that_evaluated_after_rounds_of_their_own_are_not_averaged(tmp_path):
    run_dir = hub_run(tmp_path)
    node_files(run_dir, 0, [{"t": 3.0, "loss": 3.0}])
    node_files(run_dir, 1, [{"t": 9.0, "loss": 1.0}])
    assert [evaluation.loss for evaluation in held_out(read_run(run_dir))] == [3.0, 1.0]


@pytest.mark.parametrize("few", [1, 20])
def test_plots_of_a_hub_have_something_on_them(tmp_path, few):
    run_dir = hub_run(tmp_path)
    metrics = run_dir / "hub" / "metrics.jsonl"
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:few]))
    paths = plot.plot_command(run_dir)
    assert {path.name for path in paths} == HUB_PLOTS
    for path in paths:
        image = matplotlib.image.imread(path)
        assert min(image.shape[:2]) > 600
        assert np.std(image[..., :3]) > 0.02


def ticks(axis):
    """Return the labels of the ticks in view, with the offset that matplotlib may add to all of them."""
    low, high = sorted(axis.get_view_interval())
    places = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
    return [label.get_text() for at, label in places if low <= at <= high], axis.get_offset_text().get_text()


def drawn(figure):
    FigureCanvasAgg(figure).draw()
    return figure


def test_ticks_of_flat_series_at_a_hub_are_whole_numbers_from_zero(tmp_path):
    still = dict.fromkeys(("steps_per_s", "staleness", "bytes_up", "bytes_down", "wait_s", "wire_s"), 0)
    lines = [line(t, [node_at(0, 8, **still)], [1, 1]) for t in range(1, 5)]
    write(tmp_path / "hub", lines)
    run = read_run(tmp_path)
    with look.context(["default", plot.STYLE]):
        _, staleness, _ = drawn(hub_nodes(run)).axes
        wire, sent, versions, _ = drawn(hub_traffic(run)).axes
    assert ticks(staleness.yaxis) == (["0", "1"], "")
    assert ticks(versions.yaxis) == (["0", "1"], "")
    labels, offset = ticks(sent.yaxis)
    assert (labels[0], labels[-1], offset) == ("0 B", "1 kB", "")
    assert wire.get_xlim()[0] == 0


def test_a_hub_without_nodes_is_shown_but_cannot_be_plotted(tmp_path, capsys):
    write(tmp_path / "young" / "hub", [line(1, [], [])])
    live.status_command(tmp_path / "young")
    text = capsys.readouterr().out
    assert "versions none yet" in text
    assert "steps/s" not in text, "a table of nobody"
    with pytest.raises(UserError, match="nothing to plot"):
        plot.plot_command(tmp_path / "young")


def test_lines_of_another_kind_harm_nothing(tmp_path):
    odd = [{"t": 1}, {"elapsed_s": "x"}, {"t": 2, "nodes": 7}, {"t": 3, "nodes": [{}]}, {"nodes": []}]
    write(tmp_path / "odd" / "hub", [*odd, line(4, [node_at(0, 8)], [2])])
    (hub,) = read_run(tmp_path / "odd").hubs
    assert hub.last.t == 4
    assert totals([HubRecords((), ())]) is None


def test_a_real_hub_is_shown_followed_and_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with ending():
        hub = HubProcess(write_run(tmp_path), tmp_path / "run" / "hub")
        node = Client(hub.address, name="box").found()
        node.merged(0)
        assert not node.push(0, base=99).accepted
        node.hub.heartbeat(heartbeat_of(node))
        until(lambda: any(n["steps"] for at in node.status()["lines"] for n in at["nodes"]), "a line")
        assert main(["status", hub.address]) == 0
        text = capsys.readouterr().out
        assert "box" in text
        assert "1 future" in text
        with open_source(hub.address) as source:
            run = source.poll()
        (now,) = run.hubs[0].lines
        assert now.versions == (2, 1)
        assert now.founder == now.nodes[0].node
        assert "node 0 training step 40 4.00 steps/s" in plain_line(run, [])
        assert main(["plot", hub.address]) == 0
        assert {Path(row).name for row in capsys.readouterr().out.splitlines()} == HUB_PLOTS
        assert {path.name for path in Path("runs/run/plots").iterdir()} == HUB_PLOTS
        assert main(["status", "run"]) == 0
        assert "1 future" in capsys.readouterr().out
        node.leave()
        assert hub.stop() == 0
    last = HubSample.of(json.loads((tmp_path / "run" / "hub" / "metrics.jsonl").read_text().splitlines()[-1]))
    assert last.nodes[0].state == "gone: left", "the last line is written at the end"
    (read,) = read_run(tmp_path / "run").hubs
    assert (read.last.nodes[0].steps, read.last.nodes[0].refused) == (40, {"future": 1})


def heartbeat_of(node):
    from aedit.proto.rpc import hub_pb2 as pb

    return pb.HeartbeatRequest(who=node.who, steps=40, steps_per_s=4.0, wire_s=0.5, state="training")


def test_an_address_where_no_hub_is_ends_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(sources, "ASK_S", 1.0)
    for view in ("status", "plot"):
        assert main([view, "127.0.0.1:9"]) == 2
        assert "127.0.0.1:9" in capsys.readouterr().err


def test_prometheus_reads_a_real_hub(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ending():
        hub = HubProcess(write_run(tmp_path), tmp_path / "hub", f"--hub.metrics-port={port}")
        node = Client(hub.address, name="box").found()
        node.merged(0)
        server, other = Announcer(hub.address), Announcer(hub.address, "beta")
        server.announce(tokens_per_s=75.5)
        other.announce()
        other.accuse(node.who, server)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert 'aedit_version{unit="unit0"} 2.0' in text
    assert 'aedit_node_accepted_pushes_total{node="box"} 3.0' in text
    assert 'aedit_server_tokens_per_second{server="alpha"} 75.5' in text
    assert 'aedit_server_lag_versions{server="alpha"} 1.0' in text
    assert 'aedit_server_accusations_total{node="box",server="alpha"} 1.0' in text
    assert 'aedit_server_up{server="alpha"} 0.0' in text
    assert 'aedit_server_banned{server="alpha"} 1.0' in text
    assert 'aedit_server_up{server="beta"} 1.0' in text
    names = re.findall(r"^# TYPE (aedit_\S+) (\w+)", text, re.MULTILINE)
    page = (Path(__file__).parent.parent / "docs" / "operating.md").read_text()
    wanted = set(re.findall(r"`(aedit_[a-z_]+)(?:\{\w+\})?`", page))
    assert {"aedit_steps_total", "aedit_node_refused_pushes_total"} < wanted
    assert wanted <= {name for name, _ in names}
    for name, kind in names:
        assert name.count("total") == (kind == "counter"), name
        assert not re.search(r"_(s|bytes_up|bytes_down)(_total)?$", name), "seconds and bytes are written out"
