"""Jobs of tests/test_own_hub_loop.py: one node of several ranks that joins a hub from its own loop."""

import torch
import torch.distributed as dist
from kit.hubs import move_sharded
from kit.nodes import parameters, tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit import HubExchange, LayerSync


def train_sharded(rank, size, address, nowhere, steps):
    """Train over the hub at `address`, after a failed attempt at `nowhere`.

    Returns the error at `nowhere`, the start, the sum of the steps and the end (whole, by name), and the
    samples drawn.
    """
    model = tower()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 256).round() / 256)
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    for module in (model.first, model.middle, model.last, model):
        fully_shard(module, mesh=mesh)
    try:
        HubExchange.join(nowhere, model, name="sharded")
    except ValueError as error:
        wrong = str(error)
    exchange = HubExchange.join(address, model, name="sharded", num_samples=100)
    sync = LayerSync.of(model, torch.optim.SGD(model.parameters(), lr=0.1), exchange=exchange)
    start, rng, drawn = parameters(model), torch.Generator().manual_seed(0), []
    total = {name: torch.zeros_like(whole) for name, whole in start.items()}
    with sync:
        for _ in range(steps):
            drawn += exchange.lease(3).tolist()
            model(torch.ones(1, 5)).sum().backward()
            moved = move_sharded(model, rng)
            total = {name: total[name] + moved[name] for name in total}
            sync.step()
    dist.barrier()
    return wrong, start, total, parameters(model), drawn
