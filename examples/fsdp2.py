"""Two nodes of two ranks each: FSDP2 inside a node, local SGD between the nodes, and a checkpoint.

    torchrun --nproc-per-node 4 examples/fsdp2.py OUT

is both nodes on this machine. OUT/node-0 and OUT/node-1 hold checkpoints; a second start goes on from there.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit import EverySteps, LayerSync, MeanExchange, TorchTransport

RANKS = 2


class ModelAndInner(Stateful):
    """Model and inner optimizer, named and sharded as `torch.distributed.checkpoint` wants them."""

    def __init__(self, model: nn.Module, inner: torch.optim.Optimizer) -> None:
        self.model, self.inner = model, inner

    def state_dict(self):
        model, inner = get_state_dict(self.model, self.inner)
        return {"model": model, "inner": inner}

    def load_state_dict(self, state):
        set_state_dict(
            self.model, self.inner, model_state_dict=state["model"], optim_state_dict=state["inner"]
        )


def main(out: Path) -> None:
    """Train 20 steps, from the checkpoint in `out` if there is one, and save."""
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // RANKS, RANKS)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("sync", "shard"))
    node, ranks = mesh.get_local_rank("sync"), mesh.get_group("shard")

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

    exchange = MeanExchange(TorchTransport(mesh.get_group("sync"), timeout_s=60))
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(5))
    state, folder = {"training": ModelAndInner(model, inner), "sync": sync}, out / f"node-{node}"
    if folder.exists():
        dcp.load(state, checkpoint_id=folder, process_group=ranks)
    began = sync.steps

    with sync:
        for step in range(began, began + 20):
            data = torch.Generator().manual_seed(1000 * node + step)
            x = torch.randn(16, 8, generator=data)
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            inner.step()
            inner.zero_grad()
            sync.step()
        sync.finish()
        dcp.save(state, checkpoint_id=folder, process_group=ranks)
    exchange.transport.close()

    total = sum(p.full_tensor().double().sum().item() for p in model.parameters())
    if mesh.get_local_rank("shard") == 0:
        print(f"node {node}: steps {began} to {sync.steps}, {sync.round_id} rounds, checksum {total:.12f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
