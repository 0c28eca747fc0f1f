"""Join the run of a hub: the node joins, leaves and rejoins alone."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import aedit
from aedit.edit import HubExchange, SharedModule, find_units, flat_layout, make_pace
from aedit.launch.config import JoinOptions, RunConfig, method, samples_per_step, tokens_per_step
from aedit.launch.data import LeasedOrder
from aedit.launch.node.budget import HubBudget
from aedit.launch.node.checkpoint import resume_alone
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.stop import LEAVE_HUB_WITHIN_S, StopAlone, Stopped
from aedit.launch.node.train import TrainingNode
from aedit.launch.node.world import World
from aedit.proto.agent import (
    AgentLink,
    AgentPlan,
    Link,
    Progress,
    attach_agent,
    rejoin_secret,
    replicas_of_parts,
    start_agent,
)
from aedit.proto.rpc import SERVER, is_loopback
from aedit.proto.transports import PeersMissing
from aedit.system import write_atomically
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.launch.node.build import NodeStart

NAME = "name"


@contextmanager
def hub_member(start: "NodeStart") -> Iterator[NodeParts]:
    """Join the run of a hub, or of the owners of a swarm's parts; yield the parts of the node.

    All ranks of the node together. Raises UserError if the hub refuses this node.
    """
    config, member, num_samples = start.config, start.member, len(start.data.train)
    plan = agent_plan(config, member, start.model, start.facts, num_samples, start.shared)
    link = _link(plan, start.world, start.run_dir)
    try:
        exchange = HubExchange(
            link,
            max_steps_ahead=config.hub.max_steps_ahead,
            tokens_per_step=tokens_per_step(config),
            penalty=config.edit.penalty,
            timeout_s=config.edit.timeout_s,
        )
        if start.shared is not None:
            start.shared.attach(exchange)
        sync = start.sync(exchange, make_pace(config.edit, link.news))
        known = known_directory(start.run_dir, member.name)
        resumed = (
            resume_alone(sync, start.checkpoints(known, sync), start.facts, of_hub=True) if known else None
        )
        sync.anchor()
        world = replace(start.world, node=link.node)
        directory = start.directory(world.node)
        start.log_to(directory, start.options.attempt)
        if world.leads:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / NAME, member.name)
        if not resumed:
            torch.manual_seed(config.seed + 1 + world.node)  # a different dropout mask per node
        elapsed_s = max(link.news().elapsed_s, resumed.elapsed_s if resumed else 0.0)
        yield NodeParts(
            config=config,
            world=world,
            tokenizer=start.tokenizer,
            sync=sync,
            order=LeasedOrder(link, num_samples, config.seed, sync),
            budget=HubBudget(config, sync, link),
            stop=StopAlone(sync.shards),
            checkpoints=start.checkpoints(directory, sync),
            recorder=start.recorder(world.node, elapsed_s),
            facts=start.facts,
            resumed=resumed,
            shared=start.shared,
            hub=HubMembership(
                options=member,
                link=link,
                exchange=exchange,
                identity=lambda: (link.node, link.session),
                next_number=link.next_number,
            ),
        )
    finally:
        link.stop()


def agent_plan(
    config: RunConfig,
    member: JoinOptions,
    model: nn.Module,
    facts: dict[str, Any],
    num_samples: int,
    shared: SharedModule | None = None,
) -> AgentPlan:
    """Return the settings of the node's agent."""
    hub = config.hub
    units = flat_layout.layout([*_units(model, config), *([shared.unit] if shared else [])]).units
    addresses = (
        replicas_of_parts(member.replicas, config.edit.timeout_s)
        if member.replicas
        else member.hub.split(",")
    )
    return AgentPlan(
        addresses=tuple(addresses),
        replicas=str(member.replicas or ""),
        standbys=tuple(member.standby.split(",")) if member.standby else (),
        name=member.name,
        prefers=member.prefers,
        run=config.name,
        method=tuple(method(config).items()),
        version=aedit.__version__,
        units=units,
        facts=tuple((name, str(value)) for name, value in facts.items()),
        num_samples=num_samples,
        samples_per_step=samples_per_step(config),
        steps_ahead=hub.max_steps_ahead,
        lease_samples=hub.lease_samples,
        codec=hub.codec,
        codec_down=hub.codec_down,
        traces=config.traces.endpoint,
        keys=str(member.keys or ""),
        donor=_donor_address(member, addresses),
        heartbeat_s=hub.heartbeat_s,
        expire_s=hub.expire_s,
        round_s=config.edit.round_s,
        call_timeout_s=hub.call_timeout_s,
    )


