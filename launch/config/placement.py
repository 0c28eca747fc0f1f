"""Nodes of a run that this machine starts, and the number of processes per node."""

from dataclasses import dataclass
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.launch.config.swarm import PEER_EXCHANGES
from aedit.proto.rpc import is_loopback
from aedit.types import UserError

FIRST = "local-0"
"""Name of the first node of `aedit run` on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Part of this machine in a run."""

    nodes: int = 1
    """Nodes of the whole run."""

    node: int = 0
    """Index of this machine's node; 0 with `local`, which starts all nodes."""

    local: bool = False
    """All nodes are processes on this machine."""

    master: str = ""
    """HOST:PORT of node 0, the rendezvous of several machines."""

    keys: Path | None = None
    """Folder of keys of this machine's peer in a swarm; None without TLS."""

    insecure: bool = False
    """Let other machines reach this machine's peer without TLS."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"{'--local' if self.local else '--nodes'}: must be at least 1, got {self.nodes}")
        if not 0 <= self.node < self.nodes:
            raise UserError(f"--node: must be from 0 to {self.nodes - 1} (--nodes minus 1), got {self.node}")
        if self.nodes > 1 and not self.local and not self.master:
            raise UserError("--master: several machines need HOST:PORT of node 0, the same on all of them")
        host, _, port = self.master.rpartition(":")
        if self.master and not (host and port.isdecimal()):
            raise UserError(f"--master: expected HOST:PORT, got {self.master}")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Address of the hub and identity of a node that joins its run."""

    hub: str
    """HOST:PORT of the hub; several, separated by commas, split the units."""

    name: str
    """Name of the node, kept over restarts so that the hub recognizes it."""

    replicas: Path | None = None
    """File in which this machine's peer keeps where the parts of a swarm are; None with a hub."""

    standby: str = ""
    """HOST:PORT of the standbys, separated by commas: of a single hub all, of several one for each."""

    keys: Path | None = None
    """Folder of keys that `aedit keys` made for this node; None without TLS."""

    insecure: bool = False
    """Connect to a hub on another machine without TLS."""

    prefers: int | None = None
    """Preferred index of the node."""

    @property
    def standbys_of_first(self) -> str:
        """Return the standbys of the first hub, separated by commas."""
        return self.standby.split(",")[0] if "," in self.hub else self.standby


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Options of the processes of a node, beside the configuration."""

    ranks: int = 0
    """Processes per node; 0: all that torchrun has started on this machine."""

    attempt: int = 1
    """Number of this start of the run, for its logs and events."""

    local: bool = False
    """All nodes are on this machine: `[local]` has an effect."""

    membership: JoinOptions | None = None
    """How the node joins the others; None: all nodes are one `torchrun` world."""


def check_hub_start(config: RunConfig, placement: Placement) -> None:
    """Raise UserError if `aedit run` cannot start a run with this hub; the text names the commands that can.

    Without `--local` it starts the hub and one node, and only if the hub listens at a loopback address: with
    several machines the hub has a command of its own.
    """
    hub = config.hub
    if config.swarm.on and (placement.nodes > 1 or placement.master) and not placement.local:
        raise UserError(
            "--nodes, --master: no effect in a swarm; use aedit join ADDRESS on each of the others,"
            ' or with swarm.exchange = "hivemind" aedit run CONFIG --swarm.peers ADDRESS'
        )
    if (placement.keys or placement.insecure) and not config.swarm.on:
        raise UserError(
            "--keys, --insecure: of aedit run have an effect in a swarm only; aedit hub takes them"
        )
    if config.swarm.on:
        PEER_EXCHANGES[config.swarm.exchange].check_start(config, placement)
    if placement.keys and placement.nodes > 1:
        raise UserError(
            f"--local: the keys in {placement.keys} are for one peer; begin the run with one node, and add"
            " others by aedit join with keys of their own"
        )
    if not hub.address or placement.local:
        return
    reach = hub.address if not hub.address.endswith(":0") else "HOST:PORT"
    others = f"aedit hub CONFIG on its machine, aedit join {reach} on each of the others"
    if placement.nodes > 1 or placement.master:
        raise UserError(f"--nodes, --master: no effect with hub.address = {hub.address}; use {others}")
    open_to_others = [
        one for one in (*hub.addresses, *hub.standby.split(",")) if one and not is_loopback(one)
    ]
    if open_to_others:
        raise UserError(
            f"hub.address = {open_to_others[0]} is not a loopback address: aedit run starts only a hub of"
            f" this machine; use {others}, or --hub.address 127.0.0.1:0 for a hub and one node here"
        )


def ranks_per_node(config: RunConfig, placement: Placement) -> int:
    """Return the processes per node.

    One per GPU of this machine, or `local.ranks` without GPUs or with `--local`.
    """
    if placement.local or config.device == "cpu":
        return config.local.ranks
    import torch

    num_gpus = torch.cuda.device_count()
    if config.device == "cuda" and not num_gpus:
        raise UserError('device: "cuda" but no GPU is visible; use --device cpu or see aedit doctor')
    return num_gpus or config.local.ranks


def warnings(config: RunConfig, placement: Placement) -> list[str]:
    """Return a sentence for each value that has no effect on this machine."""
    if config.local.slowdown and not placement.local:
        return ["local.slowdown has no effect without --local"]
    return []  # More entries than nodes are no mistake: one file serves any number of nodes.
