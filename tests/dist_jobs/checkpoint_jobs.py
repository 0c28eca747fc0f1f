"""Jobs of tests/test_checkpoint_files.py: ranks that write or read one checkpoint together."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aedit.edit import Shards
from aedit.launch.node import Mark, NodeCheckpoints

VALUES = torch.arange(35.0).view(7, 5)


def parts(rank, size, directory, values):
    """Return the checkpoints of `size` ranks, and a state of which each has a part and a replica."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    checkpoints = NodeCheckpoints(Path(directory), keep=2, shards=Shards(mesh.get_group()))
    state = {"model": {"w": distribute_tensor(values.clone(), mesh, [Shard(0)]), "b": values[0].clone()}}
    return checkpoints, state


def save(rank, size, directory):
    checkpoints, state = parts(rank, size, directory, VALUES)
    checkpoints.save(Mark(1), state, {})


def load(rank, size, directory):
    checkpoints, state = parts(rank, size, directory, torch.zeros_like(VALUES))
    checkpoints.load(Mark(1), state)
    return state["model"]["w"].full_tensor().tolist(), state["model"]["b"].tolist()
