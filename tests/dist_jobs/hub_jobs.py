"""Jobs of tests/test_hub_exchange.py: a node of several ranks whose hub runs in the first rank's process."""

import torch
from kit.hubs import Hub, SharedLink, box_of, hub_node, move_sharded
from kit.nodes import tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.edit import OwnPace
from aedit.types import Verdict


def train_sharded(rank, size):
    """Train and return what the first rank sent to the hub: ((unit, seq, base, steps), values)."""
    sync, link = _node(rank, size, refused=range(4))
    with sync:
        for n in range(14):
            _step(sync, n)
    assert sync.total_steps == 0
    pushes = sorted(link.hub.pushes, key=lambda push: (push.seq, push.unit))  # units come in any order
    return [((p.unit, p.seq, p.base, p.steps), p.values) for p in pushes]


def wait_and_stop(rank, size):
    """Stop only the first rank while both wait; both leave the wait at the same check."""
    sync, link = _node(rank, size, max_steps_ahead=5)
    looks = [0]

    def stop(position):
        looks[0] += 1
        if sync.shards.decide([rank == 0 and looks[0] == 7])[0]:
            raise InterruptedError

    sync.while_waiting, link.away = stop, True
    sync.__enter__()
    for n in range(20):
        try:
            _step(sync, n)
        except InterruptedError:
            return sync.local_steps, "stopped", looks[0]
    return sync.local_steps, "went on", looks[0]


def _node(rank, size, refused=(), **config):
    model = tower()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 256).round() / 256)
    link = SharedLink(box_of(model, rank, size), rank, _hub(refused))
    if size > 1:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
        for block in (model.first, model.middle, model.last):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return hub_node(model, link, schedule=OwnPace(3), **config)[0], link


def _hub(refused):
    hub = Hub()
    hub.judge = lambda push: Verdict.REFUSED if len(hub.pushes) - 1 in refused else Verdict.MERGED
    return hub


def _step(sync, n):
    sync.model(torch.ones(1, 5)).sum().backward()  # without a backward pass FSDP2's root stays gathered
    move_sharded(sync.model, torch.Generator().manual_seed(n))
    sync.step()
