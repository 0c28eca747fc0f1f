"""Faults of a run with standbys: all processes and links can fail, the leading hub at its worst moments."""

import json
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from aedit.launch.hub import read_accounts
from aedit.launch.records import SampleVerdict
from benchmarks.chaos_parts.accounts import Accounts, account, errors, keep
from benchmarks.kit import netns
from benchmarks.kit.cluster import Field, free_port, ledger_tail
from benchmarks.kit.netns import Place, set_link
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import copy_folder, end, limit_files, put_back, start
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report

# -- A hub and its standbys as processes, each under a supervisor that starts the plain command again.


FOLLOW = "another hub leads this run under"
"""In the last words of a hub that was replaced: its operator shall start it as a standby."""


@dataclass(slots=True)
class Replica:
    """One hub of the run: its place, command and process."""

    directory: Path
    address: str
    words: tuple[str, ...]
    """Further words of its command, after configuration and folder."""
    place: Place | None
    process: "subprocess.Popen[str] | None" = None
    follows: bool = False
    """True if its last message named the command that starts it next."""
    due_s: float = 0.0
    """Time at which its supervisor starts it again."""
    is_killed: bool = False

    @property
    def log(self) -> Path:
        """Return the file with what its processes have said."""
        return Path(f"{self.directory}.log")


@dataclass(slots=True)
class Replicas:
    """All hubs of a run. The caller calls `supervise` again and again."""

    toml: Path
    hubs: list[Replica]
    back_after_s: float = 1.0
    starts: int = 0
    failed: list[str] = field(default_factory=list)
    """Last words of hubs that ended for another reason than a fault or a successor."""

    def supervise(self) -> None:
        """Start every hub that has ended and whose time has come."""
        for hub in self.hubs:
            if hub.process is not None and hub.process.poll() is not None:
                self._ended(hub, hub.process.returncode)
            if hub.process is None and time.monotonic() >= hub.due_s:
                self._start(hub)

    def pause(self, until_s: float) -> None:
        """Supervise until this time of the monotonic clock."""
        while (left_s := until_s - time.monotonic()) > 0:
            self.supervise()
            time.sleep(min(0.1, left_s))

    def kill(self, hub: Replica, back_after_s: float) -> None:
        """Kill a hub with SIGKILL; it is started again after so long."""
        if hub.process is not None and hub.process.poll() is None:
            hub.is_killed = True
            hub.process.kill()
            hub.process.wait(10)
            self._ended(hub, hub.process.returncode)
        hub.due_s = time.monotonic() + back_after_s

    def stop(self, hub: Replica, number: signal.Signals) -> None:
        """Send SIGSTOP or SIGCONT to a hub, if it runs."""
        if hub.process is not None:
            hub.process.send_signal(number)

    def cut(self, hub: Replica, state: str) -> None:
        """Set the link of a hub "down" or "up"."""
        assert hub.place is not None
        set_link(hub.place, state)

    def fill(self, hub: Replica, num_bytes: int = resource.RLIM_INFINITY) -> None:
        """Let no file of a hub, if it runs, grow beyond so many bytes; its next process has no such limit."""
        if hub.process is not None:
            limit_files(hub.process.pid, num_bytes)

    def at(self, address: str) -> Replica | None:
        """Return the hub at `address`."""
        return next((hub for hub in self.hubs if hub.address == address), None)

    def heal(self) -> None:
        """Let all hubs go on, be reached and be started."""
        for hub in self.hubs:
            self.stop(hub, signal.SIGCONT)
            self.fill(hub)
            hub.due_s = 0.0
            if hub.place is not None:
                set_link(hub.place, "up")

    def end(self, first: Replica) -> None:
        """End all hubs with SIGTERM, the leading one first: it writes its snapshot."""
        for hub in (first, *(hub for hub in self.hubs if hub is not first)):
            if hub.process is not None:
                hub.process.terminate()
                hub.process.wait(30)

    def kill_all(self) -> None:
        """Kill what is left."""
        end(hub.process for hub in self.hubs if hub.process is not None)

    def _start(self, hub: Replica) -> None:
        place = ("--standby", f"--address={hub.address}") if hub.follows else hub.words
        words = ("hub", str(self.toml), f"--directory={hub.directory}", "--insecure", *place)
        with hub.log.open("a") as log:
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            hub.process = start("aedit.launch.cli", *words, place=hub.place, **pipes)
        self.starts += 1
        hub.is_killed = hub.follows = False

    def _ended(self, hub: Replica, code: int) -> None:
        said = hub.log.read_text(errors="replace").strip().rpartition("\n")[2] if hub.log.exists() else ""
        hub.follows = code == 2 and FOLLOW in said and "--standby" not in hub.words
        if not hub.is_killed and not (code == 2 and FOLLOW in said):
            self.failed.append(f"{hub.directory.name}: exit code {code}: {said[-300:]}")
        hub.process, hub.due_s = None, time.monotonic() + self.back_after_s


