"""Source of a rank's rollouts: its own engine, or worker processes."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from math import ceil
from pathlib import Path
from typing import Any

import torch

from aedit.launch.config import RunConfig
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_drafter import ForwardLearner, make_learner
from aedit.launch.node.rl_engine import ARMS, DTYPES, make_engine_source
from aedit.launch.node.rl_servers import make_servers
from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.rl import RolloutSource
from aedit.spec_rollout.training import OnlineDrafter
from aedit.spec_rollout.workers import WorkerConfig, WorkerSource
from aedit.types import UserError


def make_source(
    parts: NodeParts, longest: int, window: Callable[[str], AbstractContextManager[None]]
) -> tuple[RolloutSource, OnlineDrafter | None, ForwardLearner | None]:
    """Return the source of this rank's rollouts and its learned drafter; closing them ends their processes.

    The third is there if the drafter learns from the training forward, as the rank has no engine.

    longest: tokens of the longest prompt. Raises UserError if the model is not supported.
    """
    config, world = parts.config, parts.world
    if not config.rl.num_workers:
        return *make_engine_source(parts, longest), None
    directory = parts.recorder.directory / "workers" / str(world.rank)

    def record(event: str, fields: Mapping[str, Any]) -> None:
        parts.recorder.event(event, **fields)

    with ExitStack() as opened:
        learner = make_learner(parts)
        online = opened.enter_context(learner.online) if learner is not None else None
        arms = _arms(config, has_layer=online is not None)
        try:
            source = WorkerSource(
                parts.sync.model,
                worker_config(parts, longest, directory, arms),
                drafter=online,
                servers=make_servers(parts, directory),
                window=window,
                report=record,
            )
        except ValueError as error:
            raise UserError(f"workers and servers of rollouts: {error}") from None
        opened.pop_all()
    return source, online, learner


def worker_config(parts: NodeParts, longest: int, directory: Path, arms: tuple[str, ...]) -> WorkerConfig:
    """Return the settings of this rank's workers, whose logs and tokenizer are in `directory`."""
    config = parts.config
    samples = config.rl.groups // parts.world.ranks * config.rl.group_size
    tokenizer = directory / "tokenizer" if config.rl.sampling.stop else None
    if tokenizer is not None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        parts.tokenizer.save(tokenizer)
    return WorkerConfig(
        processes=config.rl.num_workers,
        rows=config.rl.rows or ceil(samples / config.rl.num_workers),
        max_tokens=longest + config.rl.sampling.max_new_tokens,
        dtype=DTYPES.get(config.rl.engine_dtype, torch.float32),
        device=str(parts.world.device),
        arms=arms,
        tokenizer=tokenizer,
        logs=directory,
    )


def _arms(config: RunConfig, *, has_layer: bool) -> tuple[str, ...]:
    drafters = {"layer"} if has_layer else set()
    if config.drafter.kind in ("suffix", "auto"):
        drafters.add("suffix")
    return ("off", *(arm for arm in ARMS if parse_arm(arm).drafter in drafters))
