import time

import torch
import torch.distributed as dist


def add_ranks(rank, size, plus=0):
    x = torch.tensor([rank + plus])
    dist.all_reduce(x)
    return int(x)


def fail_on_one(rank, size):
    if rank == 1:
        raise ValueError("rank one objects")
    return rank


def hang(rank, size):
    if rank == 1:
        time.sleep(60)
    return rank
