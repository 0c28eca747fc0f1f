"""Connection of a training loop to a hub: read the settings of the run, then start the node's agent."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

import aedit
from aedit.async_sgd.rules import DRAFTER
from aedit.edit import flat_layout
from aedit.edit.hub_report import HubSettings
from aedit.edit.shards import Shards, control_device, shards_of
from aedit.edit.shared_module import SharedModule, TrainedApart
from aedit.edit.units import SyncUnit, find_units
from aedit.proto.agent import AgentLink, AgentPlan, Link, attach_agent, rejoin_secret, start_agent
from aedit.types import UnitLayout, UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The options that each node sets for itself."""

    name: str
    """Kept over restarts: the same name gets the same index."""
    keys: str | Path | Literal[False] | None = None
    """Folder that `aedit keys` wrote; None: no TLS, on this machine only; False: no TLS anywhere."""
    num_samples: int = 0
    """Samples of the data set; 0: the hub leases no data to this node."""
    directory: str | Path | None = None
    """Folder of this node, kept over restarts: it holds the secret by which the hub knows that it is the same
    node. None: unless its keys have its name, a restarted node waits until the hub has given up its
    predecessor (`hub.expire_s`)."""
    agent: Literal["process", "thread"] = "process"
    """Place of the network traffic: a process of its own, or a thread."""
    drafter: TrainedApart | None = None
    """Drafter that the nodes of the run share."""


def open_link(
    address: str, model: nn.Module, options: NodeOptions, shared: SharedModule | None = None
) -> tuple[AgentLink, HubSettings, tuple[UnitLayout, ...]]:
    """Read the settings of the run from the hub and start this node's agent; the node is not a member yet.

    Returns the link to the agent, the settings, and the units: those of the model, and that of `shared`.

    All ranks of the node call it together, each with its shard of the model.

    Raises:
        ValueError: On every rank of the node: there is no such hub, it refuses the node, the keys cannot be
            read, or the model does not have the units that the run names.
    """
    shards = shards_of(list(model.parameters()))
    reply_text, error = _on_first_rank(shards, lambda: _responder(address, options))
    if error:
        raise ValueError(error)
    from aedit.proto.rpc import HelloReply

    settings = HubSettings.of(HelloReply.FromString(bytes.fromhex(reply_text)), address)
    if (shared is not None) != settings.shares_drafter and (shared is not None or settings.hub.endless):
        raise ValueError(_about_drafter(settings))
    plan = node_plan(model, settings, options, shared)
    link: AgentLink | None = None

    def start() -> str:
        nonlocal link
        link = start_agent(plan, ranks=shards.size, mode=options.agent)
        return link.path

    path, error = _on_first_rank(shards, start)
    if error:
        raise ValueError(error)
    return link or attach_agent(path, shards.rank), settings, plan.units


def check_units(units: Sequence[SyncUnit], link: Link, joined: tuple[UnitLayout, ...] | None) -> None:
    """Raise ValueError unless `units` are those that the exchange was made for.

    joined: names and shapes of the model that was joined with; None where only the sizes in `link` are known.
    """
    remedy = (
        "give LayerSync.of the model that was joined with, frozen where it was then, and no"
        " EditConfig(units=...) of its own"
    )
    ours, theirs = [unit.numel for unit in units], [len(anchor) for anchor in link.anchors]
    if ours != theirs:
        raise ValueError(
            f"the units have {ours} parameters, and the exchange was made for {theirs}: {remedy}"
        )
    for here, there in zip(flat_layout.layout(units).units, joined or (), strict=bool(joined)):
        if here != there:
            raise ValueError(f"unit {here.name} is {here}, and the exchange was made for {there}: {remedy}")


def shared_drafter(model: nn.Module, options: NodeOptions) -> SharedModule | None:
    """Return the unit of the drafter that this node brings, not yet attached to an exchange; None: none."""
    if options.drafter is None:
        return None
    shapes = {name: tensor.shape for name, tensor in options.drafter.tensors().items()}
    return SharedModule(DRAFTER, shapes, next(model.parameters()).device)


def _about_drafter(settings: HubSettings) -> str:
    if settings.shares_drafter:
        return f"run {settings.run} shares a drafter: pass drafter=online to HubExchange.join"
    return (
        f'run {settings.run} shares no drafter: join without one, or set drafter.kind = "layer" in the '
        "configuration of its hub"
    )


def node_plan(
    model: nn.Module, settings: HubSettings, options: NodeOptions, shared: SharedModule | None = None
) -> AgentPlan:
    """Return the plan of this node's agent."""
    hub = settings.hub
    apart = [shared.unit] if shared is not None else []
    units = flat_layout.layout([*find_units(model, settings.edit.units), *apart]).units
    return AgentPlan(
        addresses=hub.addresses,
        standbys=tuple(hub.standby.split(",")) if hub.standby else (),
        name=options.name,
        run=settings.run,
        version=aedit.__version__,
        units=units,
        num_samples=options.num_samples or 1,  # required by the hub; without leases it has no effect
        samples_per_step=1 if options.num_samples else 0,
        steps_ahead=hub.max_steps_ahead,
        lease_samples=hub.lease_samples,
        rejoin=rejoin_secret(Path(options.directory) / "rejoin" if options.directory else None),
        codec=hub.codec,
        codec_down=hub.codec_down,
        keys=str(options.keys or ""),
        donor="127.0.0.1:0" if hub.address.startswith("127.") and not options.keys else "",
        heartbeat_s=hub.heartbeat_s,
        expire_s=hub.expire_s,
        call_timeout_s=hub.call_timeout_s,
    )


def _responder(address: str, options: NodeOptions) -> str:
    """Return the hub's reply as text, which can be sent to the other ranks."""
    # Only now: a trainer whose agent is a process needs gRPC for this one call.
    from aedit.proto.rpc import caller_keys, check_address, greet, is_loopback

    for place in address.split(","):
        check_address(place)
        if options.keys is None and not is_loopback(place):
            raise ValueError(
                f"{place} is another machine: pass keys=FOLDER with what `aedit keys` wrote for nodes, or"
                " keys=False if the network is closed"
            )
    keys = caller_keys(address, Path(options.keys) if options.keys else None, insecure=True)
    return greet(address, keys).SerializeToString().hex()


def _on_first_rank(shards: Shards, act: Callable[[], str]) -> tuple[str, str]:
    """Return the result of `act` on the node's first rank, and its error, which is empty if there was none.

    All ranks get the same, so that none waits for another one that has failed.
    """
    found = ["", ""]
    if shards.leads:
        try:
            found = [act(), ""]
        except (UserError, ValueError) as error:
            found = ["", str(error)]
    if shards.size > 1:
        device = torch.device(control_device(shards.group))
        dist.broadcast_object_list(found, group=shards.group, group_src=0, device=device)
    return found[0], found[1]
