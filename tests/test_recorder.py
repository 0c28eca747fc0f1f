import json
import sys

import pytest

from aedit.launch.rundir.recorder import Clock, Recorder
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


def test_tensorboard_gets_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorder = Recorder(tmp_path, Clock(), writes=True, tensorboard=True)
    recorder.metrics(step=3, loss=2.5)
    recorder.event("eval", step=3, loss=2.25)
    recorder.close()
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(3, 2.5)]
    assert [(e.step, e.value) for e in found.Scalars("held_out_loss")] == [(3, 2.25)]


def test_tensorboard_without_its_extra_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UserError, match=r"pip install 'aedit\[tensorboard\]'"):
        Recorder(tmp_path, Clock(), writes=True, tensorboard=True)
