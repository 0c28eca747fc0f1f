"""Jobs of tests/test_defects.py and tests/faults/test_poison.py: real processes, FSDP2 inside a node."""

import torch
import torch.distributed as dist
from kit.nodes import batches, fingerprint, follow_script, loss, parameters, tower
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aedit.async_sgd.rules import Nesterov
from aedit.edit import EditConfig, EverySeconds, EverySteps, LayerSync, MeanExchange, PenaltyConfig
from aedit.proto.transports import TorchTransport


def follow(rank, size, moves, rounds):
    """Run scripted training on nodes of one rank.

    Return the last parameters, their bits and the distrusted rounds.
    """
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("sync", "shard"))
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    try:
        seen = follow_script(
            tower(), transport, moves[rank], [1] * rounds, outer=Nesterov(), penalty=PenaltyConfig()
        )
    finally:
        transport.close()
    distrusted = [r for r, one in enumerate(seen, 1) if one.outcome.distrusted]
    return seen[-1].parameters, seen[-1].fingerprint, distrusted


def sharded(mesh):
    model = tower()
    if mesh["shard"].size() > 1:
        for block in (model.first, model.middle, model.last, model):
            fully_shard(block, mesh=mesh["shard"])
    return model


def collectives_of_the_users_own(rank, size, nodes, timed, steps):
    """Train with clocks that drift apart within a node and a collective of the user's own in every step.

    The collective runs over the ranks of a node if rounds are timed, otherwise over all ranks. Returns the
    inner steps at which rounds were opened, and the final parameters.
    """
    mesh = init_device_mesh("cpu", (nodes, size // nodes), mesh_dim_names=("sync", "shard"))
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    model = sharded(mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    clock = Ticking(1.7e9 + rank)
    schedule = EverySeconds(5.0, clock) if timed else EverySteps(5)
    exchange = MeanExchange(transport)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=EditConfig())
    opened = []
    with sync:
        for batch in batches(rank, steps):
            value = loss(model, batch)
            value.backward()
            inner.step()
            inner.zero_grad()
            before = sync.schedule.last_id
            sync.step()
            if sync.schedule.last_id != before:
                opened.append(sync.steps)
            dist.all_reduce(value.detach(), group=mesh.get_group("shard") if timed else None)
            clock.now += 1 + 2 * (rank % (size // nodes))
    transport.close()
    return opened, parameters(model)


class Ticking:
    """Clock that moves only when the test sets it."""

    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def accumulate_without_gradient_sync(rank, size, nodes, every, micro, steps):
    """Train with FSDP2 and gradients reduced at the last micro-batch only.

    Return the inner step of every round.
    """
    mesh = init_device_mesh("cpu", (nodes, size // nodes), mesh_dim_names=("sync", "shard"))
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    model = sharded(mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(transport), config=EditConfig(every=every))
    rounds = []
    sync.on_round = lambda outcome, waited_s: rounds.append(outcome.round.steps)
    data = iter(batches(rank, steps * micro))
    with sync:
        for _ in range(steps):
            for n in range(micro):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(n == micro - 1)
                (loss(model, next(data)) / micro).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
    transport.close()
    return rounds, parameters(model)


def one_rank_goes_bad(rank, size, nodes):
    """Put a NaN into the shard of one rank in the second round.

    Return the round outcomes and the final bits.
    """
    mesh = init_device_mesh("cpu", (nodes, size // nodes), mesh_dim_names=("sync", "shard"))
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    model = sharded(mesh)
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = LayerSync.of(model, inner, exchange=MeanExchange(transport), config=EditConfig(every=2))
    rounds = []
    sync.on_round = lambda outcome, waited_s: rounds.append((outcome.distrusted, outcome.weights))
    with sync:
        for step, batch in enumerate(batches(rank, 6)):
            loss(model, batch).backward()
            inner.step()
            inner.zero_grad()
            if (rank, step) == (size - 1, 3):
                with torch.no_grad():
                    model.first.weight.to_local()[-1] = float("nan")
            sync.step()
    transport.close()
    return rounds, fingerprint(model), parameters(model)
