"""Reinforcement learning on rollouts, without engine and trainer: pure functions, and processes for rewards.

Begin with `groups`: the stages of a sample from prompt to loss, advantages, and the interface of sources of
rollouts. `losses` has the policy losses and their metrics. `rewards` scores groups: `built_in` functions,
`reward` (interface and reports), `pool` (processes that call the functions) and `worker` (the process
itself). `tasks` generates problems.

Called by the training loop of a node (`launch.node`), by readers of prompts (`launch.data`), and by adapters.
"""

from typing import TYPE_CHECKING

from aedit.lazy import exports

if TYPE_CHECKING:
    from aedit.spec_rollout.rl.groups import (
        Advantage,
        Group,
        Messages,
        Problem,
        RolloutSource,
        advantages,
        answered,
        capacity,
        has_signal,
        overlong_penalty,
    )
    from aedit.spec_rollout.rl.losses import (
        LOSSES,
        MEANS,
        LossInputs,
        LossOutput,
        LossSettings,
        PolicyLoss,
        find_loss,
        loss_metrics,
        mean_metrics,
        try_loss,
    )
    from aedit.spec_rollout.rl.rewards.pool import RewardPool
    from aedit.spec_rollout.rl.rewards.reward import (
        BUILT_IN,
        Reward,
        RewardFailed,
        RewardReport,
        RewardSpec,
        Scalar,
    )
    from aedit.spec_rollout.rl.rewards.worker import BadReturn, EventLoop, values_of
    from aedit.spec_rollout.rl.tasks import ProblemOrigin, num_levels, source_of

__all__ = [
    "BUILT_IN",
    "LOSSES",
    "MEANS",
    "Advantage",
    "BadReturn",
    "EventLoop",
    "Group",
    "LossInputs",
    "LossOutput",
    "LossSettings",
    "Messages",
    "PolicyLoss",
    "Problem",
    "ProblemOrigin",
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
