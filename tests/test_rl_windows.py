"""Tests that the waits of nodes in real processes are windows in which the drafter's trainer runs."""

import io
from contextlib import contextmanager

import pytest
import torch
from kit.rl_nodes import config_of, records, run
from rich.console import Console

from aedit.launch.config import DrafterConfig
from aedit.launch.data import load_tokenizer
from aedit.launch.node import online_config
from aedit.launch.node.model import make_model
from aedit.launch.node.world import World
from aedit.launch.records import read_run
from aedit.launch.views import run_report as report_module
from aedit.launch.views.panel import panel
from aedit.spec_rollout.drafters import DraftLayer

JOBS = "tests/dist_jobs/rl_window_jobs.py"


class Opened:
    """Idle work that writes a file when a wait with this cause begins."""

    used_s = 0.0

    def __init__(self, cause, path):
        self.cause, self.path = cause, path

    @contextmanager
    def window(self, cause):
        if cause == self.cause:
            self.path.touch()
        yield


def test_the_wait_for_rewards_is_a_window(tmp_path, monkeypatch):
    """The rewards come once the window is open, after those of the first call."""
    file = tmp_path / "open"
    file.touch()
    monkeypatch.setenv("REWARDS_AFTER", str(file))
    keys = {"reward__functions": ("kit.rl_rewards:after_a_file",), "reward__time_limit_s": 60.0}
    config = config_of(tmp_path, **keys, train__steps=1, drafter__kind="off")

    def watch(node):
        file.unlink()
        node.sync.idle = Opened("rewards", file)

    run(config, watch)
    last = records(config, "metrics")[-1]["rl"]
    assert (last["excluded"], last["reward"]) == (0, 0.5)
    assert last["idle_s"]["rewards"] > 0
    assert last["reward_s"] > 0


@pytest.mark.slow  # two trainers load torch
def test_a_fast_node_of_a_world_trains_its_drafter_while_it_waits_for_the_slow_one(
    world, tmp_path, monkeypatch
):
    keys = {"drafter__kind": "layer", "rl__sampling__max_new_tokens": 8, "checkpoint__every": 0}
    fast, slow = world.run(JOBS, "two_nodes", size=2, args={"directory": tmp_path, "keys": keys})
    assert fast["round"] > 0
    assert slow is None
    config = config_of(tmp_path)
    last = records(config, "metrics")[-1]
    assert last["idle_used_s"] > 0
    assert last["rl"]["idle_used_s"] > 0
    assert last["rl"]["idle_s"]["round"] > 0
    run_dir = tmp_path / config.name
    (run_dir / "run.toml").write_text(f'name = "{config.name}"\n[prompts]\nsource = "kit.rl_runs:rows"\n')
    seen = read_run(run_dir)
    console = Console(file=io.StringIO(), width=200)
    console.print(panel(seen, seen.indices))
    assert "% used" in console.file.getvalue()
    assert " 0.0 % used" not in console.file.getvalue()
    monkeypatch.setattr(report_module, "draw", lambda run: [])
    lines = map(str.strip, report_module.report(run_dir).splitlines())
    (idle,) = (line.removeprefix("idle").strip() for line in lines if line.startswith("idle "))
    assert " used; round " in idle
    assert not idle.startswith("0.0 s")


def test_each_rank_waits_for_the_rollouts_of_the_slower_one_in_a_window(world, tmp_path):
    keys = {"drafter__kind": "off", "rl__groups": 4, "checkpoint__every": 0}
    first, second = world.run(JOBS, "two_ranks", size=2, args={"directory": tmp_path, "keys": keys})
    assert first["rank"] > 0
    assert second["rank"] > 0
    assert records(config_of(tmp_path), "metrics")[-1]["rl"]["idle_s"]["rank"] > 0


@pytest.mark.slow  # two ranks and two workers load torch
def test_sharded_ranks_with_workers_collect_the_features_of_their_own_samples(world, tmp_path):
    """The whole weights of each step, in a plain model, are the oracle."""
    keys = {"drafter__kind": "layer", "drafter__idle_training": False, "rl__workers": 1, "rl__groups": 4}
    keys |= {"checkpoint__every": 0, "train__steps": 2}
    ranks = world.run(JOBS, "ranks_with_workers", size=2, args={"directory": tmp_path, "keys": keys})
    config = config_of(tmp_path, **keys)
    model = make_model(config, load_tokenizer(config.data), World(0, 1, 0, 1, torch.device("cpu"), None))
    texts = []
    for samples, trained, weights, shapes, (version, embedding, head) in ranks:
        assert len(samples) == 2 * 8
        assert sorted(tuple(tokens.tolist()) for tokens, *_ in samples) == sorted(trained)
        assert {name: tuple(t.shape) for name, t in DraftLayer.of(model).state_dict().items()} == shapes
        assert {each[3] for each in samples} == weights.keys()
        for tokens, features, _, at in samples:
            model.load_state_dict(weights[at], strict=False)
            with torch.no_grad():
                plain = model.model(input_ids=tokens[None]).last_hidden_state[0, :-1]
            torch.testing.assert_close(features, plain, rtol=0, atol=1e-5)
        assert version == max(weights)
        assert embedding.equal(model.get_input_embeddings().weight)
        assert head.equal(model.get_output_embeddings().weight)
        texts.append(sorted(trained))
    assert texts[0] != texts[1]


def test_the_priority_of_the_training_is_that_of_the_configuration(tmp_path):
    """In a wait its rank does nothing, so the training may have its place; on a shared desktop it may not."""
    found = {
        priority: online_config(DrafterConfig(priority=priority), tmp_path / "log").idle.niceness
        for priority in ("normal", "idle")
    }
    assert found == {"normal": 0, "idle": 19}
