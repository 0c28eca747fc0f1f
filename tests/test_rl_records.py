"""Tests the records of reinforcement learning, in a run directory and on their way to the hub."""

import json
import math
import socket
import urllib.request
from types import SimpleNamespace

import pytest
from kit.hub_processes import Client, HubProcess, ending, write_run
from kit.rl_runs import RLNode, closing, rl_run

from aedit.edit import Shards
from aedit.launch.config import RunConfig
from aedit.launch.node.rl_records import RLRecords, Waits
from aedit.launch.records import Clock, HubSample, Recorder, RLMetric, read_run
from aedit.launch.records.recorder import Tracker
from aedit.proto.agent import Progress, mailbox
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import RL_REPORT


@pytest.fixture(autouse=True)
def _files_are_closed():
    with closing():
        yield


def test_a_run_is_read_back_as_its_nodes_wrote_it(tmp_path):
    run = read_run(rl_run(tmp_path))
    assert run.is_rl
    state = run.nodes[1].metrics[-1].rl
    assert (state.reward, state.solved, state.staleness_max) == (0.8, pytest.approx(0.7), 2.0)
    assert (state.groups, state.rollout_tokens, state.rollout_s) == (200, 16000, 50)
    assert state.arms == {"off": 50, "layer:4": 150, "layer:6x2x12": 100, "suffix:8": 200}
    assert state.idle_s == {"hub": 15.0, "longest sample": 5.0, "rewards": 5.0}
    assert (state.drafter["steps"], state.drafter["accepted_length"]) == (250, 2.0)
    assert [(e.step, e.solved, e.problems) for e in run.nodes[0].rl_evaluations] == [
        (1, 0.26, 64),
        (25, 0.5, 64),
        (50, 0.75, 64),
    ]


@pytest.mark.parametrize("bad", [None, "x", [], {}, {"reward": "x", "arms": [1], "idle_s": 3, "drafter": 4}])
def test_what_is_missing_or_no_number_is_unknown(tmp_path, bad):
    run_dir = rl_run(tmp_path, 2)
    node = RLNode(run_dir, 2)
    node.step(1)
    node.out.metrics(step=2, tokens=1, rl=bad)
    node.step(3, reward=math.nan, entropy=math.inf, arms={"off": None, "layer:4": 3}, drafter=None)
    first, torn, last = (metric.rl for metric in read_run(run_dir).nodes[2].metrics)
    assert first.drafter
    if torn is not None:
        assert all(math.isnan(value) for value in (torn.reward, torn.groups, torn.idle_used_s))
        assert (torn.arms, torn.idle_s, torn.drafter) == ({}, {}, {})
    assert math.isnan(last.reward)
    assert math.isnan(last.entropy)
    assert last.arms == {"layer:4": 3}
    assert last.drafter == {}


