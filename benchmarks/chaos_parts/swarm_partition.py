"""A swarm that is cut in two, and healed: no unit has two answers under one version.

Each part goes on at the side that has most of its replicas; the other one acknowledges nothing, trains on,
and pushes what it has once it is healed.
"""

import random
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts import answers, partition_loss
from benchmarks.chaos_parts.books import attempts, owed
from benchmarks.chaos_parts.history import chain_of, read
from benchmarks.chaos_parts.swarm import HEALS_WITHIN_S, finish, machine_places, mistakes, newest, staged
from benchmarks.chaos_parts.swarm_peers import SwarmShape
from benchmarks.chaos_parts.swarm_scene import Scene, SwarmStory
from benchmarks.kit import netns
from benchmarks.kit.cluster import left_behind
from benchmarks.kit.tables import Bar, Report

SECONDS, QUICK_S = 60.0, 30.0
COMPLETE_WITHIN_S = 120.0
IN_FLIGHT_S = 1.0
"""Longest time after which a node notes an acknowledgement from before the cut."""
TRAINED = 0.8
"""Wanted: share of the time of the partition whose steps a node pushes in one push afterwards."""


@dataclass(slots=True)
class Partition:
    """One partition and its results."""

    sides: tuple[int, ...]
    """Side of each place."""
    story: SwarmStory = field(default_factory=SwarmStory)
    cut_s: float = 0.0
    healed_s: float = 0.0
    """Times of the monotonic clock."""
    majority: list[int] = field(default_factory=list)
    """Side at which a part went on, by part."""
    by_majority: list[int] = field(default_factory=list)
    """Pushes acknowledged there during the partition, by part."""
    by_minority: list[int] = field(default_factory=list)
    """At the other side."""
    trained: list[float] = field(default_factory=list)
    """Longest push after healing as a share of the partition, for each node and part of the other side."""
    versions: int = 0
    """Versions of units that nodes have received."""
    conflicts: int = 0
    """Versions with two answers, or with another one than the history has."""
    abandoned: int = 0
    """Merges in journals that are not in the history, and were shown to nobody."""
    owed: int = 0
    """Steps that nodes have made and did not see merged when they left."""
    unequal: int = 0
    """Replicas whose anchors on disk are not those of the others of the part, when all nodes have left."""
    owners: list[int] = field(default_factory=list)
    """Owners of each part then, as all peers together name them."""


def measure(sizes: str, minutes: float | None, seed: int, *, quick: bool) -> list[Report]:
    """Return the tables of a partition into sides of these sizes, such as "3,3", and of its loss."""
    loss = partition_loss.report(sizes, quick=quick)
    if why := netns.why_not():
        return [Report("partition of a swarm", (), (), (), (Bar(why, None),), {}), loss]
    seconds = 60 * minutes if minutes else QUICK_S if quick else SECONDS
    found = tell(sizes, seconds, seed)
    shape = SwarmShape()
    rows = tuple(
        (
            str(part),
            "AB"[side],
            str(found.by_majority[part]),
            str(found.by_minority[part]),
            str(found.owners[part]),
        )
        for part, side in enumerate(found.majority)
    )
    processes = Report(
        "partition of a swarm",
        (f"{shape.peers} machines, each in a network namespace: a peer, its hubs and a node of a fixed pace."
         f" {shape.parts} parts, {shape.copies} copies of each.",
         f"Cut into sides of {sizes} for {seconds:g} s, seed {seed}; then healed."),
        ("part", "went on at", "acknowledged there", "at the other side", "owners at the end"),
        rows,
        _bars(found),
        asdict(found),
    )  # fmt: skip
    return [processes, loss]


def _bars(found: Partition) -> tuple[Bar, ...]:
    story, least = found.story, min(found.trained, default=1.0)
    back = "every node has seen a push of every part acknowledged"
    trained = f"a node that was cut off pushed the steps of at least {least:.0%} of the partition at once"
    return (
        Bar(f"of {found.versions} versions, with two answers: {found.conflicts}", found.conflicts == 0),
        Bar(f"pushes acknowledged at the other side: {sum(found.by_minority)}", sum(found.by_minority) == 0),
        Bar(f"parts without progress: {found.by_majority.count(0)}", 0 not in found.by_majority),
        Bar(f"owners of the parts at the end: {found.owners}, wanted one each", set(found.owners) == {1}),
        Bar(f"{trained}, wanted >= {TRAINED:.0%}", least >= TRAINED),
        Bar(f"steps of nodes that were not merged when they left: {found.owed}", found.owed == 0),
        Bar(
            f"replicas with other anchors than the others of their part: {found.unequal}", found.unequal == 0
        ),
        Bar(f"{back} {story.healed_s:.1f} s after healing", story.healed_s < HEALS_WITHIN_S),
        *(Bar(f"{text}: {number}", number == 0) for text, number in mistakes(story).items()),
        *(Bar(f"ended: {text}", False) for text in story.died),
    )


