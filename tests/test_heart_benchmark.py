"""Tests that the benchmark of whole runs derives its configurations and judges as it says."""

from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import heart
from benchmarks.heart import ARMS, CONFIG, Result, config_ready, policy_ready, report
from rich.console import Console

from aedit.launch.config import load

OFF = Result(
    arm="off",
    seed=0,
    steps=12,
    seconds=300.0,
    rollout_s=200.0,
    train_s=50.0,
    waited_s=40.0,
    used_s=0.0,
    accepted=1.0,
    speed_up=1.0,
    solved=(0.25, 0.5),
    digest=99,
    by_time=((1.0, 1.0),),
)
WAITS = replace(OFF, arm="waits-tv", seconds=200.0, used_s=36.0, accepted=2.5)


def verdicts(*found):
    return [bar.passed for bar in report(found).bars]


def test_the_runs_are_the_shipped_one_after_its_warm_up(tmp_path):
    shipped, run = load(CONFIG, []).config, load(config_ready(tmp_path), []).config
    assert run.rl == replace(shipped.rl, supervised_steps=0, supervised_batch=run.rl.supervised_batch)
    assert run.train == replace(shipped.train, steps=shipped.train.steps - shipped.rl.supervised_steps)
    assert run.model.pretrained == str(tmp_path / "policy")
    assert (run.edit, run.outer, run.drafter, run.local) == (
        shipped.edit, shipped.outer, shipped.drafter, shipped.local,
    )  # fmt: skip


def test_the_policy_has_the_sizes_of_the_shipped_run_and_is_made_once(tmp_path, monkeypatch):
    commands = []

    def command(*words):
        commands.append(words)
        if words[0] == "run":
            found = load(Path(words[1]), []).config
            assert (found.model, found.prompts.source) == (load(CONFIG, []).config.model, "")
            assert found.train.steps == 7
        else:
            (tmp_path / "policy").mkdir()
            (tmp_path / "policy" / "config.json").touch()

    monkeypatch.setattr(heart, "_command", command)
    for _ in range(2):
        assert policy_ready(tmp_path, 7, Console(quiet=True)) == tmp_path / "policy"
    assert [words[0] for words in commands] == ["run", "export"]


@pytest.mark.parametrize(("changed", "passed"), [
    ({}, [True, True, True]),
    ({"seconds": 201.0}, [False, True, True]),
    ({"used_s": 31.0}, [True, False, True]),
    ({"digest": 98}, [True, True, False]),
])  # fmt: skip
def test_a_run_is_judged_beside_the_one_that_does_without_of_its_seed(changed, passed):
    assert verdicts(OFF, replace(WAITS, **changed)) == passed
    assert verdicts(replace(WAITS, **changed), replace(OFF, seed=1))[0] is None


def test_each_arm_has_flags_that_a_run_accepts(tmp_path):
    for arm in ARMS:
        load(config_ready(tmp_path), arm.flags)
