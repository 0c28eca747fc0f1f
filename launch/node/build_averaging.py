"""Join peers that average by hivemind."""

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from aedit.async_sgd.rules import make_outer
from aedit.edit import AtMultiples, AveragingExchange, LayerSync
from aedit.launch.config import FIRST, RunConfig, method
from aedit.launch.data import SampleOrder
from aedit.launch.node.checkpoint import resume_alone
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.stop import StopAlone
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

if TYPE_CHECKING:
    from aedit.launch.node.build import NodeStart

START_S = 60.0
"""Longest time that a peer waits for its averager before it begins to train."""


@contextmanager
def averaging_peer(start: "NodeStart") -> Iterator[NodeParts]:
    """Yield the parts of a peer; end its averager when the block ends."""
    config, index = start.config, start.member.prefers or 0
    if start.world.ranks > 1:
        raise UserError(
            f'swarm.exchange = "hivemind" needs one process per node, not {start.world.ranks}: it averages'
            ' whole models; set swarm.exchange = "parts", or show one GPU to this node'
        )
    directory = start.directory(index)
    start.log_to(directory, start.options.attempt)
    with closing(HivemindAverager(averaging_settings(start))) as averager:
        exchange = AveragingExchange(averager, outer=make_outer(config.outer))
        sync = start.sync(exchange, AtMultiples(config.edit.every))
        checkpoints = start.checkpoints(directory, sync)
        resumed = resume_alone(sync, checkpoints, start.facts)
        if not resumed:
            torch.manual_seed(config.seed + 1 + index)  # a different dropout mask per node
        if not averager.wait_until_up(START_S):
            print(f"aedit: hivemind is not up after {START_S:g} s: this peer begins alone", flush=True)
        elapsed_s = resumed.elapsed_s if resumed else 0.0
        recorder = start.recorder(index, elapsed_s)
        exchange.began_s = time.time() - elapsed_s
        exchange.on_event = recorder.event
        # No process leases samples to the peers. One of another machine does not know its number: it draws a
        # seed.
        own = secrets.randbits(31) if config.swarm.peers else index
        order = SampleOrder(len(start.data.train), hash((config.seed, own)) % 2**31)
        yield NodeParts(
            config=config,
            world=replace(start.world, node=index),
            tokenizer=start.tokenizer,
            sync=sync,
            order=(resumed and resumed.order) or order,
            budget=OwnBudget(config, sync, exchange, evaluates=index == 0),
            stop=StopAlone(sync.shards),
            checkpoints=checkpoints,
            recorder=recorder,
            facts=start.facts,
            resumed=resumed,
        )


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


def averaging_settings(start: "NodeStart") -> AveragingSettings:
    """Return the settings of the node's averager. Raises UserError for an address that is none."""
    swarm, member, averaging = start.config.swarm, start.member, start.run_dir / AVERAGING
    peers = checked_maddrs(tuple(filter(None, swarm.peers.split(","))))
    port = int(swarm.listen.rpartition(":")[2] or 0)
    return AveragingSettings(
        name=member.name,
        prefix=prefix_of(start.config, start.facts),
        numel=sum(p.numel() for p in start.model.parameters() if p.requires_grad),
        directory=averaging / member.name,
        initial_peers=peers,
        introduction=None if peers or not member.prefers else averaging / FIRST / INTRODUCTION,
        listen=listening_maddr(swarm.listen, 0 if member.prefers else port),
        announce=announced_maddr(swarm.announce, port) if swarm.announce else "",
        client=not swarm.listen,
        total_s=swarm.averaging_s,
    )


def prefix_of(config: RunConfig, facts: dict[str, Any]) -> str:
    """Return a name under which only peers with this run, method, model and data meet."""
    described = repr((config.name, sorted(method(config).items()), sorted(facts.items())))
    return hashlib.sha256(described.encode()).hexdigest()[:32]