def replicas(directory: Path, toml: Path, addresses: Sequence[str], places: Sequence[Place]) -> Replicas:
    """Return the hub at the first of `addresses`, and its standbys at the others; none is started yet."""
    hubs = []
    for k, address in enumerate(addresses):
        words = ("--standby", f"--standby-number={k}") if k else ()
        name = "hub" if k == 0 else f"standby_{k}"
        place = places[k] if places else None
        hubs.append(Replica(directory / name, address, words, place))
    return Replicas(toml, hubs)


def addresses_of(number: int, places: Sequence[Place]) -> list[str]:
    """Return so many addresses for hubs: of their places, or on loopback without places."""
    if places:
        return [f"{place.address}:7000" for place in places[:number]]
    return [f"127.0.0.1:{free_port()}" for _ in range(number)]


# -- the benchmark


NODES = tuple(f"node-{i}" for i in range(6))
RATE_MBIT = 100
"""Slow enough that a kill finds a push of the large unit half-way."""
NODE = PacedNode(
    hub="", name="", ledger="", numel=1024, every=25, large_numel=270_000, large_every=250, call_timeout_s=3.0
)
"""A push of its large unit takes long enough to be hit by a fault."""
CALM_S = 60.0
GOODPUT, DECIDES_S = 0.90, 300.0
"""Wanted goodput, and how long a run must be to tell."""
NODE_FAULT_EVERY_S, HUB_FAULT_EVERY_S = 20.0, 25.0
JOINS_WITHIN_S = 300.0
"""On a busy machine."""
HEALS_WITHIN_S = 60.0
"""After the last fault every node must have seen a push acknowledged."""
AIM_S = 8.0
"""How long a fault waits for its worst moment."""
KEEP_EVERY_S, ANSWERS_S = 0.3, 5.0
FULL_S = 20.0
"""How long a disk is full."""
IN_SYNC_WITHIN_S = 30.0
"""How long an older folder waits until another hub has all that was acknowledged: else none would have it."""


@dataclass(slots=True)
class Story:
    """Faults applied and results."""

    faults: dict[str, int] = field(default_factory=dict)
    starts: int = 0
    """Starts of hubs."""
    longest_gap_s: float = 0.0
    """Longest time in which no node saw a push acknowledged."""
    healed_s: float = 0.0
    """Seconds from the end of the last fault until every node had an acknowledgement again."""
    died: list[str] = field(default_factory=list)
    """Processes that ended though nobody had killed them, with their last words."""
    left_behind: int = 0
    accounts: Accounts | None = None
    samples: str = ""
    """What `aedit ledger` says."""
    samples_agree: bool = False
    samples_twice: int = 0
    """Samples that were trained twice."""


