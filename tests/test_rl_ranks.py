"""Tests that the ranks of a node generate and train the same as one rank with the same prompts."""

import torch
from kit.rl_nodes import config_of, records

JOBS = "tests/dist_jobs/rl_jobs.py"
KEYS = {"rl__groups": 4, "train__steps": 3, "drafter__kind": "off"}
# Groups of two are often without signal, so that ranks train groups that the other one has generated.
KEYS |= {"rl__group_size": 2, "rl__dynamic_sampling": True}


def test_two_ranks_train_the_groups_and_reach_the_weights_of_one(world, tmp_path):
    """The policies agree up to the rounding of sums, in which the tokens do not differ."""
    (alone,) = world.run(JOBS, "train", size=1, args={"directory": tmp_path / "one", "keys": KEYS})
    shared = world.run(JOBS, "train", size=2, args={"directory": tmp_path / "two", "keys": KEYS})
    assert len(alone[0]) == 12
    assert [shared[0][0], shared[1][0]] == [alone[0][::2], alone[0][1::2]]
    for name, value in alone[1].items():
        torch.testing.assert_close(shared[0][1][name], value, rtol=0, atol=2e-4)
    ours, theirs = (records(config_of(tmp_path / run), "metrics")[-1]["rl"] for run in ("one", "two"))
    for name in ("groups", "rollouts", "rollout_tokens", "no_signal"):
        assert ours[name] == theirs[name], name
    for name in ("reward", "solved", "entropy", "length", "length_max"):
        assert abs(ours[name] - theirs[name]) < 1e-3, name
    assert ours["no_signal"] > 0, "no group was replaced"