def _units(model: nn.Module, config: RunConfig) -> Any:
    try:
        return find_units(model, config.edit.units)
    except ValueError as error:
        raise UserError(str(error)) from None


def _donor_address(member: JoinOptions, addresses: Sequence[str]) -> str:
    """Return the address at which other nodes may fetch this node's anchors; "" if they cannot.

    It is a loopback address if the hub is on this machine. TLS also requires a server certificate, which
    `aedit keys` puts into the hub's folder only.
    """
    here = all(map(is_loopback, addresses))
    certified = member.keys is None or (member.keys / f"{SERVER}.key").exists()
    return "127.0.0.1:0" if here and certified else ""


def _link(plan: AgentPlan, world: World, run_dir: Path) -> AgentLink:
    """Return the link to the agent, which the first rank starts.

    The others attach to its shared memory by path.
    """
    link = None
    if world.leads:
        secret = rejoin_secret(run_dir / "rejoin" / plan.name)
        votes = str(run_dir / "votes" / plan.name)
        link = start_agent(replace(plan, rejoin=secret, votes=votes), ranks=world.ranks)
    if world.ranks > 1:
        shared_path = [link.path if link else ""]
        group = world.mesh.get_group("shard")
        dist.broadcast_object_list(shared_path, group=group, group_src=0)
        link = link or attach_agent(shared_path[0], world.rank)
    assert link is not None
    return link


@dataclass(frozen=True, slots=True, kw_only=True)
class HubMembership:
    """Membership of a node in a run with a hub: reports each step to the agent, and leaves alone.

    `link` connects to the agent, and `exchange` is that of the node's `sync`.
    """

    options: JoinOptions
    link: Link
    exchange: HubExchange
    identity: Callable[[], tuple[int, int]] = lambda: (0, 0)
    """Returns index and session of the node; the session changes when the node joins again."""
    next_number: Callable[[int], int] = lambda unit: 0
    """Returns the number that the hub gives the next push of a unit; 0 if that is unknown."""
    leave_within_s: float = LEAVE_HUB_WITHIN_S
    """Longest wait of a leaving node for a hub that does not answer."""

    def begin(self, node: TrainingNode) -> None:
        """Let pushes and reports say which samples are used; the unused ones go to other nodes at the end."""
        self.exchange.samples_upto = node.objective.used
        self.exchange.before_leaving = lambda: self.record_step(node)

    def record_step(self, node: TrainingNode) -> None:
        """Report steps, tokens, times, loss, used samples and reinforcement learning to the agent."""
        if not node.sync.shards.leads:
            return
        self.link.tell(
            Progress(
                steps=node.sync.steps,
                tokens=node.tokens,
                busy_s=node.recorder.clock.busy_s,
                wait_s=node.sync.waited_s,
                loss=node.newest_loss,
                used=node.objective.used(self.exchange.used_steps),
                drawn=node.objective.drawn(),
                rl=node.rl.report() if node.rl else {},
            )
        )

    def leave_early(self, node: TrainingNode) -> str:
        """Push the pending updates and leave; return the reason for the record of the stop.

        If the hub does not answer within `leave_within_s`, the checkpoint counts the last steps, and the run
        does not.
        """
        self.exchange.timeout_s = min(self.exchange.timeout_s, self.leave_within_s)
        try:
            self.record_step(node)
            node.sync.close()
        except (Stopped, PeersMissing, TimeoutError) as error:
            node.sync.abandon()
            return f"signal; the hub did not take the last steps: {error}"
        return "signal"


def known_directory(run_dir: Path, name: str) -> Path | None:
    """Return the directory of the node with this name on this machine, None if it has none."""
    found = [path.parent for path in run_dir.glob(f"nodes/*/{NAME}") if path.read_text() == name]
    return found[0] if found else None
