"""The peers of a swarm, each a peer process with its hubs and a paced node, killed and started as a whole."""

import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil

from aedit.launch.swarm import INTRODUCTION, MARK, is_maddrs
from aedit.proto.swarm import REPLICAS
from benchmarks.chaos_parts.books import LATE
from benchmarks.chaos_parts.history import keep
from benchmarks.kit.cluster import TOML, free_port, ledger_lines
from benchmarks.kit.netns import Place, set_link
from benchmarks.kit.paced_node import STRIDE, PacedNode
from benchmarks.kit.processes import start

SWARM = """
[swarm]
discovery = "file"
parts = {parts}
copies = {copies}
lease_s = {lease_s}
"""
_WITNESS = "benchmarks.chaos_parts.witness"
_LOG_END = 1000


@dataclass(frozen=True, slots=True)
class SwarmShape:
    """Size of the swarm."""

    peers: int = 6
    parts: int = 4
    copies: int = 3
    lease_s: float = 5.0
    tables: tuple[int, ...] = ()
    """Places of the machines that find others by hivemind's hash table."""


@dataclass(slots=True)
class SwarmPeer:
    """One place in the swarm: the machine that is there now, and its processes."""

    slot: int
    address: str
    place: Place | None
    ledger: Path
    """File with the pushes of all nodes that have been in this place."""
    directory: Path
    number: int
    """Number of this machine, counted over all that have ever been in the swarm."""
    process: "subprocess.Popen[str] | None" = None
    node: "subprocess.Popen[str] | None" = None
    due_s: float = 0.0
    """Time at which it is started again after a kill."""
    is_away: bool = False
    """It is stopped or cut off."""
    finds: tuple[str, ...] = ()
    """Words of its command line by which it finds others, the same in all its starts."""

    @property
    def name(self) -> str:
        """Return the name of the machine."""
        return f"peer-{self.number}"

    @property
    def log(self) -> Path:
        """Return the file with what the peer and the node of the machine have said."""
        return self.directory / "output.log"

    def processes(self) -> list[psutil.Process]:
        """Return all live processes of the machine: node, peer, and its hubs."""
        found: list[psutil.Process] = []
        for process in (self.node, self.process):
            if process is not None and process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    known = psutil.Process(process.pid)
                    found += [known, *known.children(recursive=True)]
        return found

    def send(self, number: signal.Signals) -> None:
        """Send a signal to all processes of the machine."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes of the machine at once, as a power cut does."""
        found = self.processes()
        self.send(signal.SIGSTOP)  # none starts another or notices the end of another meanwhile
        self.send(signal.SIGKILL)
        for process in (self.node, self.process):
            if process is not None:
                process.wait(10)
        await_ends(found, 10)
        self.process = self.node = None

    def ended(self) -> list[str]:
        """Return which processes have ended by themselves, with their exit codes."""
        named = ((f"{self.name} (node)", self.node), (self.name, self.process))
        return [
            f"{name}: exit code {one.returncode}" for name, one in named if one and one.poll() is not None
        ]


