"""Jobs that test the harness itself (tests/test_world.py)."""

import os
import threading

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class OnlyHereError(Exception):
    """Error class that the test process cannot import."""


def sum_of_ranks(rank, size, scale):
    value = torch.tensor([float(rank + 1) * scale])
    dist.all_reduce(value)
    return value


def process_id(rank, size):
    return os.getpid()


def threads_and_groups(rank, size):
    return torch.get_num_threads(), dist.get_world_size(), dist.get_rank()


def fail_on(rank, size, culprit):
    if rank == culprit:
        raise ValueError(f"rank {rank} refuses")
    dist.barrier()


def fail_in_own_words(rank, size):
    raise OnlyHereError("unheard of")


def hang_on(rank, size, culprit):
    if rank == culprit:
        threading.Event().wait()


def die_on(rank, size, culprit):
    if rank == culprit:
        os._exit(7)
    dist.barrier()


def sharded_step(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,), mesh_dim_names=("shard",)))
    model(torch.ones(1, 4)).sum().backward()
    return model.weight.grad.full_tensor()
