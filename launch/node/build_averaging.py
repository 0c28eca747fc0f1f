"""Build a node that averages with other peers by hivemind; `build_hub.py` does so for a run with a hub."""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from aedit.async_sgd.rules import make_outer
from aedit.edit import AtMultiples, AveragingExchange, LayerSync
from aedit.launch.config import FIRST, RunConfig, method
from aedit.launch.data import SampleOrder, load_tokenizer
from aedit.launch.node.build import check_fits, facts_of, load_data, started
from aedit.launch.node.build_hub import NodeStartOptions
from aedit.launch.node.checkpoint import NodeCheckpoints, resume_alone
from aedit.launch.node.model import make_model
from aedit.launch.node.objective import NodeParts, make_inners
from aedit.launch.node.stop import StopAlone
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.launch.records import Clock, Recorder, file_name, open_trackers
from aedit.proto.dht import (
    AVERAGING,
    INTRODUCTION,
    AveragingSettings,
    HivemindAverager,
    announced_maddr,
    checked_maddrs,
    listening_maddr,
)
from aedit.types import UserError

START_S = 60.0
"""Longest time that a peer waits for its averager before it begins to train."""


@contextmanager
def build_averaging(config: RunConfig, world: World, options: NodeStartOptions) -> Iterator[TrainingNode]:
    """Build a peer, resume it if it has a checkpoint, and end its averager when the block ends."""
    check_fits(config, world)
    if world.ranks > 1:
        raise UserError(
            f'swarm.exchange = "hivemind" needs one process per node, not {world.ranks}: it averages whole'
            ' models; set swarm.exchange = "parts", or show one GPU to this node'
        )
    torch.manual_seed(config.seed)
    index = options.membership.prefers or 0
    tokenizer = load_tokenizer(config.data)
    data = load_data(config, tokenizer, options.run_dir / "data")
    model = make_model(config, tokenizer, world)
    facts = facts_of(config, model, tokenizer, data)
    numel = sum(p.numel() for p in model.parameters() if p.requires_grad)
    directory = options.run_dir / "nodes" / str(index)
    options.log_to(directory, options.attempt)
    settings = averaging_settings(config, options, numel, prefix_of(config, facts))
    with closing(HivemindAverager(settings)) as averager:
        exchange = AveragingExchange(averager, outer=make_outer(config.outer))
        sync = _sync(config, model, exchange)
        world = replace(world, node=index)
        checkpoints = NodeCheckpoints(
            directory / "checkpoints", keep=config.checkpoint.keep, shards=sync.shards
        )
        resumed = resume_alone(sync, checkpoints, facts)
        if not resumed:
            torch.manual_seed(config.seed + 1 + index)  # a different dropout mask per node
        if not averager.wait_until_up(START_S):
            print(f"aedit: hivemind is not up after {START_S:g} s: this peer begins alone", flush=True)
        clock, elapsed_s = Clock(), resumed.elapsed_s if resumed else 0.0
        clock.start(elapsed_s)
        exchange.began_s = time.time() - elapsed_s
        trackers = partial(open_trackers, config.log, config.name, index, directory)
        recorder = Recorder(directory, clock, writes=True, trackers=trackers)
        exchange.on_event = recorder.event
        stop = StopAlone(sync.shards)
        parts = NodeParts(
            config=config,
            world=world,
            tokenizer=tokenizer,
            sync=sync,
            order=(resumed and resumed.order) or _order(config, data.num_samples, index),
            stop=stop,
            recorder=recorder,
        )
        make = partial(
            TrainingNode,
            config=config,
            world=world,
            sync=sync,
            budget=OwnBudget(config, sync, exchange, evaluates=index == 0),
            stop=stop,
            checkpoints=checkpoints,
            recorder=recorder,
            facts=facts,
            slowdown=options.slowdown,
        )
        with started(make, data, parts, resumed, options.attempt) as node:
            yield node


class OwnBudget:
    """Budget of a peer without a hub or world: its own steps, and the time since the first peer began.

    With seconds it ends with the round that is nearest to the end of the time, in which all peers meet.
    """

    def __init__(
        self,
        config: RunConfig,
        sync: LayerSync,
        exchange: AveragingExchange,
        *,
        evaluates: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.config, self.sync, self.exchange = config, sync, exchange
        self._evaluates, self._now = evaluates, now

    def goes_on(self) -> bool:
        """Return whether neither steps nor time are used up."""
        return self.sync.steps < self.config.train.steps and not self._time_is_up()

    def progress(self) -> float:
        """Return the used share of the budget, 0 to 1."""
        train = self.config.train
        timed = self._elapsed_s() / train.seconds if train.seconds else 0.0
        return min(1.0, max(self.sync.steps / train.steps, timed))

    def nodes(self) -> int:
        """Return the peers of the newest round."""
        return self.exchange.members

    def evaluates(self) -> bool:
        """Return whether this node was chosen to evaluate."""
        return self._evaluates

    def _elapsed_s(self) -> float:
        return self._now() - self.exchange.began_s

    def _time_is_up(self) -> bool:
        seconds, every = self.config.train.seconds, self.config.edit.every
        if not seconds or self._elapsed_s() < seconds - every / 2:
            return False
        opened_now = self.sync.schedule.last_step == self.sync.local_steps
        return opened_now or self._elapsed_s() > seconds + every


def averaging_settings(
    config: RunConfig, options: NodeStartOptions, numel: int, prefix: str
) -> AveragingSettings:
    """Return the settings of the node's averager. Raises UserError for an address that is none."""
    swarm, member = config.swarm, options.membership
    peers = checked_maddrs(tuple(filter(None, swarm.peers.split(","))))
    first = options.run_dir / AVERAGING / FIRST
    port = int(swarm.listen.rpartition(":")[2] or 0)
    return AveragingSettings(
        name=member.name,
        prefix=prefix,
        numel=numel,
        directory=options.run_dir / AVERAGING / file_name(member.name),
        initial_peers=peers,
        introduction=None if peers or not member.prefers else first / INTRODUCTION,
        listen=listening_maddr(swarm.listen, 0 if member.prefers else port),
        announce=announced_maddr(swarm.announce, port) if swarm.announce else "",
        client=not swarm.listen,
        total_s=swarm.averaging_s,
    )


def prefix_of(config: RunConfig, facts: dict[str, Any]) -> str:
    """Return a name under which only peers with this run, method, model and data meet."""
    described = repr((config.name, sorted(method(config).items()), sorted(facts.items())))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _order(config: RunConfig, num_samples: int, index: int) -> SampleOrder:
    """Return an order of this peer alone: no process leases samples to the peers.

    A peer of another machine does not know its number, and draws a seed.
    """
    own = secrets.randbits(31) if config.swarm.peers else index
    return SampleOrder(num_samples, hash((config.seed, own)) % 2**31)


def _sync(config: RunConfig, model: torch.nn.Module, exchange: AveragingExchange) -> LayerSync:
    try:
        return LayerSync.of(
            model,
            make_inners(model, config.train),
            exchange=exchange,
            schedule=AtMultiples(config.edit.every),
            config=config.edit,
        )
    except ValueError as error:
        raise UserError(str(error)) from error
