"""Build a node from its configuration, with its data, objective and shared drafter.

Begin at `build`. A node joins the others in one of three ways: `world_member` here, `hub_member` in
`build_hub`, `averaging_peer` in `build_averaging`.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aedit.async_sgd.rules import DRAFTER, make_outer
from aedit.edit import Exchange, LayerSync, MeanExchange, RoundSchedule, SharedModule, compare
from aedit.launch.config import JoinOptions, NodeOptions, RunConfig, unit_rules
from aedit.launch.data import (
    Corpus,
    CorpusTokenizer,
    ProblemSet,
    SampleOrder,
    load_corpus,
    load_problems,
    load_tokenizer,
    need_answer,
)
from aedit.launch.node.budget import WorldBudget
from aedit.launch.node.build_averaging import averaging_peer
from aedit.launch.node.build_hub import hub_member
from aedit.launch.node.checkpoint import NodeCheckpoints, resume_training
from aedit.launch.node.evaluation import make_evaluation
from aedit.launch.node.model import make_model, num_parameters
from aedit.launch.node.objective import NodeParts, Objective, TextObjective, make_inners
from aedit.launch.node.rl_build import make_policy_objective
from aedit.launch.node.rl_engine import draft_form
from aedit.launch.node.stop import Stop
from aedit.launch.node.text_learner import make_text_learner
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.launch.records import (
    OF_NODE_WITH_HUB,
    Alerts,
    Clock,
    NodeAlerts,
    PositionLog,
    Recorder,
    open_trackers,
)
from aedit.proto.transports import TorchTransport
from aedit.spec_rollout.drafters import layer_of
from aedit.types import UserError

TrainingData = Corpus | ProblemSet
"""Samples of a run: texts, or problems whose answers are rewarded. `train` has those of an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStart:
    """A node with its model and data, before it joins the others."""

    config: RunConfig
    world: World
    options: NodeOptions
    log_to: Callable[[Path, int], None]
    """Redirects stdout and stderr to the log of this attempt in a node's directory."""
    tokenizer: CorpusTokenizer
    data: TrainingData
    model: nn.Module
    facts: dict[str, Any]
    """Properties that must be equal for all nodes and checkpoints of the run."""
    shared: SharedModule | None
    """The drafter as the nodes share it."""

    @property
    def member(self) -> JoinOptions:
        """Return how a node outside a world joins the others."""
        return self.options.membership or JoinOptions(hub="", name="")

    @property
    def run_dir(self) -> Path:
        """Return the run directory."""
        return Path(self.config.dir) / self.config.name

    def directory(self, index: int) -> Path:
        """Return the directory of the node with this index."""
        return self.run_dir / "nodes" / str(index)

    def sync(self, exchange: Exchange, schedule: RoundSchedule | None = None) -> LayerSync:
        """Return the model as a node that exchanges by `exchange`.

        Raises UserError if a setting does not fit the model.
        """
        inners = make_inners(self.model, self.config.train)
        try:
            return LayerSync.of(
                self.model, inners, exchange=exchange, schedule=schedule, config=self.config.edit
            )
        except ValueError as error:
            raise UserError(str(error)) from error

    def checkpoints(self, directory: Path, sync: LayerSync) -> NodeCheckpoints:
        """Return the checkpoints in the directory of a node."""
        return NodeCheckpoints(
            directory / "checkpoints", keep=self.config.checkpoint.keep, shards=sync.shards
        )

    def recorder(self, index: int, elapsed_s: float) -> Recorder:
        """Return the records of the node, which continue `elapsed_s` seconds into the run."""
        clock, directory = Clock(), self.directory(index)
        clock.start(elapsed_s)
        trackers = partial(open_trackers, self.config.log, self.config.name, index, directory)
        return Recorder(directory, clock, writes=self.world.leads, trackers=trackers)


