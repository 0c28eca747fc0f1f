"""Evaluation of the policy on held-out problems, answered greedily."""

from collections.abc import Sequence
from typing import Any

import torch

from aedit.edit import Shards
from aedit.launch.config import RunConfig
from aedit.launch.data import evaluation_indices
from aedit.launch.node.rl_pipeline import GroupPipeline
from aedit.spec_rollout.rl import Group, Problem
from aedit.spec_rollout.sampling import Sampling

FIRST_KEY = 1 << 62
"""Problem i has the key FIRST_KEY + i, beyond all positions of the run's stream of prompts."""


def solved_share(
    problems: Sequence[Problem],
    config: RunConfig,
    pipeline: GroupPipeline,
    sampling: Sampling,
    shards: Shards,
) -> dict[str, Any]:
    """Return solved share, mean reward and mean length of greedy answers to `rl.eval_problems` problems.

    They are evenly spaced over the held-out problems and always the same; each rank answers its share. A
    problem without a reward is not solved, and is left out of the mean reward.
    """
    chosen = [int(i) for i in evaluation_indices(len(problems), config.rl.eval_problems)]
    mine = chosen[shards.rank :: shards.size]
    for index in mine:
        pipeline.start(FIRST_KEY + index, problems[index], sampling, 1)
    answered: list[Group] = []
    while len(answered) < len(mine):
        pipeline.advance()
        ready = [position for position in pipeline.done if position >= FIRST_KEY]
        answered += map(pipeline.take, ready)
    rewards = [reward for group in answered for reward in group.rewards if reward is not None]
    solved = sum(reward >= config.reward.solved for reward in rewards)
    length = sum(len(rollout.tokens) for group in answered for rollout in group.rollouts)
    sums = torch.tensor([solved, sum(rewards), len(rewards), length], dtype=torch.float64)
    with pipeline.window("rank"):
        num_solved, reward, num_rewards, num_tokens = shards.sum(sums).tolist()
    return {
        "solved": num_solved / len(chosen),
        "reward": reward / num_rewards if num_rewards else None,
        "length": num_tokens / len(chosen),
        "problems": len(chosen),
    }