def test_a_run_on_text_has_no_reinforcement_learning(tmp_path):
    (tmp_path / "nodes" / "0").mkdir(parents=True)
    (tmp_path / "run.toml").write_text('[prompts]\nsource = ""\n')
    line = {"t": 1.0, "step": 1, "tokens": 5}
    (tmp_path / "nodes" / "0" / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    run = read_run(tmp_path)
    assert run.nodes[0].metrics[0].rl is None
    assert not run.is_rl


def test_evaluations_after_the_resumed_step_are_dropped(tmp_path):
    run_dir = rl_run(tmp_path, 20)
    node = RLNode(run_dir, 0)
    node.now = 50.0
    node.start(attempt=1, step=10)
    node.evaluate(11, 0.9)
    found = read_run(run_dir).nodes[0].rl_evaluations
    assert [(e.step, e.solved) for e in found] == [(1, 0.275), (10, 0.5), (11, 0.9)]


def test_an_error_in_a_reward_names_function_sample_and_line(tmp_path):
    node = RLNode(tmp_path, 0)
    node.out.event(
        "reward_error", function="mine:score", sample=7, line="/a/mine.py:12", message="ZeroDivisionError: /0"
    )
    (tmp_path / "run.toml").write_text("")
    notices = read_run(tmp_path).nodes[0].notices
    assert [notice.text for notice in notices] == ["mine:score (mine.py:12), sample 7: ZeroDivisionError: /0"]


def test_trackers_get_the_numbers_of_reinforcement_learning(tmp_path):
    told = []

    sink = Tracker("Sink", lambda values, step: told.append((step, dict(values))), lambda: None)
    out = Recorder(tmp_path, Clock(), writes=True, trackers=lambda: [sink])
    out.metrics(
        step=3, loss=1.0, rl={"reward": 0.5, "entropy": math.nan, "arms": {"off": 2}, "drafter": None}
    )
    out.event("rl_eval", step=3, round=1, solved=0.25, reward=0.5, length=9.0, problems=64)
    assert told[0] == (3, {"step": 3, "loss": 1.0, "rl/reward": 0.5, "rl/arms/off": 2})
    assert told[1][0] == 3
    assert told[1][1]["held_out/solved"] == 0.25


def test_totals_of_earlier_attempts_are_counted_and_so_is_their_use_of_idle_time():
    def attempt(before):
        engine = {"rollout_tokens": 10, "arms": {"off": 2}, "compared_s": 0.5, "worker_idle_s": 0.25}
        source = SimpleNamespace(status=lambda: engine)
        used = {"used_by_cause_s": {"hub": 2.0, "rewards": 1.0}, "training": {"rests": 1.0}}
        online = SimpleNamespace(status=lambda: used)
        sync = SimpleNamespace(free=True, waited_s=4.0, idle_used_s=3.0)
        pipeline = SimpleNamespace(source=source, rollout_s=1.0, reward_s=0.25)
        shards, waits = Shards(), Waits(sync, {"rewards": 0.25})
        records = RLRecords(
            config=RunConfig(),
            sync=sync,
            pipeline=pipeline,
            waits=waits,
            shards=shards,
            before=before,
            online=online,
        )
        return RLMetric.of(records.line()), records.totals()

    first, totals = attempt({})
    second, _ = attempt(totals)
    assert (first.rollout_tokens, first.idle_used_s, first.idle_s) == (10, 3.0, {"hub": 4.0, "rewards": 0.25})
    assert (second.rollout_tokens, second.idle_used_s) == (20, 6.0)
    assert second.idle_s == {"hub": 8.0, "rewards": 0.5}
    assert (first.used_s, first.worker_idle_s) == ({"hub": 2.0, "rewards": 1.0}, 0.25)
    assert (second.used_s, second.worker_idle_s) == ({"hub": 4.0, "rewards": 2.0}, 0.5)
    assert (second.arms, second.compared_s) == ({"off": 4}, 1.0)
    assert first.drafter["rests"] == second.drafter["rests"] == 1, "a state, and no total"


def report_after(n):
    """Return what a node reports after `n` steps, by arithmetic."""
    state = RLNode.state(type("Node", (), {"speed": 1.0, "plain": True})(), n)
    return RLMetric.of(state).report()


def test_a_report_to_the_hub_counts_steps_by_drafter_and_leaves_out_what_is_unknown():
    found = report_after(10)
    assert set(found) <= set(RL_REPORT)
    steps = {name: found[name] for name in found if name.startswith("arms/")}
    assert steps == {"arms/off": 10, "arms/layer": 50, "arms/suffix": 40}
    assert found["idle_s/longest sample"] == pytest.approx(1.0)
    odd = RLMetric.of({"reward": None, "arms": {"mine:3": 2, "yours:1": 3}, "idle_s": {"elsewhere": 1.0}})
    assert odd.report() == {"arms/other": 5}


def test_a_report_passes_the_mailbox_of_the_agent():
    told = Progress(steps=3, tokens=9, rl=report_after(10))
    box = mailbox.create_mailbox([5], ranks=1, feedback=False)
    other = mailbox.attach_mailbox(box.path)
    box.tell(told)
    assert other.progress().rl == told.rl
    box.tell(Progress(steps=4))
    assert other.progress().rl == {}


def test_the_hub_shows_the_figures_that_its_nodes_report(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ending():
        hub = HubProcess(write_run(tmp_path), tmp_path / "hub", f"--hub.metrics-port={port}")
        learner, reader = Client(hub.address, name="learner").found(), Client(hub.address, name="reader")
        reader.join()
        told = pb.HeartbeatRequest(who=learner.who, steps=10, bytes_up=1, state="training")
        told.rl.update(report_after(10) | {"made up": 1.0, "reward": math.inf})
        learner.hub.heartbeat(told)
        sample = HubSample.of(learner.status())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    learns, reads = sample.nodes
    assert reads.rl is None
    assert math.isnan(learns.rl.reward), "infinity is not taken"
    assert (learns.rl.solved, learns.rl.rollout_tokens) == (pytest.approx(0.3), 6400)
    assert learns.rl.arms == {"off": 10, "layer": 50, "suffix": 40}
    assert learns.rl.idle_s["longest sample"] == pytest.approx(1.0)
    assert 'aedit_node_rollout_tokens_total{node="learner"} 6400.0' in text
    assert 'aedit_node_rollout_steps_total{drafter="layer",node="learner"} 50.0' in text
    assert 'aedit_node_idle_seconds_total{cause="hub",node="learner"}' in text
    assert 'rollout_tokens_total{node="reader"}' not in text
    assert "made up" not in text