@contextmanager
def build(
    config: RunConfig, world: World, options: NodeOptions, log_to: Callable[[Path, int], None]
) -> Iterator[TrainingNode]:
    """Build a node, let it join the others, resume it if it has a checkpoint; close it when the block ends.

    All processes of a world together, or all ranks of a node with a hub. Raises UserError if the machine or
    the other nodes refuse it.

    log_to: see `NodeStart`.
    """
    check_fits(config, world)
    torch.manual_seed(config.seed + world.node)
    tokenizer = load_tokenizer(config.data)
    data = load_data(config, tokenizer, Path(config.dir) / config.name / "data")
    model = make_model(config, tokenizer, world)
    start = NodeStart(
        config=config,
        world=world,
        options=options,
        log_to=log_to,
        tokenizer=tokenizer,
        data=data,
        model=model,
        facts=facts_of(config, model, tokenizer, data),
        shared=make_shared(config, model, world.device),
    )
    joined = {"parts": hub_member, "hivemind": averaging_peer}[config.swarm.exchange]
    with (joined if options.membership else world_member)(start) as parts:
        index = world.node if options.membership is None else options.membership.prefers or 0
        known = options.local and index < len(config.local.slowdown)
        parts.slowdown.factor = config.local.slowdown[index] if known else 1.0
        with started(parts, data, attempt=options.attempt) as node:
            yield node


@contextmanager
def world_member(start: NodeStart) -> Iterator[NodeParts]:
    """Yield the parts of a node that meets the others in one `torchrun` world. All processes together."""
    config, world, data = start.config, start.world, start.data
    with closing(TorchTransport(world.mesh.get_group("sync"), timeout_s=config.edit.timeout_s)) as transport:
        exchange = MeanExchange(
            transport,
            outer=make_outer(config.outer),
            penalty=config.edit.penalty,
            offload=config.edit.offload,
            rules=unit_rules(config),
        )
        if start.shared is not None:
            start.shared.attach(exchange)
        sync = start.sync(exchange)
        try:
            sync.compare()
            compare(transport, "facts", {name: str(value) for name, value in start.facts.items()})
        except ValueError as error:
            raise UserError(f"{error}, and use the same files and the same Python version") from None
        checkpoints = start.checkpoints(start.directory(world.node), sync)
        order = SampleOrder(len(data.train), config.seed, world.node, world.nodes)
        resumed = resume_training(sync, exchange, checkpoints, order, start.facts)
        recorder = start.recorder(world.node, resumed.elapsed_s if resumed else 0.0)
        yield NodeParts(
            config=config,
            world=world,
            tokenizer=start.tokenizer,
            sync=sync,
            order=(resumed and resumed.order) or order,
            budget=WorldBudget(config, world, sync, recorder.clock),
            stop=Stop(world.node, world.nodes, transport, sync.shards),
            checkpoints=checkpoints,
            recorder=recorder,
            facts=start.facts,
            resumed=resumed,
            shared=start.shared,
        )


@contextmanager
def started(parts: NodeParts, data: TrainingData, *, attempt: int = 1) -> Iterator[TrainingNode]:
    """Make the objective and the node, restore and record it; close objective and records with the block.

    Args:
        parts: Of the node.
        data: Samples of the run.
        attempt: Number of this start of the run.
    """
    recorder = parts.recorder
    positions = PositionLog(
        recorder.directory, rank=parts.world.rank, elapsed_s=lambda: recorder.clock.elapsed_s
    )
    parts = replace(parts, positions=positions)
    try:
        with closing(make_objective(data, parts)) as objective:
            node = TrainingNode(
                config=parts.config,
                world=parts.world,
                objective=objective,
                sync=parts.sync,
                budget=parts.budget,
                stop=parts.stop,
                checkpoints=parts.checkpoints,
                recorder=recorder,
                facts=parts.facts,
                slowdown=parts.slowdown,
                hub=parts.hub,
                positions=positions,
                alerts=alerts_of(parts) if parts.world.leads else None,
            )
            if parts.resumed:
                node.restore(parts.resumed)
            recorder.event("start", **start_values(node, attempt))
            node.begin_positions(attempt)
            yield node
    except Exception as error:
        recorder.event("error", message=str(error) or type(error).__name__)
        raise
    finally:
        positions.close()
        recorder.close()


