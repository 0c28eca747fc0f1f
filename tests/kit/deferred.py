"""Transports whose answers arrive when a test lets them, and a node that waits for them."""

import random

import torch

from aedit.async_sgd.rules import Average
from aedit.edit import EditConfig, LayerSync, MeanExchange, PenaltyConfig
from aedit.proto.transports import MemoryWorld
from kit.nodes import loss

PLAIN = PenaltyConfig(weights="uniform", detector="off", clip=None)


class Held:
    """Transport whose answers arrive when the test says so; asking for one too early is an error."""

    def __init__(self, transport):
        self.transport = transport
        self.open = True
        self.asked = []
        """Keys of the units sent so far."""

    def channel(self, name=None):
        return self

    def gather(self, key, row):
        return Answer(self, self.transport.gather(key, row))

    def weighted_mean(self, key, value, weight):
        self.asked.append(key.partition("/")[2])
        return Answer(self, self.transport.weighted_mean(key, value, weight))

    def __getattr__(self, name):
        return getattr(self.transport, name)


class Answer:
    def __init__(self, held, pending):
        self.held, self.pending = held, pending

    def done(self):
        return self.held.open and self.pending.done()

    def result(self):
        assert self.held.open, "this would have waited for another node"
        return self.pending.result()


class Late(Held):
    """Transport whose answers arrive after a random number of calls of `done`, or at once in `result`."""

    def __init__(self, transport, seed):
        super().__init__(transport)
        self.random = random.Random(seed)

    def gather(self, key, row):
        return Looked(self.transport.gather(key, row), self.random.randrange(6))

    def weighted_mean(self, key, value, weight):
        return Looked(self.transport.weighted_mean(key, value, weight), self.random.randrange(6))


class Looked:
    def __init__(self, pending, looks):
        self.pending, self.looks = pending, looks

    def done(self):
        self.looks -= 1
        return self.looks < 0 and self.pending.done()

    def result(self):
        return self.pending.result()


class Slow(Held):
    """Transport whose answers arrive only for a caller that waits for them."""

    def gather(self, key, row):
        return Looked(self.transport.gather(key, row), 10**9)

    def weighted_mean(self, key, value, weight):
        return Looked(self.transport.weighted_mean(key, value, weight), 10**9)


def node(model, transport, *, outer=None, penalty=PLAIN, schedule=None, lr=0.1, **config):
    """Return `model` as a node, and its inner optimizer."""
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    exchange = MeanExchange(transport, outer=outer or Average(), penalty=penalty)
    config = EditConfig(**{"every": 10_000, **config})
    return LayerSync.of(model, inner, exchange=exchange, schedule=schedule, config=config), inner


def alone():
    """Return the transport of a single node, whose answers can be held back."""
    return Held(MemoryWorld(1, timeout_s=5).node(0))


def step(sync, inner, batch):
    loss(sync.model, batch).backward()
    inner.step()
    inner.zero_grad()
    sync.step()


def move(model, rng):
    """Take an inner step by numbers that fp32 adds without rounding; return it, by name."""
    moved = {}
    for name, p in model.named_parameters():
        moved[name] = torch.randint(-512, 512, p.shape, generator=rng) / 1024
        with torch.no_grad():
            p.add_(moved[name])
    return moved


def round_numbers(model):
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * 256).round() / 256)
    return model


def add_one(model):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)


def anchors(sync):
    found = {}
    for i, unit in enumerate(sync.units):
        for (p, part), name in zip(unit.split(sync.exchange.store.read(i)[0]), unit.names, strict=True):
            found[name] = part.view_as(p).clone()
    return found
