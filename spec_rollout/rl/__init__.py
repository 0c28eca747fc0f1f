"""Reinforcement learning on rollouts: groups, rewards, advantages, policy losses, admission."""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.rl.admission import capacity
    from aedit.spec_rollout.rl.group_advantages import Advantage, advantages, has_signal
    from aedit.spec_rollout.rl.groups import Group, answered
    from aedit.spec_rollout.rl.losses.find import find_loss, try_loss
    from aedit.spec_rollout.rl.losses.inputs import LossInputs, LossOutput, LossSettings, PolicyLoss
    from aedit.spec_rollout.rl.metrics import MEANS, loss_metrics, mean_metrics
    from aedit.spec_rollout.rl.overlong import overlong_penalty
    from aedit.spec_rollout.rl.problems import Messages, Problem
    from aedit.spec_rollout.rl.rewards.calling import BadReturn, EventLoop, values_of
    from aedit.spec_rollout.rl.rewards.pool import RewardPool
    from aedit.spec_rollout.rl.rewards.reward import (
        BUILT_IN,
        Reward,
        RewardFailed,
        RewardReport,
        RewardSpec,
        Scalar,
    )
    from aedit.spec_rollout.rl.source import RolloutSource
    from aedit.spec_rollout.rl.tasks.gym import Origin, num_levels, source_of

__all__ = [
    "BUILT_IN",
    "MEANS",
    "Advantage",
    "BadReturn",
    "EventLoop",
    "Group",
    "LossInputs",
    "LossOutput",
    "LossSettings",
    "Messages",
    "Origin",
    "PolicyLoss",
    "Problem",
    "Reward",
    "RewardFailed",
    "RewardPool",
    "RewardReport",
    "RewardSpec",
    "RolloutSource",
    "Scalar",
    "advantages",
    "answered",
    "capacity",
    "find_loss",
    "has_signal",
    "loss_metrics",
    "mean_metrics",
    "num_levels",
    "overlong_penalty",
    "source_of",
    "try_loss",
    "values_of",
]

if not TYPE_CHECKING:  # so that type checkers know which names there are
    __getattr__, __dir__ = exports(__name__)
