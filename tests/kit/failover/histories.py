"""Random histories of faults, their check, and the search for the shortest one that still fails."""

import random
from dataclasses import dataclass, replace

from aedit.async_sgd.journal import Damaged, segment_numbers, segment_path
from aedit.proto.rpc import Voter
from aedit.system import no_collections
from kit.failover.accounts import Accounts
from kit.failover.hub import SimHub, begin_world
from kit.failover.mutants import patched
from kit.failover.node import Liar, SimNode
from kit.failover.world import Fault, Violation, World

FAULTS_S, HEAL_S = 9.0, 120.0
"""How long faults happen, and after how long all nodes must have pushed again.

Nine nodes behind a link of 700 bytes a turn take more than 40 s for it, while the run goes on steadily."""
NODE = 10
"""Number of the first node; hubs are numbered from 0."""
LEADER = -1
"""In the place of a number: the hub that leads then; -2, -3, ... are the others in order."""
KINDS = ("anew", "kill", "kill", "lose", "lose", "pause", "part", "cut")
KINDS += ("damage", "node", "full", "fail", "snapshot")


@dataclass(frozen=True)
class History:
    """Everything that decides what happens in one simulation."""

    seed: int
    recipe: str
    num_hubs: int
    num_nodes: int
    faults: tuple
    has_liar: bool = False
    loss: float = 0.0
    repeat: float = 0.0
    delay_s: float = 0.01
    chunk_bytes: int = 2**16
    """Most bytes of the journal in one message."""
    gap_s: float = 0.0
    """Between two of them."""
    least: int = 1
    """Hubs that must have what is acknowledged, as in a swarm."""

    def __str__(self):
        head = f"seed {self.seed} ({self.recipe}): {self.num_hubs} hubs, {self.num_nodes} nodes"
        head += f", loss {self.loss:.2f}, repeat {self.repeat:.2f}, delay {self.delay_s} s"
        head += f", at least {self.least}, chunks of {self.chunk_bytes} every {self.gap_s} s"
        head += ", one node lies" * self.has_liar
        return "\n".join([head, *map(str, self.faults)])


def lags(chance, at_s):
    """A follower is cut off until it is not waited for; when it is back, the leader is gone."""
    lasts_s = chance.uniform(3.0, 5.0)
    faults = [Fault(at_s, "cut", LEADER, -2, lasts_s), Fault(at_s + lasts_s - 0.3, "lose", LEADER, 0, 9.0)]
    return chance.choice((2, 2, 3)), 3, faults


def tails(chance, at_s):
    """A leader alone with some of the nodes writes what nobody else has, and comes back."""
    nodes, lasts_s = chance.randrange(1, 2**5), chance.uniform(3.0, 9.0)
    faults = [Fault(at_s, "alone", LEADER, nodes, lasts_s)]
    if chance.random() < 0.5:
        faults.append(Fault(at_s + chance.uniform(0.5, 5.0), chance.choice(("kill", "lose")), LEADER, 0, 0.5))
    return chance.choice((2, 3)), chance.choice((3, 5)), faults


def promises(chance, at_s):
    """A voter without room is asked twice, and killed; another candidate asks under the same term."""
    full, winner, late = chance.sample((1, 2, 3), 3)
    then_s = at_s + chance.uniform(4.0, 6.5)
    faults = [
        Fault(at_s, "kill", LEADER, 0, 10.0),
        Fault(at_s, "full", full, 0, then_s - at_s),
        Fault(at_s, "pause", late, 0, then_s - at_s),
        Fault(then_s, "kill", full, 0, 0.2),
        Fault(then_s, "pause", winner, 0, 6.0),
    ]
    return 4, 3, faults


def lies(chance, at_s):
    """A member with a valid key lies while another hub is elected."""
    kind = chance.choice(("kill", "lose", "pause", "ruin"))
    gone = Fault(at_s, kind, LEADER, 0, chance.uniform(1.0, 9.0))
    return chance.choice((2, 3, 3)), chance.choice((3, 5)), [gone]


def power(chance, at_s):
    """Machines lose power again and again, and are back at once."""
    faults = []
    for turn in range(5):
        who, gone_s = chance.choice((LEADER, LEADER, -2)), chance.uniform(0.1, 0.6)
        faults.append(Fault(at_s + 1.5 * turn * chance.random(), "lose", who, 0, gone_s))
    return chance.choice((2, 3)), 3, faults


