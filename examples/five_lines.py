"""Five lines around a training loop: two nodes that average every 8 steps.

    python examples/five_lines.py

starts both nodes on this machine; on two machines, start `torchrun --nnodes 2 ... examples/five_lines.py`.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from aedit import EverySteps, LayerSync, MeanExchange, TorchTransport


def train() -> float:
    """Train one node; return the loss of its last step."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # every node has data of its own
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    exchange = MeanExchange(TorchTransport(timeout_s=60))
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(8))
    with sync:
        for _ in range(100):
            x = torch.randn(32, 8)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            inner.step()
            inner.zero_grad()
            sync.step()
    exchange.transport.close()

    checksum = sum(float(p.double().sum()) for p in model.parameters())
    line = (
        f"node {dist.get_rank()}: loss {loss.item():.4f}, {sync.round_id} rounds, checksum {checksum:.12f}\n"
    )
    print(line, end="")  # in one write: both nodes share the output
    dist.destroy_process_group()
    return loss.item()


def node(rank: int, nodes: int, port: int) -> None:
    """Be one of several nodes on this machine."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(nodes)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train()


if __name__ == "__main__":
    if "RANK" in os.environ:  # under torchrun
        train()
    else:
        mp.spawn(node, args=(2, int(sys.argv[1]) if sys.argv[1:] else 29555), nprocs=2)
