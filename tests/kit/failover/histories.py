"""Random histories of faults, their check, and the search for the shortest one that still fails."""

import random
from dataclasses import dataclass, replace

from aedit.async_sgd.journal import Damaged
from aedit.async_sgd.replication import journal_stream
from kit.failover.accounts import Accounts
from kit.failover.hub import SimHub, begin_world
from kit.failover.mutants import patched
from kit.failover.node import SimNode
from kit.failover.world import Fault, Violation, World

FAULTS_S, HEAL_S = 11.0, 40.0
"""How long faults happen, and after how long all nodes must have pushed again."""
NODE = 10
"""Number of the first node; hubs are numbered from 0."""
KINDS = (
    "anew",
    "kill",
    "kill",
    "lose",
    "lose",
    "pause",
    "part",
    "cut",
    "damage",
    "node",
    "full",
    "fail",
    "snapshot",
)


@dataclass(frozen=True)
class History:
    """Everything that decides what happens in one simulation."""

    seed: int
    num_hubs: int
    num_nodes: int
    loss: float
    repeat: float
    delay_s: float
    chunk_bytes: int
    """Most bytes of the journal in one message."""
    gap_s: float
    """Between two of them."""
    has_liar: bool
    faults: tuple
    least: int = 1
    """Hubs that must have what is acknowledged, as in a swarm."""

    def __str__(self):
        head = f"seed {self.seed}: {self.num_hubs} hubs, {self.num_nodes} nodes, loss {self.loss:.2f}"
        head += f", at least {self.least}, chunks of {self.chunk_bytes} every {self.gap_s} s"
        head += ", one node lies" * self.has_liar
        return "\n".join([head, *map(str, self.faults)])


def history(seed):
    """Return the history of a seed."""
    chance = random.Random(seed)
    num_hubs = chance.choice((2, 2, 2, 3, 3, 3, 4, 5))
    num_nodes = chance.choice((1, 2, 3, 3, 3, 5, 9)) if num_hubs < 4 else chance.choice((1, 2, 3))
    hubs, nodes = range(num_hubs), range(NODE, NODE + num_nodes)
    everybody = [*hubs, *nodes]
    faults = []
    for _ in range(chance.randint(1, 6)):
        kind = chance.choice(KINDS)
        at_s, lasts_s = chance.uniform(3.0, FAULTS_S), chance.choice((0.5, 2.0, 5.0, 9.0)) * chance.random()
        who = chance.choice(hubs)
        if kind == "node":
            kind, who = chance.choice(("kill", "lose", "leave")), chance.choice(nodes)
        elif kind in ("cut", "pause"):
            who = chance.choice(everybody)
        elif kind == "part":  # a bit per process: on which side it is
            who = chance.randrange(2 ** len(everybody))
        faults.append(Fault(at_s, kind, who, chance.choice(hubs), lasts_s))
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        at_s = chance.uniform(3.0, FAULTS_S)
        faults += [Fault(at_s, "hand", who) for who in hubs]  # one of them leads
    if num_hubs > 2 and chance.random() < 0.4:
        kind, who, lasts_s = (
            chance.choice(("brim", "old", "ruin")),
            chance.choice(hubs),
            chance.uniform(1.0, 6.0),
        )
        faults.append(Fault(chance.uniform(4.0, FAULTS_S), kind, who, 0, lasts_s))
    if any(fault.kind in ("brim", "ruin", "old") for fault in faults):  # one voter is gone, and not two
        gone = [fault.kind == "lose" and fault.who >= NODE for fault in faults]
        faults = [
            replace(one, kind="kill") if is_gone else one for one, is_gone in zip(faults, gone, strict=True)
        ]
    faults.sort(key=lambda fault: fault.at_s)
    rough = chance.random() < 0.4
    loss, repeat = (0.15 * chance.random(), 0.1 * chance.random()) if rough else (0.0, 0.0)
    return History(
        seed,
        num_hubs,
        num_nodes,
        loss,
        repeat,
        delay_s=chance.choice((0.002, 0.01, 0.05)),
        chunk_bytes=chance.choice((150, 700, 2**16)),
        gap_s=chance.choice((0.0, 0.0, 0.02)),
        has_liar=chance.random() < 0.25,
        faults=tuple(faults),
        least=chance.choice((1, 1, 2)),
    )