def older(chance, at_s):
    """A folder is put back older while other hubs are gone."""
    who, lasts_s = chance.choice((LEADER, -2)), chance.uniform(1.0, 4.0)
    if who == LEADER and chance.random() < 0.5:
        others = [Fault(at_s + lasts_s - 0.1, "kill", one, 0, chance.uniform(2.0, 4.0)) for one in (-2, -3)]
        return 3, 3, [Fault(at_s, "old", who, 0, lasts_s), *others]
    gone = Fault(at_s + lasts_s + chance.uniform(-0.5, 1.0), "kill", LEADER, 0, chance.uniform(1.0, 8.0))
    return chance.choice((2, 3, 3)), 3, [Fault(at_s, "old", who, 0, lasts_s), gone]


def twin(chance, at_s):
    """A hub is replaced by a copy of another one's folder, with its register; then the leader ends."""
    copied = Fault(at_s, "twin", -2, -3, 0.5)
    gone = Fault(at_s + chance.uniform(0.0, 4.0), chance.choice(("kill", "lose")), LEADER, 0, 6.0)
    return chance.choice((3, 3, 4)), 3, [copied, gone]


def images(chance, at_s):
    """A copy of the leader's machine is started at its address, or elsewhere, while the leader runs on.

    The leader is cut off from those that reach the copy, or paused until it is long replaced.
    """
    num_hubs, num_nodes = chance.choice((2, 2, 3)), chance.choice((2, 3, 5))
    if chance.random() < 0.4:
        return 3, num_nodes, [Fault(at_s, "twin", -2, LEADER, 0.5)]
    begins_s, sides = chance.choice((0.0, 0.0, 1.0, 2.0)) * chance.random(), chance.getrandbits(24)
    faults = [Fault(at_s, "image", LEADER, sides, begins_s)]
    if chance.random() < 0.5:
        faults.append(Fault(at_s + 0.9 * begins_s, "pause", LEADER, 0, chance.uniform(2.5, 7.0)))
    return num_hubs, num_nodes, faults


def anew(chance, at_s):
    """Both followers fetch their journals anew over a slow line, and their leader ends meanwhile."""
    faults = [Fault(at_s + 0.3 * chance.random(), "damage", who) for who in (-2, -3)]
    ends_s, kind = at_s + chance.uniform(0.6, 1.4), chance.choice(("kill", "lose"))
    return 3, 3, [*faults, Fault(ends_s, kind, LEADER, 0, chance.uniform(5.0, 9.0))]


def brims(chance, at_s):
    """The disk of the leader becomes full for good, while the others have room."""
    return 3, chance.choice((2, 3)), [Fault(at_s, "brim", LEADER)]


def anything(chance, at_s):
    num_hubs = chance.choice((2, 2, 2, 3, 3, 3, 4, 5))
    return num_hubs, chance.choice((1, 2, 3, 3, 3, 5, 9)) if num_hubs < 4 else chance.choice((1, 2, 3)), []


RECIPES = (anything, lags, tails, promises, images, lies, power, older, twin, anew, brims)
RECIPES += tuple(anything if recipe is images else recipe for recipe in RECIPES)
"""A history begins with one of them, in turn; other faults follow."""


def history(seed):
    """Return the history of a seed."""
    chance = random.Random(seed)
    recipe = RECIPES[seed % len(RECIPES)]
    num_hubs, num_nodes, faults = recipe(chance, chance.uniform(2.2, 4.0))
    # With a second fault, a copy at another address may need an operator to end one of the two.
    is_copy_elsewhere = recipe is images and faults[0].kind == "twin"
    most = 6 if recipe is anything else 2 * (not is_copy_elsewhere)
    for _ in range(chance.randint(recipe is anything, most)):
        faults.append(_any_fault(chance, range(num_hubs), range(NODE, NODE + num_nodes)))
    if recipe is anything:
        for _ in range(chance.choice((0, 0, 0, 1, 2))):
            faults.append(Fault(chance.uniform(2.2, FAULTS_S), "hand", LEADER))
        if num_hubs > 2 and chance.random() < 0.4:
            kind = chance.choice(("brim", "old", "ruin"))
            lasts_s = chance.uniform(1.0, 6.0)
            faults.append(Fault(chance.uniform(3.0, FAULTS_S), kind, chance.randrange(num_hubs), 0, lasts_s))
    if any(fault.kind in ("brim", "ruin", "old", "twin", "image") for fault in faults):
        # One voter is gone, and not two.
        is_gone = [fault.kind == "lose" and fault.who >= NODE for fault in faults]
        faults = [
            replace(one, kind="kill") if gone else one for one, gone in zip(faults, is_gone, strict=True)
        ]
    rough, is_slow = chance.random() < 0.3, recipe is anew
    return History(
        seed,
        recipe.__name__,
        num_hubs,
        num_nodes,
        tuple(sorted(faults, key=lambda fault: fault.at_s)),
        has_liar=num_nodes > 2 and (recipe is lies or chance.random() < 0.1),
        loss=rough * 0.15 * chance.random(),
        repeat=rough * 0.1 * chance.random(),
        delay_s=chance.choice((0.002, 0.01, 0.05)),
        chunk_bytes=150 if is_slow else chance.choice((150, 700, 2**16)),
        gap_s=0.03 if is_slow else chance.choice((0.0, 0.0, 0.02)),
        least=chance.choice((1, 1, 2)),
    )


