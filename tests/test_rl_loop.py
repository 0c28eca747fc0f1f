"""Tests the reinforcement-learning loop of a node: its records, its numbers, evaluation and stops."""

from kit.rl_nodes import config_of, records, run


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
