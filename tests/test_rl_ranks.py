"""Tests that the ranks of a node generate and train the same as one rank with the same prompts."""

import numpy as np
import torch
from kit.rl_nodes import config_of, records

JOBS = "tests/dist_jobs/rl_jobs.py"
KEYS = {"rl__groups": 4, "train__steps": 4, "edit__every": 1, "drafter__kind": "off"}
# Groups of two are often without signal, so that ranks train groups that the other one has generated.
KEYS |= {"rl__group_size": 2, "rl__dynamic_sampling": True}
SCRIPTS = ([(1, 30, 11), (3, 50, 12)], [(1, 10, 13)])
"""Of the drafter trainers of both ranks: (batch, training steps so far, seed of the published drafter)."""


def check_drafters(ranks):
    """Check that each round has the mean of the ranks' drafters, by their new steps, on both ranks."""
    seen, landed, weights = [0, 0], np.zeros(()), []
    for both in zip(*ranks, strict=True):
        new = [each["steps"] - before for each, before in zip(both, seen, strict=True)]
        seen = [each["steps"] for each in both]
        own = [each["own"].double().numpy() for each in both]
        brought = np.average(own, axis=0, weights=new) if sum(new) else own[0]
        landed = brought if sum(new) else landed
        for each in both:
            np.testing.assert_allclose(each["brought"].numpy(), brought, atol=1e-6)
            np.testing.assert_allclose(each["landed"].numpy(), landed, atol=1e-6)
        weights.append(tuple(new))
    assert weights == [(30, 10), (0, 0), (20, 0), (0, 0), (0, 0)]


def test_two_ranks_train_the_groups_and_reach_the_weights_of_one(world, tmp_path):
    """The policies agree up to the rounding of sums, in which the tokens do not differ."""
    (alone,) = world.run(JOBS, "train", size=1, args={"directory": tmp_path / "one", "keys": KEYS})
    keys = KEYS | {"drafter__kind": "layer", "drafter__idle_training": False}
    args = {"directory": tmp_path / "two", "keys": keys, "scripts": SCRIPTS}
    shared = world.run(JOBS, "train", size=2, args=args)
    assert len(alone[0]) == 16
    assert [shared[0][0], shared[1][0]] == [alone[0][::2], alone[0][1::2]]
    check_drafters([result[2] for result in shared])
    for name, value in alone[1].items():
        torch.testing.assert_close(shared[0][1][name], value, rtol=0, atol=2e-4)
    ours, theirs = (records(config_of(tmp_path / run), "metrics")[-1]["rl"] for run in ("one", "two"))
    for name in ("groups", "rollouts", "rollout_tokens", "no_signal"):
        assert ours[name] == theirs[name], name
    for name in ("reward", "solved", "entropy", "length", "length_max"):
        assert abs(ours[name] - theirs[name]) < 1e-3, name
    assert ours["no_signal"] > 0, "no group was replaced"
