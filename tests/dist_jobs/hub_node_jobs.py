"""Jobs of tests/test_hub_nodes.py: whole nodes with their own agents that train over a real network."""

import time

import torch
import torch.distributed as dist
from kit.hubs import OFF, move_sharded
from kit.nodes import parameters, tower
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from aedit.edit import EditConfig, HubExchange, LayerSync, OwnPace, find_units, flat_layout
from aedit.launch.data import LeasedOrder
from aedit.proto.agent import AgentPlan, Progress, attach_agent, start_agent

NUM_SAMPLES = 10**6
BATCH = 4
LIMIT_S = 60.0


def round_tower():
    """Return a model whose parameters fp32 adds to without rounding."""
    model = tower()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 256).round() / 256)
    return model


def train(rank, size, addresses, rounds, **plan):
    """Train with rank 0 as one node and ranks 1 and 2 as another.

    Returns the sum of its steps by name, its final parameters, the samples drawn, the rounds and the seconds
    waited.
    """
    group = dist.new_group([1, 2])
    ranks, place = (1, 0) if rank == 0 else (2, rank - 1)
    torch.manual_seed(100)
    model = round_tower()
    link = _link(model, rank, (ranks, place, group), addresses, plan)
    if ranks > 1:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        for module in (model.first, model.middle, model.last, model):
            fully_shard(module, mesh=mesh)
    try:
        return _train(model, link, rounds, seed=min(rank, 1))
    finally:
        link.stop()


def _train(model, link, rounds, seed):
    exchange = HubExchange(link, max_steps_ahead=10**6, tokens_per_step=1, penalty=OFF, timeout_s=LIMIT_S)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    config = EditConfig(landing="arrival", timeout_s=LIMIT_S, every=10_000)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=OwnPace(3), config=config)
    order = LeasedOrder(link, NUM_SAMPLES, 0, sync)
    total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    rng, drawn, give_up_at = torch.Generator().manual_seed(seed), [], time.monotonic() + LIMIT_S

    def tell():
        if sync.shards.leads:
            link.tell(Progress(steps=sync.steps, used=exchange.used_steps * BATCH, drawn=order.drawn))

    exchange.before_leaving = tell
    with sync:
        while sync.round_id < rounds:
            assert time.monotonic() < give_up_at, f"{sync.round_id} rounds within {LIMIT_S} s"
            drawn += order.take(BATCH).tolist()
            model(torch.ones(1, 5)).sum().backward()
            moved = move_sharded(model, rng)
            total = {name: total[name] + moved[name] for name in total}
            sync.step()
            tell()
    return total, parameters(model), drawn, sync.round_id, sync.waited_s


def agent_plan(model, addresses, **settings):
    units = flat_layout.layout(find_units(model)).units
    return AgentPlan(
        addresses=tuple(addresses),
        run="test",
        units=units,
        num_samples=NUM_SAMPLES,
        samples_per_step=BATCH,
        **settings,
    )


def _link(model, rank, place, addresses, settings):
    ranks, index, group = place
    made = agent_plan(model, addresses, name="one" if ranks == 1 else "two", **settings)
    link = start_agent(made, ranks=ranks) if index == 0 else None
    if ranks > 1:
        told = [link.path if link else ""]
        dist.broadcast_object_list(told, group=group, group_src=0)
        link = link or attach_agent(told[0], index)
    return link
