"""All processes of a run on this machine, with the interface of one child: hubs or peers, and nodes."""

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil

from aedit.child import POLL_S, Child, HostProcess, to_json
from aedit.launch.config import FIRST, JoinOptions, NodeOptions, Placement, RunConfig, ranks_per_node
from aedit.launch.hub import HUB_PROGRAM, HubOptions, of_standby
from aedit.launch.records import FAILED
from aedit.proto.dht import AVERAGING
from aedit.proto.dht import INTRODUCTION as AVERAGING_INTRODUCTION
from aedit.proto.rpc import name_of
from aedit.proto.swarm import REPLICAS
from aedit.system import num_cores, write_atomically

NODE_PROGRAM = ("-m", "aedit.launch.node")
"""Arguments of torchrun."""
PEERS = "peers.txt"
"""File of a local run with the addresses of its peers."""
NODE_LEAVE_LIMIT_S = 60.0
"""Longest time of a node for its last evaluation and checkpoint after it has left the hub."""

LOOK_S = 0.5
"""Interval at which torchrun looks at its processes."""

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
                start = {"parts": self._start_peers, "hivemind": self._start_averaging}[config.swarm.exchange]
                members = start(config, run_toml, placement, joins)
            else:
                members = self._start_hubs(config, run_dir, placement.nodes)
            # torchrun limits each process to one thread, but not if it starts a single one; without a limit
            # each such node would use all cores.
            threads = max(1, num_cores() // (placement.nodes * config.local.ranks))
            for i, member in enumerate(members):
                command = torchrun_command(run_toml, config, placement, attempt, program, member)
                log = run_dir / f"launch_{joins.name if joins else i}.log"
                self.nodes.append(Child(command, log, {"OMP_NUM_THREADS": str(threads)} | os.environ))
        except BaseException:
            self.kill()
            raise

    def _start_hubs(self, config: RunConfig, run_dir: Path, nodes: int) -> list[JoinOptions]:
        """Start the hubs; return how the nodes find them. Raises UserError if one cannot start."""
        self._hubs.extend(_hub_processes(config, run_dir))
        parts = len(config.hub.addresses)
        self._needs = [self._hubs[:1] + self._hubs[parts:], *([hub] for hub in self._hubs[1:parts])]
        addresses = [hub.wait_for("address") for hub in self._hubs]
        self.address, standby = ",".join(addresses[:parts]), ",".join(addresses[parts:])
        return [
            JoinOptions(hub=self.address, standby=standby, name=f"local-{i}", prefers=i) for i in range(nodes)
        ]

    def _start_peers(
        self, config: RunConfig, run_toml: Path, placement: Placement, joins: JoinOptions | None
    ) -> list[JoinOptions]:
        """Start a peer per node; return how each node finds the owners of the parts: through its peer.

        The first peer of a new run begins it. Raises UserError if one cannot start.
        """
        from aedit.launch.swarm import INTRODUCTION

        trust, swarm, known = joins or placement, config.swarm, run_toml.parent / PEERS
        own_name = joins.name if joins else name_of(placement.keys)
        names = [own_name] if own_name else [f"local-{i}" for i in range(placement.nodes)]
        in_table = swarm.discovery == "hivemind" and not swarm.peers
        self.address = swarm.peers
        for i, name in enumerate(names):
            found = "" if swarm.peers else self.address if in_table else str(known)
            founds = joins is None and i == 0
            process = _peer_process(config, run_toml, name, trust, peers=found, founds=founds)
            self._hubs.append(process)
            if i == 0 and swarm.listen:
                process.wait_for("address")
                self.address = process.wait_for(
                    INTRODUCTION,
                    lambda text: bool(text) and text.startswith("/" if in_table else ""),
                    "the first peer was not reachable in time",
                )
        addresses = [process.wait_for("address") for process in self._hubs]
        if joins is None:
            write_atomically(known, "".join(f"{address}\n" for address in addresses))
        self._needs = [[peer] for peer in self._hubs]
        return [
            JoinOptions(
                hub="",
                replicas=process.directory / REPLICAS,
                name=name,
                keys=trust.keys,
                insecure=trust.insecure,
                prefers=None if joins else i,
            )
            for i, (name, process) in enumerate(zip(names, self._hubs, strict=True))
        ]

    def _start_averaging(
        self, config: RunConfig, run_toml: Path, placement: Placement, joins: JoinOptions | None
    ) -> list[JoinOptions]:
        """Return the nodes of a swarm that averages by hivemind: each is a peer, the first one begins."""
        introduction = run_toml.parent / AVERAGING / FIRST / AVERAGING_INTRODUCTION
        introduction.unlink(missing_ok=True)  # of an earlier start, at another port
        self.address = str(introduction)
        return [JoinOptions(hub="", name=f"local-{i}", prefers=i) for i in range(placement.nodes)]

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def look(self) -> None:
        """Restart hubs that have failed, and end nodes that wait in vain; end the hubs once no node runs.

        Call it about once a second.
        """
        for node in self.nodes:
            node.look()
        if self.running():
            for hub in self._hubs:
                hub.mend()
            self._end_late_nodes()
            self._end_nodes_without_hub()
        elif not self._is_over:
            self._is_over = True
            for hub in self._hubs:
                hub.child.terminate()
            deadline = time.monotonic() + HUB_LEAVE_LIMIT_S
            while any(hub.child.running() for hub in self._hubs) and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def running(self) -> bool:
        """Return whether any node runs."""
        return any(node.running() for node in self.nodes)

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
            hub.child.kill()

    def _end_late_nodes(self) -> None:
        """Stop nodes that wait in vain: the peer of this machine has ended with the run.

        The hubs and peers of a run that began here serve until the last node has ended.
        """
        if not self._hubs or not all(hub.is_over for hub in self._hubs):
            return
        self._over_since = self._over_since or time.monotonic()
        if time.monotonic() > self._over_since + NODE_LEAVE_LIMIT_S:
            self._late.update(i for i, node in enumerate(self.nodes) if node.running())
            self.terminate()

    def _end_nodes_without_hub(self) -> None:
        """End the nodes if a hub or peer has failed for good: they would wait for it."""
        faults = [[host.fault for host in group] for group in self._needs]
        if not self._fault and (fatal := next(filter(all, faults), None)):
            self._fault, self._kill_at = fatal[0], time.monotonic() + NODE_LEAVE_LIMIT_S
            self.terminate()
        if time.monotonic() > self._kill_at:
            for node in self.nodes:
                node.kill()


def torchrun_command(
    run_toml: Path,
    config: RunConfig,
    placement: Placement,
    attempt: int,
    program: tuple[str, ...] = NODE_PROGRAM,
    membership: JoinOptions | None = None,
) -> list[str]:
    """Return the command that starts this machine's processes.

    With a `membership` it starts one node, which the hub connects with the others. attempt: number of this
    start in the names of its logs and in its events, from 1.
    """
    ranks = ranks_per_node(config, placement)
    joined = placement.local and membership is None
    num_processes = ranks * placement.nodes if joined else ranks
    command = [sys.executable, "-m", "torch.distributed.run", f"--monitor-interval={LOOK_S:g}"]
    command += [f"--log-dir={os.devnull}"]  # else each start leaves an empty folder in TMPDIR
    command += [f"--nproc-per-node={num_processes}", f"--max-restarts={config.restarts}"]
    if membership or placement.local or placement.nodes == 1:
        # The loopback address: a container's own name often cannot be resolved.
        command += ["--standalone", "--local-addr=127.0.0.1"]
    else:
        host, _, port = placement.master.rpartition(":")
        # The static rendezvous keeps a machine's node index over restarts; the c10d one assigns new ones.
        command += [f"--nnodes={placement.nodes}", f"--node-rank={placement.node}"]
        command += [f"--master-addr={host}", f"--master-port={port}"]
    options = NodeOptions(ranks=ranks, attempt=attempt, local=placement.local, membership=membership)
    return [*command, *program, str(run_toml), to_json(options)]


def _hub_processes(config: RunConfig, run_dir: Path) -> Iterator[HostProcess]:
    """Start and yield the hubs that split the units, then the standbys of the first one."""
    parts = len(config.hub.addresses)
    places = [(k, run_dir / (f"hub_{k}" if parts > 1 else "hub"), 0) for k in range(parts)]
    numbers = range(1, 1 + len(config.hub.standbys_of(0)))
    places += [(0, run_dir / of_standby(number), number) for number in numbers]
    for k, directory, number in places:
        options = HubOptions(
            directory=directory, part=(k, parts), standby=number > 0, standby_number=max(1, number), stay=True
        )
        hub = f"hub {k} of {parts}" if parts > 1 else "the hub"
        yield HostProcess(
            f"standby {number} of {hub}" if number else hub,
            [sys.executable, "-m", HUB_PROGRAM, str(run_dir / "run.toml"), to_json(options)],
            directory=directory,
            log=run_dir / f"{directory.name}.log",
            restarts=config.restarts,
            may_end=False,
        )


def _peer_process(
    config: RunConfig,
    run_toml: Path,
    name: str,
    trust: JoinOptions | Placement,
    *,
    peers: str,
    founds: bool,
) -> HostProcess:
    """Start and return the peer of a node.

    Args:
        config: Of the run.
        run_toml: The configuration in the run directory.
        name: Of the node.
        trust: Keys of this machine.
        peers: Where it finds others; "": as the configuration says.
        founds: It begins the run.
    """
    from aedit.launch.swarm import PEER_PROGRAM, PeerOptions  # here: most runs have a hub

    directory = run_toml.parent / "peers" / name
    options = PeerOptions(
        directory=directory,
        name=name,
        peers=peers,
        founds=founds,
        stays=isinstance(trust, Placement),
        keys=trust.keys,
        insecure=trust.insecure,
    )
    return HostProcess(
        f"the peer of node {name}",
        [sys.executable, "-m", PEER_PROGRAM, str(run_toml), to_json(options)],
        directory=directory,
        log=run_toml.parent / f"peer_{name}.log",
        restarts=config.restarts,
    )
