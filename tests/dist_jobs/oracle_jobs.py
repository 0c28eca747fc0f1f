"""Jobs of tests/test_oracle.py: a mesh of nodes x ranks processes, FSDP2 inside a node."""

import torch
from kit.nodes import batches, follow_script, parameters, tower, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.async_sgd.rules import Average, Nesterov
from aedit.edit import EditConfig, MeanExchange, PenaltyConfig
from aedit.proto.transports import TorchTransport

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)
INNER = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def everything(rank, size, nodes, ranks, averaging, steps, following):
    """Run all cases on one mesh of nodes x ranks, because starting a mesh is slow.

    averaging: (inner, warmup_steps) cases of averaging every step; following: cases of scripted training.
    Returns the results of both, in the order of the cases.
    """
    mesh = init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("sync", "shard"))
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    try:
        return (
            [average_every_step(sharded(mesh), transport, rank, *case, steps) for case in averaging],
            [follow(sharded(mesh), transport, rank // ranks, **case) for case in following],
        )
    finally:
        transport.close()


def sharded(mesh):
    """Return this rank's shard of the model."""
    model = tower()
    if mesh["shard"].size() > 1:
        for block in (model.first, model.middle, model.last, model):
            fully_shard(block, mesh=mesh["shard"])
    return model


def average_every_step(model, transport, rank, inner, warmup_steps, steps):
    """Train every rank on its own batches; return the parameters afterwards."""
    config = EditConfig(every=1, warmup_steps=warmup_steps)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    train(model, INNER[inner](model), exchange, batches(rank, steps), config)
    return parameters(model)


def follow(model, transport, node, moves, steps, penalty, outer):
    """Run scripted training; `moves` and `steps` are per node."""
    return follow_script(
        model,
        transport,
        moves[node],
        steps[node],
        outer=Nesterov(*outer),
        penalty=PenaltyConfig(**penalty),
    )
