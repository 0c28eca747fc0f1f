"""Tests the recorder of a node's figures, and the trackers that it writes to."""

import json
import sqlite3
import struct
import sys
import tomllib
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from aedit.launch.config import RunConfig
from aedit.launch.records import Clock, Recorder, open_trackers
from aedit.launch.records.recorder import TRACKERS, Tracker
from aedit.types import UserError


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_not_finite_is_written_as_null(tmp_path):
    recorder = Recorder(tmp_path, Clock(now=lambda: 5.0), writes=True)
    recorder.event("round", norms=[1.0, float("nan")], loss=float("inf"))
    recorder.close()
    assert lines(tmp_path / "events.jsonl") == [
        {"t": 5.0, "event": "round", "norms": [1.0, None], "loss": None}
    ]


def test_a_line_torn_by_a_crash_does_not_spoil_the_next_one(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"event": "eval", "lo')
    (tmp_path / "metrics.jsonl").write_text("")
    recorder = Recorder(tmp_path, Clock(now=lambda: 1.0), writes=True)
    recorder.event("stop")
    recorder.close()
    torn, whole = (tmp_path / "events.jsonl").read_text().splitlines()
    assert torn == '{"event": "eval", "lo'
    assert json.loads(whole) == {"t": 1.0, "event": "stop"}
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_ranks_that_do_not_lead_write_nothing(tmp_path):
    Recorder(tmp_path / "node", Clock(), writes=False).event("stop")
    assert not (tmp_path / "node").exists()


def recorded(tmp_path, *names):
    """Run a node's recorder that writes two lines and an evaluation, and close it."""
    trackers = partial(open_trackers, names, "wide", 2, tmp_path)
    recorder = Recorder(tmp_path, Clock(), writes=True, trackers=trackers)
    recorder.metrics(step=3, loss=2.5, lr=float("nan"), state="fine")
    recorder.metrics(step=5, loss=1.5)
    recorder.event("eval", step=5, loss=2.25)
    recorder.close()


EXPECTED = {"loss": [(3, 2.5), (5, 1.5)], "held_out_loss": [(5, 2.25)]}


def test_tensorboard_gets_the_metrics(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recorded(tmp_path, "tensorboard")
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {*EXPECTED, "step"}
    assert {name: [(e.step, e.value) for e in found.Scalars(name)] for name in EXPECTED} == EXPECTED


def wandb_entries(directory):
    """Return the numbers in the files that `wandb` writes offline."""
    from wandb.proto import wandb_internal_pb2

    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                yield {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in items}


def log_records(data, block=32768, header=7, whole=1, last=4):
    """Return the records of a LevelDB log, as `wandb` writes them behind its own header.

    Blocks of 32 KiB hold chunks: checksum (4 bytes), length (2), kind (1: whole, 2 to 4: parts), data.
    """
    at, record = header, b""
    while at < len(data):
        if block - at % block < header:  # too little room for a chunk: filled with zeros
            at += block - at % block
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + header : at + header + size]
        at += header + size
        if kind in (whole, last):
            yield record
            record = b""


def test_weights_and_biases_gets_the_metrics_offline(tmp_path, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    recorded(tmp_path, "wandb")
    recorded(tmp_path, "wandb")  # as after a resume: the same steps come again
    wandb.teardown()
    entries = list(wandb_entries(tmp_path))
    found = {name: [(e["step"], e[name]) for e in entries if name in e] for name in EXPECTED}
    assert found == {name: 2 * points for name, points in EXPECTED.items()}
    assert len({path.name.split("-")[-1] for path in tmp_path.glob("wandb/offline-run-*")}) == 1, "one run"


def test_trackio_gets_the_metrics_on_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # read when the module is imported
    pytest.importorskip("trackio")  # it wants other versions of what is pinned: not in the test extra
    recorded(tmp_path, "trackio")
    (database,) = (tmp_path / "trackio").glob("*.db")
    rows = sqlite3.connect(database).execute("select step, metrics from metrics order by id").fetchall()
    entries = [(step, json.loads(text)) for step, text in rows]
    assert {n: [(step, e[n]) for step, e in entries if n in e] for n in EXPECTED} == EXPECTED


@pytest.mark.parametrize(
    ("name", "module"),
    [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb"), ("trackio", "trackio")],
)
def test_a_tracker_without_its_extra_is_told_in_one_line(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"^log: \"{name}\" needs its extra: pip install 'aedit\[{name}\]'$"):
        open_trackers([name], "wide", 2, tmp_path)


def test_a_tracker_that_fails_is_left_out_and_told_once(tmp_path, capsys):
    calls = []

    def add(values, step):
        calls.append(step)
        raise OSError("no space left")

    broken = Tracker("Broken", add, lambda: None)
    recorder = Recorder(tmp_path, Clock(), writes=True, trackers=lambda: [broken])
    for step in (1, 2, 3):
        recorder.metrics(step=step, loss=1.0)
    recorder.close()
    assert calls == [1]
    assert capsys.readouterr().out == "aedit: Broken: no space left; training continues without it\n"
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]


def test_every_tracker_has_an_extra_of_its_name():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    assert set(TRACKERS) <= set(project["project"]["optional-dependencies"])
    assert set(TRACKERS) == set(get_args(get_args(get_type_hints(RunConfig)["log"])[0]))