class Simulation:
    """One history as it happens."""

    def __init__(self, what):
        begin_world(what.seed)
        journal_stream._CHUNK_BYTES = what.chunk_bytes
        self.what, self.world, self.accounts = what, World(what.seed), Accounts()
        self.hubs = [SimHub(self.world, number, self.accounts, what.least) for number in range(what.num_hubs)]
        for hub in self.hubs:
            hub.others = [one for one in self.hubs if one is not hub]
            hub.disk_failed, hub.identity = False, 0
            hub.disk.removes = lambda name, number=hub.number: self.accounts.note_removal(number, name)
        self.accounts.hubs = self.hubs
        self.nodes = [SimNode(self.world, NODE + i, self.hubs) for i in range(what.num_nodes)]
        if what.has_liar and what.num_nodes > 1:
            self.nodes[-1].lies = True
        self.everybody = [*self.hubs, *self.nodes]
        self.processes = {process.number: process for process in self.everybody}
        self.world.network.delay_s, self.world.network.gap_s = what.delay_s, what.gap_s
        self.world.check = self._check
        self.is_full_for_good = set()

    def run(self):
        """Let everything happen. Raises Violation."""
        world, what = self.world, self.what
        for process in self.everybody:
            process.start()
        world.run(2.0)
        world.network.loss, world.network.repeat = what.loss, what.repeat
        for fault in what.faults:
            world.run(fault.at_s)
            getattr(self, f"_{fault.kind}")(fault)
        world.run(max(FAULTS_S, world.now))
        self._heal()
        honest = [node for node in self.nodes if not node.lies]
        before = [node.count for node in honest]
        done = world.run(
            world.now + HEAL_S, lambda: all(n.count > b + 1 for n, b in zip(honest, before, strict=True))
        )
        if not done and not self.accounts.is_excused:
            raise Violation(f"no progress within {HEAL_S} s after everything was healed")
        if self.accounts.leaders:
            self._check_end()

    def _check(self):
        if self.accounts.removing is not None:
            self.accounts.check_copies()

    def _heal(self):
        world = self.world
        world.network.cut.clear()
        world.network.loss = world.network.repeat = world.network.gap_s = 0.0
        for hub in self.hubs:
            hub.disk.full, hub.disk.failing = hub.number in self.is_full_for_good, 0
        for process in self.everybody:
            process.paused_until = 0.0
            if not process.alive:
                process.start()

    def _check_end(self):
        newest = self.accounts.leaders[max(self.accounts.leaders)]
        host = self.hubs[newest]
        if host.process is not None and host.process._leading is not None:
            self.accounts.check_leader(host)

    # --- faults

    def _kill(self, fault, loses=False):
        process = self.processes[fault.who]
        if process.alive:
            process.kill(loses)
            self.world.after(fault.lasts_s, process.restart, process.life)

    def _lose(self, fault):
        self._kill(fault, loses=True)

    def _leave(self, fault):
        """A node leaves, and comes back."""
        self._kill(fault)

    def _pause(self, fault):
        self.processes[fault.who].paused_until = self.world.now + fault.lasts_s

    def _damage(self, fault):
        """What a follower receives is damaged; it notices, and fetches it anew."""
        hub = self.processes[fault.who]
        follows = hub.alive and hub.process is not None and hub.process._leading is None
        leader = getattr(hub.stream, "leader_host", None) if follows else None
        if leader is not None and leader.process is not None and leader.process._leading is not None:
            hub._lost(hub.process._standby, Damaged("a bit has flipped"))

    def _anew(self, fault):
        """A follower fetches its journal anew, and its leader ends meanwhile."""
        self._damage(fault)
        leading = [hub for hub in self.hubs if hub.process and hub.process._leading]
        for hub in leading:
            self.world.after(0.3, self._kill, replace(fault, who=hub.number))

    def _full(self, fault):
        disk = self.processes[fault.who].disk
        disk.full = True
        self.world.after(fault.lasts_s, lambda: setattr(disk, "full", fault.who in self.is_full_for_good))

    def _can_bear(self):
        """Return whether a majority has everything without one hub: one fault of that kind at a time."""
        leading = [hub.process._leading for hub in self.hubs if hub.process and hub.process._leading]
        configs = [one.leadership._replica.configs for one in leading]
        return bool(configs) and all(len(each) == 1 and len(each[0].replicas) > 2 for each in configs)

    def _brim(self, fault):
        """A disk becomes full, and stays so: the others have room."""
        if self._can_bear():
            self.is_full_for_good.add(fault.who)
            self.processes[fault.who].disk.full = True

    def _fail(self, fault):
        """A write of a disk fails; which of the next ones depends on the fault."""
        hub = self.processes[fault.who]
        hub.disk.failing, hub.disk_failed = 1 + int(1000 * fault.lasts_s) % 12, True

    def _snapshot(self, fault):
        for hub in self.hubs:
            if hub.alive and hub.process is not None and hub.process._leading is not None:
                hub.process._leading.engine._snapshot()
                hub._pump()

    def _old(self, fault):
        """A copy that is made now is put back in a while, over all but the register of votes."""
        hub = self.processes[fault.who]
        files = hub.disk.copied()

        def put_back():
            can_bear = self._can_bear()
            if hub.alive:
                hub.kill()
            hub.disk.put_back(files, but=("votes.json",))
            self.accounts.excuse(always=not can_bear)
            self.world.after(0.5, hub.restart, hub.life)

        self.world.after(fault.lasts_s, put_back)

    def _ruin(self, fault):
        """Lose the disk of a hub for good, and let another machine take its place."""
        hub = self.processes[fault.who]
        if not self._can_bear():
            return
        if hub.alive:
            hub.kill(loses=True)
        hub.disk.put_back({})
        hub.is_standby, hub.identity = True, 0
        self.accounts.excuse()
        self.world.after(0.5, hub.restart, hub.life)

    def _hand(self, fault):
        """Let a hub that leads hand over to a follower; one that follows does nothing."""
        hub = self.processes[fault.who]
        if hub.alive and hub.process is not None and hub.process._leading is not None:
            hub.process._leading.leadership.hand_over()

    def _cut(self, fault):
        """Cut one direction of one link, or both for an odd number of milliseconds."""
        pairs = {(fault.who, fault.other), (fault.other, fault.who)}
        self._cut_pairs(pairs if int(1000 * fault.lasts_s) % 2 else {(fault.who, fault.other)}, fault)

    def _part(self, fault):
        sides = {p.number: fault.who >> i & 1 for i, p in enumerate(self.everybody)}
        self._cut_pairs({(a, b) for a in sides for b in sides if sides[a] != sides[b]}, fault)

    def _cut_pairs(self, pairs, fault):
        self.world.network.cut |= pairs
        self.world.after(fault.lasts_s, self.world.network.cut.difference_update, pairs)


