"""The learned drafter of a rank: made from the configuration, kept in a file beside the checkpoints."""

import sys
from pathlib import Path

from aedit.launch.config.rl import DrafterConfig
from aedit.launch.node.objective import NodeParts
from aedit.spec_rollout.drafters.draft_layer import DraftLayer
from aedit.spec_rollout.idle.trainer_supervisor import IdleConfig
from aedit.spec_rollout.learning.draft_training import DraftTrainingConfig
from aedit.spec_rollout.learning.learning import LearningConfig
from aedit.spec_rollout.learning.online_drafter import OnlineConfig, OnlineDrafter
from aedit.spec_rollout.model.target_model import TargetModel
from aedit.types import UserError

FILE = "drafter.safetensors"
"""In the directory of the node: written with each checkpoint, read by a resume and by `aedit export`."""


def make_online(parts: NodeParts, target: TargetModel) -> OnlineDrafter | None:
    """Return the drafter of this rank, with its trainer; None if the configuration has none.

    Raises UserError if `drafter.kind = "layer"` and there is no draft layer for this type of model.
    """
    config, directory = parts.config.drafter, parts.recorder.directory
    if config.kind not in ("layer", "auto"):
        return None
    rank = parts.world.rank
    try:
        return OnlineDrafter.of(
            target,
            layer=_saved(directory / FILE, target),
            config=_online_config(config, directory / f"drafter_{rank}.log"),
            checkpoint=directory / f"drafter_{rank}.training",
            seed=parts.config.seed,
        )
    except ValueError as error:
        if config.kind == "auto":
            return None
        raise UserError(f'drafter.kind = "layer": {error}; use "suffix" or "auto"') from None


def save_drafter(online: OnlineDrafter, directory: Path) -> None:
    """Write the drafter in use. If that fails, print the error and continue: the older file is intact."""
    try:
        online.layer.save(directory / FILE)
    except OSError as error:
        print(f"aedit: {directory / FILE} was not written: {error}", file=sys.stderr, flush=True)


def _online_config(config: DrafterConfig, log: Path) -> OnlineConfig:
    return OnlineConfig(
        learning=LearningConfig(training=DraftTrainingConfig(lr=config.lr)),
        idle=IdleConfig(log=log),
        memory_bytes=config.memory_bytes,
        train=config.idle_training,
    )


def _saved(path: Path, target: TargetModel) -> DraftLayer | None:
    """Return the drafter of an earlier attempt; None without one. A damaged file costs its training only."""
    if not path.exists():
        return None
    try:
        return DraftLayer.load(path, target.model)
    except (OSError, ValueError) as error:
        print(f"aedit: the drafter begins anew: {error}", file=sys.stderr, flush=True)
        return None
