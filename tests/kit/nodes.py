"""Nodes as threads of the test process, a small model, and training whose inner steps are scripted."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from aedit.edit import EditConfig, LayerSync, MeanExchange, RoundOutcome
from aedit.edit.shards import local
from aedit.proto.transports import MemoryWorld
from aedit.types import Round


class Tower(nn.Module):
    """Three blocks and a parameter of the root's own; sizes that two ranks cannot share evenly."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.middle(self.first(x).tanh()) * self.scale)


UNITS = {
    "rest": ["scale"],
    "first": ["first.weight", "first.bias"],
    "middle": ["middle.weight", "middle.bias"],
    "last": ["last.weight", "last.bias"],
}
"""The units of a Tower and their parameters."""


def tower(seed=0):
    """Return a Tower initialized from `seed`. Not for threads: the seed is the process's."""
    torch.manual_seed(seed)
    return Tower()


def loss(model, batch):
    """Return the mean squared error against the sum of five numbers' sines."""
    return (model(batch) - batch.sin().sum(-1, keepdim=True)).square().mean()


def batches(seed, count, rows=4):
    """Return `count` batches of `rows` x 5 numbers."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 5, generator=rng) for _ in range(count)]


def in_threads(nodes, job, *, timeout_s=20.0, wrap=lambda transport, node: transport):
    """Return what `job(transport, node)` returned on each of `nodes` threads; raise the first error.

    `wrap` may put a test's own transport around the one in memory.
    """
    meeting_place = MemoryWorld(nodes, timeout_s=timeout_s)

    def run(node):
        transport = wrap(meeting_place.node(node), node)
        try:
            return job(transport, node)
        finally:
            transport.close()  # whatever has happened here, the others need not wait

    with ThreadPoolExecutor(nodes) as pool:
        return [future.result() for future in [pool.submit(run, node) for node in range(nodes)]]


def train(model, inner, exchange, data, config, *, accumulate=1, act=lambda sync, step: None):
    """Train on `data` as a node; `act` gets the sync after every step. Returns the sync."""
    sync = LayerSync.of(model, inner, exchange=exchange, config=config)
    with sync:
        for step in range(0, len(data), accumulate):
            for batch in data[step : step + accumulate]:
                (loss(model, batch) / accumulate).backward()
            inner.step()
            inner.zero_grad()
            sync.step()
            act(sync, step)
    return sync


def plain_training(model, make_inner, data):
    """Run the same training in torch alone; return the parameters by name."""
    model = deepcopy(model)
    inner = make_inner(model)
    for batch in data:
        loss(model, batch).backward()
        inner.step()
        inner.zero_grad()
    return parameters(model)


def parameters(model):
    """Return whole parameters by name, as new tensors. A collective call on a sharded model."""
    return {name: whole(p).detach().clone() for name, p in model.named_parameters()}


def whole(p):
    return p.full_tensor() if isinstance(p, DTensor) else p


def furthest(ours, theirs):
    """Return the largest absolute difference between two sets of parameters."""
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def fingerprint(model):
    """Return the sha256 of the bits this rank holds."""
    held = b"".join(local(p.detach()).contiguous().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(held).hexdigest()


class Script:
    """Schedule that opens round r after this node's own steps[r] inner steps."""

    def __init__(self, steps):
        self.ends = torch.tensor(steps).cumsum(0).tolist()
        self.last_id = self.last_step = 0

    def due(self, step):
        if step not in self.ends:
            return None
        round = Round(self.ends.index(step) + 1, step - self.last_step)
        self.last_id, self.last_step = round.id, step
        return round

    def listen(self, notes):
        pass


@dataclass(frozen=True)
class Seen:
    """State of a node after one round of scripted training."""

    parameters: dict
    fingerprint: str
    outcome: RoundOutcome


def follow_script(model, transport, moves, steps, *, outer, penalty, prefetch=1):
    """Train with inner steps that add moves[r][name] to the parameters before round r + 1 is opened.

    Every step has a forward and a backward pass, so that everything lands where it lands in training.
    """
    outcomes, seen = [], []
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    exchange = MeanExchange(transport, outer=outer, penalty=penalty)
    config = EditConfig(prefetch=prefetch)
    sync = LayerSync.of(model, inner, exchange=exchange, schedule=Script(steps), config=config)
    sync.on_round = lambda outcome, waited_s: outcomes.append(outcome)
    x = torch.ones(2, 5)
    with sync:
        for move, count in zip(moves, steps, strict=True):
            for step in range(count):
                _pass(model, x)
                if step == count - 1:
                    add(model, move)
                sync.step()
            _pass(model, x)
            seen.append(Seen(parameters(model), fingerprint(model), outcomes[-1]))
    return seen


def add(model, move):
    """Add whole tensors by name to parameters that may be sharded."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            change = torch.from_numpy(move[name])
            if isinstance(p, DTensor):
                change = distribute_tensor(change, p.device_mesh, p.placements, src_data_rank=None).to_local()
            local(p).add_(change)


def _pass(model, x):
    model(x).sum().backward()
    model.zero_grad()