@dataclass(slots=True)
class SwarmGround:
    """All processes of one run."""

    directory: Path
    plan: PacedNode
    shape: SwarmShape
    places: Sequence[Place]
    peers: list[SwarmPeer] = field(default_factory=list)
    starts: int = 0
    machines: int = 0
    stopped: set[str] = field(default_factory=set)
    """Names of machines that were stopped, whose own calls were late therefore."""
    hubs: dict[str, str] = field(default_factory=dict)
    """Machine by address of a hub: a replica that is started again has another address."""
    tables: dict[int, str] = field(default_factory=dict)
    """Multiaddresses of the hash table by place, as the machine there has told them."""

    def set_up(self) -> None:
        """Write the configuration and the list of peers; nothing is started."""
        shape = self.shape
        facts = {"every": self.plan.every, "expire_s": self.plan.expire_s, "address": ""}
        facts |= {"lease_samples": self.plan.lease_samples, "directory": self.directory, "more": ""}
        swarm = SWARM.format(parts=shape.parts, copies=shape.copies, lease_s=shape.lease_s)
        (self.directory / "run.toml").write_text(TOML.format(**facts) + swarm)
        for slot in range(shape.peers):
            place = self.places[slot] if self.places else None
            address = f"{place.address}:7000" if place else f"127.0.0.1:{free_port()}"
            ledger = self.directory / f"node-{slot}.jsonl"
            self.peers.append(SwarmPeer(slot, address, place, ledger, Path(), 0))
            self.replace_machine(self.peers[slot])
        # Machines that know no table yet find the others by one, and are found by the others there.
        listed = (peer.address for peer in self.peers if peer.slot not in shape.tables[1:])
        (self.directory / "peers.txt").write_text("".join(f"{address}\n" for address in listed))

    def replace_machine(self, peer: SwarmPeer) -> None:
        """Put a machine with an empty disk, and a name and a key of its own, in the place of another."""
        assert self.machines < STRIDE, "more machines than there are elements of their own"
        peer.number, self.machines = self.machines, self.machines + 1
        peer.directory = self.directory / "peers" / peer.name
        peer.directory.mkdir(parents=True)
        peer.finds = ()
        self.tables.pop(peer.slot, None)

    def waits(self, peer: SwarmPeer) -> bool:
        """Return whether a machine is to start when another one has told its hash table."""
        return not peer.finds and peer.slot in self.shape.tables[1:] and not self.tables

    def start(self, peer: SwarmPeer) -> None:
        """Start the peer process and the node of a machine; the first machine of all founds the run."""
        peer.finds = peer.finds or self._finds(peer)
        words = [
            "peer",
            str(self.directory / "run.toml"),
            f"--directory={peer.directory}",
            f"--as={peer.name}",
        ]
        words += [*peer.finds, "--insecure", f"--swarm.listen={peer.address}"]
        words += ["--found"] * (peer.number == 0)
        node = replace(
            self.plan,
            name=peer.name,
            ledger=str(peer.ledger),
            replicas=str(peer.directory / REPLICAS),
            rejoin=sha256(peer.name.encode()).hexdigest()[:32],
            votes=str(peer.directory / "votes"),
            prefers=peer.number,
        )
        with peer.log.open("a") as log:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            peer.process = start("aedit.launch.cli", *words, place=peer.place, **pipes)
            peer.node = start(_WITNESS, json.dumps(asdict(node)), place=peer.place, **pipes)
        self.starts += 1

    def _finds(self, peer: SwarmPeer) -> tuple[str, ...]:
        if peer.slot not in self.shape.tables:
            return (f"--peers={self.directory / 'peers.txt'}",)
        others = [f"--peers={told}" for slot, told in self.tables.items() if slot != peer.slot]
        return ("--swarm.discovery=hivemind", *others[:1])

    def cut(self, peer: SwarmPeer, state: str) -> None:
        """Set the link of a machine "down" or "up"."""
        assert peer.place is not None
        set_link(peer.place, state)

    def ask(self, peer: SwarmPeer) -> "subprocess.Popen[str]":
        """Start a process that prints what a peer says of the swarm, and fails if it does not answer."""
        return start("benchmarks.kit.cluster", peer.address, place=peer.place, stdout=subprocess.PIPE)

    def ledgers(self) -> list[list[dict[str, Any]]]:
        """Return the ledger of each place, with the machine in place of a hub's address."""
        found = [ledger_lines(peer.ledger) for peer in self.peers]
        for line in (line for lines in found for line in lines if "hub" in line):
            line["hub"] = self.hubs.get(line["hub"], line["hub"])
        return found

    def late_calls(self) -> int:
        """Return the calls that ended too late, of machines that were never stopped."""
        logs = (self.directory / "peers").glob("*/output.log")
        counted = (log for log in logs if log.parent.name not in self.stopped)
        return sum(log.read_text(errors="replace").count(LATE) for log in counted)

    # -- what is on the disks

    def folders(self, part: int) -> Iterator[Path]:
        """Yield the folders of all replicas of a part, of machines that were replaced too."""
        for folder in sorted((self.directory / "peers").glob(f"*/part_{part}")):
            if (folder / MARK).exists() and any(folder.glob("journal-*")):
                yield folder

    def keep(self) -> None:
        """Keep the segments that the hubs have now, their addresses, and those of hash tables."""
        for peer in self.peers:
            with suppress(OSError):
                told = (peer.directory / INTRODUCTION).read_text()
                if peer.slot in self.shape.tables and is_maddrs(told):
                    self.tables[peer.slot] = told
        for part in range(self.shape.parts):
            for folder in self.folders(part):
                keep(folder, self.directory / f"copies_{part}_{folder.parent.name}")
                with suppress(OSError):
                    self.hubs[(folder / "address").read_text().strip()] = folder.parent.name

    def copies(self, part: int) -> list[Path]:
        """Return all segments of a part that were kept."""
        return sorted(self.directory.glob(f"copies_{part}_*/journal-*"))

    def kill_all(self) -> None:
        """Kill what is left."""
        for peer in self.peers:
            peer.kill()


def await_ends(processes: Sequence[psutil.Process], limit_s: float) -> None:
    """Return when all have ended, whether somebody has asked for their exit codes or not."""
    deadline_s = time.monotonic() + limit_s
    while any(map(_lives, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.01)


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def last_words(peers: Path) -> str:
    """Return the end of all logs of all machines."""
    return "\n".join(
        f"{log.parent.name}/{log.name}: {log.read_text(errors='replace')[-_LOG_END:]}"
        for log in sorted(peers.glob("*/*.log"))
    )