def tell(sizes: str, seconds: float, seed: int, patience_s: float = 0.0) -> Partition:
    """Cut a swarm for so long; return the results.

    Args:
        sizes: Machines of either side, such as "2,4".
        seconds: How long it is cut.
        seed: Of the sides and of what the nodes push.
        patience_s: It is cut for up to so much longer, until each part has acknowledged a push meanwhile.
    """
    chance, sides = random.Random(seed), _sides(sizes)
    chance.shuffle(sides)
    found = Partition(tuple(sides))
    with tempfile.TemporaryDirectory() as name, machine_places() as places:
        with staged(Path(name), places, chance, found.story) as scene:
            if not scene.until(lambda: _is_complete(scene), COMPLETE_WITHIN_S):
                raise TimeoutError(f"not all parts have all copies after {COMPLETE_WITHIN_S:g} s")
            apart = [place for place, side in zip(places, sides, strict=True) if side]
            netns.split(places, apart)
            found.cut_s = time.monotonic()
            scene.pause(found.cut_s + seconds)
            scene.until(lambda: _all_go_on(scene, found.cut_s + IN_FLIGHT_S), patience_s)
            netns.split(places, ())
            found.healed_s = time.monotonic()
            finish(scene, lambda: _compare_replicas(scene, found))
            _compare(scene, found)
        found.story.left_behind = len(left_behind(Path(name)))
        return found


def _sides(sizes: str) -> list[int]:
    return [side for side, size in enumerate(sizes.split(",")) for _ in range(int(size))]


def _is_complete(scene: Scene) -> bool:
    """Return whether each part has all its copies and no other: four of them may be cut into two and two."""
    time.sleep(0.5)
    status = scene.status(scene.ground.peers[0])
    followers = scene.ground.shape.copies - 1
    return status is not None and all(part and part["in_sync"] == followers for part in status["parts"])


def _all_go_on(scene: Scene, since_s: float) -> bool:
    """Return whether each part has acknowledged a push since then."""
    lines = (line for lines in scene.ground.ledgers() for line in lines if line["event"] == "acknowledged")
    parts = scene.ground.shape.parts
    return {line["unit"] % parts for line in lines if line["t"] > since_s} == set(range(parts))


def _compare_replicas(scene: Scene, found: Partition) -> None:
    """Compare the anchors of all replicas, and who owns the parts, as soon as that is decided.

    All replicas follow the owner, also those that it does not wait for: without nodes it takes in no others.
    """
    ground = scene.ground
    deadline_s = time.monotonic() + COMPLETE_WITHIN_S
    while time.monotonic() < deadline_s:
        found.unequal, found.owners = _unequal(scene), _owners(scene)
        if not found.unequal and set(found.owners) == {1}:
            break
        ground.keep()
        time.sleep(0.5)


def _owners(scene: Scene) -> list[int]:
    """Return how many owners of each part the peers name together: two for a moment in a hand-over."""
    told = [scene.status(peer) for peer in scene.ground.peers]
    cards = [card for status in told if status for card in status["peers"]]
    parts = range(scene.ground.shape.parts)
    return [len({card["name"] for card in cards if part in card["owns"]}) for part in parts]


def _unequal(scene: Scene) -> int:
    unequal = 0
    for part in range(scene.ground.shape.parts):
        count = Counter(answers.digest_on_disk(folder) for folder in scene.ground.folders(part))
        unequal += sum(count.values()) - max(count.values(), default=0)
    return unequal


def _compare(scene: Scene, found: Partition) -> None:
    """Compare what nodes were told with the histories of all parts."""
    ground, plan = scene.ground, scene.ground.plan
    ledgers, parts = ground.ledgers(), ground.shape.parts
    side_of = {peer.name: found.sides[peer.slot] for peer in ground.peers}
    for part in range(parts):
        units = range(part, plan.units, parts)
        folder, copies = newest(ground, part), [one for path in ground.copies(part) if (one := read(path))]
        told = answers.journaled(folder, copies, ground.directory / f"whole_{part}")
        seen = answers.received(ledgers, units)
        found.versions += len(seen)
        found.conflicts += answers.conflicts(seen, told)
        found.abandoned += answers.abandoned(copies, chain_of(folder, copies))
        acknowledged = Counter(
            side_of.get(line["hub"], -1)
            for lines in ledgers
            for line in lines
            if line["event"] == "acknowledged" and line["unit"] in units and _is_during(line, found)
        )
        side = max((0, 1), key=lambda side: acknowledged[side])
        found.majority.append(side)
        found.by_majority.append(acknowledged[side])
        found.by_minority.append(acknowledged.total() - acknowledged[side])
        for slot, lines in enumerate(ledgers):
            if found.sides[slot] != side:
                found.trained.append(
                    _longest_push(lines, units, found.healed_s) * plan.step_s / _lasted(found)
                )
    found.owed = sum(owed(attempt, plan.units) for lines in ledgers for attempt in attempts(lines))


def _is_during(line: dict[str, Any], found: Partition) -> bool:
    return bool(found.cut_s + IN_FLIGHT_S < line["t"] < found.healed_s)


def _lasted(found: Partition) -> float:
    return found.healed_s - found.cut_s


def _longest_push(lines: list[dict[str, Any]], units: range, after_s: float) -> int:
    """Return the steps of the longest push of one of these units that was merged after this time."""
    merged = (
        line["steps"]
        for line in lines
        if line["event"] == "answered" and line["t"] > after_s and line["unit"] in units
        if line["verdict"] == "MERGED"
    )
    return max(merged, default=0)
