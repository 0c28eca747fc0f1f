"""Jobs of tests/test_library.py: the library on FSDP2 models."""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from kit.local_sgd import trainable
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, EverySeconds, EverySteps, LayerSync, MeanExchange, PenaltyConfig
from aedit.proto.transports import TorchTransport

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    """Model of blocks of one kind, with a head outside any block."""

    def __init__(self, num_blocks=3, width=5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.blocks = nn.ModuleList([Block(width) for _ in range(num_blocks)])
            self.head = nn.Linear(width, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(model, x):
    return (model(x) - x.sum(-1, keepdim=True)).square().mean()


def batches(node, count, rows=8, width=5):
    """Return `count` batches of this node's samples; no other node has them."""
    random = torch.Generator().manual_seed(1000 + node)
    return [torch.randn(rows, width, generator=random) for _ in range(count)]


@torch.no_grad()
def scale(model, factor):
    for p in model.parameters():
        p.mul_(factor)


def train_sharded(rank, size, nodes, ranks, every, num_steps, scaled=1.0):
    """Train with the library on a model sharded over the ranks of a node; return the whole parameters.

    scaled: Factor of the weights that the forward passes run on; afterwards they are scaled back.
    """
    mesh = init_device_mesh("cpu", (nodes, ranks), mesh_dim_names=("sync", "shard"))
    model = Tower()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN)
    landed = []

    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(every), config=EditConfig())
    sync.on_round = lambda outcome, waited_s: landed.append(outcome.round.steps)
    with sync:
        for batch in batches(rank // ranks, num_steps):
            scale(model, scaled)
            loss(model, batch.chunk(ranks)[rank % ranks]).backward()
            scale(model, 1 / scaled)
            inner.step()
            inner.zero_grad()
            sync.step()
    transport.close()
    return landed, {name: p.detach().full_tensor() for name, p in trainable(model)}


def land_after_an_evaluation(rank, size):
    """Run a forward without a backward, then a landing outside any forward.

    Returns the model's output afterwards, and that of a plain model with the same whole parameters.
    """
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    model, x = Tower(), torch.ones(2, 5)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    exchange = MeanExchange(transport, penalty=PLAIN)  # Nesterov overshoots: landing moves the parameters
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(1), config=EditConfig())
    with sync:
        loss(model, x).backward()
        inner.step()
        inner.zero_grad()
        with torch.no_grad():
            model(x)
        sync.step()
        sync.finish()
        with torch.no_grad():
            said = model(x)
    transport.close()
    plain = Tower()
    plain.load_state_dict({name: p.detach().full_tensor() for name, p in model.named_parameters()})
    return said, plain(x).detach()


def train_after_an_evaluation(rank, size, units, sharded):
    """Run an evaluation, a round and the forward in which it lands, while parameters stay gathered.

    Returns the model's output in that forward, and that of a plain model with the anchors.
    """
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("sync", "shard"))
    model, x = Tower(), torch.ones(2, 5)
    for block in model.blocks if sharded == "blocks" else ():
        fully_shard(block, mesh=mesh["shard"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    exchange = MeanExchange(transport, penalty=PLAIN)  # Nesterov overshoots: landing moves the parameters
    config = EditConfig(units=units)
    model(x)  # and the block is entered with everything gathered
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=EverySteps(1), config=config)
    model(x)
    with sync:
        loss(model, x).backward()
        inner.step()
        inner.zero_grad()
        with torch.no_grad():
            model(x)
        sync.step()
        said = model(x)
        said.sum().backward()
        reshard(model)
        anchors = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    transport.close()
    plain = Tower()
    plain.load_state_dict(anchors)
    return said.detach(), plain(x).detach()


def start_gathered(rank, size):
    """Start nodes of one rank with different weights, whose blocks hold gathered parameters at the start.

    Returns the parameters at the start of the warm-up.
    """
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("sync", "shard"))
    model = Tower()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(rank + 1)
    fully_shard(model, mesh=mesh["shard"], reshard_after_forward=False)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    transport = TorchTransport(mesh.get_group("sync"), timeout_s=120)
    exchange = MeanExchange(transport, penalty=PLAIN)
    sync = LayerSync.of(model, inner, exchange=exchange, config=EditConfig(warmup_steps="all"))
    model(torch.ones(2, 5))
    with sync:
        reshard(model)
        found = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    transport.close()
    return found


def reshard(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def constant_gradients(transport, *, every, rate, landing="forward", name=None):
    """Return a node whose steps add -`rate` to each of four numbers, and its step; all sums are exact."""
    model = nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    exchange = MeanExchange(transport, outer=Average(), penalty=PLAIN, name=name)
    schedule = every if isinstance(every, EverySeconds) else EverySteps(every)
    config = EditConfig(landing=landing)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config)

    def step():
        (rate * model(torch.ones(1, 4))).sum().backward()
        inner.step()
        inner.zero_grad()
        sync.step()

    return sync, step


def train_beside_own_sums(rank, size, landing, numel):
    """Return the weights, and the loop's own sums over the default group that are wrong.

    Each sum is under way while `sync.step` sends; node 0 begins it before that, node 1 after it. `numel` = 5
    is what the transport sends for the unit.
    """
    transport = TorchTransport(timeout_s=20)
    sync, step = constant_gradients(transport, every=2, rate=(0.25, 0.75)[rank], landing=landing)
    wrong = []
    with sync:
        for n in range(12):
            own = torch.full((numel,), float(n + rank))
            work = dist.all_reduce(own, async_op=True) if rank == 0 else None
            step()
            (work or dist.all_reduce(own, async_op=True)).wait()
            wrong += [n] * bool((own != 2 * n + 1).any())
    transport.close()
    return sync.model.weight.flatten().tolist(), wrong


def train_two_over_one_transport(rank, size, landing, in_threads):
    """Return weights, rounds and steps of two models that share a transport, in one thread or in one each."""
    transport = TorchTransport(timeout_s=20)
    # In threads, nodes end after other numbers of steps, and rounds are due by time.
    every = [EverySeconds(n, iter(range(10**6)).__next__) if in_threads else n for n in (2, 3)]
    counts = [(12, 7)[rank], (5, 9)[rank]] if in_threads else [12, 12]
    rates = [(0.25, 0.75)[rank], (0.5, 1.5)[rank]]
    both = [
        constant_gradients(transport, every=e, rate=r, landing=landing, name=name)
        for e, r, name in zip(every, rates, ("actor", "critic"), strict=True)
    ]

    def train(one, count):
        sync, step = one
        with sync:
            for _ in range(count):
                step()

    if in_threads:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(train, both, counts))
    else:
        with both[0][0], both[1][0]:
            for _ in range(12):
                for _, step in both:
                    step()
    transport.close()
    return [
        (sync.model.weight.flatten().tolist(), sync.schedule.last_id, sync.total_steps) for sync, _ in both
    ]
