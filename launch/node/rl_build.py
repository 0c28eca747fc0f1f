"""Build the objective of reinforcement learning: source of rollouts, rewards, groups and policy gradient."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from aedit.edit import find_units, flat_layout
from aedit.launch.config import RunConfig, VllmConfig
from aedit.launch.data import AnswerTokens, Curriculum, ProblemSet, reward_pool
from aedit.launch.node.model import make_model, stop_tokens
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_audit import MAKE, TrainingAudit, audit_options
from aedit.launch.node.rl_engine import (
    ARMS,
    DTYPES,
    ForwardLearner,
    TrainerWatch,
    hand_drafter,
    make_engine_source,
    make_helper_engine,
    make_learner,
)
from aedit.launch.node.rl_groups import FIRST_KEY, GroupPipeline, GroupStream
from aedit.launch.node.rl_objective import PolicyObjective, WarmUp
from aedit.launch.node.rl_policy import PolicyGradient, without_dropout
from aedit.launch.node.rl_records import KeptGroups, RLRecords, Waits
from aedit.launch.node.world import World
from aedit.launch.records import FOLDER, Recorder, RolloutStore
from aedit.proto.rpc import is_loopback
from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.engine import EngineSource
from aedit.spec_rollout.remote import PooledSource, PoolPlace, Servers, WorkerConfig, WorkerSource
from aedit.spec_rollout.rl import Group, RewardReport, RolloutSource
from aedit.spec_rollout.sampling import Sampling
from aedit.spec_rollout.server import check_vllm_server
from aedit.spec_rollout.training import OnlineDrafter
from aedit.types import ImportPath, UserError

MAKE_VLLM = ImportPath("aedit.spec_rollout.server.vllm_engine:make_vllm_engine")
MAKE_VLLM_SERVER = ImportPath("aedit.spec_rollout.server.vllm_server:make_vllm_server_engine")


def make_policy_objective(problems: ProblemSet, parts: NodeParts) -> PolicyObjective:
    """Return the objective of a node; closing it ends its processes.

    Raises UserError if the model has no engine or a reward cannot be used.
    """
    config, sync, world = parts.config, parts.sync, parts.world
    without_dropout(sync.model)
    sampling = partial(run_sampling, config, sync.model, parts.tokenizer.eos_id)
    longest = max(len(problem.tokens) for problem in (*problems.train, *problems.held_out))
    curriculum = Curriculum.of(problems.train) if config.prompts.curriculum else None
    waits = Waits(sync)
    with ExitStack() as opened:
        rewards = opened.enter_context(reward_pool(config, (*problems.train, *problems.held_out)))
        source, online, learner = make_source(parts, longest, waits.window)
        pipeline = GroupPipeline(
            source=source,
            rewards=rewards,
            decode=parts.tokenizer.decode,
            window=waits.window,
            report=partial(_record_faults, parts.recorder),
        )
        opened.pop_all()
    sync.idle = online
    if online is not None and parts.shared is not None:
        parts.shared.connect(online, sync.shards)
    stream = GroupStream(
        config=config.rl,
        order=parts.order,
        choose=curriculum.problem if curriculum else lambda position, index: problems.train[index],
        pipeline=pipeline,
        shards=sync.shards,
        sampling=sampling(config.rl.sampling.temperature),
        check_stop=parts.stop.check,
        log=parts.positions,
    )
    return PolicyObjective(
        config=config,
        sync=sync,
        stream=stream,
        gradient=PolicyGradient(
            config=config,
            model=sync.model,
            reference=_reference(config, parts),
            shards=sync.shards,
            device=world.device,
            learner=learner,
            audit=make_training_audit(config, source),
        ),
        warm_up=WarmUp(
            config=config,
            model=sync.model,
            problems=problems.train,
            answers=AnswerTokens(
                parts.tokenizer,
                config.prompts.answer_key,
                config.data.seq_len,
                chat_template=config.prompts.chat_template,
            ),
            world=world,
        ),
        records=RLRecords(
            config=config, sync=sync, pipeline=pipeline, waits=waits, shards=sync.shards, online=online
        ),
        held_out=problems.held_out,
        curriculum=curriculum,
        greedy=sampling(0.0),
        online=online,
        watch=None if online is None else TrainerWatch.of(online, parts.recorder.event, config.drafter),
        directory=parts.recorder.directory,
        kept=KeptGroups(
            store=RolloutStore(
                parts.recorder.directory / FOLDER / str(world.rank),
                -(-config.rl.keep_rollouts // config.rl.group_size),
            ),
            most=config.rl.keep_rollouts,
            decode=parts.tokenizer.decode,
            recorder=parts.recorder,
        ),
        started=config.rl.supervised_steps == 0,
    )


def run_sampling(config: RunConfig, model: Any, eos_id: int, temperature: float) -> Sampling:
    """Return how a run samples answers, at another temperature."""
    chosen = config.rl.sampling
    return Sampling(
        temperature=temperature,
        max_new_tokens=chosen.max_new_tokens,
        stop_tokens=stop_tokens(model, eos_id),
        stop_strings=chosen.stop,
    )


def _reference(config: RunConfig, parts: NodeParts) -> nn.Module | None:
    """Return the policy at the start: the configured model itself, equal on all nodes and after a resume."""
    if not config.rl.kl:
        return None
    model = make_model(config, parts.tokenizer, parts.world)
    without_dropout(model)
    return model.requires_grad_(False)


def _record_faults(recorder: Recorder, group: Group, report: RewardReport) -> None:
    """Record the calls of reward functions that failed."""
    for fault in report.events:
        position, slash, number = fault.sample.partition("/")
        held_out = int(position) - FIRST_KEY  # held-out problems have keys of their own
        sample = f"held-out {held_out}{slash}{number}" if held_out >= 0 else fault.sample
        recorder.event(
            "reward_error",
            function=fault.function,
            sample=sample,
            line=fault.line,
            message=fault.message,
        )


def make_source(
    parts: NodeParts, longest: int, window: Callable[[str], AbstractContextManager[None]]
) -> tuple[RolloutSource, OnlineDrafter | None, ForwardLearner | None]:
    """Return the source of this rank's rollouts and its learned drafter; closing them ends their processes.

    The third lets the drafter learn from the training forward.

    longest: tokens of the longest prompt. Raises UserError if the model is not supported.
    """
    config, world = parts.config, parts.world
    if config.rl.engine == "vllm" and config.rollout.vllm.server and world.nodes * world.ranks > 1:
        raise UserError(
            f"rollout.vllm.server: {world.nodes * world.ranks} ranks of one world cannot share a server, of"
            " one set of weights: set rollout.vllm.python, or run one rank"
        )
    if not config.rl.num_workers:
        own, online = make_engine_source(parts, longest)
        learner = None if online is None else ForwardLearner.of(parts, own.engine.target, online)
        return (_pooled(own, online, parts, window) if is_pooled(config, world) else own), online, learner
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


def is_pooled(config: RunConfig, world: World) -> bool:
    """Return whether the nodes of this world generate for each other.

    Samples that outlive a step would not get the same tokens: the policy of their node changes under way.
    """
    return config.rl.pool and world.nodes > 1 and not config.rl.max_staleness


def _pooled(
    own: EngineSource,
    online: OnlineDrafter | None,
    parts: NodeParts,
    window: Callable[[str], AbstractContextManager[None]],
) -> PooledSource:
    """Return the engine of this rank in a pool with that of the same rank of each other node.

    All processes of the world together.
    """
    world, sync = parts.world, parts.sync
    groups = [
        dist.new_group([node * world.ranks + rank for node in range(world.nodes)], backend="gloo")
        for rank in range(world.ranks)
    ]
    place = PoolPlace(
        group=groups[world.rank],
        steps=lambda: sync.steps,
        rounds=lambda: sync.round_id,
        waited_s=lambda: sync.waited_s,
        window=window,
        stretch=parts.slowdown.stretch,
        note_wait=parts.slowdown.note_wait,
        refresh=partial(hand_drafter, online),
    )
    source = PooledSource(own, partial(make_helper_engine, parts, own.engine.target, online), place)
    sync.help = source
    return source


def worker_config(parts: NodeParts, longest: int, directory: Path, arms: tuple[str, ...]) -> WorkerConfig:
    """Return the settings of this rank's workers, whose logs and tokenizer are in `directory`."""
    config = parts.config
    samples = config.rl.groups // parts.world.ranks * config.rl.group_size
    tokenizer = directory / "tokenizer" if config.rl.sampling.stop else None
    if tokenizer is not None:
        tokenizer.mkdir(parents=True, exist_ok=True)
        parts.tokenizer.save(tokenizer)
    return WorkerConfig(
        **(vllm_settings(config.rollout.vllm) if config.rl.engine == "vllm" else {}),
        processes=config.rl.num_workers,
        rows=config.rl.rows or ceil(samples / config.rl.num_workers),
        max_tokens=longest + config.rl.sampling.max_new_tokens,
        dtype=DTYPES.get(config.rl.engine_dtype, torch.float32),
        device=str(parts.world.device),
        arms=arms,
        tokenizer=tokenizer,
        logs=directory,
    )


