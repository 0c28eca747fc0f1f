"""A swarm whose machines fail as a whole, owners and the first one included, and its accounts.

Some machines find the others by hivemind's hash table, whose processes are killed too.
"""

import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from benchmarks.chaos_parts.accounts import account, errors
from benchmarks.chaos_parts.history import history_of, read
from benchmarks.chaos_parts.swarm_faults import AWAY_S, fault_plan
from benchmarks.chaos_parts.swarm_peers import SwarmGround, SwarmShape, last_words
from benchmarks.chaos_parts.swarm_scene import KILLED_S, TURN_S, Scene, SwarmStory
from benchmarks.chaos_parts.swarm_tables import BACK_WITHIN_S, machines_with_tables
from benchmarks.kit import netns
from benchmarks.kit.cluster import left_behind
from benchmarks.kit.netns import Place
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report

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
JOINS_WITHIN_S, HEALS_WITHIN_S, ENDS_WITHIN_S = 120.0, 60.0, 90.0


def measure(
    minutes: float | None, seed: int, *, copies: int, quick: bool, back_within_s: float = KILLED_S
) -> Report:
    """Return the table of a swarm: calm, then with faults. back_within_s: see `Scene`."""
    seconds, shape = 60 * (minutes or (1 if quick else 10)), SwarmShape(copies=copies)
    calm = tell(min(CALM_S, seconds), seed, calm=True, shape=shape)
    story = tell(seconds, seed, shape=shape, back_within_s=back_within_s)
    why = netns.why_not()
    wires = "each in a network namespace" if why is None else f"on one network ({why}), so no wire is cut"
    faults = ", ".join(f"{number} x {kind}" for kind, number in sorted(story.faults.items()))
    absent = story.absent_s / seconds / shape.peers
    return Report(
        "chaos in a swarm",
        (f"{shape.peers} machines, {wires}: a peer, its hubs and a node of a fixed pace in each."
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
    shape: SwarmShape = SwarmShape(),  # noqa: B008 - it is immutable
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
    shape: SwarmShape = SwarmShape(),  # noqa: B008 - it is immutable
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
