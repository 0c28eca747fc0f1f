"""All processes of a run on this machine, with the interface of one child.

Hubs or peers, and torchrun per node.
"""

import os
import sys
import time
from pathlib import Path
from types import TracebackType

import psutil

from aedit.launch.config import NODE_PROGRAM, JoinOptions, Placement, RunConfig, torchrun_command
from aedit.launch.hub import of_standby
from aedit.launch.processes.child import POLL_S, Child, HostProcess
from aedit.launch.processes.local_peers import LOCAL_PEERS
from aedit.launch.records import FAILED, file_name

NODE_LEAVE_LIMIT_S = 60.0
"""Longest time of a node for its last evaluation and checkpoint after it has left the hub."""

HUB_LEAVE_LIMIT_S = 30.0
"""Longest time of a hub for its snapshot after the last node has ended."""


class Cluster:
    """Processes of one run on this machine, which end with the block.

    A failed node does not stop the others, which do not depend on it. A hub or peer that has failed for good
    ends all nodes: they may wait for it for ever.
    """

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        run_toml: Path,
        attempt: int,
        program: tuple[str, ...] = NODE_PROGRAM,
        joins: JoinOptions | None = None,
    ) -> None:
        """Start all processes.

        joins: the node of this machine in a swarm that runs already; default: begin the run, with the nodes
        `local-0`, `local-1`, ...
        """
        self.nodes: list[Child] = []
        self.address = ""
        """HOST:PORT of the hub; several, separated by commas, split the units. Of a peer in a swarm; with
        hivemind's averaging the file to which the first peer writes its address."""
        run_dir = run_toml.parent
        self._over_since: float | None = None
        self._late: set[int] = set()
        """Nodes of a swarm that were started or restarted after the run was over."""
        self._hubs: list[HostProcess] = []
        self._needs: list[list[HostProcess]] = []
        """Groups of processes, of each of which one must be there."""
        self._fault = ""
        """Why the nodes are ended before the run is over."""
        self._kill_at = float("inf")
        self._is_over = False
        """True once no node runs."""
        try:
            if config.swarm.on:
                peers = LOCAL_PEERS[config.swarm.exchange](config, run_toml, placement, joins)
                self._hubs = peers.processes
                peers.start()
                members, self.address = peers.members(), peers.place
                self._needs = [[peer] for peer in self._hubs]
            else:
                self._hubs, parts = _hubs(config, run_dir), len(config.hub.addresses)
                members = _start_hubs(self._hubs, parts, placement.nodes)
                self.address = members[0].hub
                self._needs = [self._hubs[:1] + self._hubs[parts:], *([hub] for hub in self._hubs[1:parts])]
            for i, member in enumerate(members):
                command = torchrun_command(run_toml, config, placement, attempt, program, member)
                log = run_dir / f"launch_{file_name(joins.name) if joins else i}.log"
                self.nodes.append(Child(command, log, _shared(config, placement)))
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def running(self) -> bool:
        """Return whether any node runs. Once none does, the hubs are asked to end."""
        if sum(
            node.running() for node in self.nodes
        ):  # no early exit: each call also looks for new processes
            for hub in self._hubs:
                hub.mend()
            self._end_the_late()
            self._end_the_helpless()
            return True
        self._is_over = True
        self._end_hubs()
        return False

    def failed(self) -> int | None:
        """Return the index of the first node that failed before the run was over, None if none did."""
        codes = [node.exit_code() for node in self.nodes]
        return next((i for i, code in enumerate(codes) if code != 0 and i not in self._late), None)

    def exit_code(self) -> int:
        """Return 0 if all nodes ended without error.

        Only after `running` returned False or `kill` was called.
        """
        failed = self.failed()
        if self._fault:
            return 1
        return 0 if failed is None else self.nodes[failed].exit_code()

    def output(self) -> str:
        """Return the output of all nodes; before it, once none runs, why they were ended."""
        fault = f"aedit: {FAILED}{self._fault}\n" if self._fault and self._is_over else ""
        return "".join([fault, *(node.output() for node in self.nodes)])

    def workers(self) -> list[psutil.Process]:
        """Return the live processes of the nodes."""
        return [worker for node in self.nodes for worker in node.workers()]

    def terminate(self) -> None:
        """Ask the nodes to end."""
        for node in self.nodes:
            node.terminate()

    def kill(self) -> None:
        """Kill all processes and wait for their end."""
        for node in self.nodes:
            node.kill()
        for hub in self._hubs:
            if hub.child is not None:
                hub.child.kill()

    def _end_the_late(self) -> None:
        """Stop nodes that wait in vain: the peer of this machine has ended with the run.

        The hubs and peers of a run that began here serve until the last node has ended.
        """
        if not self._hubs or not all(hub.is_over for hub in self._hubs):
            return
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() > self._over_since + NODE_LEAVE_LIMIT_S:
            self._late.update(i for i, node in enumerate(self.nodes) if node.running())
            self.terminate()

    def _end_the_helpless(self) -> None:
        """End the nodes if a hub or peer has failed for good: they would wait for it."""
        faults = [[host.fault for host in group] for group in self._needs]
        if not self._fault and (fatal := next(filter(all, faults), None)):
            self._fault, self._kill_at = fatal[0], time.monotonic() + NODE_LEAVE_LIMIT_S
            self.terminate()
        if time.monotonic() > self._kill_at:
            for node in self.nodes:
                node.kill()

    def _end_hubs(self) -> None:
        hubs = [hub.child for hub in self._hubs if hub.child is not None]
        for hub in hubs:
            hub.terminate()
        deadline = time.monotonic() + HUB_LEAVE_LIMIT_S
        while sum(hub.running() for hub in hubs) and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _shared(config: RunConfig, placement: Placement) -> dict[str, str]:
    """Return the environment of nodes that share the cores of this machine.

    torchrun limits each process to one thread, but not if it starts a single one; without a limit each such
    node would use all cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // (placement.nodes * config.local.ranks))
    return {"OMP_NUM_THREADS": str(threads)} | os.environ


def _hubs(config: RunConfig, run_dir: Path) -> list[HostProcess]:
    """Return the hubs that split the units, then the standbys of the first one."""
    parts = len(config.hub.addresses)
    places = [(k, run_dir / (f"hub_{k}" if parts > 1 else "hub"), 0) for k in range(parts)]
    numbers = range(1, 1 + len(config.hub.standbys_of(0)))
    places += [(0, run_dir / of_standby(number), number) for number in numbers]
    command = [sys.executable, "-m", "aedit.launch.cli", "hub", str(run_dir / "run.toml"), "--stay"]
    return [
        HostProcess(
            _name(k, number, parts),
            [*command, f"--part={k}/{parts}", f"--directory={directory}", *_as_standby(number)],
            directory,
            run_dir / f"{directory.name}.log",
            config.restarts,
            may_end=False,
        )
        for k, directory, number in places
    ]


def _start_hubs(hubs: list[HostProcess], num_parts: int, nodes: int) -> list[JoinOptions]:
    """Start the hubs, and return how the nodes find them. Raises UserError if one cannot start."""
    for hub in hubs:
        hub.start()
    addresses = [hub.address() for hub in hubs]
    address, standby = ",".join(addresses[:num_parts]), ",".join(addresses[num_parts:])
    return [JoinOptions(hub=address, standby=standby, name=f"local-{i}", prefers=i) for i in range(nodes)]


def _name(part: int, standby: int, parts: int) -> str:
    hub = f"hub {part} of {parts}" if parts > 1 else "the hub"
    return f"standby {standby} of {hub}" if standby else hub


def _as_standby(number: int) -> list[str]:
    """Return the options of standby `number`; none for 0, a hub that leads."""
    return ["--standby", f"--standby-number={number}"] if number else []
