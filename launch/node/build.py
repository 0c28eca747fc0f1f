"""Build a node of a `torchrun` world from its configuration."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from aedit.async_sgd.rules.outer import make_outer
from aedit.edit.agreement import compare
from aedit.edit.mean_exchange import MeanExchange
from aedit.edit.sync import LayerSync
from aedit.launch.config.config import ModelConfig, RunConfig
from aedit.launch.config.memory import check_memory
from aedit.launch.data.samples import Corpus, SampleOrder, load_corpus
from aedit.launch.data.tokenizer import CorpusTokenizer, load_tokenizer
from aedit.launch.node.budget import WorldBudget
from aedit.launch.node.checkpoint import NodeCheckpoints
from aedit.launch.node.inner import make_inner
from aedit.launch.node.model import blocks, build_model, compile_blocks, num_parameters, outline
from aedit.launch.node.resume import resume
from aedit.launch.node.stop import Stop
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.launch.rundir.recorder import Clock, Recorder
from aedit.launch.rundir.sinks import Origin, open_sinks
from aedit.proto.transports.c10d import TorchTransport
from aedit.types import UserError


@contextmanager
def build(
    config: RunConfig, world: World, run_dir: Path, attempt: int, slowdown: float = 1.0
) -> Iterator[TrainingNode]:
    """Build a node, resume it if there is a checkpoint, and close it when the block ends.

    All processes of the run together. slowdown: factor by which each step is slowed down.
    """
    check_fits(config, world)
    torch.manual_seed(config.seed + world.node)
    tokenizer = load_tokenizer(config.data.tokenizer)
    corpus = load_corpus(config.data, tokenizer, run_dir / "data")
    model = make_model(config, tokenizer, world)
    inner = make_inner(model, config.train)
    with closing(TorchTransport(world.mesh.get_group("sync"), timeout_s=config.edit.timeout_s)) as transport:
        exchange = _exchange(config, transport)
        sync = _sync(config, model, inner, exchange)
        facts = facts_of(config, model, tokenizer, corpus)
        _compare(sync, transport, facts)
        clock, directory = Clock(), run_dir / "nodes" / str(world.node)
        checkpoints = NodeCheckpoints(
            directory / "checkpoints", keep=config.checkpoint.keep, shards=sync.shards
        )
        order = SampleOrder(len(corpus.train), config.seed, world.node, world.nodes)
        resumed = resume(sync, exchange, checkpoints, order, facts)
        clock.start(resumed.elapsed_s if resumed else 0.0)
        origin = Origin(config.name, world.node, directory)
        sinks = partial(open_sinks, config.log, origin)
        recorder = Recorder(directory, clock, writes=world.leads, sinks=sinks)
        node = TrainingNode(
            config=config,
            world=world,
            corpus=corpus,
            order=(resumed and resumed.order) or order,
            sync=sync,
            budget=WorldBudget(config, world, sync, clock),
            stop=Stop(world.node, world.nodes, transport, sync.shards),
            checkpoints=checkpoints,
            recorder=recorder,
            facts=facts,
            slowdown=slowdown,
        )
        try:
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
    if config.train.batch_size % world.ranks:
        size = config.train.batch_size
        raise UserError(f"train.batch_size = {size}: must be a multiple of the {world.ranks} ranks per node")
    if config.edit.offload and world.device.type != "cuda":
        raise UserError("edit.offload = true needs CUDA: on a CPU node anchors are in host memory already")


def make_model(config: RunConfig, tokenizer: CorpusTokenizer, world: World) -> nn.Module:
    """Return the model on its device, sharded over the ranks of the node.

    Raises UserError if it cannot fit.
    """
    num_params = num_parameters(outline(config, tokenizer))
    if world.device.type == "cuda":
        have = world.ranks * torch.cuda.get_device_properties(world.device).total_memory
        check_memory(config, num_params, have=have)
    else:
        check_memory(config, num_params)
    model: nn.Module = build_model(
        config.model, tokenizer.vocab_size, config.data.seq_len, config.seed, tokenizer.eos_id
    )
    model.to(world.device)
    if config.model.compile:
        compile_blocks(model)
    if world.ranks > 1:
        _shard(model, config.model, world)
    return model


def _shard(model: nn.Module, config: ModelConfig, world: World) -> None:
    """Shard the model over the node's ranks with FSDP2: each block, then the remaining parameters."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if config.dtype == "bf16" else None, reduce_dtype=torch.float32
    )
    for _, block in blocks(model):
        fully_shard(block, mesh=world.mesh["shard"], mp_policy=policy)
    fully_shard(model, mesh=world.mesh["shard"], mp_policy=policy)


def _exchange(config: RunConfig, transport: TorchTransport) -> MeanExchange:
    return MeanExchange(
        transport,
        outer=make_outer(config.outer),
        penalty=config.edit.penalty,
        offload=config.edit.offload,
    )


def _sync(
    config: RunConfig, model: nn.Module, inner: torch.optim.Optimizer, exchange: MeanExchange
) -> LayerSync:
    try:
        return LayerSync.of(model, inner, exchange=exchange, config=config.edit)
    except ValueError as error:
        raise UserError(str(error)) from error


def facts_of(
    config: RunConfig, model: nn.Module, tokenizer: CorpusTokenizer, corpus: Corpus
) -> dict[str, Any]:
    """Return the properties that must be equal for nodes and checkpoints of one run."""
    layout = [(name, tuple(p.shape), p.requires_grad) for name, p in model.named_parameters()]
    return {
        "parameters": num_parameters(model),
        "layout of the model": hashlib.sha256(repr(layout).encode()).hexdigest()[:16],
        "tokenizer": tokenizer.fingerprint,
        "samples of the corpus": len(corpus.train),
        "seed": config.seed,
        "outer.kind": config.outer.kind,
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
