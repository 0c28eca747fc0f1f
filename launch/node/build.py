"""Build a node of a `torchrun` world from its configuration, with its data, objective and shared drafter."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aedit.async_sgd.rules import DRAFTER, make_outer
from aedit.edit import Inner, LayerSync, MeanExchange, SharedModule, compare
from aedit.launch.config import RunConfig, unit_rules
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
from aedit.launch.node.checkpoint import NodeCheckpoints, Resumed, resume
from aedit.launch.node.model import make_model, num_parameters
from aedit.launch.node.objective import NodeParts, Objective, TextObjective, make_inners
from aedit.launch.node.rl_build import make_policy_objective
from aedit.launch.node.stop import Stop
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.launch.records import Clock, Recorder, open_trackers
from aedit.proto.transports import TorchTransport
from aedit.spec_rollout.drafters import DraftLayer, DraftShape
from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class TrainingData:
    """Samples of a run; one of the two."""

    corpus: Corpus | None = None
    problems: ProblemSet | None = None

    @property
    def num_samples(self) -> int:
        """Return the number of samples in an epoch: texts, or prompts."""
        if self.problems is not None:
            return len(self.problems.train)
        assert self.corpus is not None
        return len(self.corpus.train)

    @property
    def facts(self) -> dict[str, object]:
        """Return the properties that must be equal for nodes and checkpoints of one run."""
        if self.problems is not None:
            return {"problems": self.problems.fingerprint}
        return {"samples of the corpus": self.num_samples}


@contextmanager
def build(
    config: RunConfig, world: World, run_dir: Path, attempt: int, slowdown: float = 1.0
) -> Iterator[TrainingNode]:
    """Build a node, resume it if there is a checkpoint, and close it when the block ends.

    All processes of the run together. slowdown: factor by which each step is slowed down.
    """
    check_fits(config, world)
    torch.manual_seed(config.seed + world.node)
    tokenizer = load_tokenizer(config.data)
    data = load_data(config, tokenizer, run_dir / "data")
    model = make_model(config, tokenizer, world)
    inners = make_inners(model, config.train)
    with closing(TorchTransport(world.mesh.get_group("sync"), timeout_s=config.edit.timeout_s)) as transport:
        exchange = _exchange(config, transport)
        shared = make_shared(config, model, world.device)
        if shared is not None:
            shared.attach(exchange)
        sync = _sync(config, model, inners, exchange)
        facts = facts_of(config, model, tokenizer, data)
        _compare(sync, transport, facts)
        clock, directory = Clock(), run_dir / "nodes" / str(world.node)
        checkpoints = NodeCheckpoints(
            directory / "checkpoints", keep=config.checkpoint.keep, shards=sync.shards
        )
        order = SampleOrder(data.num_samples, config.seed, world.node, world.nodes)
        resumed = resume(sync, exchange, checkpoints, order, facts)
        clock.start(resumed.elapsed_s if resumed else 0.0)
        trackers = partial(open_trackers, config.log, config.name, world.node, directory)
        recorder = Recorder(directory, clock, writes=world.leads, trackers=trackers)
        stop = Stop(world.node, world.nodes, transport, sync.shards)
        order = (resumed and resumed.order) or order
        parts = NodeParts(
            config=config,
            world=world,
            tokenizer=tokenizer,
            sync=sync,
            order=order,
            stop=stop,
            recorder=recorder,
            shared=shared,
        )
        make = partial(
            TrainingNode,
            config=config,
            world=world,
            sync=sync,
            budget=WorldBudget(config, world, sync, clock),
            stop=stop,
            checkpoints=checkpoints,
            recorder=recorder,
            facts=facts,
            slowdown=slowdown,
        )
        with started(make, data, parts, resumed, attempt) as node:
            yield node


@contextmanager
def started(
    make: Callable[..., TrainingNode],
    data: TrainingData,
    parts: NodeParts,
    resumed: Resumed | None,
    attempt: int,
) -> Iterator[TrainingNode]:
    """Make the objective and the node, restore and record it; close objective and records with the block.

    make: returns the node of an objective, which is its keyword argument.
    """
    recorder = parts.recorder
    try:
        with closing(make_objective(data, parts)) as objective:
            node = make(objective=objective)
            if resumed:
                node.restore(resumed)
            recorder.event("start", **start_values(node, attempt))
            yield node
    except Exception as error:
        recorder.event("error", message=str(error) or type(error).__name__)
        raise
    finally:
        recorder.close()


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


def _exchange(config: RunConfig, transport: TorchTransport) -> MeanExchange:
    return MeanExchange(
        transport,
        outer=make_outer(config.outer),
        penalty=config.edit.penalty,
        offload=config.edit.offload,
        rules=unit_rules(config),
    )


def _sync(config: RunConfig, model: nn.Module, inners: Inner, exchange: MeanExchange) -> LayerSync:
    try:
        return LayerSync.of(model, inners, exchange=exchange, config=config.edit)
    except ValueError as error:
        raise UserError(str(error)) from error


def facts_of(
    config: RunConfig, model: nn.Module, tokenizer: CorpusTokenizer, data: TrainingData
) -> dict[str, Any]:
    """Return the properties that must be equal for nodes and checkpoints of one run."""
    layout = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "parameters": num_parameters(model),
        "layout of the model": hashlib.sha256(repr(layout).encode()).hexdigest()[:16],
        "tokenizer": tokenizer.fingerprint,
        **data.facts,
        "seed": config.seed,
        "outer.kind": config.outer.kind,
        "train.optimizer": config.train.optimizer,
    }


def _compare(sync: LayerSync, transport: TorchTransport, facts: dict[str, Any]) -> None:
    """Raise UserError on all nodes, before the first step, if their settings or data differ."""
    try:
        sync.compare()
        compare(transport, "facts", {name: str(value) for name, value in facts.items()})
    except ValueError as error:
        raise UserError(f"{error}, and use the same files and the same Python version") from None


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
        return TrainingData(corpus=load_corpus(config.data, tokenizer, directory))
    problems = load_problems(
        config.prompts,
        tokenizer,
        seed=config.seed,
        longest=config.data.seq_len - config.rl.sampling.max_new_tokens,
        needs_answer=need_answer(config.reward) or config.rl.supervised_steps > 0,
    )
    return TrainingData(problems=problems)


def make_objective(data: TrainingData, parts: NodeParts) -> Objective:
    """Return the objective of a node. Raises UserError if the model or the rewards cannot be used."""
    if data.problems is not None:
        return make_policy_objective(data.problems, parts)
    assert data.corpus is not None
    return TextObjective(
        config=parts.config, world=parts.world, corpus=data.corpus, order=parts.order, sync=parts.sync
    )


def make_shared(config: RunConfig, model: nn.Module, device: torch.device) -> SharedModule | None:
    """Return the unit of the drafter; None if the run shares none, or has no draft layer for this model."""
    if DRAFTER not in unit_rules(config):
        return None
    untyped: Any = model
    try:
        shape = DraftShape.of(untyped.config)
    except ValueError:
        return None
    with torch.device("meta"):  # names and shapes only
        layer = DraftLayer(shape)
    shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    return SharedModule(DRAFTER, shapes, device)
