"""Which nodes of a run this machine starts, and how many processes each has."""

import sys
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.config import RunConfig
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
) -> list[str]:
    """The command that starts this machine's processes. `attempt` numbers their logs and events, from 1."""
    ranks = ranks_per_node(config, placement)
    num_processes = ranks * placement.nodes if placement.local else ranks
    words = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_processes}"]
    words += [f"--max-restarts={config.restarts}", *_rendezvous(placement), *program, str(run_toml)]
    return words + [f"--ranks={ranks}", f"--attempt={attempt}"] + ["--local"] * placement.local


def warnings(config: RunConfig, placement: Placement) -> list[str]:
    """Values that can have no effect here, each in a sentence."""
    slowed = len(config.local.slowdown)
    if slowed and not placement.local:
        return ["local.slowdown has no effect without --local"]
    if slowed > placement.nodes:
        return [f"local.slowdown has {slowed} entries for {placement.nodes} nodes; the rest has no effect"]
    return []


def _rendezvous(placement: Placement) -> list[str]:
    if placement.local or placement.nodes == 1:
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
