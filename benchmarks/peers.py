"""Measure swarms of many peers: the cost of gossip and parts, owners under churn, and the balance of load.

Real peers, each in a process of its own with its hubs, and nodes of a fixed pace, many in each of two
processes. And 1,000 simulated peers, of which only the signed cards exist, in the code by which a peer places
parts.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import psutil

from aedit.launch.swarm import part_view
from aedit.proto.rpc import SigningKey
from aedit.proto.swarm import REPLICAS, KnownPeers, PeerCard, ReplicasFile, encoded_card, hosts_of
from benchmarks.chaos_parts.swarm import SWARM
from benchmarks.kit import netns
from benchmarks.kit.cluster import TOML
from benchmarks.kit.netns import Place, run_command
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import Dialogue, end, until
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.peers import PeersPlan

# -- peers that only exist as signed cards: where their code places parts, and what moves when one goes


SIMULATED_RUN = "simulated"
SIMULATED_LEASE_S = 10.0
_DRAWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Placement of all parts over so many peers, and changes of it."""

    peers: int
    parts: int
    copies: int
    mean: float
    """Replicas per peer."""
    most: int
    """Replicas of the peer that has most."""
    ideal_most: float
    """The same with independent draws, mean."""
    ideal_most_within: tuple[int, int]
    """95 % of the draws."""
    changes: int
    """Peers that left or came, one after the other."""
    moved: float
    """Replicas that began anew, per change."""
    ideal_moved: float
    owners_moved: float
    """Parts with another best-ranked peer, per change."""
    ideal_owners_moved: float
    needless: int
    """Replicas that begin anew though no other of their part has left, nor is it the new peer that begins."""
    look_s: float
    """CPU time in which a peer finds its role for all parts, once all others are known; the median."""


Places = dict[int, tuple[bytes, ...]]
"""Keys of the peers that are to keep a part, the owner's first."""


class Swarm:
    """Knowledge of one peer about all others, whose cards come as in gossip. Time is virtual."""

    def __init__(self, peers: int, parts: int, copies: int) -> None:
        self.parts, self.copies, self.now_s, self.made = parts, copies, 0.0, 0
        self.keys: list[SigningKey] = []
        own = self._new_key()
        self.known = KnownPeers(SIMULATED_RUN, own.public, limit=2 * peers)
        self.known.renew(self._card(own), self.now_s)
        for _ in range(peers - 1):
            self.join()

    def join(self) -> bytes:
        """Let a new peer send its card and answer; return its key."""
        key = self._new_key()
        self.keys.append(key)
        self.known.offer(self._card(key), self.now_s)
        self.known.confirm(key.public, self.now_s)
        return key.public

    def leave(self, index: int) -> bytes:
        """Let a peer say that it leaves; return its key."""
        key = self.keys.pop(index)
        self.known.offer(self._card(key, leaving=True), self.now_s)
        return key.public

    def places(self) -> Places:
        """Return the peers that are to keep each part, as the peer that looks finds them."""
        live = self.known.live(self.now_s)
        views = (part_view(SIMULATED_RUN, part, live, self.known.own_key) for part in range(self.parts))
        return {part: view.ranked[: self.copies] for part, view in enumerate(views)}

    def _new_key(self) -> SigningKey:
        self.made += 1
        return SigningKey(self.made.to_bytes(32, "big"))

    def _card(self, key: SigningKey, *, leaving: bool = False) -> bytes:
        address = f"10.{self.made >> 16}.{self.made >> 8 & 255}.{self.made & 255}:7000"
        card = PeerCard(
            run=SIMULATED_RUN,
            name=key.public.hex()[:16],
            public_key=key.public,
            serial=1 + leaving,
            address=address,
            lease_s=SIMULATED_LEASE_S,
            leaving=leaving,
        )
        return encoded_card(card, key.private)