@dataclass(slots=True)
class Ground:
    """Processes of one run."""

    field: Field
    hubs: Replicas
    chance: random.Random
    story: Story
    kept_s: float = 0.0

    def pause(self, until_s: float) -> None:
        """Supervise the hubs, and keep their segments, until this time of the monotonic clock."""
        while time.monotonic() < until_s:
            self.hubs.pause(min(until_s, time.monotonic() + KEEP_EVERY_S))
            self.keep()

    def keep(self) -> None:
        """Keep the segments that the hubs have now."""
        for hub in self.hubs.hubs:
            keep(hub.directory, self.field.directory / f"copies_{hub.directory.name}")

    def until(self, is_so: Callable[[], object], limit_s: float) -> bool:
        """Supervise until `is_so()`; return False if it is not within `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not (so := bool(is_so())) and time.monotonic() < deadline:
            self.hubs.supervise()
            time.sleep(0.02)
        return so

    def acknowledged(self) -> list[tuple[float, int, str]]:
        """Return time, term and hub of the last push of each node that was acknowledged."""
        found = []
        for name in NODES:
            lines = ledger_tail(self.field.ledger(name))
            told = [line for line in lines if line.get("event") == "acknowledged"]
            found += [(told[-1]["t"], told[-1]["term"], told[-1]["hub"])] if told else []
        return found

    def leader(self) -> Replica:
        """Return the hub that has acknowledged last."""
        last = max(self.acknowledged(), default=(0.0, 0, ""))
        return self.hubs.at(last[2]) or self.hubs.hubs[0]

    def term(self) -> int:
        """Return the highest term in which a push was acknowledged."""
        return max((term for _, term, _ in self.acknowledged()), default=0)


def measure(minutes: float | None, standbys: int, seed: int, *, quick: bool) -> Report:
    """Return the table of a run with standbys: calm, then with faults."""
    seconds = 60 * (minutes or (1 if quick else 10))
    calm = tell(min(CALM_S, seconds), standbys, seed, calm=True)
    story = tell(seconds, standbys, seed)
    assert calm.accounts is not None
    assert story.accounts is not None
    faults = ", ".join(f"{number} x {kind}" for kind, number in sorted(story.faults.items()))
    return Report(
        "chaos with standbys",
        (f"One hub, {standbys} standby(s) and {len(NODES)} nodes of a fixed pace, {netns.wires()};"
         f" {seconds:g} s of faults, seed {seed}.",
         "A supervisor starts a hub that ended with its plain command. Steps are those in accepted pushes.",
         f"Faults: {faults or 'none'}."),
        ("run", "steps/s", "acknowledged", "faults", "hub starts", "terms led", "longest gap s", "healed s"),
        (_row("calm", calm, calm.accounts), _row("faults", story, story.accounts)),
        _bars(story, story.accounts, story.accounts.steps_per_s / calm.accounts.steps_per_s, seconds),
        {"calm": asdict(calm), "faults": asdict(story)},
    )  # fmt: skip


def _row(name: str, story: Story, accounts: Accounts) -> tuple[str, ...]:
    numbers = (accounts.acknowledged, sum(story.faults.values()), story.starts, len(accounts.terms))
    times = (f"{story.longest_gap_s:.1f}", f"{story.healed_s:.1f}")
    return (name, f"{accounts.steps_per_s:.1f}", *map(str, numbers), *times)


def _bars(story: Story, found: Accounts, share: float, seconds: float) -> tuple[Bar, ...]:
    reached = None if seconds < DECIDES_S else share >= GOODPUT
    nothing = {
        **errors([found]),
        "processes that ended though nobody killed them": len(story.died),
        "processes left behind": story.left_behind,
    }
    back = f"all nodes acknowledged {story.healed_s:.1f} s after the last fault"
    return (
        Bar(f"goodput {percent(share)} of the calm run, wanted >= {percent(GOODPUT, 0)}", reached),
        *(Bar(f"{text}: {number}", number == 0) for text, number in nothing.items()),
        Bar(f"{back}, wanted < {HEALS_WITHIN_S:g} s", story.healed_s < HEALS_WITHIN_S),
        Bar(f"samples: {story.samples}", story.samples_agree),
        Bar(f"samples trained twice: {story.samples_twice}", story.samples_twice == 0),
        *(Bar(f"ended: {text}", False) for text in story.died),
    )


Act = Callable[[Ground], Callable[[], None] | None]
"""Applies a fault; returns what ends it, if something must."""


def tell(seconds: float, standbys: int, seed: int, *, calm: bool = False) -> Story:
    """Apply faults for so long to a run with `standbys`, or none with `calm`; compare the accounts."""
    with tempfile.TemporaryDirectory() as name, network_of(1 + standbys) as places:
        story = Story()
        with _ground(Path(name), standbys, places, random.Random(seed), story) as ground:
            began = time.monotonic()
            for at_s, seconds_long, act in () if calm else _plan(seconds, ground.chance, bool(places)):
                ground.pause(began + at_s)
                ended = act(ground)
                if ended is not None:
                    ground.pause(time.monotonic() + seconds_long)
                    ended()
            ground.pause(began + seconds)
            _end(ground)
        story.left_behind = len(ground.field.left_behind())
        return story


@contextmanager
def network_of(hubs: int) -> Iterator[list[Place]]:
    """Yield a place for each of so many hubs and for each node; none where there are no namespaces."""
    if netns.why_not() is not None:
        yield []
        return
    with netns.network(hubs + len(NODES), RATE_MBIT) as places:
        yield places


@contextmanager
def _ground(
    directory: Path, standbys: int, places: list[Place], chance: random.Random, story: Story
) -> Iterator[Ground]:
    addresses = addresses_of(1 + standbys, places)
    plan = replace(NODE, standby=",".join(addresses[1:]))
    where = [places[0], *places[1 + standbys :]] if places else []
    more = f'standby = "{plan.standby}"'
    program = "benchmarks.programs.chaos_witness"
    with Field(directory, plan, places=where, more=more, program=program, address=addresses[0]) as nodes:
        hubs = replicas(directory, nodes.toml, addresses, places)
        ground = Ground(nodes, hubs, chance, story)
        try:
            hubs.supervise()
            for name in NODES:
                _start(ground, name)
            if not ground.until(lambda: len(ground.acknowledged()) == len(NODES), JOINS_WITHIN_S):
                raise TimeoutError(f"not all nodes have joined:\n{hubs.hubs[0].log.read_text()[-3000:]}")
            yield ground
        finally:
            hubs.kill_all()


def _start(ground: Ground, name: str) -> None:
    secret = sha256(name.encode()).hexdigest()[:32]
    ground.field.start_node(name, rejoin=secret, votes=str(ground.field.directory / f"votes-{name}"))


# --- faults


def _plan(seconds: float, chance: random.Random, wires: bool) -> list[tuple[float, float, Act]]:
    """Return (second, duration, fault) in order."""
    nodes: list[Callable[[str], Act]] = [_kill_node, _stop_node]
    kinds: list[Act] = [_kill_leader, _kill_at_push, _kill_twice, _stop_leader, _kill_standby, _stop_standby]
    kinds += [_fill_disk, _older_folder]
    if wires:
        nodes.append(_cut_node)
        kinds += [_cut_leader, _cut_standby]
    found: list[tuple[float, float, Act]] = []
    at_s, bag = HUB_FAULT_EVERY_S / 2, list[Act]()
    while at_s < seconds - 5:
        bag = bag or chance.sample([*kinds, _kill_all], len(kinds) + 1)  # all kinds by turns
        act, seconds_long = bag.pop(), chance.uniform(3, 14)
        found.append((at_s, FULL_S if act is _fill_disk else seconds_long, act))
        at_s += HUB_FAULT_EVERY_S
    at_s = NODE_FAULT_EVERY_S / 2
    while at_s < seconds - 5:
        act = chance.choice(nodes)(chance.choice(NODES))
        found.append((at_s, chance.uniform(1, 8), act))
        at_s += NODE_FAULT_EVERY_S
    return sorted(found, key=lambda entry: entry[0])


def _note(ground: Ground, kind: str) -> None:
    ground.story.faults[kind] = ground.story.faults.get(kind, 0) + 1


def _kill_node(name: str) -> Act:
    def act(ground: Ground) -> None:
        _note(ground, "node killed")
        process = ground.field.nodes[name]
        if process.poll() is not None:
            ground.story.died.append(f"{name}: exit code {process.returncode}")
        ground.field.kill_node(name)
        _start(ground, name)

    return act


def _stop_node(name: str) -> Act:
    def act(ground: Ground) -> Callable[[], None]:
        _note(ground, "node stopped")
        ground.field.signal_node(name, signal.SIGSTOP)
        return partial(ground.field.signal_node, name, signal.SIGCONT)

    return act


def _cut_node(name: str) -> Act:
    def act(ground: Ground) -> Callable[[], None]:
        _note(ground, "node cut off")
        ground.field.cut(name)
        return partial(ground.field.mend, name)

    return act


def _kill_leader(ground: Ground) -> None:
    _note(ground, "leader killed")
    ground.hubs.kill(ground.leader(), ground.chance.uniform(0.2, 15))


def _kill_at_push(ground: Ground) -> None:
    """Kill the leader while a node pushes its large unit."""
    _note(ground, "leader killed")
    ground.until(lambda: any(_pushes_large(ground.field.ledger(name)) for name in NODES), AIM_S)
    time.sleep(ground.chance.uniform(0, 0.1))
    ground.hubs.kill(ground.leader(), ground.chance.uniform(0.2, 15))


def _kill_twice(ground: Ground) -> None:
    """Kill the leader, and its successor as soon as that has acknowledged something; both come back soon."""
    _note(ground, "leader and successor killed")
    term = ground.term()
    ground.hubs.kill(ground.leader(), 12)
    if ground.until(lambda: ground.term() > term, 4 * AIM_S):
        time.sleep(ground.chance.uniform(0, 0.3))
        ground.hubs.kill(ground.leader(), ground.chance.uniform(0.2, 5))


def _kill_all(ground: Ground) -> None:
    """Kill all hubs at once, as a power cut does."""
    _note(ground, "all hubs killed")
    for hub in ground.hubs.hubs:
        ground.hubs.kill(hub, ground.chance.uniform(0.2, 3))


def _stop_leader(ground: Ground) -> Callable[[], None]:
    _note(ground, "leader stopped")
    hub = ground.leader()
    ground.hubs.stop(hub, signal.SIGSTOP)
    return partial(ground.hubs.stop, hub, signal.SIGCONT)


def _cut_leader(ground: Ground) -> Callable[[], None]:
    _note(ground, "leader cut off")
    hub = ground.leader()
    ground.hubs.cut(hub, "down")
    return partial(ground.hubs.cut, hub, "up")


def _standby(ground: Ground) -> Replica:
    leader = ground.leader()
    return ground.chance.choice([hub for hub in ground.hubs.hubs if hub is not leader])


def _kill_standby(ground: Ground) -> None:
    _note(ground, "standby killed")
    ground.hubs.kill(_standby(ground), ground.chance.uniform(0.2, 8))


def _stop_standby(ground: Ground) -> Callable[[], None]:
    _note(ground, "standby stopped")
    hub = _standby(ground)
    ground.hubs.stop(hub, signal.SIGSTOP)
    return partial(ground.hubs.stop, hub, signal.SIGCONT)


def _cut_standby(ground: Ground) -> Callable[[], None]:
    _note(ground, "standby cut off")
    hub = _standby(ground)
    ground.hubs.cut(hub, "down")
    return partial(ground.hubs.cut, hub, "up")


def _fill_disk(ground: Ground) -> Callable[[], None]:
    hub = ground.chance.choice(ground.hubs.hubs)
    _note(ground, "leader's disk full" if hub is ground.leader() else "standby's disk full")
    ground.hubs.fill(hub, 0)
    return partial(ground.hubs.fill, hub)


def _older_folder(ground: Ground) -> Callable[[], None]:
    """Copy the leader's folder; later kill that hub, and let it start with the copy."""
    hub, older = ground.leader(), ground.field.directory / "older"
    ground.hubs.stop(hub, signal.SIGSTOP)
    copy_folder(hub.directory, older)
    ground.hubs.stop(hub, signal.SIGCONT)

    def put_older_back() -> None:
        if not ground.until(lambda: _has_standby(ground), IN_SYNC_WITHIN_S):
            _note(ground, "older folder not put back, as no standby was in sync")
            shutil.rmtree(older)
            return
        _note(
            ground,
            "leader killed, older folder put back" if hub is ground.leader() else "older folder put back",
        )
        ground.hubs.kill(hub, ground.chance.uniform(0.2, 3))
        ground.keep()
        put_back(hub.directory, older)

    return put_older_back


