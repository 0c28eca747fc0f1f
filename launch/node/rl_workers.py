"""Source of a rank's rollouts: its own engine, or worker processes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from math import ceil
from pathlib import Path
from typing import Any

import torch

from aedit.launch.config.config import RunConfig
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_engine import ARMS, DTYPES, make_engine_source
from aedit.spec_rollout.learning.online_drafter import OnlineDrafter
from aedit.spec_rollout.rl.source import RolloutSource
from aedit.spec_rollout.workers.config import WorkerConfig
from aedit.spec_rollout.workers.source import WorkerSource
from aedit.types import UserError


def make_source(
    parts: NodeParts, longest: int, window: Callable[[str], AbstractContextManager[None]]
) -> tuple[RolloutSource, OnlineDrafter | None]:
    """Return the source of this rank's rollouts and its learned drafter; closing them ends their processes.

    longest: tokens of the longest prompt. Raises UserError if the model is not supported.
    """
    config, world = parts.config, parts.world
    if not config.rl.workers:
        return make_engine_source(parts, longest)
    directory = parts.recorder.directory / "workers" / str(world.rank)

    def record(event: str, fields: Mapping[str, Any]) -> None:
        parts.recorder.event(event, **fields)

    try:
        source = WorkerSource(
            parts.sync.model, worker_config(parts, longest, directory), window=window, report=record
        )
    except ValueError as error:
        raise UserError(f"rl.workers = {config.rl.workers}: {error}") from None
    return source, None


def worker_config(parts: NodeParts, longest: int, directory: Path) -> WorkerConfig:
    """Return the settings of this rank's workers, whose logs and tokenizer are in `directory`."""
    config = parts.config
    samples = config.rl.groups // parts.world.ranks * config.rl.group_size
    tokenizer = directory / "tokenizer" if config.rl.sampling.stop else None
    if tokenizer is not None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        parts.tokenizer.save(tokenizer)
    return WorkerConfig(
        processes=config.rl.workers,
        rows=config.rl.rows or ceil(samples / config.rl.workers),
        max_tokens=longest + config.rl.sampling.max_new_tokens,
        dtype=DTYPES.get(config.rl.engine_dtype, torch.float32),
        device=str(parts.world.device),
        arms=_arms(config),
        tokenizer=tokenizer,
        logs=directory,
    )


def _arms(config: RunConfig) -> tuple[str, ...]:
    if config.drafter.kind not in ("suffix", "auto"):
        return ("off",)
    return ("off", *(arm for arm in ARMS if arm.startswith("suffix")))
