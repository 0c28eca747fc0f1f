"""Jobs of tests/test_oracle.py: a mesh of nodes x ranks processes, FSDP2 inside a node."""

import torch
from nodes import batches, follow_script, parameters, tower, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.async_sgd.outer import Average, Nesterov
from aedit.edit.config import EditConfig, PenaltyConfig
from aedit.edit.exchange import MeanExchange
from aedit.proto.c10d import TorchTransport

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)
INNER = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def join(nodes, ranks):
    """The model of this rank and its transport."""
    mesh = init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("sync", "shard"))
    model = tower()
    if ranks > 1:
        for block in (model.first, model.middle, model.last, model):
            fully_shard(block, mesh=mesh["shard"])
    return model, TorchTransport(mesh.get_group("sync"), timeout_s=30)


def average_every_step(rank, size, nodes, ranks, inner, warmup_steps, steps):
    """Every rank draws batches of its own; returns the parameters after them."""
    model, transport = join(nodes, ranks)
    config = EditConfig(every=1, warmup_steps=warmup_steps)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    train(model, INNER[inner](model), exchange, batches(rank, steps), config)
    transport.close()
    return parameters(model)


def follow(rank, size, nodes, ranks, moves, steps, penalty, outer):
    """Scripted training; `moves` and `steps` are per node."""
    model, transport = join(nodes, ranks)
    node = rank // ranks
    seen = follow_script(
        model,
        transport,
        moves[node],
        steps[node],
        outer=Nesterov(*outer),
        penalty=PenaltyConfig(**penalty),
    )
    transport.close()
    return seen
