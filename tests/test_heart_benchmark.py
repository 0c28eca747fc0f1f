"""Tests that the benchmark of whole runs derives its configurations and judges as it says."""

from dataclasses import replace

import pytest
from benchmarks import heart
from benchmarks.heart import ARMS, CONFIG, POLICY, Result, config_ready, policy_ready, report
from benchmarks.policies import new_model
from benchmarks.tail import Times
from rich.console import Console

from aedit.launch.config import load
from aedit.launch.node import num_parameters

SPENT = dict.fromkeys(heart.USES, 1.0)
OFF = Result(
    arm="off",
    seed=0,
    lr="1e-5",
    steps=12,
    seconds=300.0,
    spent=(SPENT, SPENT),
    used=0.0,
    accepted=1.0,
    speed_up=1.0,
    rewards=(0.25, 0.5),
    digest=99,
    by_time=(1.0,) * 4,
)
WAITS = replace(OFF, arm="waits-tv", seconds=200.0, used=0.9, accepted=2.5)


def verdicts(*found):
    return [bar.passed for bar in report(found).bars]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_the_runs_are_the_shipped_one_with_the_policy_and_the_engine_of_the_arm(arm, tmp_path):
    python = tmp_path / "python"
    shipped, run = load(CONFIG, []).config, load(config_ready(tmp_path, arm, python), []).config
    assert run.model == replace(shipped.model, pretrained=str(tmp_path / "policy"))
    assert (run.rl, run.train, run.edit, run.outer, run.local) == (
        shipped.rl, shipped.train, shipped.edit, shipped.outer, shipped.local,
    )  # fmt: skip
    assert shipped.local.slowdown == (1.0, heart.SLOW)
    assert run.rollout.vllm.python == (str(python) if arm.uses_vllm else "")
    flagged = load(config_ready(tmp_path, arm, python), arm.flags).config
    assert flagged.rl.engine == ("vllm" if arm.name.startswith("vllm") else "aedit")
    assert flagged.rollout.vllm.has_own_drafter == (arm.name == "vllm-waits")


def test_the_policy_is_made_once(tmp_path, monkeypatch):
    made = []

    def ready(policy, root):
        made.append(policy)
        (root / "named").mkdir()
        (root / "named" / "config.json").touch()
        return root / "named"

    monkeypatch.setattr(heart, "ready", ready)
    for _ in range(2):
        assert (policy_ready(tmp_path, POLICY, Console(quiet=True)) / "config.json").exists()
    assert made == [POLICY]
    assert num_parameters(new_model(POLICY)) >= 25e6


@pytest.mark.parametrize(("changed", "passed"), [
    ({}, [True, True, True]),
    ({"seconds": 201.0}, [False, True, True]),
    ({"used": 0.79}, [True, False, True]),
    ({"digest": 98}, [True, True, False]),
])  # fmt: skip
def test_a_run_is_judged_beside_the_one_that_does_without_of_its_world(changed, passed):
    assert verdicts(OFF, replace(WAITS, **changed)) == passed
    for other in ({"seed": 1}, {"lr": "1e-4"}, {"arm": "vllm-off"}):
        assert verdicts(replace(WAITS, **changed), replace(OFF, **other))[0] is None


def test_the_bound_is_that_of_the_best_depth():
    draft_s = {f"layer:{depth}": (0.1 * depth,) * 2 for depth in (1, 2, 4, 8)}
    times = Times(
        (1, 8), (0, 1, 2, 4, 8), ((1.0, 1.1, 1.2, 1.4, 1.8), (2.0, 3.0, 4.0, 6.0, 10.0)), draft_s, (0, 0), 0
    )
    assert heart._drafted_s(times, 1, [1.0] * 8) == pytest.approx((1.8 + 0.8) / 9)
    assert heart._drafted_s(times, 1, [0.5, 0.5]) == pytest.approx(min(1.2 / 1.5, 1.4 / 1.75))
    assert heart._drafted_s(times, 8, [0.0] * 8) == 2.0