def vllm_settings(vllm: VllmConfig) -> dict[str, Any]:
    """Return the settings of workers that run vLLM, or push to its server.

    Raises UserError if its interpreter, or the directory of weights, is not there.
    """
    if vllm.server:
        folder = Path(vllm.weights).expanduser().absolute()
        if not os.access(folder, os.W_OK):
            raise UserError(f"rollout.vllm.weights: {vllm.weights!r} is no directory that can be written")
        try:
            check_vllm_server(vllm.server)
        except RuntimeError as error:
            raise UserError(f"rollout.vllm.server: {error}") from None
        return {"make": MAKE_VLLM_SERVER, "options": {"server": vllm.server, "folder": str(folder)}}
    named = vllm.python
    python = Path(named).expanduser().absolute()
    if not named or not python.is_file() or not os.access(python, os.X_OK):
        raise UserError(
            f"rollout.vllm.python: {named!r} is no program: name the Python interpreter of this machine's"
            " environment with vLLM (`make vllm` builds .venv-vllm/bin/python), or set rollout.vllm.server"
        )
    options = {"speculative": dict(vllm.speculative), "choose": vllm.choose}
    return {"make": MAKE_VLLM, "python": python, "options": options}


def _arms(config: RunConfig, *, has_layer: bool) -> tuple[str, ...]:
    if config.rl.engine == "vllm":
        return ("off",)
    drafters = {"layer"} if has_layer else set()
    if config.drafter.kind in ("suffix", "auto"):
        drafters.add("suffix")
    return ("off", *(arm for arm in ARMS if parse_arm(arm).drafter in drafters))