def _has_standby(ground: Ground) -> bool:
    """Return whether the leader says that another hub has all that it has acknowledged."""
    leader = ground.leader()
    asked = start("benchmarks.kit.cluster", leader.address, place=leader.place, stdout=subprocess.PIPE)
    if not ground.until(lambda: asked.poll() is not None, ANSWERS_S):
        end([asked])
    told = asked.communicate()[0]
    return asked.returncode == 0 and json.loads(told).get("in_sync", 0) > 0


def _pushes_large(ledger: Path) -> bool:
    lines = ledger_tail(ledger)
    return bool(lines) and lines[-1]["event"] == "offered" and lines[-1]["unit"] == 0


# --- the end


def _end(ground: Ground) -> None:
    """End all faults, let all nodes push and leave in good order, end the hubs; then compare the accounts."""
    story, nodes = ground.story, ground.field.nodes
    ground.hubs.heal()
    healed_s = time.monotonic()
    ground.until(lambda: all(at > healed_s for at, _, _ in ground.acknowledged()), HEALS_WITHIN_S)
    story.healed_s = time.monotonic() - healed_s
    ended_s = time.monotonic()
    for process in nodes.values():
        process.terminate()
    ground.until(lambda: all(process.poll() is not None for process in nodes.values()), 90)
    story.died += [f"{name}: exit code {process.poll()}" for name, process in nodes.items() if process.poll()]
    leader = ground.leader()
    ground.keep()
    ground.hubs.end(leader)
    ground.keep()
    story.died += ground.hubs.failed
    story.starts = ground.hubs.starts
    ledgers = [ground.field.lines(name) for name in NODES]
    copies = sorted(ground.field.directory.glob("copies_*/journal-*"))
    story.accounts = account(ground.field.plan, ledgers, leader.directory, copies, ended_s)
    samples = read_accounts(ground.field.directory)
    story.samples, story.samples_agree = samples.summary(), not samples.disagreements
    story.samples_twice = samples.count(SampleVerdict.TWICE)
    times = sorted(line["t"] for lines in ledgers for line in lines if line["event"] == "acknowledged")
    story.longest_gap_s = max((b - a for a, b in pairwise(times)), default=0.0)
