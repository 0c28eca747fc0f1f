"""Jobs of the tests of landing between steps and of the hand-over from sharded trainers to engines."""

import torch
from kit.deferred import round_numbers
from kit.hubs import Hub, SharedLink, box_of, hub_node, move_sharded
from kit.nodes import parameters, tower
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit.pace import OwnPace


class Slow(SharedLink):
    """Link of a rank that sees each answer `looks` looks late."""

    def __init__(self, *args, looks):
        super().__init__(*args)
        self.looks, self.seen = looks, {}

    def answer(self, unit, seq):
        found = super().answer(unit, seq)
        if found is None:
            return None
        self.seen[unit, seq] = self.seen.get((unit, seq), 0) + 1
        return found if self.seen[unit, seq] > self.looks else None


def shard(model: nn.Module, size, blocks):
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    for block in (*blocks, model):
        fully_shard(block, mesh=mesh)
    return model


def land_between_steps(rank, size):
    """Train over a hub that adds to the anchors; return what `land` returned, and the parameters."""
    model, hub = round_numbers(tower()), Hub()
    link = Slow(box_of(model, rank, size), rank, hub, looks=3 if rank == size - 1 else 0)
    if size > 1:
        shard(model, size, (model.first, model.middle, model.last))
    sync, _ = hub_node(model, link, schedule=OwnPace(2))
    landed = []
    with sync:
        for n in range(12):
            model(torch.ones(1, 5)).sum().backward()
            move_sharded(model, torch.Generator().manual_seed(n))
            model.zero_grad()
            sync.step()
            landed += [sync.land(), sync.land()]
            now = parameters(model)
            model(torch.ones(1, 5)).sum().backward()
            assert all(torch.equal(value, now[name]) for name, value in parameters(model).items())
    return landed, parameters(model)