def balance(peers: int, parts: int, copies: int, changes: int, seed: int) -> Balance:
    """Return the load of a swarm, and what moves while peers leave and come by turns."""
    chance, swarm = np.random.default_rng(seed), Swarm(peers, parts, copies)
    places, looks_s = swarm.places(), list[float]()
    load = _load_of(places, peers)
    moved = owners = needless = 0
    for number in range(changes):
        gone, new = b"", b""
        if number % 2:
            new = swarm.join()
        else:
            gone = swarm.leave(int(chance.integers(len(swarm.keys))))
        before, places = places, swarm.places()
        began_s = time.process_time()
        assert swarm.places() == places
        looks_s.append(time.process_time() - began_s)
        for part, keys in places.items():
            begun = set(keys) - set(before[part])
            moved += len(begun)
            owners += keys[0] != before[part][0]
            needless += len(begun) if gone not in before[part] and begun != {new} else 0
    ideal = _ideal_most(peers, parts, copies, chance)
    return Balance(
        peers=peers,
        parts=parts,
        copies=copies,
        mean=parts * copies / peers,
        most=int(load.max()),
        ideal_most=float(ideal.mean()),
        ideal_most_within=(int(np.quantile(ideal, 0.025)), int(np.quantile(ideal, 0.975))),
        changes=changes,
        moved=moved / changes,
        ideal_moved=parts * copies / peers,
        owners_moved=owners / changes,
        ideal_owners_moved=parts / peers,
        needless=needless,
        look_s=float(np.median(looks_s)),
    )


def _load_of(places: Places, peers: int) -> np.ndarray:
    keys = [key for found in places.values() for key in found]
    counts = np.unique(keys, return_counts=True)[1]
    return np.pad(counts, (0, peers - len(counts)))


def _ideal_most(peers: int, parts: int, copies: int, chance: np.random.Generator) -> np.ndarray:
    """Return the largest number of replicas of a peer, for many draws of the scores."""
    most = []
    for _ in range(_DRAWS):
        scores = chance.random((parts, peers))
        chosen = np.argpartition(-scores, copies - 1, axis=1)[:, :copies]
        most.append(np.bincount(chosen.ravel(), minlength=peers).max())
    return np.array(most)


# -- many real peers and paced nodes: what they cost, and owners under churn


