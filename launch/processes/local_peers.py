"""The peers of a swarm on this machine: one per node, each with a process and a folder of its own."""

import sys
import time
from pathlib import Path

from aedit.launch.config import FIRST, JoinOptions, Placement, RunConfig
from aedit.launch.processes.child import HostProcess
from aedit.launch.records import file_name
from aedit.launch.swarm import INTRODUCTION
from aedit.proto.dht import AVERAGING
from aedit.proto.dht import INTRODUCTION as AVERAGING_INTRODUCTION
from aedit.proto.rpc import name_of
from aedit.proto.swarm import REPLICAS
from aedit.system import write_atomically
from aedit.types import UserError

PEERS = "peers.txt"
"""File of a local run with the addresses of its peers."""
_INTRODUCTION_LIMIT_S = 60.0
_POLL_S = 0.05


class LocalPeers:
    """The peers that this machine starts: those of a local run, or the one of a node that joins a swarm."""

    def __init__(
        self, config: RunConfig, run_toml: Path, placement: Placement, joins: JoinOptions | None
    ) -> None:
        """Prepare them. joins: the node that joins a swarm; None for a new run, by `placement`."""
        self._config, self._run_toml, self._joins = config, run_toml, joins
        self._run_dir = run_toml.parent
        trust = joins or placement
        own_name = joins.name if joins else name_of(placement.keys)
        self._names = [own_name] if own_name else [f"local-{i}" for i in range(placement.nodes)]
        self._keys, self._insecure = trust.keys, trust.insecure
        self.processes: list[HostProcess] = []
        self.place = ""
        """What a further peer passes to `aedit join`."""

    def start(self) -> None:
        """Start the peers; the first one of a new run begins it. Raises UserError if one cannot start."""
        begins = self._joins is None
        for i, name in enumerate(self._names):
            process = self._process(name, founds=begins and i == 0)
            self.processes.append(process)
            process.start()
            if i == 0:
                swarm = self._config.swarm
                self.place = self._introduction(process) if swarm.listen else swarm.peers
        addresses = [process.address() for process in self.processes]
        if begins:
            write_atomically(self._run_dir / PEERS, "".join(f"{address}\n" for address in addresses))

    def members(self) -> list[JoinOptions]:
        """Return how each node finds the owners of the parts: through its peer."""
        return [
            JoinOptions(
                hub="",
                replicas=process.directory / REPLICAS,
                name=name,
                keys=self._keys,
                insecure=self._insecure,
                prefers=None if self._joins else i,
            )
            for i, (name, process) in enumerate(zip(self._names, self.processes, strict=True))
        ]

    def _process(self, name: str, *, founds: bool) -> HostProcess:
        directory = self._run_dir / "peers" / file_name(name)
        command = [sys.executable, "-m", "aedit.launch.cli", "peer", str(self._run_toml)]
        command += [f"--directory={directory}", f"--as={name}"]
        if not self._config.swarm.peers:
            in_table = self._config.swarm.discovery == "hivemind"
            command += [f"--peers={self.place if in_table else self._run_dir / PEERS}"]
        command += [f"--keys={self._keys}"] if self._keys else []
        command += ["--insecure"] * self._insecure
        command += ["--stay"] * (self._joins is None)
        log = self._run_dir / f"peer_{file_name(name)}.log"
        command += ["--found"] * founds
        return HostProcess(f"the peer of node {name}", command, directory, log, self._config.restarts)

    def _introduction(self, first: HostProcess) -> str:
        """Return what the first peer says that others need to find it."""
        first.address()
        deadline_s = time.monotonic() + _INTRODUCTION_LIMIT_S
        wanted = "/" if self._config.swarm.discovery == "hivemind" and not self._config.swarm.peers else ""
        while not (text := _read(first.directory / INTRODUCTION)) or not text.startswith(wanted):
            if not first.running() or time.monotonic() > deadline_s:
                raise UserError(f"the first peer was not reachable in time: see {first.log}")
            time.sleep(_POLL_S)
        return text


class AveragingPeers:
    """Peers that average by hivemind: each is a node, and needs no process beside it. See `LocalPeers`."""

    def __init__(
        self, config: RunConfig, run_toml: Path, placement: Placement, joins: JoinOptions | None
    ) -> None:
        self.processes: list[HostProcess] = []
        self._introduction = run_toml.parent / AVERAGING / FIRST / AVERAGING_INTRODUCTION
        self._nodes = placement.nodes
        self.place = str(self._introduction)
        """File to which the first peer writes its addresses."""

    def start(self) -> None:
        """Remove the addresses of an earlier start, which had another port."""
        self._introduction.unlink(missing_ok=True)

    def members(self) -> list[JoinOptions]:
        """Return the nodes, of which the first one begins the run."""
        return [JoinOptions(hub="", name=f"local-{i}", prefers=i) for i in range(self._nodes)]


LOCAL_PEERS: dict[str, type[LocalPeers] | type[AveragingPeers]] = {
    "parts": LocalPeers,
    "hivemind": AveragingPeers,
}
"""By the value of `swarm.exchange`."""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