def alerts_of(parts: NodeParts) -> NodeAlerts:
    """Return the alerts of a node. In a run with a hub the hub sends those that it knows to the webhook."""
    config, recorder = parts.config, parts.recorder
    posts = OF_NODE_WITH_HUB if config.has_hub else None
    name = f"node {recorder.directory.name}"
    alerts = Alerts(config.alerts, config.name, name, recorder.event, posts=posts)
    return NodeAlerts(config.alerts, recorder.directory, alerts)


def check_fits(config: RunConfig, world: World) -> None:
    """Raise UserError that names the key if this machine cannot run the configuration."""
    sizes = {"train.batch_size": config.train.batch_size}
    if config.prompts.source:
        sizes |= {"rl.groups": config.rl.groups, "rl.supervised_batch": config.rl.supervised_batch}
    for name, size in sizes.items():
        if size % world.ranks:
            raise UserError(f"{name} = {size}: must be a multiple of the {world.ranks} ranks per node")
    if config.prompts.source and config.rl.batches * world.ranks > config.rl.groups:
        most = config.rl.groups // world.ranks
        raise UserError(f"rl.batches = {config.rl.batches}: must be at most {most}, the groups of a rank")
    if config.edit.offload and world.device.type != "cuda":
        raise UserError("edit.offload = true needs CUDA: on a CPU node anchors are in host memory already")


def facts_of(
    config: RunConfig, model: nn.Module, tokenizer: CorpusTokenizer, data: TrainingData
) -> dict[str, Any]:
    """Return the properties that must be equal for nodes and checkpoints of one run."""
    layout = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "parameters": num_parameters(model),
        "layout of the model": hashlib.sha256(repr(layout).encode()).hexdigest()[:16],
        "tokenizer": tokenizer.fingerprint,
        **(
            {"problems": data.fingerprint}
            if isinstance(data, ProblemSet)
            else {"samples of the corpus": len(data.train)}
        ),
        "seed": config.seed,
        "outer.kind": config.outer.kind,
        "train.optimizer": config.train.optimizer,
    }


def start_values(node: TrainingNode, attempt: int) -> dict[str, Any]:
    """Return the values of the `start` event."""
    world, units = node.world, node.sync.units
    return {
        "attempt": attempt,
        "node": world.node,
        "nodes": world.nodes,
        "ranks": world.ranks,
        "device": str(world.device),
        "params": num_parameters(node.sync.model),
        "units": [unit.name for unit in units],
        "params_per_unit": [unit.numel for unit in units],
        "resumed_round": node.sync.round_id if node.resumed else None,
        "step": node.sync.steps,
        "pid": os.getpid(),
    }


def load_data(config: RunConfig, tokenizer: CorpusTokenizer, directory: Path) -> TrainingData:
    """Return the samples of the run. directory: of packed text.

    Raises UserError for an unusable source.
    """
    if not config.prompts.source:
        return load_corpus(config.data, tokenizer, directory)
    return load_problems(
        config.prompts,
        tokenizer,
        seed=config.seed,
        longest=config.data.seq_len - config.rl.sampling.max_new_tokens,
        needs_answer=need_answer(config.reward) or config.rl.supervised_steps > 0,
    )


def make_objective(data: TrainingData, parts: NodeParts) -> Objective:
    """Return the objective of a node. Raises UserError if the model or the rewards cannot be used."""
    if isinstance(data, ProblemSet):
        return make_policy_objective(data, parts)
    return TextObjective(
        config=parts.config,
        world=parts.world,
        corpus=data,
        order=parts.order,
        sync=parts.sync,
        learner=make_text_learner(parts),
        in_waits=make_evaluation(parts, data),
    )


def make_shared(config: RunConfig, model: nn.Module, device: torch.device) -> SharedModule | None:
    """Return the unit of the drafter; None if the run shares none, or has no draft layer for this model."""
    if DRAFTER not in unit_rules(config):
        return None
    untyped: Any = model
    try:
        shape = draft_form(config.drafter).shape(untyped.config)
    except ValueError:
        return None
    with torch.device("meta"):  # names and shapes only
        layer = layer_of(shape)
    shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    return SharedModule(DRAFTER, shapes, device)