def failure(what, patches=()):
    """Return how a history breaks a promise; "" if it does not. patches: of a mutant."""
    try:
        with patched(*patches):
            Simulation(what).run()
    except Violation as violation:
        return str(violation)
    except Exception as error:  # that nothing in production caught: its process would end with a traceback
        return f"{type(error).__name__}: {error}"
    return ""


def shortest(what, fails):
    """Return the history without every fault that is not needed for it to fail."""
    smaller = True
    while smaller:
        smaller = False
        for i in range(len(what.faults)):
            without = replace(what, faults=what.faults[:i] + what.faults[i + 1 :])
            if fails(without):
                what, smaller = without, True
                break
    for simpler in (
        replace(what, loss=0.0, repeat=0.0),
        replace(what, has_liar=False),
        replace(what, least=1),
    ):
        calmer = replace(
            what,
            loss=min(what.loss, simpler.loss),
            repeat=min(what.repeat, simpler.repeat),
            has_liar=what.has_liar and simpler.has_liar,
            least=min(what.least, simpler.least),
        )
        what = calmer if calmer != what and fails(calmer) else what
    return what


def first_failure(seeds, patches=()):
    """Return (seed, failure, shortest failing history) of the first seed that fails; None if none does."""
    for seed in seeds:
        what = history(seed)
        if found := failure(what, patches):
            return seed, found, shortest(what, lambda h: bool(failure(h, patches)))
    return None
