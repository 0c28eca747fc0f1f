"""The learned drafter of a rank: made from the configuration, kept in a file beside the checkpoints."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from aedit.launch.config import DrafterConfig
from aedit.launch.node.objective import NodeParts
from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.training import (
    DraftTrainingConfig,
    ForwardFeatures,
    IdleConfig,
    LearningConfig,
    OnlineConfig,
    OnlineDrafter,
    PolicySource,
    TrainedPolicy,
    TrainedText,
)
from aedit.types import UserError

FILE = "drafter.safetensors"
"""In the directory of the node: written with each checkpoint, read by a resume and by `aedit export`."""


def make_online(parts: NodeParts, policy: PolicySource) -> OnlineDrafter | None:
    """Return the drafter of this rank, with its trainer; None if the configuration has none.

    policy: the target of the rank's engine, or the trained model of a rank without one.

    Raises UserError if `drafter.kind = "layer"` and there is no draft layer for this type of model.
    """
    config, directory = parts.config.drafter, parts.recorder.directory
    if config.kind not in ("layer", "auto"):
        return None
    rank = parts.world.rank
    try:
        return OnlineDrafter.of(
            policy,
            layer=saved_layer(directory / FILE, policy),
            config=online_config(config, directory / f"drafter_{rank}.log"),
            checkpoint=directory / f"drafter_{rank}.training",
            seed=parts.config.seed,
        )
    except ValueError as error:
        if config.kind == "auto":
            return None
        raise UserError(f'drafter.kind = "layer": {error}; use "suffix" or "auto"') from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardLearner:
    """Learned drafter of a rank whose rollouts come from workers: it learns from the training forward."""

    policy: TrainedPolicy
    online: OnlineDrafter
    features: ForwardFeatures

    def begin(self, version: int) -> None:
        """Read the policy of which features follow. All ranks of the node together.

        Not at the hand-over: in the wait for rollouts after that, the features are of the version before.
        """
        self.policy.update(version)
        self.online.after_update()

    def collecting(self, model: nn.Module, samples: Sequence[Rollout]) -> AbstractContextManager[None]:
        """Return a context that collects the features of the forward pass in it; `features.write` follows."""
        texts = [
            TrainedText((*each.prompt.tokens, *each.tokens), len(each.prompt.tokens)) for each in samples
        ]
        return self.features.collecting(model, texts, self.policy.version)


def make_learner(parts: NodeParts) -> ForwardLearner | None:
    """Return the drafter of a rank without an engine. See `make_online`."""
    policy = TrainedPolicy(parts.sync.model)
    online = make_online(parts, policy)
    if online is None:
        return None
    return ForwardLearner(policy=policy, online=online, features=ForwardFeatures(online.sink))


@dataclass(slots=True)
class TrainerDeaths:
    """Reports the deaths of the drafter's trainer process, which is started again."""

    online: OnlineDrafter
    record: Callable[..., None]
    """Takes the name of an event and its fields."""
    reported: int = 0

    def report(self) -> None:
        """Record an event if the process has died since the last call."""
        status = self.online.status()
        deaths = status.get("deaths", 0)  # without a process of its own there are none
        if deaths > self.reported:
            self.reported = deaths
            self.record(
                "drafter_trainer_died", deaths=self.reported, reason=status["error"], state=status["state"]
            )


def save_drafter(online: OnlineDrafter, directory: Path) -> None:
    """Write the drafter in use. If that fails, print the error and continue: the older file is intact."""
    try:
        online.layer.save(directory / FILE)
    except OSError as error:
        print(f"aedit: {directory / FILE} was not written: {error}", file=sys.stderr, flush=True)


def online_config(config: DrafterConfig, log: Path) -> OnlineConfig:
    """Return the settings of the training; `log`: file of the trainer's output."""
    return OnlineConfig(
        learning=LearningConfig(training=DraftTrainingConfig(lr=config.lr)),
        idle=IdleConfig(log=log),
        memory_bytes=config.memory_bytes,
        train=config.idle_training,
    )


def saved_layer(path: Path, policy: PolicySource) -> DraftLayer | None:
    """Return the drafter of an earlier attempt; None without one. A damaged file costs its training only."""
    if not path.exists():
        return None
    try:
        return DraftLayer.load(path, policy.model)
    except (OSError, ValueError) as error:
        print(f"aedit: the drafter begins anew: {error}", file=sys.stderr, flush=True)
        return None
