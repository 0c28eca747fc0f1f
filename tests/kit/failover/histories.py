"""Random histories of faults, their check, and the search for the shortest one that still fails."""

import random
from dataclasses import dataclass, replace

from kit.failover.hub import Disk, SimHub
from kit.failover.node import SimNode
from kit.failover.world import Fault, Violation, World

FAULTS_S, HEAL_S = 8.0, 12.0
"""How long faults happen, and after how long all nodes must have pushed again."""
NODE = 10
"""Number of the first node; hubs are numbered from 0."""


@dataclass(frozen=True)
class History:
    """Everything that decides what happens in one simulation."""

    seed: int
    num_hubs: int
    num_nodes: int
    loss: float
    repeat: float
    delay_s: float
    faults: tuple
    least: int = 1
    """Hubs that must have what is acknowledged, as in a swarm."""

    def __str__(self):
        head = f"seed {self.seed}: {self.num_hubs} hubs, {self.num_nodes} nodes, loss {self.loss:.2f}"
        head += f", at least {self.least}"
        return "\n".join([head, *map(str, self.faults)])


def history(seed):
    """Return the history of a seed."""
    chance = random.Random(seed)
    num_hubs, num_nodes = chance.choice((2, 2, 3)), chance.choice((1, 2, 3, 3))
    hubs = range(num_hubs)
    everybody = [*hubs, *range(NODE, NODE + num_nodes)]
    faults = []
    for _ in range(chance.randint(1, 7)):
        kind = chance.choice(("kill", "kill", "lose", "pause", "part", "cut", "damage", "node"))
        at_s, lasts_s = chance.uniform(1.0, FAULTS_S), chance.choice((0.3, 1.0, 2.5, 5.0)) * chance.random()
        if kind == "node":
            kind, who = chance.choice(("kill", "lose")), chance.choice(everybody[num_hubs:])
        elif kind == "cut":
            who = chance.choice(everybody)
        elif kind == "part":  # a bit per process: on which side it is
            who = chance.randrange(2 ** len(everybody))
        else:
            who = chance.choice(hubs)
        faults.append(Fault(at_s, kind, who, chance.choice(hubs), lasts_s))
    moves = random.Random(f"moves {seed}")  # of its own: with it, the faults above are as they were without
    for _ in range(moves.choice((0, 0, 1, 2, 4))):
        kind, at_s = moves.choice(("hand", "hand", "hand", "stand")), moves.uniform(1.0, FAULTS_S)
        faults += [Fault(at_s, kind, who, moves.choice(hubs)) for who in hubs]  # one of them leads
    least = moves.choice((1, 2))
    if num_hubs == 3 and least == 2 and moves.random() < 0.5:
        faults = [*_without_losses(faults), Fault(moves.uniform(2.0, FAULTS_S), "ruin", moves.choice(hubs))]
    faults.sort(key=lambda fault: fault.at_s)
    rough = chance.random() < 0.5
    loss, repeat = (0.15 * chance.random(), 0.1 * chance.random()) if rough else (0.0, 0.0)
    delay_s = chance.choice((0.002, 0.01, 0.03))
    return History(seed, num_hubs, num_nodes, loss, repeat, delay_s, tuple(faults), least)


def _without_losses(faults):
    """Return the faults without those that lose a journal or a vote for good: one disk may be, not two."""

    def loses(fault):
        return fault.kind == "damage" or (fault.kind == "lose" and fault.who >= NODE)

    return [replace(fault, kind="kill") if loses(fault) else fault for fault in faults]


class Simulation:
    """One history as it happens."""

    def __init__(self, what, make_hub=SimHub, make_node=SimNode):
        self.what, self.world = what, World(what.seed)
        numbers = list(range(what.num_hubs))
        self.hubs = [make_hub(self.world, number, numbers) for number in numbers]
        self.nodes = [make_node(self.world, NODE + i, numbers) for i in range(what.num_nodes)]
        for hub in self.hubs:
            hub.least = what.least
        self.everybody = [*self.hubs, *self.nodes]
        self.world.processes = {process.number: process for process in self.everybody}
        self.world.network.delay_s = what.delay_s

    def run(self):
        """Let everything happen. Raises Violation."""
        world, what = self.world, self.what
        for process in self.everybody:
            process.start()
        world.run(0.8)
        world.network.loss, world.network.repeat = what.loss, what.repeat
        for fault in what.faults:
            world.run(fault.at_s)
            getattr(self, f"_{fault.kind}")(fault)
        world.run(FAULTS_S)
        self._heal()
        before = [node.acked for node in self.nodes]
        done = world.run(
            FAULTS_S + HEAL_S, lambda: all(n.acked > b + 1 for n, b in zip(self.nodes, before, strict=True))
        )
        self._check_end(done)

    def _heal(self):
        world = self.world
        world.network.cut.clear()
        world.network.loss = world.network.repeat = 0.0
        for process in self.everybody:
            process.paused_until = 0.0
            if not process.alive:
                process.start()

    def _check_end(self, done):
        if not done:
            raise Violation(f"no progress within {HEAL_S} s after everything was healed")
        last = self.world.accounts.leaders[max(self.world.accounts.leaders)]
        self.world.accounts.check_log(last, self.hubs[last].pushes())

    # --- faults

    def _process(self, number):
        return self.world.processes[number]

    def _kill(self, fault, loses=False):
        process = self._process(fault.who)
        if process.alive:
            process.kill(loses)
            self.world.after(fault.lasts_s, self._restart, process, process.life)

    def _restart(self, process, life):
        if not process.alive and process.life == life:
            process.start()

    def _lose(self, fault):
        self._kill(fault, loses=True)

    def _pause(self, fault):
        self._process(fault.who).paused_until = self.world.now + fault.lasts_s

    def _damage(self, fault):
        self._process(fault.who).damage()

    def _ruin(self, fault):
        """Lose the disk of a hub for good, and let another machine take its place.

        Only once the leader's configuration is agreed and it is not alone: one fault at a time.
        """
        hub = self._process(fault.who)
        leaders = [one.machine.configs for one in self.hubs if one.alive and one.machine.term]
        if leaders and all(len(configs) == 1 and len(configs[0].replicas) > 1 for configs in leaders):
            hub.kill(loses=False)
            hub.disk = Disk(hub.disk.voter.me + 50)
            hub.ruined = True
            self.world.after(0.5, self._restart, hub, hub.life)

    def _hand(self, fault):
        """Let a hub that leads hand over to another one; one that follows does nothing."""
        if fault.who != fault.other:
            self._process(fault.who).hand_over(fault.other)

    def _stand(self, fault):
        self._process(fault.who).stand()

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


def failure(what, make_hub=SimHub, make_node=SimNode):
    """Return how a history breaks a promise; "" if it does not."""
    try:
        Simulation(what, make_hub, make_node).run()
    except Violation as violation:
        return str(violation)
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
    calm = replace(what, loss=0.0, repeat=0.0)
    what = calm if fails(calm) else what
    one_node = replace(what, num_nodes=1)
    is_possible = all(fault.kind == "part" or fault.who <= NODE >= fault.other for fault in what.faults)
    return one_node if is_possible and fails(one_node) else what


def first_failure(seeds, make_hub=SimHub, make_node=SimNode):
    """Return (seed, failure, shortest failing history) of the first seed that fails; None if none does."""
    for seed in seeds:
        what = history(seed)
        found = failure(what, make_hub, make_node)
        if found:
            return seed, found, shortest(what, lambda h: bool(failure(h, make_hub, make_node)))
    return None