def _any_fault(chance, hubs, nodes):
    kind = chance.choice(KINDS)
    at_s, lasts_s = chance.uniform(2.2, FAULTS_S), chance.choice((0.5, 2.0, 5.0, 9.0)) * chance.random()
    who = chance.choice((LEADER, *hubs))
    if kind == "node":
        kind, who = chance.choice(("kill", "lose")), chance.choice(nodes)
    elif kind in ("cut", "pause"):
        who = chance.choice((*hubs, *nodes))
    elif kind == "part":  # a bit per process: on which side it is
        who = chance.randrange(2 ** (len(hubs) + len(nodes)))
    return Fault(at_s, kind, who, chance.choice(hubs), lasts_s)


def copying_the_leader(what):
    """Return a history in which the folder that is copied is that of the leader."""
    faults = (replace(one, other=LEADER) if one.kind == "twin" else one for one in what.faults)
    return replace(what, faults=tuple(faults))


def losing_power(what):
    """Return a history in which followers lose power again and again in the middle of small pieces."""
    chance, num_hubs = random.Random(what.seed), min(3, what.num_hubs)
    faults = []
    for turn in range(6):
        who = chance.choice((-2, -3)) if num_hubs > 2 else -2
        faults.append(Fault(1.8 + 0.9 * turn + 0.5 * chance.random(), "lose", who, 0, 0.15))
    return replace(what, faults=tuple(faults), num_hubs=num_hubs, chunk_bytes=16, gap_s=0.0)