def make_servers(parts: NodeParts, logs: Path) -> Servers | None:
    """Return the servers of this rank; None if the configuration wants none.

    logs: directory of the output. Raises UserError if they cannot be reached safely.
    """
    config, rank = parts.config, parts.world.rank
    if not config.rl.has_servers:
        return None
    options = parts.hub.options if parts.hub is not None else None
    keys = options.keys if options is not None else None
    far = [place for place in config.rl.server_addresses if not is_loopback(place)]
    if far and keys is None and not (options is not None and options.insecure):
        raise UserError(
            f"rl.servers: {far[0]} is on another machine, and this node has no keys for it: join a run whose"
            " hub has keys (`aedit keys`), or say --insecure if the network is closed"
        )
    listed = config.rl.servers == "hub" and options is not None
    audit, directory = config.audit, parts.recorder.directory / "audit" / str(rank)
    model = parts.sync.model
    return Servers(
        addresses=config.rl.server_addresses,
        hubs=tuple(options.hub.split(",")) if options is not None and listed else (),
        standby=options.standbys_of_first if options is not None and listed else "",
        run=config.name,
        trainer=options.name if options is not None else f"node {parts.world.node}",
        rank=rank,
        keys=keys,
        layout=flat_layout.layout(find_units(model, config.edit.units)),
        dtype=config.rl.version_dtype,
        on_new_version=config.rl.on_new_version,
        silent_s=config.rl.server_silent_s,
        stalled_s=config.rl.server_stalled_s,
        auditor=MAKE if audit.on else "",
        audit_options=audit_options(config, model, parts.world.device, str(directory)) if audit.on else {},
        member=parts.hub.identity if parts.hub is not None else lambda: (0, 0),
        logs=logs,
    )


def make_training_audit(config: RunConfig, source: RolloutSource) -> TrainingAudit | None:
    """Return the audit in the forward pass of training; None without servers, or if it is off."""
    if not config.rl.has_servers or not isinstance(source, WorkerSource):
        return None
    return TrainingAudit.of(config, source.accuse)
