"""Which nodes of a run this machine starts, and how many processes each has."""

import sys
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.config.config import RunConfig
from aedit.proto.wire.security import is_loopback
from aedit.types import UserError

NODE_PROGRAM = ("-m", "--", "aedit.launch.node")
"""With `--`, or torchrun would take the node's `--local` for one of its own options, cut short."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """This machine's part in a run."""

    nodes: int = 1
    """Nodes of the whole run."""

    node: int = 0
    """Which of them this machine is; 0 with `local`, which starts them all."""

    local: bool = False
    """All nodes are processes on this machine."""

    master: str = ""
    """HOST:PORT of node 0, where several machines meet."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise UserError(f"{'--local' if self.local else '--nodes'}: must be at least 1, got {self.nodes}")
        if not 0 <= self.node < self.nodes:
            raise UserError(f"--node: must be from 0 to {self.nodes - 1}, one below --nodes, got {self.node}")
        if self.nodes > 1 and not self.local and not self.master:
            raise UserError("--master: several machines need HOST:PORT of node 0, the same on all of them")
        host, _, port = self.master.rpartition(":")
        if self.master and not (host and port.isdecimal()):
            raise UserError(f"--master: expected HOST:PORT, got {self.master}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """How a node of a run with a hub finds it, and who it is there."""

    hub: str
    """HOST:PORT of the hub; several, separated by commas, split the units."""

    name: str
    """Of the node: the same one after a restart, so that it is the same member."""

    standby: str = ""
    keys: Path | None = None
    """What `aedit keys` made for this node; None: a hub on this machine, or one that is open to all."""

    insecure: bool = False
    """Speak to a hub on another machine without TLS."""

    prefers: int | None = None
    """The index it would like to have."""

    def words(self) -> list[str]:
        """Options of the node program."""
        words = [f"--hub={self.hub}", f"--name={self.name}"]
        words += [f"--standby={self.standby}"] if self.standby else []
        words += [f"--keys={self.keys}"] if self.keys else []
        words += [f"--prefers={self.prefers}"] if self.prefers is not None else []
        return words + ["--insecure"] * self.insecure


def check_hub_start(config: RunConfig, placement: Placement) -> None:
    """Raise UserError if `aedit run` cannot start a run with this hub; the text says which commands can.

    Without `--local` it starts the hub and one node, and only where the hub is for this machine alone:
    the machines of a hub have commands of their own.
    """
    hub = config.hub
    if not hub.address or placement.local:
        return
    reach = hub.address if not hub.address.endswith(":0") else "HOST:PORT"
    others = f"aedit hub CONFIG on its machine, aedit join {reach} on each of the others"
    if placement.nodes > 1 or placement.master:
        raise UserError(
            f"--nodes, --master: the nodes of a hub meet at the hub, not at a master; use {others}"
        )
    open_to_others = [place for place in (*hub.addresses, hub.standby) if place and not is_loopback(place)]
    if open_to_others:
        raise UserError(
            f"hub.address = {open_to_others[0]} is for several machines: use {others},"
            " or --hub.address 127.0.0.1:0 to have the hub and a node here alone"
        )


def ranks_per_node(config: RunConfig, placement: Placement) -> int:
    """Processes per node: one per GPU of this machine, or `local.ranks` without GPUs or with `--local`."""
    if placement.local or config.device == "cpu":
        return config.local.ranks
    import torch

    num_gpus = torch.cuda.device_count()
    if config.device == "cuda" and not num_gpus:
        raise UserError('device: "cuda" but no GPU is visible; use --device cpu or see aedit doctor')
    return num_gpus or config.local.ranks


def torchrun_words(
    run_toml: Path,
    config: RunConfig,
    placement: Placement,
    attempt: int,
    program: tuple[str, ...] = NODE_PROGRAM,
    membership: Membership | None = None,
) -> list[str]:
    """The command that starts this machine's processes. `attempt` numbers their logs and events, from 1.

    With a `membership` it is one node's, which the hub brings together with the others.
    """
    ranks = ranks_per_node(config, placement)
    joined = placement.local and membership is None
    num_processes = ranks * placement.nodes if joined else ranks
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
    words += [f"--max-restarts={config.restarts}", *_rendezvous(placement, membership), *program]
    words += [str(run_toml), f"--ranks={ranks}", f"--attempt={attempt}"] + ["--local"] * placement.local
    return words + (membership.words() if membership else [])


def warnings(config: RunConfig, placement: Placement) -> list[str]:
    """Values that can have no effect here, each in a sentence."""
    if config.local.slowdown and not placement.local:
        return ["local.slowdown has no effect without --local"]
    return []  # More entries than nodes are no mistake: one file serves any number of nodes.


def _rendezvous(placement: Placement, membership: Membership | None) -> list[str]:
    if membership or placement.local or placement.nodes == 1:
        # The loopback address, as a container's own name often resolves to nothing.
        return ["--standalone", "--local-addr=127.0.0.1"]
    host, _, port = placement.master.rpartition(":")
    # The static rendezvous keeps a machine's node number over restarts; c10d's would hand out new ones.
    return [
        f"--nnodes={placement.nodes}",
        f"--node-rank={placement.node}",
        f"--master-addr={host}",
        f"--master-port={port}",
    ]