class Simulation:
    """One history as it happens."""

    def __init__(self, what):
        begin_world(what.seed, what.least, what.chunk_bytes)
        self.what, self.world, self.accounts = what, World(what.seed), Accounts()
        self.hubs = [SimHub(self.world, number, self.accounts) for number in range(what.num_hubs)]
        for hub in self.hubs:
            hub.others = [one for one in self.hubs if one is not hub]
            hub.disk.removes = lambda name, number=hub.number: self.accounts.note_removal(number, name)
        self.accounts.hubs = self.hubs
        kinds = [SimNode] * (what.num_nodes - what.has_liar) + [Liar] * what.has_liar
        self.nodes = [made(self.world, NODE + i, self.hubs) for i, made in enumerate(kinds)]
        for node in self.nodes:
            node.nodes = self.nodes
        self.everybody = [*self.hubs, *self.nodes]
        self.processes = {process.number: process for process in self.everybody}
        self.world.network.delay_s, self.world.network.gap_s = what.delay_s, what.gap_s
        self.world.check = self._check
        self.is_full_for_good = set()
        self.copied = {}
        """By a machine that was copied: whether, of the two, the copy stays if they are equal in the end."""

    @no_collections()  # a sixth of the time: one collection after it finds as much
    def run(self):
        """Let everything happen. Raises Violation."""
        world, what = self.world, self.what
        for process in self.everybody:
            process.start()
        world.run(2.0)
        world.network.loss, world.network.repeat = what.loss, what.repeat
        for fault in what.faults:
            world.run(fault.at_s)
            who, other = self._number(fault.who), self._number(fault.other)
            getattr(self, f"_{fault.kind}")(replace(fault, who=who, other=other))
        world.run(max(FAULTS_S, world.now))
        self._heal()
        honest = [node for node in self.nodes if not isinstance(node, Liar)]
        before = [node.count for node in honest]

        def goes_on():
            return all(node.count > count + 1 for node, count in zip(honest, before, strict=True))

        is_done = world.run(world.now + HEAL_S, lambda: goes_on() and self._is_whole())
        if not is_done and not self.accounts.is_excused:
            lack = "a replica that is back is not counted" if goes_on() else "no progress"
            raise Violation(f"{lack} within {HEAL_S} s after everything was healed")

    def _is_whole(self):
        """Return whether all replicas that run, and have room, are in sync again."""
        leading = self.processes[self._number(LEADER)]
        configs = leading.process._leading.leadership._replica.configs if self._term(leading) else ()
        there = {hub.identity for hub in self.hubs if hub.process and hub.number not in self.is_full_for_good}
        return len(configs) == 1 and there <= set(configs[0].replicas)

    def _number(self, who):
        """Return the number of a process that is named by its role."""
        if who >= 0:
            return who
        leading = max(self.hubs, key=lambda hub: (self._term(hub), -hub.number))
        return [leading, *leading.others][LEADER - who].number

    def _term(self, hub):
        leading = hub.process and hub.process._leading
        return leading.ledger.hub.state.term if leading else 0

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
            process.pause(world.now)
            if process in self.copied and not process.is_gone:
                self._take_one_away(process)
            process.restart(process.life)

    # --- faults

    def _kill(self, fault, loses=False):
        process = self.processes[fault.who]
        if process.alive:
            process.kill(loses)
            self.world.after(fault.lasts_s, process.restart, process.life)

    def _lose(self, fault):
        self._kill(fault, loses=True)

    def _pause(self, fault):
        self.processes[fault.who].pause(self.world.now + fault.lasts_s)

    def _damage(self, fault):
        """What a follower receives is damaged; it notices, and fetches it anew."""
        hub = self.processes[fault.who]
        if hub.standby and hub.stream and self._term(hub.stream.leader):
            hub._lost(hub.standby, Damaged("a bit has flipped"))

    def _anew(self, fault):
        """A follower fetches its journal anew, and its leader ends meanwhile."""
        self._damage(fault)
        self.world.after(0.3, lambda: self._kill(replace(fault, who=self._number(LEADER))))

    def _full(self, fault):
        disk = self.processes[fault.who].disk
        disk.full = True
        self.world.after(fault.lasts_s, lambda: setattr(disk, "full", fault.who in self.is_full_for_good))

    def _can_bear(self, gone=None):
        """Return whether a majority has everything without one hub: one fault of that kind at a time.

        gone: the hub whose disk goes; another one that fetches its journal anew would be a second fault.
        """
        leading = [hub.process._leading for hub in self.hubs if hub.process and hub.process._leading]
        configs = [one.leadership._replica.configs for one in leading]
        left = {hub.identity for hub in self.hubs if hub is not gone and self.accounts.is_whole(hub)}
        return bool(configs) and all(
            len(each) == 1
            and len(replicas := each[0].replicas) > 2
            and (gone is None or 2 * len(left & set(replicas)) > len(replicas))
            for each in configs
        )

    def _brim(self, fault):
        """A disk becomes full, and stays so: the others have room."""
        if self._can_bear():
            self.is_full_for_good.add(fault.who)
            self.processes[fault.who].disk.full = True

    def _fail(self, fault):
        """A write of a disk fails; which of the next ones depends on the fault."""
        hub = self.processes[fault.who]
        hub.disk.failing, hub.is_unreliable = 1 + int(1000 * fault.lasts_s) % 12, True

    def _snapshot(self, fault):
        for hub in self.hubs:
            if self._term(hub):
                hub.process._leading.engine._snapshot()
                hub._pump()

    def _old(self, fault):
        """A copy that is made now is put back in a while, over all but the register of votes."""
        hub = self.processes[fault.who]
        files = hub.disk.copied()

        def put_back():
            can_bear = self._can_bear(hub)
            if hub.alive:
                hub.kill()
            hub.disk.put_back(files, but=("votes.json",))
            hub.is_unreliable = True
            self.accounts.replaced_s = self.world.now
            self.accounts.excuse(always=not can_bear)
            self.world.after(0.5, hub.restart, hub.life)

        self.world.after(fault.lasts_s, put_back)

    def _ruin(self, fault):
        """Lose the disk of a hub for good, and let another machine take its place."""
        self._replace_by(fault, {})

    def _twin(self, fault):
        """Let another machine take the place of a hub, with a copy of the folder of a third one."""
        other = self.processes[fault.other]
        here, there = (str(self.processes[one].directory) for one in (fault.who, fault.other))
        files = {name.replace(there, here, 1): inode for name, inode in other.disk.copied().items()}
        self._replace_by(fault, files)
        if self.what.loss or len(self.what.faults) > 2:
            self.accounts.forgiven = other.identity

    def _image(self, fault):
        """Let a machine and a copy of it, as it is now, run at one address; each process reaches one of them.

        other: 10 bits for the processes that reach the copy while both sides are cut off from each other, 10
            for those that reach it then; whether the original still reaches the first ones, whether the copy
            stays in the end, and for how long they are cut off.
        """
        hub = self.processes[fault.who]
        if self.copied:
            return
        copy = SimHub(self.world, len(self.hubs), self.accounts, hub)
        copy.disk.removes = lambda name: self.accounts.note_removal(copy.number, name)
        others = [process.number for process in self.everybody if process is not hub]
        first, later = ({one for i, one in enumerate(others) if fault.other >> i + at & 1} for at in (0, 10))
        flags, cut_s = fault.other >> 20, (1.5, 4.0, 8.0, 99.0)[fault.other >> 22 & 3]
        self.copied[hub] = flags >> 1 & 1
        pairs = {(one, hub.number) for one in first} | {(hub.number, one) for one in first if flags & 1}
        for one in {*others} - first:
            pairs |= {(one, copy.number), (copy.number, one)}

        def begin():
            self.hubs.append(copy)
            self.everybody.append(copy)
            self.processes[copy.number], self.accounts.forgiven = copy, hub.identity
            hub.copy, hub.callers = copy, first
            self._cut_pairs(pairs, replace(fault, lasts_s=cut_s))
            copy.start()
            self.world.after(cut_s, lambda: hub.is_gone or copy.is_gone or setattr(hub, "callers", later))

        self.world.after(fault.lasts_s, begin)

    def _take_one_away(self, hub):
        """Take away the one of two machines at an address that has less: all reach the other one then."""

        def has(one):
            numbers = segment_numbers(one.directory, "journal")[-1:]
            ends = [(number, segment_path(one.directory, number).stat().st_size) for number in numbers]
            return Voter.load(one.directory / "votes.json").accepted, ends

        copy_stays = has(hub.copy) > has(hub) or (has(hub.copy) == has(hub) and self.copied[hub])
        gone = hub if copy_stays else hub.copy
        gone.is_gone, hub.callers = True, {*self.processes} if copy_stays else ()
        gone.kill()

    def _replace_by(self, fault, files):
        hub = self.processes[fault.who]
        if not self._can_bear(hub):
            return
        if hub.alive:
            hub.kill(loses=True)
        hub.disk.put_back(files)
        hub.is_standby, hub.identity, hub.is_unreliable, hub.disk.failing = True, 0, bool(files), 0
        self.accounts.replaced_s = self.world.now
        self.accounts.excuse()
        self.world.after(0.5, hub.restart, hub.life)

    def _hand(self, fault):
        """Let a hub that leads hand over to a follower; one that follows does nothing."""
        hub = self.processes[fault.who]
        if self._term(hub):
            hub.process._leading.leadership.hand_over()

    def _cut(self, fault):
        """Cut one direction of one link, or both for an odd number of milliseconds."""
        pairs = {(fault.who, fault.other), (fault.other, fault.who)}
        self._cut_pairs(pairs if int(1000 * fault.lasts_s) % 2 else {(fault.who, fault.other)}, fault)

    def _alone(self, fault):
        """Cut off a hub with some of the nodes: a bit for each of them."""
        mine = {fault.who, *(node.number for i, node in enumerate(self.nodes) if fault.other >> i & 1)}
        others = {process.number for process in self.everybody} - mine
        self._cut_pairs({pair for a in mine for b in others for pair in ((a, b), (b, a))}, fault)

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
    for calm in ({"loss": 0.0, "repeat": 0.0}, {"has_liar": False}, {"least": 1}, {"gap_s": 0.0}):
        simpler = replace(what, **calm)
        what = simpler if simpler != what and fails(simpler) else what
    return what


def first_failure(seeds, patches=()):
    """Return (seed, failure, shortest failing history) of the first seed that fails; None if none does."""
    for seed in seeds:
        what = history(seed)
        if found := failure(what, patches):
            return seed, found, shortest(what, lambda h: bool(failure(h, patches)))
    return None
