"""A swarm whose machines fail as a whole, owners and the first one included, and its accounts.

Some machines find the others by hivemind's hash table, whose processes are killed too.
"""

import importlib.util
import json
import random
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from aedit.launch.hub import read_accounts
from aedit.launch.records import SampleVerdict
from aedit.launch.swarm import INTRODUCTION, MARK, is_maddrs
from aedit.proto.swarm import REPLICAS
from benchmarks.chaos_parts.accounts import LATE, Accounts, account, errors, history_of, keep, read
from benchmarks.kit import netns
from benchmarks.kit.cluster import TOML, free_port, ledger_lines, ledger_tail, left_behind
from benchmarks.kit.netns import Place, set_link
from benchmarks.kit.paced_node import STRIDE, PacedNode
from benchmarks.kit.processes import copy_folder, end, last_line, limit_files, put_back, start
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report

# -- The peers of a swarm, each a peer process with its hubs and a paced node, killed and started as a whole.


SWARM = """
[swarm]
discovery = "file"
parts = {parts}
copies = {copies}
lease_s = {lease_s}
"""
_WITNESS = "benchmarks.programs.chaos_witness"
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

    def fill(self, num_bytes: int = resource.RLIM_INFINITY) -> None:
        """Let no file of the peer and its hubs grow beyond so many bytes; the node has another disk."""
        if self.process is not None:
            limit_files(self.process.pid, num_bytes)

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
        """Return which processes have ended by themselves, with exit codes and last words."""
        named = ((f"{self.name} (node)", self.node), (self.name, self.process))
        return [
            f"{name}: exit code {one.returncode}: {last_line(self.log)}"
            for name, one in named
            if one and one.poll() is not None
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


# -- hivemind's hash tables in a swarm: which machines have one, how it is killed, and whether it is back.


PROCESS = "aedit.proto.dht.dht_process"
BACK_WITHIN_S = 60.0
"""Longest time until a table is back that had been killed: two tries fail if all were, on busy processors."""
_ASKS_WITHIN_S = 90.0
_BACK = re.compile(r"the hash table is back after [\d.]+ s")


def machines_with_tables() -> tuple[int, ...]:
    """Return the places of the machines that find others by a hash table; none without hivemind."""
    return (1, 4) if importlib.util.find_spec("hivemind") else ()


def table_processes(peer: SwarmPeer) -> list[psutil.Process]:
    """Return hivemind's process of a machine and what it has started, p2pd; nothing unless both run."""
    found: list[psutil.Process] = []
    for process in peer.processes():
        with suppress(psutil.NoSuchProcess):
            if PROCESS in process.cmdline():
                found = [process, *process.children(recursive=True)]
    return found if len(found) > 1 else []


@dataclass(slots=True)
class Outage:
    """A table that was killed."""

    machine: str
    peer: int
    """Its process."""
    began_s: float
    said: int
    """Times that the log of the machine had said before that its table is back."""
    pids: tuple[int, ...]
    disturbed: bool = False
    """A machine with a table failed before this one was back."""
    restarted: bool = False
    """The machine itself was killed before that; it has started another table."""
    back_s: float | None = None
    """Time until the machine said that its table was back."""


@dataclass(slots=True)
class Tables:
    """Outages of the tables of one run, and what a newcomer finds at the end."""

    outages: list[Outage] = field(default_factory=list)
    answering: int = 0
    """Tables in which a newcomer finds peers at the end."""
    wanted: int = 0
    left_behind: int = 0
    """Killed processes that still run."""

    def kill(self, peers: Sequence[SwarmPeer]) -> None:
        """Kill hivemind's process and p2pd of these machines, all at once."""
        found = {peer.name: table_processes(peer) for peer in peers}
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees the end of another one
            for process in (one for processes in found.values() for one in processes):
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
        for peer in peers:
            pids = tuple(process.pid for process in found[peer.name])
            whose = peer.process.pid if peer.process else 0
            self.outages.append(Outage(peer.name, whose, time.monotonic(), _times_back(peer), pids))

    def open(self) -> list[Outage]:
        """Return the outages that have not ended."""
        return [one for one in self.outages if one.back_s is None and not one.restarted]

    def look(self, peers: Sequence[SwarmPeer]) -> None:
        """Note which tables are back. peers: the machines with tables that are there now."""
        failed = any(peer.process is None or peer.is_away for peer in peers)
        for outage in self.open():
            outage.disturbed |= failed
            peer = next((one for one in peers if one.process and one.process.pid == outage.peer), None)
            if peer is None:
                outage.restarted = True
            elif _times_back(peer) > outage.said and table_processes(peer):
                outage.back_s = time.monotonic() - outage.began_s

    def ask(self, peers: Sequence[SwarmPeer], told: dict[int, str]) -> None:
        """Look for peers in the table of each machine, as a newcomer does. told: multiaddresses by place."""
        asked = [
            start("benchmarks.programs.newcomer", told[peer.slot], place=peer.place, stdout=-1)
            for peer in peers
            if peer.slot in told and table_processes(peer)
        ]
        deadline_s, self.answering = time.monotonic() + _ASKS_WITHIN_S, 0
        for process in asked:
            with suppress(subprocess.TimeoutExpired):
                said = process.communicate(timeout=max(1.0, deadline_s - time.monotonic()))[0]
                self.answering += process.returncode == 0 and bool(json.loads(said))
        end(asked)
        self.wanted = len(peers)
        self.left_behind = sum(_runs(pid) for outage in self.outages for pid in outage.pids)

    @property
    def lasted_s(self) -> list[float]:
        """Return how long tables were away, of machines that were left alone meanwhile."""
        return [one.back_s for one in self.outages if one.back_s is not None and not one.disturbed]


def _times_back(peer: SwarmPeer) -> int:
    return len(_BACK.findall(peer.log.read_text(errors="replace")))


def _runs(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and any(
            PROCESS in word or "p2pd" in word for word in process.cmdline()
        )
    return False


# -- A swarm under faults: what is due is started, and the hubs' journals are kept.


TURN_S, KEEP_EVERY_S, ANSWERS_S = 0.05, 0.3, 5.0
KILLED_S = 0.5
"""Longest time for which a machine that was killed is away, unless the command says otherwise."""
TAIL = 65536
"""Bytes of a ledger that have a push of each unit."""


@dataclass(slots=True)
class SwarmStory:
    """Faults applied and results."""

    faults: dict[str, int] = field(default_factory=dict)
    moments: list[str] = field(default_factory=list)
    """Time of each fault by the monotonic clock, as in the ledgers, its kind and its machine."""
    starts: int = 0
    """Starts of machines."""
    absent_s: float = 0.0
    """Seconds for which machines were stopped, or had been killed and were not to start yet, summed."""
    samples: str = ""
    """What `aedit ledger` says."""
    samples_agree: bool = False
    samples_twice: int = 0
    """Samples that were trained twice."""
    longest_gap_s: float = 0.0
    """Longest time in which no node saw a push of some part acknowledged; the largest over parts."""
    healed_s: float = 0.0
    """Seconds from the end of the last fault until every node had an acknowledgement of every part."""
    died: list[str] = field(default_factory=list)
    """Processes that ended though nobody had killed them."""
    late_calls: int = 0
    """Calls that ended more than a second after their deadline."""
    left_behind: int = 0
    tables: Tables = field(default_factory=Tables)
    accounts: list[Accounts] = field(default_factory=list)
    """Accounts of each part."""

    @property
    def steps_per_s(self) -> float:
        """Return the steps in pushes of the history, mean over parts, of all nodes together."""
        return sum(part.steps_per_s for part in self.accounts) / len(self.accounts)


@dataclass(slots=True)
class Scene:
    """A swarm under faults. The caller calls `pause` again and again."""

    ground: SwarmGround
    chance: random.Random
    story: SwarmStory
    kept_s: float = 0.0
    back_within_s: float = KILLED_S
    """Longest time after which a machine that was killed, or another in its place, starts."""
    mends: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Times at which faults end, and the acts that end them."""

    def pause(self, until_s: float) -> None:
        """Start what is due and keep journals, until this time of the monotonic clock."""
        self.until(lambda: False, until_s - time.monotonic())

    def until(self, is_so: Callable[[], object], limit_s: float) -> bool:
        """Start what is due and keep journals until `is_so()`; return False if it is not within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not (so := bool(is_so())) and time.monotonic() < deadline:
            self._turn()
            time.sleep(TURN_S)
        return so

    def note(self, kind: str, *peers: SwarmPeer) -> None:
        """Count a fault."""
        names = ", ".join(f"{peer.name} (place {peer.slot})" for peer in peers)
        self.story.moments.append(f"{time.monotonic():.1f} {kind}: {names}")
        self.story.faults[kind] = self.story.faults.get(kind, 0) + 1

    def heal(self) -> None:
        """End all faults."""
        mends, self.mends = self.mends, []
        for _, mend in mends:
            mend()
        self.mends = []  # one that waits for something has added itself again
        for peer in self.ground.peers:
            peer.due_s = 0.0

    def status(self, peer: SwarmPeer) -> dict[str, Any] | None:
        """Return what a peer says of the swarm, None without an answer; what is due starts meanwhile."""
        asked = self.ground.ask(peer)
        if not self.until(lambda: asked.poll() is not None, ANSWERS_S):
            end([asked])
            return None
        found: dict[str, Any] | None = json.loads(asked.communicate()[0]) if asked.returncode == 0 else None
        return found

    def present(self) -> list[SwarmPeer]:
        """Return the machines that run and are neither stopped nor cut off."""
        return [peer for peer in self.ground.peers if peer.process is not None and not peer.is_away]

    def with_tables(self) -> list[SwarmPeer]:
        """Return the machines that find others by a hash table."""
        return [peer for peer in self.ground.peers if peer.slot in self.ground.shape.tables]

    def owner(self, part: int) -> SwarmPeer | None:
        """Return the machine that has acknowledged last for a part, if it runs and can be reached."""
        tails = [ledger_tail(peer.ledger, TAIL) for peer in self.ground.peers]
        parts = self.ground.shape.parts
        told = [
            (line["t"], line["hub"])
            for lines in tails
            for line in lines
            if line.get("event") == "acknowledged" and line["unit"] % parts == part
        ]
        name = self.ground.hubs.get(max(told)[1], "") if told else ""
        return next((peer for peer in self.present() if peer.name == name), None)

    def pushes_large(self) -> bool:
        """Return whether a node pushes its large unit now."""
        tails = [ledger_tail(peer.ledger, TAIL) for peer in self.present()]
        return any(lines and lines[-1]["event"] == "offered" and lines[-1]["unit"] == 0 for lines in tails)

    def all_acknowledged(self, after_s: float) -> bool:
        """Return whether every node has seen a push of every part acknowledged after this time."""
        parts = self.ground.shape.parts
        for peer in self.ground.peers:
            lines = (line for line in ledger_tail(peer.ledger, TAIL) if line.get("event") == "acknowledged")
            if {line["unit"] % parts for line in lines if line["t"] > after_s} != set(range(parts)):
                return False
        return True

    def _turn(self) -> None:
        now = time.monotonic()
        if now > self.kept_s + KEEP_EVERY_S:
            self.kept_s = now
            self.ground.keep()
            self.story.tables.look(self.with_tables())
        while due := next((entry for entry in self.mends if entry[0] <= now), None):
            self.mends.remove(due)  # before, as it may take turns itself
            due[1]()
        for peer in self.ground.peers:
            if ended := peer.ended():
                self.story.died += ended
                peer.kill()
            if peer.process is None and now >= peer.due_s and not self.ground.waits(peer):
                self.ground.start(peer)


# -- Faults of a swarm: whole machines are killed, stopped and cut off, owners and the first one included.


KILL_EVERY_S, AWAY_EVERY_S, AWAY_S = 20.0, 40.0, 30.0
FULL_S = 20.0
"""How long a disk is full."""
OLDER_S, OLDER_WAITS_S = 10.0, 60.0
"""Age of a folder that is put back, and how much older it may get until all parts have all their copies: not
shortly before a machine is away, as two of three copies would be missing."""
TABLES_FROM_S, TABLES_EVERY_S, TABLES_WAIT_S = 47.0, 60.0, 30.0
"""The first time, and every second one after it, is between two times at which a machine is away."""
AIM_S = 6.0
"""How long a kill waits for a push of the large unit."""

Act = Callable[[Scene], None]


def fault_plan(
    seconds: float, chance: random.Random, away_s: float, *, wires: bool, tables: int = 0
) -> list[tuple[float, Act]]:
    """Return (second, fault) in order. tables: machines that have a hash table."""
    kills: list[Act] = [_kill_owner, _kill_at_push, _kill_first, _kill_any, _older_folder]
    aways: list[Act] = [partial(_stop, away_s), partial(_cut if wires else _stop, away_s), _fill_disk]
    found: list[tuple[float, Act]] = []
    # A machine is stopped or cut off between two kills: the one that was killed last is about to be back.
    for every_s, first_s, kinds in ((KILL_EVERY_S, 5.0, kills), (AWAY_EVERY_S, 15.0, aways)):
        at_s, bag = first_s, list[Act]()
        while at_s < seconds - 5:
            bag = bag or chance.sample(kinds, len(kinds))  # all kinds by turns
            found.append((at_s, bag.pop()))
            at_s += every_s
    at_s, num = TABLES_FROM_S, tables
    while tables and at_s < seconds - 5:
        found.append((at_s, partial(_kill_tables, num)))
        at_s, num = at_s + TABLES_EVERY_S, 1 if num == tables else tables
    return sorted(found, key=lambda entry: entry[0])


def _kill_owner(scene: Scene) -> None:
    _kill(scene, scene.owner(scene.chance.randrange(scene.ground.shape.parts)), "owner killed")


def _kill_at_push(scene: Scene) -> None:
    """Kill the owner of the large unit while a node pushes it."""
    scene.until(scene.pushes_large, AIM_S)
    time.sleep(scene.chance.uniform(0, 0.1))
    _kill(scene, scene.owner(0), "owner killed in a push")


def _kill_first(scene: Scene) -> None:
    first = scene.ground.peers[0]
    _kill(scene, first if first in scene.present() else None, "first machine killed")


def _kill_any(scene: Scene) -> None:
    _kill(scene, None, "machine killed")


def _kill(scene: Scene, peer: SwarmPeer | None, kind: str) -> None:
    """Kill a machine, any if `peer` is None. It comes back, or another takes its place.

    One with an empty disk comes only if all parts have all their copies: only then does a majority of each
    outlive it and the machine that is stopped or cut off.
    """
    if peer is None:
        peer, kind = scene.chance.choice(scene.present()), "machine killed"
    renewed = scene.chance.random() < 0.5 and all_in_sync(scene, peer)
    scene.note(f"{kind}, disk lost" if renewed else kind, peer)
    peer.kill()
    peer.due_s = time.monotonic() + (absent_s := scene.chance.uniform(0.0, scene.back_within_s))
    scene.story.absent_s += absent_s
    if renewed:
        scene.ground.replace_machine(peer)


def _kill_tables(num: int, scene: Scene, until_s: float | None = None) -> None:
    """Kill the hash tables of so many machines at once; of fewer if there are no more for a while.

    A table that is not up yet is waited for while other faults go on. until_s: how long.
    """
    ground, tables = scene.ground, scene.story.tables
    now = time.monotonic()
    until_s = until_s or now + TABLES_WAIT_S
    away = {outage.machine for outage in tables.open()}
    mine = [peer for peer in scene.present() if peer in scene.with_tables() and peer.name not in away]
    found = [peer for peer in mine if peer.slot in ground.tables and table_processes(peer)]
    if len(found) < num and now < until_s:
        scene.mends.append((now + 1.0, partial(_kill_tables, num, scene, until_s)))
        return
    first = len(tables.outages) % max(1, len(found))  # by turns
    if killed := [*found[first:], *found[:first]][:num]:
        scene.note("hash table killed" if len(killed) == 1 else "all hash tables killed at once", *killed)
        tables.kill(killed)


def all_in_sync(scene: Scene, victim: SwarmPeer) -> bool:
    """Return whether each part has all its copies, and all are on machines that run."""
    if any(peer.is_away or peer.process is None for peer in scene.ground.peers):
        return False
    status = scene.status(next(peer for peer in scene.present() if peer is not victim))
    followers = scene.ground.shape.copies - 1
    return status is not None and all(part and part["in_sync"] >= followers for part in status["parts"])


def _stop(away_s: float, scene: Scene) -> None:
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.ground.peers[0]
    scene.note("machine stopped", peer)
    peer.is_away = True
    scene.ground.stopped.add(peer.name)
    peer.send(signal.SIGSTOP)
    now = time.monotonic()
    scene.mends.append((now + away_s, partial(_go_on, scene, peer, now)))


def _go_on(scene: Scene, peer: SwarmPeer, since_s: float) -> None:
    scene.story.absent_s += time.monotonic() - since_s
    peer.is_away = False
    peer.send(signal.SIGCONT)


def _cut(away_s: float, scene: Scene) -> None:
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.ground.peers[0]
    scene.note("machine cut off", peer)
    peer.is_away = True
    scene.ground.cut(peer, "down")
    scene.mends.append((time.monotonic() + away_s, partial(_mend, scene, peer)))


def _fill_disk(scene: Scene) -> None:
    """Let the peer of a machine and its hubs write nothing, as on a disk without room."""
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.ground.peers[0]
    scene.note("disk full", peer)
    peer.is_away = True
    peer.fill(0)
    scene.mends.append((time.monotonic() + FULL_S, partial(_empty_disk, peer)))


def _empty_disk(peer: SwarmPeer) -> None:
    peer.is_away = False
    peer.fill()


def _older_folder(scene: Scene) -> None:
    """Copy the folder of an owner; later kill that machine, and start it with the copy."""
    peer = scene.owner(scene.chance.randrange(scene.ground.shape.parts)) or scene.present()[0]
    older = Path(tempfile.mkdtemp(prefix="older_", dir=scene.ground.directory)) / "peer"
    peer.send(signal.SIGSTOP)
    copy_folder(peer.directory, older)
    peer.send(signal.SIGCONT)
    now = time.monotonic()
    act = partial(_put_back, scene, peer, peer.number, older, now + OLDER_S + OLDER_WAITS_S)
    scene.mends.append((now + OLDER_S, act))


def _put_back(scene: Scene, peer: SwarmPeer, number: int, older: Path, until_s: float) -> None:
    """Put an older folder back once all parts have all their copies: else nobody could have what it lacks."""
    now = time.monotonic()
    if now > until_s or peer.number != number:  # another machine is in its place
        shutil.rmtree(older)
    elif peer not in scene.present() or not all_in_sync(scene, peer):
        scene.mends.append((now + 1.0, partial(_put_back, scene, peer, number, older, until_s)))
    else:
        scene.note("machine killed, older folder put back", peer)
        peer.kill()
        scene.ground.keep()
        put_back(peer.directory, older)
        peer.due_s = time.monotonic() + (absent_s := scene.chance.uniform(0.0, scene.back_within_s))
        scene.story.absent_s += absent_s


def _mend(scene: Scene, peer: SwarmPeer) -> None:
    peer.is_away = False
    scene.ground.cut(peer, "up")


# -- the benchmark


RATE_MBIT = 100
NODE = PacedNode(
    hub="",
    name="",
    ledger="",
    numel=1024,
    step_s=0.05,
    every=20,
    large_numel=270_000,
    large_every=100,
    call_timeout_s=3.0,
)
"""A push of its large unit takes long enough to be hit by a fault."""
CALM_S = 60.0
GOODPUT, DECIDES_S = 0.90, 300.0
"""Wanted goodput, and how long a run must be to tell."""
JOINS_WITHIN_S, HEALS_WITHIN_S, ENDS_WITHIN_S = 300.0, 60.0, 90.0


def measure(
    minutes: float | None, seed: int, *, copies: int, quick: bool, back_within_s: float = KILLED_S
) -> Report:
    """Return the table of a swarm: calm, then with faults. back_within_s: see `Scene`."""
    seconds, shape = 60 * (minutes or (1 if quick else 10)), SwarmShape(copies=copies)
    calm = tell(min(CALM_S, seconds), seed, calm=True, shape=shape)
    story = tell(seconds, seed, shape=shape, back_within_s=back_within_s)
    faults = ", ".join(f"{number} x {kind}" for kind, number in sorted(story.faults.items()))
    absent = story.absent_s / seconds / shape.peers
    return Report(
        "chaos in a swarm",
        (f"{shape.peers} machines, {netns.wires()}: a peer, its hubs and a node of a fixed pace in each."
         f" {shape.parts} parts, {shape.copies} copies of each.",
         _tables_line(),
         f"{seconds:g} s of faults, seed {seed}. A machine is killed with all its processes,"
         f" and starts again, or another one does, within {back_within_s:g} s."
         " Steps are those in accepted pushes.",
         "Of the time of all machines they were stopped, or killed and not started again yet, for"
         f" {percent(absent)}; those that are cut off train on.",
         f"Faults: {faults or 'none'}."),
        ("run", "steps/s", "acknowledged", "faults", "starts", "terms led", "longest gap s", "healed s"),
        (_row("calm", calm), _row("faults", story)),
        _bars(story, story.steps_per_s / calm.steps_per_s, 1 - absent, seconds),
        {"calm": asdict(calm), "faults": asdict(story)},
    )  # fmt: skip


def _tables_line() -> str:
    places = " and ".join(map(str, machines_with_tables()))
    if not places:
        return (
            "hivemind is not installed: all machines find the others by a file, and there is no hash table."
        )
    return f"Those at places {places} find others by hivemind's hash table, in both runs; the rest by a file."


def _row(name: str, story: SwarmStory) -> tuple[str, ...]:
    acknowledged = sum(part.acknowledged for part in story.accounts)
    terms = sum(len(part.terms) for part in story.accounts)
    numbers = (acknowledged, sum(story.faults.values()), story.starts, terms)
    times = (f"{story.longest_gap_s:.1f}", f"{story.healed_s:.1f}")
    return (name, f"{story.steps_per_s:.1f}", *map(str, numbers), *times)


def _bars(story: SwarmStory, share: float, present: float, seconds: float) -> tuple[Bar, ...]:
    reached = None if seconds < DECIDES_S else share >= GOODPUT
    back = f"all nodes acknowledged in all parts {story.healed_s:.1f} s after the last fault"
    alone = sum(part.alone for part in story.accounts)
    return (
        Bar(f"accepted pushes that only the owner had on disk: {alone}", alone == 0),
        Bar(
            f"goodput {percent(share)} of the calm run, wanted >= {percent(GOODPUT, 0)}; of what the machines"
            f" that were there make in it {percent(share / present)}",
            reached,
        ),
        *(Bar(f"{text}: {number}", number == 0) for text, number in mistakes(story).items()),
        Bar(f"{back}, wanted < {HEALS_WITHIN_S:g} s", story.healed_s < HEALS_WITHIN_S),
        Bar(f"samples: {story.samples}", story.samples_agree),
        *_table_bars(story),
        *(Bar(f"ended: {text}", False) for text in story.died),
    )


def _table_bars(story: SwarmStory) -> tuple[Bar, ...]:
    tables = story.tables
    if not tables.wanted:
        return ()
    killed, gone, lasted_s = len(tables.outages), len(tables.open()), tables.lasted_s
    restarted = sum(outage.restarted for outage in tables.outages)
    longest_s = max(lasted_s, default=0.0)
    back = f"{killed - gone - restarted} of {killed} hash tables that were killed were back"
    left = f"{len(lasted_s)} of them, of machines that all went on meanwhile, after at most {longest_s:.1f} s"
    answer = f"hash tables in which a newcomer finds peers at the end: {tables.answering} of {tables.wanted}"
    return (
        Bar(f"{back}, {restarted} were begun by a machine that was restarted", gone == 0 if killed else None),
        Bar(f"{left}, wanted < {BACK_WITHIN_S:g} s", longest_s < BACK_WITHIN_S if lasted_s else None),
        Bar(answer, tables.answering == tables.wanted),
    )


def mistakes(story: SwarmStory) -> dict[str, int]:
    """Return the number of errors of each kind, by description; without an error all are 0."""
    return {
        **errors(story.accounts),
        "samples trained twice": story.samples_twice,
        "calls that ended over 1 s after their deadline": story.late_calls,
        "processes that ended though nobody killed them": len(story.died),
        "processes left behind": story.left_behind,
    }


def tell(
    seconds: float,
    seed: int,
    *,
    calm: bool = False,
    away_s: float = AWAY_S,
    back_within_s: float = KILLED_S,
    shape: SwarmShape = SwarmShape(),
) -> SwarmStory:
    """Apply faults for so long to a swarm, or none with `calm`; compare the accounts.

    away_s: how long a machine is stopped or cut off. back_within_s: see `Scene`.
    """
    with tempfile.TemporaryDirectory() as name, machine_places() as places:
        story, chance = SwarmStory(), random.Random(seed)
        tables = machines_with_tables()
        with staged(Path(name), places, chance, story, replace(shape, tables=tables)) as scene:
            scene.back_within_s = back_within_s
            plan = fault_plan(seconds, chance, away_s, wires=bool(places), tables=len(tables))
            began = time.monotonic()
            for at_s, act in () if calm else plan:
                scene.pause(began + at_s)
                act(scene)
            scene.pause(began + seconds)
            finish(scene, lambda: _see_tables(scene))
        story.left_behind = len(left_behind(Path(name))) + story.tables.left_behind
        return story


@contextmanager
def machine_places() -> Iterator[list[Place]]:
    if netns.why_not() is not None:
        yield []
        return
    with netns.network(SwarmShape().peers, RATE_MBIT) as places:
        yield places


@contextmanager
def staged(
    directory: Path,
    places: list[Place],
    chance: random.Random,
    story: SwarmStory,
    shape: SwarmShape = SwarmShape(),
) -> Iterator[Scene]:
    """Run a swarm in which every node has joined; no process is left afterwards."""
    scene = Scene(SwarmGround(directory, NODE, shape, places), chance, story)
    scene.ground.set_up()
    try:
        if not scene.until(lambda: scene.all_acknowledged(0.0), JOINS_WITHIN_S):
            raise TimeoutError(f"not all nodes have joined:\n{last_words(directory / 'peers')}")
        yield scene
    finally:
        scene.ground.kill_all()


# --- the end


def finish(scene: Scene, look: Callable[[], object] = lambda: None) -> None:
    """End all faults, let all nodes push and leave, then all peers; compare the accounts.

    look: called when all nodes have left, while the peers run.
    """
    story, ground, peers = scene.story, scene.ground, scene.ground.peers
    scene.heal()
    healed_s = time.monotonic()
    scene.until(lambda: scene.all_acknowledged(healed_s), HEALS_WITHIN_S)
    story.healed_s = time.monotonic() - healed_s
    ended_s = time.monotonic()
    nodes = {peer.name: peer.node for peer in peers if peer.node is not None}
    _ask_to_end(scene, nodes)
    for peer in peers:  # a node that has left is none that has ended by itself
        peer.node = None if peer.node is not None and peer.node.poll() is not None else peer.node
    look()
    ground.keep()
    _ask_to_end(scene, {peer.name: peer.process for peer in peers if peer.process is not None})
    ground.keep()
    story.starts = ground.starts
    story.late_calls = ground.late_calls()
    ledgers, parts = ground.ledgers(), ground.shape.parts
    for part in range(parts):
        folder, copies = newest(ground, part), ground.copies(part)
        story.accounts.append(account(ground.plan, ledgers, folder, copies, ended_s, (part, parts)))
        told = (line for lines in ledgers for line in lines if line["event"] == "acknowledged")
        times = sorted(line["t"] for line in told if line["unit"] % parts == part)
        gap_s = max((b - a for a, b in pairwise(times)), default=0.0)
        story.longest_gap_s = max(story.longest_gap_s, gap_s)
    samples = read_accounts(ground.directory)
    story.samples, story.samples_agree = samples.summary(), not samples.disagreements
    story.samples_twice = samples.count(SampleVerdict.TWICE)


def _see_tables(scene: Scene) -> None:
    """Wait until all hash tables are back, and ask each for peers."""
    tables, peers, ground = scene.story.tables, scene.with_tables(), scene.ground
    deadline = time.monotonic() + BACK_WITHIN_S
    while (len(ground.tables) < len(peers) or tables.open()) and time.monotonic() < deadline:
        ground.keep()
        tables.look(peers)
        time.sleep(TURN_S)
    deadline = time.monotonic() + 2 * BACK_WITHIN_S  # a machine that was restarted begins its table anew
    tables.ask(peers, ground.tables)
    while tables.answering < tables.wanted and time.monotonic() < deadline:
        ground.keep()
        time.sleep(TURN_S)
        tables.ask(peers, ground.tables)


def _ask_to_end(scene: Scene, processes: "Mapping[str, subprocess.Popen[str]]") -> None:
    """Send SIGTERM to processes and wait for their end; note those that fail or are late."""
    for process in processes.values():
        process.terminate()
    deadline = time.monotonic() + ENDS_WITHIN_S
    while any(one.poll() is None for one in processes.values()) and time.monotonic() < deadline:
        scene.ground.keep()
        time.sleep(TURN_S)
    codes = {name: process.poll() for name, process in processes.items()}
    late = f"not within {ENDS_WITHIN_S:g} s"
    said = {name: late if code is None else f"exit code {code}" for name, code in codes.items() if code != 0}
    scene.story.died += [f"{name}, asked to end: {text}" for name, text in said.items()]


def newest(ground: SwarmGround, part: int) -> Path:
    """Return the folder of the replica whose journal has the highest term, and of those the longest one."""
    segments = [segment for path in ground.copies(part) if (segment := read(path))]

    def place(folder: Path) -> tuple[int, int, int]:
        newest = max(folder.glob("journal-*"), key=lambda path: path.name)
        segment = read(newest)
        end = (segment.number, segment.end[0]) if segment else (0, 0)
        return (max(history_of(folder, segments).terms, default=0), *end)

    return max(ground.folders(part), key=place)