RUN = "paced"
SETTLES_S, ENDS_S = 240.0, 90.0
LEASE_S, LEASE_PER_PEER_S, EXPIRE_S = 10.0, 1.0, 60.0
"""Least lease of a card, and lease by the number of peers: what a peer hears of all others then costs the
same, whatever their number."""
NODE_PROCESSES, STEADY = 2, 2
"""Processes that host the nodes, and peers that stay, whose files of replicas the nodes read."""
NODE = PacedNode(
    hub="",
    name="",
    ledger="",
    units=8,
    numel=4096,
    step_s=0.3,
    every=100,
    heartbeat_s=10.0,
    expire_s=EXPIRE_S,
    join_s=200.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Number of peers, and how long they are watched."""

    peers: int
    processes: int
    """That host the peers."""
    parts: int
    copies: int
    steady_s: float
    changes: int
    """One peer leaves, another comes."""
    change_every_s: float


@dataclass(slots=True)
class Crowd:
    """Results. Rates are means over the time without changes."""

    peers: int
    calls_per_s: float = 0.0
    """Calls of gossip that one peer makes."""
    gossip_bytes_per_s: float = 0.0
    """Messages of one peer's calls and of their answers."""
    other_bytes_per_s: float | None = None
    """All else on the loopback device, per peer: pushes, anchors, heartbeats, journals, headers of gossip."""
    peer_cpu: float = 0.0
    """Share of a core that one peer process takes: gossip, placement and the state of its hubs."""
    hub_cpu: float = 0.0
    """Share of a core that the hubs take, per peer."""
    node_cpu: float = 0.0
    """Share of a core that one paced node takes."""
    pushes_per_s: float = 0.0
    changes: int = 0
    owners_moved: int = 0
    ideal_owners_moved: int = 0
    replicas_begun: int = 0
    ideal_replicas_begun: int = 0
    settled_s: float = 0.0
    """From the last change until every part had all copies, and the owner that it is to have."""
    is_settled: bool = False
    refused: int = 0
    failed: int = 0
    """Nodes that have ended too early."""


@dataclass(slots=True)
class Ground:
    """All processes of one run."""

    directory: Path
    size: Size
    place: Place | None
    log: IO[str]
    peers: list[Dialogue] = field(default_factory=list)
    nodes: list[Dialogue] = field(default_factory=list)
    there: dict[str, int] = field(default_factory=dict)
    """Process of each peer by name."""
    made: int = 0

    def start(self) -> None:
        """Start all peers, and all nodes once all parts have copies; these use the peers that stay."""
        size, toml = self.size, self.directory / "run.toml"
        facts = {"every": NODE.every, "expire_s": EXPIRE_S, "address": "", "lease_samples": 64}
        lease_s = max(LEASE_S, LEASE_PER_PEER_S * size.peers)
        swarm = SWARM.format(parts=size.parts, copies=size.copies, lease_s=lease_s)
        toml.write_text(TOML.format(**facts, directory=self.directory, more="") + swarm)
        introduction = ""
        for _ in range(size.processes):
            plan = PeersPlan(toml=str(toml), directory=str(self.directory), introduction=introduction)
            self.peers.append(self._start("peers", asdict(plan)))
            introduction = self.join(len(self.peers) - 1)
        while self.made < size.peers:
            self.join(self.made % size.processes)
        until(self.has_copies, "copies of all parts", SETTLES_S)
        for number in range(NODE_PROCESSES):
            names = [f"peer-{n}" for n in range(number, size.peers, NODE_PROCESSES)]
            self.nodes.append(self._start("peer_nodes", [self._node(name) for name in names]))
        for line in self.nodes:
            line.ask("figures")

    def _start(self, module: str, job: Any) -> Dialogue:
        words, place = json.dumps(job), self.place
        return Dialogue.start(f"benchmarks.programs.{module}", words, place=place, stderr=self.log)

    def join(self, process: int) -> str:
        """Start another peer; return the address of the first one of the process."""
        name = f"peer-{self.made}"
        self.made, self.there[name] = self.made + 1, process
        return str(self.peers[process].ask(f"start {name}")["introduction"])

    def leave(self, name: str) -> None:
        """Let a peer hand over its parts and leave."""
        self.peers[self.there.pop(name)].ask(f"leave {name}")

    def parts(self) -> Any:
        """Return the places of all parts, as the first peer knows them."""
        return ReplicasFile(self.directory / "peer-0" / REPLICAS).parts()

    def has_copies(self) -> bool:
        """Return whether each part has an owner and as many replicas as are wanted, in sync or not."""
        parts = self.parts()
        return len(parts) == self.size.parts and all(
            part.owner and len(part.replicas) >= self.size.copies for part in parts
        )

    def is_settled(self) -> bool:
        """Return whether each part has all copies, and the owner that it is to have."""
        wanted, parts = self.wanted(), self.parts()
        return len(parts) == self.size.parts and all(
            part.owner == part.first != "" and len(part.replicas) == len(wanted[k])
            for k, part in enumerate(parts)
        )

    def wanted(self) -> list[tuple[bytes, ...]]:
        """Return for each part the keys of the peers that are to keep it, the owner's first."""
        keys = [SigningKey.kept(self.directory / name / "key").public for name in self.there]
        return [hosts_of(RUN, part, keys, self.size.copies) for part in range(self.size.parts)]

    def replicas(self) -> set[Path]:
        """Return the folders of all replicas."""
        return {mark.parent for mark in self.directory.glob("peer-*/part_*/part.json")}

    def hub_cpu_s(self) -> float:
        """Return the CPU time of all hubs that run."""
        total = 0.0
        for line in self.peers:
            for child in psutil.Process(line.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    total += sum(child.cpu_times()[:2])
        return total

    def wire_bytes(self) -> int | None:
        """Return the bytes that the loopback device of the namespace has moved; None without a namespace."""
        if self.place is None:
            return None
        told = json.loads(run_command(f"ip -n {self.place.namespace} -s -j link show dev lo"))
        return int(told[0]["stats64"]["rx"]["bytes"])

    def end(self) -> None:
        """Kill what is left."""
        end(line.process for line in (*self.nodes, *self.peers))

    def _node(self, name: str) -> dict[str, Any]:
        steady = f"peer-{int(name.rpartition('-')[2]) % STEADY}"
        replicas = str(self.directory / steady / REPLICAS)
        return asdict(NODE) | {"name": name, "run": RUN, "replicas": replicas}


def crowd(directory: Path, size: Size, place: Place | None, seed: int) -> Crowd:
    """Run the peers; return what they cost, and what moved while some left and others came."""
    found = Crowd(size.peers)
    with (directory / "output.log").open("w") as log:
        ground = Ground(directory, size, place, log)
        try:
            ground.start()
            until(ground.is_settled, "all copies", SETTLES_S)
            _steady(ground, found)
            _churn(ground, found, random.Random(seed))
            for line in (*ground.nodes, *ground.peers):
                line.finish(ENDS_S)
        finally:
            ground.end()
    return found


def _figures(ground: Ground) -> dict[str, float]:
    peers, nodes = ([line.ask("figures") for line in lines] for lines in (ground.peers, ground.nodes))
    told = {f"peers_{name}": sum(one[name] for one in peers) for name in ("cpu_s", "calls", "bytes")}
    told |= {name: sum(one[name] for one in nodes) for name in ("cpu_s", "merged", "refused", "failed")}
    return told | {"hubs_s": ground.hub_cpu_s(), "wire": ground.wire_bytes() or 0, "t": time.monotonic()}


def _steady(ground: Ground, found: Crowd) -> None:
    before = _figures(ground)
    time.sleep(ground.size.steady_s)
    after = _figures(ground)
    took = {name: after[name] - before[name] for name in after}
    per_peer = 1 / took["t"] / ground.size.peers
    found.calls_per_s = took["peers_calls"] * per_peer
    found.gossip_bytes_per_s = took["peers_bytes"] * per_peer
    if ground.place is not None:
        found.other_bytes_per_s = (took["wire"] - took["peers_bytes"]) * per_peer
    found.peer_cpu = took["peers_cpu_s"] * per_peer
    found.hub_cpu = took["hubs_s"] * per_peer
    found.node_cpu = took["cpu_s"] * per_peer
    found.pushes_per_s = took["merged"] / took["t"]


def _churn(ground: Ground, found: Crowd, chance: random.Random) -> None:
    """Let peers leave and others come; count what moves, and what has to by the keys that are there."""
    size, watch = ground.size, _Watch(ground)
    for number in range(2 * size.changes):
        before = ground.wanted()
        if number % 2:
            ground.join(number // 2 % size.processes)
        else:
            steady = {f"peer-{n}" for n in range(STEADY)}
            ground.leave(chance.choice(sorted(ground.there.keys() - steady)))
        for old, new in zip(before, ground.wanted(), strict=True):
            found.ideal_owners_moved += old[0] != new[0]
            found.ideal_replicas_begun += len(set(new) - set(old))
        found.changes += 1
        watch.until(lambda: False, size.change_every_s)
    last_s = time.monotonic()
    watch.until(ground.is_settled, SETTLES_S)
    found.is_settled = ground.is_settled()
    found.settled_s = time.monotonic() - last_s
    found.owners_moved, found.replicas_begun = watch.owners_moved, len(watch.begun)
    told = _figures(ground)
    found.refused, found.failed = int(told["refused"]), int(told["failed"])


class _Watch:
    """Counts changes of owners, and replicas that begin."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._before, self.begun = ground.replicas(), set[Path]()
        self._owners: list[str] = [part.owner for part in ground.parts()]
        self.owners_moved = 0

    def until(self, is_so: Callable[[], object], limit_s: float) -> None:
        """Count until `is_so()`, and at most for so long."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and not is_so():
            self._look([part.owner for part in self._ground.parts()])
            time.sleep(0.1)

    def _look(self, owners: Sequence[str]) -> None:
        for k, owner in enumerate(owners):
            if owner and owner != self._owners[k]:
                self.owners_moved += 1
                self._owners[k] = owner
        self.begun |= self._ground.replicas() - self._before


# -- measurements, tables and bars


PARTS, COPIES = 8, 3
CROWDS = (32, 64)
QUICK = (Size(peers=6, processes=2, parts=2, copies=COPIES, steady_s=8, changes=2, change_every_s=6),)
SIMULATED, SIMULATED_QUICK = (32, 64, 1000), (100,)
SIMULATED_PARTS, CHANGES, CHANGES_QUICK = 64, 100, 20
RATE_MBIT = 1000
_SEED = 1


def measure(args: argparse.Namespace) -> list[Report]:
    """Return the tables of real and of simulated peers."""
    full = tuple(map(_size, args.peers or CROWDS))
    sizes, simulated = (QUICK, SIMULATED_QUICK) if args.quick else (full, SIMULATED)
    changes = CHANGES_QUICK if args.quick else CHANGES
    reports: list[Report] = []
    if args.only != "simulated":
        crowds = [_crowd(size) for size in sizes]
        reports += [_costs(crowds, sizes[0]), _moves(crowds, sizes[0])]
    if args.only != "real":
        balances = [balance(peers, SIMULATED_PARTS, COPIES, changes, _SEED) for peers in simulated]
        reports += [_load(balances)]
    return reports


def _size(peers: int) -> Size:
    return Size(
        peers=peers, processes=peers, parts=PARTS, copies=COPIES, steady_s=30, changes=6, change_every_s=5
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the choice of tables."""
    parser.add_argument("--only", choices=("real", "simulated"), help="only the tables of these peers")
    sizes = f"real peers of each crowd (default {' '.join(map(str, CROWDS))})"
    parser.add_argument("--peers", type=int, nargs="+", metavar="N", help=sizes)


def _crowd(size: Size) -> Crowd:
    with tempfile.TemporaryDirectory() as name, _place() as place:
        return crowd(Path(name), size, place, _SEED)


@contextmanager
def _place() -> Iterator[Place | None]:
    """Yield a network namespace, whose loopback device counts the bytes of this benchmark alone."""
    if netns.why_not() is not None:
        yield None
        return
    with netns.network(1, RATE_MBIT) as places:
        yield places[0]


def _costs(crowds: list[Crowd], size: Size) -> Report:
    rows = tuple(
        (
            str(found.peers),
            f"{found.pushes_per_s:.1f}",
            f"{found.calls_per_s:.2f}",
            f"{found.gossip_bytes_per_s / 1e3:.1f}",
            "-" if found.other_bytes_per_s is None else f"{found.other_bytes_per_s / 1e3:.1f}",
            f"{1e3 * found.peer_cpu:.1f}",
            f"{1e3 * found.hub_cpu:.1f}",
            f"{1e3 * found.node_cpu:.1f}",
        )
        for found in crowds
    )
    failed, refused = sum(found.failed for found in crowds), sum(found.refused for found in crowds)
    return Report(
        "many peers: cost per peer",
        (f"Each replica is a hub process; {NODE_PROCESSES} processes host all nodes. The lease of a card is a"
         f" second for each peer. {size.parts} parts, {size.copies} copies; means over {size.steady_s:g} s.",
         f"A node pushes {NODE.units} units of {4 * NODE.numel / 1e3:.0f} kB every"
         f" {NODE.every * NODE.step_s:g} s. Other bytes: all else on the loopback device."),
        ("peers", "pushes/s", "gossip calls/s", "gossip kB/s", "other kB/s", "peer CPU ms/s",
         "hubs' CPU ms/s", "node CPU ms/s"),
        rows,
        (Bar(f"nodes that ended too early: {failed}", failed == 0),
         Bar(f"pushes that were not merged: {refused}", refused == 0)),
        {"crowds": [asdict(found) for found in crowds]},
    )  # fmt: skip


def _moves(crowds: list[Crowd], size: Size) -> Report:
    rows = tuple(
        (
            str(found.peers),
            str(found.changes),
            str(found.owners_moved),
            str(found.ideal_owners_moved),
            str(found.replicas_begun),
            str(found.ideal_replicas_begun),
            f"{found.settled_s:.1f}",
        )
        for found in crowds
    )
    return Report(
        "many peers: owners under churn",
        (f"Peers leave and others come by turns, one change every {size.change_every_s:g} s."
         " By keys: what placement asks for, calculated from the keys of those who are there.",),
        ("peers", "changes", "owner changes", "by keys", "replicas begun", "by keys", "settled after s"),
        rows,
        (Bar("every part has all copies and the owner that it is to have",
             all(found.is_settled for found in crowds)),),
        {"crowds": [asdict(found) for found in crowds]},
    )  # fmt: skip


def _load(balances: list[Balance]) -> Report:
    rows = tuple(
        (
            str(found.peers),
            f"{found.mean:.2f}",
            f"{found.most}",
            f"{found.ideal_most:.1f} [{found.ideal_most_within[0]}, {found.ideal_most_within[1]}]",
            f"{found.most / found.mean:.1f}",
            f"{found.moved:.2f}",
            f"{found.ideal_moved:.2f}",
            f"{found.owners_moved:.3f}",
            f"{found.ideal_owners_moved:.3f}",
            f"{1e3 * found.look_s:.1f}",
        )
        for found in balances
    )
    needless = sum(found.needless for found in balances)
    inside = all(found.most <= found.ideal_most_within[1] for found in balances)
    return Report(
        "simulated peers: balance",
        (f"{SIMULATED_PARTS} parts, {COPIES} copies; {balances[0].changes} times a peer leaves or one comes.",
         "Ideal: independent random scores (NumPy), mean and 95 % of 200 draws; parts x copies / peers."),
        ("peers", "replicas a peer", "most", "ideal most", "most / mean", "moved a change", "ideal",
         "owners moved", "ideal", "a look, CPU ms"),
        rows,
        (Bar(f"replicas that moved without need: {needless}", needless == 0),
         Bar("the peer with most has no more than 97.5 % of independent draws give", inside)),
        {"balances": [asdict(found) for found in balances]},
    )  # fmt: skip


if __name__ == "__main__":
    main(
        "peers",
        "Many peers of a swarm: cost of gossip and parts, churn, and balance.",
        measure,
        options=options,
    )
