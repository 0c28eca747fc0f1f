"""Tests of `aedit status` on the folder of a rollout server, from records as the server writes them."""

import io
import json
import os

import pytest
from rich.console import Console

from aedit.launch.cli.main import main
from aedit.launch.records import KEY_FILE, is_server_folder, read_run, read_server
from aedit.launch.views.server_folder_view import server_panel, serving_facts
from aedit.types import UserError


def metrics(t, tokens, **changes):
    told = {
        "t": t,
        "name": "alpha",
        "address": "10.0.0.1:7100",
        "rows": 8,
        "tokens_per_s": 120.0,
        "serial": 3,
    }
    told |= {"running": 5, "waiting": 2, "state": "serving", "idle_s": t / 2, "idle_used_s": t / 4}
    told |= {"tokens": tokens, "samples": tokens // 10, "streams": 1, "hub": "", "drafter": {}}
    return told | changes


def event(t, kind, **values):
    return {"t": t, "event": kind, **values}


START = event(0.0, "start", name="alpha", address="10.0.0.1:7100")


def folder(tmp_path, lines, events):
    path = tmp_path / "servers" / "alpha"
    path.mkdir(parents=True)
    (path / KEY_FILE).write_bytes(b"key")
    for name, records in (("metrics", lines), ("events", events)):
        texts = (each if isinstance(each, str) else json.dumps(each) for each in records)
        (path / f"{name}.jsonl").write_text("".join(f"{text}\n" for text in texts))
    return path


def facts(path):
    return dict(serving_facts(read_server(path)))


def test_counts_add_up_over_the_processes_of_a_server(tmp_path):
    lines = [metrics(1, 10), metrics(100, 500), metrics(1, 20), metrics(60, 300), metrics(90, 100)]
    versions = [event(k, "version", version=k, bytes=k * 1000, seconds=k / 10) for k in (1, 2, 6)]
    path = folder(
        tmp_path, lines, [START, versions[0], event(100, "end", reason="ended"), START, *versions[1:]]
    )
    found = facts(path)
    assert found["state"] == "serving"
    assert found["served"] == "4:10 in 2 processes"
    assert found["samples"] == "90 samples over, 900 tokens"
    assert found["now"] == "120 tokens/s, 5 running and 2 waiting; 8 rows in each line"
    assert found["idle"] == "2:05 without a request, 50.0 % of it trained the drafter"
    assert found["versions"] == "3 of the line run, newest 6; median 2.0 kB in 0.2 s"
    assert found["address"] == "10.0.0.1:7100"
    assert set(found) == {"state", "address", "served", "samples", "now", "idle", "versions"}


def test_the_end_silence_and_troubles_are_named(tmp_path):
    troubles = [
        event(2, "hub_lost", reason="no answer"),
        event(3, "announced", address="a"),
        event(4, "hub_lost", reason="refused \x1b[2J"),
        event(5, "drafter_failed", reason="short of memory"),
    ]
    drafter = {"state": "training", "steps": 40, "published": 2, "adopted": 1, "refused": 0, "deaths": 0}
    lines = [metrics(9, 90, hub="HOST does not answer", drafter=drafter)]
    path = folder(tmp_path, lines, [START, *troubles])
    found = facts(path)
    assert found["hub lost"] == "2 times, last: refused ?[2J"
    assert found["drafter failed"] == "1 time, last: short of memory"
    assert found["drafter"] == "training, 40 steps, 2 published, 1 adopted"
    assert found["hub"] == "HOST does not answer"
    for name in ("events", "metrics"):
        os.utime(path / f"{name}.jsonl", (1e9, 1e9))
    assert facts(path)["state"].startswith("silent for ")
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event(10, "end", reason="ended by the hub: banned")) + "\n")
    found = facts(path)
    assert found["state"] == "ended by the hub: banned"
    assert "now" not in found


@pytest.mark.parametrize("has_lines", [True, False])
def test_torn_odd_and_missing_records_harm_nothing(tmp_path, has_lines):
    odd = [
        "",
        "7",
        "[1]",
        '{"t": 1',
        '{"t": "x"}',
        '{"event": "version", "t": 1}',
        '{"t": 1, "event": "start"}',
    ]
    lines = [
        *odd,
        {"t": 1},
        metrics(5, 50, tokens_per_s="fast", drafter=7),
        metrics(6, 60) | {"tokens": None},
    ]
    path = folder(tmp_path, lines if has_lines else [], odd)
    assert facts(path)["state"] in ("?", "serving", "starting")
    console = Console(file=io.StringIO(), width=80)
    console.print(server_panel(read_server(path)))
    assert all(len(row) <= 80 for row in console.file.getvalue().splitlines())


def test_status_shows_the_folder_and_other_commands_name_status(tmp_path, capsys):
    path = folder(tmp_path, [metrics(9, 90)], [START])
    assert main(["status", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "rollout server alpha" in shown
    assert "9 samples over, 90 tokens" in shown
    with pytest.raises(UserError, match=r"folder of a rollout server.*aedit status"):
        read_run(path)
    (path / KEY_FILE).unlink()
    assert not is_server_folder(path)
