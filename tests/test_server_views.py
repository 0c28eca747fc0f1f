"""Tests the views of a run's rollout servers, from records as its hub writes them."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console
from test_hub_views import line, node_at, node_files, shown_status, write
from test_rl_views import RLNode

from aedit.launch.records import RunFollower, read_run
from aedit.launch.views import report
from aedit.launch.views.panel import Fitted
from aedit.launch.views.plots import servers
from aedit.launch.views.run_report import server_facts
from aedit.types import UserError


def server(name, **changes):
    """Return a server's record as a hub writes it."""
    told = {"address": "10.0.0.1:7001", "role": "rollout", "state": "serving", "live": True, "serial": 3}
    told |= {"lag": 2, "rows": 8, "tokens_per_s": 1234.0, "running": 7, "waiting": 3, "idle_s": 80.0}
    told |= {"idle_used_s": 60.0, "accused": {}, "reason": "", "banned": ""}
    return {"name": name, **told, **changes}


def run_with_servers(tmp_path, beta=()):
    """Write a run over 3 s in which beta is gone at the end."""
    lines = [
        line(t, [node_at(0, 10 * t)], [t], servers=[server("alpha", tokens_per_s=100.0 * t), server("beta")])
        for t in (1, 2)
    ]
    gone = server("beta", live=False, state="gone: silent for 15 s", **dict(beta))
    lines.append(line(3, [node_at(0, 30)], [3], servers=[server("alpha", tokens_per_s=300.0), gone]))
    write(tmp_path / "hub", lines)
    return tmp_path


def test_status_lists_the_servers_with_lag_speed_queue_and_idle_time_within_80_columns(tmp_path):
    text = shown_status(run_with_servers(tmp_path))
    assert "role rollout: 1 server of 2 live" in text
    (row,) = (row for row in text.splitlines() if "alpha" in row)
    cells = row.strip("\u2502 ").split()
    assert cells == ["alpha", "10.0.0.1:7001", "serving", "2", "300", "7/3", "1:20", "75.0", "%"]
    assert "silent" in text
    assert all(len(row) <= 80 for row in text.splitlines())
    assert len([row for row in text.splitlines() if "box-0" in row]) == 1, "a server is no node"


def test_accusations_are_shown_with_their_evidence_and_so_are_bans(tmp_path):
    changes = {"accused": {"box-0": 3}, "reason": "margin 1.7 > 1", "banned": "accused by 1 of 1 nodes"}
    run_with_servers(tmp_path, changes)
    evidence = {"place": 17, "token": 4, "key": "\x1b[2J"}
    write(
        tmp_path / "hub",
        [],
        [
            {"t": 1, "event": "accused", "server": "beta", "evidence": {"place": 2}},
            {"t": 2, "event": "accused", "server": "beta", "node": "box-0", "evidence": evidence},
            {"t": 2, "event": "accused", "server": 7, "evidence": [1]},
        ],
    )
    text = " ".join(word.strip("\u2502 ") for word in shown_status(tmp_path).split("\n"))
    text = " ".join(text.split())
    assert "server beta is accused by box-0 (3): margin 1.7 > 1; place 17, token 4, key ?[2J" in text
    assert "server beta is banned: accused by 1 of 1 nodes" in text
    assert "\x1b" not in text
    follower = RunFollower(tmp_path)
    assert follower.poll() == follower.poll() == read_run(tmp_path)
    told = dict(server_facts(read_run(tmp_path)))
    assert told["accused"].startswith("beta: accused by box-0 (3): margin 1.7 > 1; place 17")
    assert told["banned"] == "beta: accused by 1 of 1 nodes"


def test_the_report_averages_each_server_over_the_time_it_lived_and_plots_it(tmp_path):
    run_with_servers(tmp_path)
    node_files(tmp_path, 0)
    text = report(tmp_path)
    assert "2 at a time at most: alpha 200 tokens/s, beta 1,234 tokens/s" in text  # alpha: 100, 200, 300
    assert "160.0 s without a request, 75.0 % of it trained the drafter" in text
    assert "servers.png" in {Path(row.strip()).name for row in text.splitlines()}
    assert (tmp_path / "plots" / "servers.png").stat().st_size > 10_000


def test_the_report_counts_what_each_server_did_for_each_node(tmp_path):
    node = RLNode(tmp_path, 0)
    work = {"alpha": {"tokens": 1200, "samples": 10, "taken_back": 1, "losses": 2, "violations": 1}}
    work |= {"beta\x1b": {"tokens": 34567, "samples": 1, "address": "h:1", "losses": math.nan}, "odd": 7}
    node.out.metrics(step=3, tokens=1, rl=node.state(3) | {"servers": work})
    path = tmp_path / "nodes" / "0" / "metrics.jsonl"
    path.write_text(path.read_text().replace("34567", '34567, "moved": Infinity'))
    facts = [text for name, text in server_facts(read_run(tmp_path)) if name == "from servers"]
    told = (
        "node 0: beta? 34,567 tokens in 1 sample, alpha 1,200 tokens in 10 samples, odd 0 tokens in 0 samples"
    )
    ended = "1 sample finished elsewhere, 2 connections lost, 1 of them because of what the server sent"
    assert facts == [f"{told}, {ended}"]


def test_a_run_without_servers_does_not_speak_of_them(tmp_path):
    write(tmp_path / "hub", [line(t, [node_at(0, 10 * t)], [t]) for t in (1, 2)])
    assert "role rollout" not in shown_status(tmp_path)
    run = read_run(tmp_path)
    assert list(server_facts(run)) == []
    assert servers(run) is None


@pytest.mark.parametrize("count", [3, 40])
@pytest.mark.parametrize("files", [False, True])
def test_top_fits_a_terminal_of_80_by_24_with_servers(tmp_path, count, files):
    servers = [server(f"server-of-lab-{k:03}", tokens_per_s=123_456.0) for k in range(count)]
    write(tmp_path / "hub", [line(9, [node_at(k, 10) for k in range(2)], [1], servers=servers)])
    if files:
        node_files(tmp_path, 0)
    run = read_run(tmp_path)
    console = Console(file=io.StringIO(), width=80, height=24)
    console.print(Fitted(run, run.indices))
    rows = console.file.getvalue().splitlines()
    assert len(rows) <= 24
    assert all(len(row) <= 80 for row in rows)
    assert ("role rollout" in "".join(rows)) == (count == 3)


def test_odd_records_of_servers_harm_nothing(tmp_path):
    odd = [{"servers": 7}, {"servers": [7]}, {"servers": [{}]}, {"servers": [{"name": None, "lag": "x"}]}]
    lines = [line(t, [node_at(0, 8)], [2], **changes) for t, changes in enumerate(odd)]
    write(tmp_path / "hub", [*lines, line(9, [node_at(0, 8)], [2], servers=[json.loads('{"name": "a"}')])])
    assert read_run(tmp_path).hubs[0].last.servers[0].name == "a"
    assert "role rollout: 0 servers of 1 live" in shown_status(tmp_path)


def test_a_folder_with_records_of_servers_alone_is_refused_with_a_word_about_the_hub(tmp_path):
    (tmp_path / "servers" / "alpha").mkdir(parents=True)
    with pytest.raises(UserError, match=r"not a run directory.*records of rollout servers.*HOST:PORT"):
        read_run(tmp_path)
