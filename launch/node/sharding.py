"""The model of a node on its device, sharded over its ranks."""

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from aedit.launch.config import ModelConfig, RunConfig, check_memory
from aedit.launch.data import CorpusTokenizer
from aedit.launch.node.model import blocks, build_model, compile_blocks, num_parameters, outline
from aedit.launch.node.world import World


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
