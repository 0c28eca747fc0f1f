"""Position of this process in a `torchrun` world, and its process groups."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from aedit.types import UserError


@dataclass(frozen=True, slots=True)
class World:
    """One process of a rectangular world of `nodes` x `ranks`."""

    node: int
    nodes: int
    rank: int
    """Rank inside the node."""
    ranks: int
    device: torch.device
    mesh: DeviceMesh
    """Axes ("sync", "shard"): between nodes, inside a node."""

    @property
    def leads(self) -> bool:
        """Return whether this is the first rank of its node."""
        return self.rank == 0


def join_world(device: str, ranks: int, timeout_s: float) -> World:
    """Initialize the process groups of the processes that torchrun started. ranks: processes per node.

    Raises UserError if torchrun did not start this process, or `ranks` does not divide the world.
    """
    try:
        world_size, global_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    except KeyError:
        raise UserError(
            "RANK and WORLD_SIZE are not set: start this under torchrun, or use aedit run CONFIG"
        ) from None
    if world_size % ranks:
        raise UserError(f"--ranks {ranks} does not divide the {world_size} processes of this run")
    chosen = chosen_device(device)
    _init_process_group(chosen.type, global_rank, world_size, timedelta(seconds=timeout_s))
    shape = (world_size // ranks, ranks)
    mesh = init_device_mesh(chosen.type, shape, mesh_dim_names=("sync", "shard"))
    return World(*divmod(global_rank, ranks)[:1], shape[0], global_rank % ranks, ranks, chosen, mesh)


def leave_world() -> None:
    """Destroy the process groups. Safe to call after an error."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _init_process_group(device: str, rank: int, world_size: int, timeout: timedelta) -> None:
    store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    # torchrun keeps its store over restarts; without its own prefix an attempt would read the keys of the
    # previous one.
    attempt = dist.PrefixStore(f"attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world_size, timeout=timeout)


def chosen_device(name: str) -> torch.device:
    """Return the device of this process. Raises UserError if the machine has no GPU for it."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"device: process {local_rank} of this machine has no GPU of its own; use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
