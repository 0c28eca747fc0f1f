"""Nodes of reinforcement learning in threads, and a hub in the test process."""

import contextlib
import threading
from pathlib import Path

import torch

from aedit.async_sgd.inprocess import InProcessHub
from aedit.async_sgd.rules import HubConfig, HubPlan, OuterConfig, PenaltyConfig
from aedit.edit import EditConfig, HubExchange, LayerSync, find_units, flat_layout
from aedit.launch.config import JoinOptions
from aedit.launch.data import LeasedOrder, load_tokenizer
from aedit.launch.node import NodeCheckpoints, load_data, make_inner
from aedit.launch.node.budget import HubBudget
from aedit.launch.node.build import started
from aedit.launch.node.build_hub import HubMembership
from aedit.launch.node.model import make_model
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_objective import train_policy
from aedit.launch.node.stop import StopAlone
from aedit.launch.node.world import World
from aedit.launch.records import Clock, Recorder


class StopInThread(StopAlone):
    """A stop that catches no signals, which only the main thread can."""

    def listen(self):
        """Do nothing."""


def hub_of(config):
    """Return a hub in this process for the run, where each arrival counts as its share of a round."""
    tokenizer = load_tokenizer(config.data)
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    units = find_units(make_model(config, tokenizer, world), config.edit.units)
    plan = HubPlan(
        hub=HubConfig(address="h:1", quorum=1, grace=0.0, weights="uniform", lease_samples=4, expire_s=600.0),
        outer=OuterConfig(kind="average", lr=1.0),
        penalty=PenaltyConfig(detector="off", clip=None),
        every=config.edit.every,
        pace="steps",
        steps=config.train.steps,
    )
    return InProcessHub(plan, flat_layout.layout(units))


@contextlib.contextmanager
def node_of(config, hub, name):
    """Yield the node `name` of the hub."""
    tokenizer = load_tokenizer(config.data)
    world = World(0, 1, 0, 1, torch.device("cpu"), None)
    data = load_data(config, tokenizer, Path(config.dir))
    model = make_model(config, tokenizer, world)
    link = hub.link(name)
    exchange = HubExchange(link, timeout_s=30)
    edit = EditConfig(every=config.edit.every, landing="arrival", timeout_s=30)
    sync = LayerSync.of(model, make_inner(model, config.train), exchange=exchange, config=edit)
    sync.anchor()
    world = World(link.node, 1, 0, 1, torch.device("cpu"), None)
    directory, clock = Path(config.dir) / config.name / "nodes" / str(link.node), Clock()
    clock.start(0.0)
    recorder, stop = Recorder(directory, clock, writes=True), StopInThread(sync.shards)
    parts = NodeParts(
        config=config,
        world=world,
        tokenizer=tokenizer,
        sync=sync,
        order=LeasedOrder(link, len(data.train), config.seed, sync),
        budget=HubBudget(config, sync, link),
        stop=stop,
        checkpoints=NodeCheckpoints(directory / "checkpoints", keep=2, shards=sync.shards),
        recorder=recorder,
        hub=HubMembership(options=JoinOptions(hub="", name=name), link=link, exchange=exchange),
    )
    with started(parts, data) as node:
        yield node


class NodeThread(threading.Thread):
    """A thread in which one node trains until the hub says that the run is over."""

    def __init__(self, config, hub, name, watch=lambda node: None):
        """watch: gets the node before its first step."""
        super().__init__(name=name, daemon=True)
        self._config, self._hub, self._watch = config, hub, watch
        self.error = None

    def run(self):
        """Train."""
        try:
            with node_of(self._config, self._hub, self.name) as node:
                self._watch(node)
                train_policy(node, node.objective)
        except BaseException as error:
            self.error = error

    def end(self, limit_s=90.0):
        """Wait for the end and raise the node's error."""
        self.join(limit_s)
        assert not self.is_alive(), f"{self.name} still trains after {limit_s} s"
        if self.error:
            raise self.error
