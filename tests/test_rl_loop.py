"""Tests the reinforcement-learning loop of a node: its records, its numbers, evaluation and stops."""

import pytest
import torch
from kit.rl_nodes import config_of, records, run, weights

from aedit.launch.node.rl_policy import without_dropout
from aedit.types import RunFailed


def test_a_run_trains_on_groups_and_records_them(tmp_path):
    config = config_of(tmp_path, rl__eval_every=2)
    node = run(config)
    assert node.sync.steps == 4
    last = records(config, "metrics")[-1]["rl"]
    assert (last["groups"], last["rollouts"], last["excluded"]) == (12, 48, 0)
    assert last["rollout_tokens"] >= 48
    assert last["staleness_max"] == 0
    assert last["mismatch_kl"] < 1e-6
    assert 0 < last["reward"] < 1
    evaluations = [line for line in records(config, "events") if line["event"] == "rl_eval"]
    assert [line["step"] for line in evaluations] == [0, 2, 4, 4]
    assert all(line["problems"] == 4 for line in evaluations)


def test_a_reward_that_fails_leaves_its_group_out_and_says_where(tmp_path):
    config = config_of(tmp_path, reward__functions=("kit.rl_rewards:fails_once_in_a_while",))
    run(config)
    last = records(config, "metrics")[-1]["rl"]
    faults = [line for line in records(config, "events") if line["event"] == "reward_error"]
    assert faults
    held_out = [fault for fault in faults if fault["sample"].startswith("held-out ")]
    assert len(held_out) < 2 * 4, "two evaluations of four problems"
    assert last["excluded"] == 4 * (len(faults) - len(held_out)) < last["rollouts"]
    assert last["excluded"] > 0
    assert faults[0]["function"] == "kit.rl_rewards:fails_once_in_a_while"
    assert "odd number of letters" in faults[0]["message"]
    assert "rl_rewards.py" in faults[0]["line"]


def test_a_reward_that_fails_ends_the_run_if_that_is_asked_for(tmp_path):
    keys = {"reward__functions": ("kit.rl_rewards:fails_once_in_a_while",), "reward__on_error": "stop"}
    with pytest.raises(RunFailed, match="odd number of letters"):
        run(config_of(tmp_path, **keys))


def test_the_divergence_from_the_configured_model_holds_the_policy_back(tmp_path):
    keys = {"train__steps": 6, "rl__epochs": 2, "drafter__kind": "off"}
    free, held = (run(config_of(tmp_path / str(kl), rl__kl=kl, **keys)) for kl in (0.0, 5.0))
    first = held.objective.gradient.reference
    assert first is not None
    assert free.objective.gradient.reference is None
    start = dict(first.named_parameters())

    def moved(node):
        return sum((value - start[name]).abs().sum().item() for name, value in weights(node).items())

    assert moved(held) < moved(free)


def test_a_policy_is_trained_without_dropout():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).train()
    x = torch.randn(2, 3, 8)
    assert not torch.equal(layer(x), layer(x))
    without_dropout(layer)
    layer.self_attn.dropout = 0.0
    assert torch.equal(layer(x), layer(x))
