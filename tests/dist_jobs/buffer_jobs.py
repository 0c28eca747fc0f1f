"""Jobs for tests/test_buffers.py: models with buffers, sharded by FSDP2."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, LayerSync, MeanExchange
from aedit.proto.transports import TorchTransport


def train_apart(rank, size, ranks):
    """Train nodes with different weights, a frozen layer and BatchNorm: two warm-up steps, two local steps.

    Returns all whole tensors at the start, the buffers at the end, and this rank's running mean before the
    last round.
    """
    mesh = init_device_mesh("cpu", (size // ranks, ranks), mesh_dim_names=("sync", "shard"))
    torch.manual_seed(rank // ranks)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.Tanh(), nn.Linear(8, 1))
    )
    model[0][0].bias.requires_grad_(False)
    model.register_buffer("wide", torch.randn(3, dtype=torch.float64))
    for part in model:
        fully_shard(part, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    exchange = MeanExchange(TorchTransport(mesh.get_group("sync"), timeout_s=120), outer=Average())
    config = EditConfig(every=8, warmup_steps=2)
    random = torch.Generator().manual_seed(rank)
    with LayerSync.of(model, inner, exchange=exchange, config=config) as sync:
        started = {name: p.detach().full_tensor() for name, p in model.named_parameters()} | held(model)
        for _ in range(4):
            (model(torch.randn(4, 5, generator=random) + rank) - 1).square().mean().backward()
            inner.step()
            inner.zero_grad()
            sync.step()
        mine = held(model)["0.1.running_mean"]
    exchange.transport.close()
    return started, held(model), mine


def held(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}
