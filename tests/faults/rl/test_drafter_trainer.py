"""Tests that a run on rewards goes on when the process that trains its drafter is killed."""

import os
import signal

import psutil
import pytest
import torch
from kit.rl_nodes import config_of, records, run, weights
from kit.waiting import until

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import parse_arm

LIMIT_S = 120.0
KEYS = {"rl__engine_dtype": "fp64", "train__steps": 2, "checkpoint__every": 0, "rl__groups": 2}


@pytest.mark.skipif(not os.path.exists("/proc"), reason="a trainer is a process on Linux only")
def test_a_killed_trainer_of_the_drafter_changes_no_weight_and_is_one_event(tmp_path):
    """The same run without drafts is the oracle; a new process is there before the run goes on."""
    plain = run(config_of(tmp_path / "plain", drafter__kind="off", **KEYS))
    pids = []

    def watch(node):
        online, source = node.objective.online, node.objective.stream.pipeline.source
        source.engine.chooser = Fixed(parse_arm("layer:3"))
        step = source.step

        def kill_once():
            finished = step()
            if not pids and node.sync.steps == 1:
                pids.append(until(lambda: online.status()["pid"], "the trainer", LIMIT_S))
                os.kill(pids[0], signal.SIGKILL)
                with online.window("rollouts"):
                    until(lambda: online.status()["deaths"], "its death", LIMIT_S)
                    pids.append(until(lambda: online.status()["pid"], "the next one", LIMIT_S))
            return finished

        source.step = kill_once

    config = config_of(tmp_path / "killed", drafter__kind="layer", **KEYS)
    killed = run(config, watch)
    assert killed.sync.steps == 2
    assert len(set(pids)) == 2
    assert all(torch.equal(value, weights(killed)[name]) for name, value in weights(plain).items())
    (death,) = [line for line in records(config, "events") if line["event"] == "drafter_trainer_died"]
    assert (death["deaths"], death["reason"]) == (1, f"process {pids[0]} ended with -9")
    assert not any(map(psutil.pid_exists, pids))
