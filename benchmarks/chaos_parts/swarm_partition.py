"""A swarm that is cut in two, and healed: no unit has two answers under one version.

Each part goes on at the side that has most of its replicas; the other one acknowledges nothing, trains on,
and pushes what it has once it is healed.
"""

import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from aedit.async_sgd.hub import NodeReport, run_news
from aedit.async_sgd.inprocess import InProcessHub, make_push
from aedit.async_sgd.rules import Vector
from aedit.clock import VirtualClock
from aedit.launch.config import load
from aedit.proto.agent import Answer, Progress
from aedit.proto.swarm import hosts_of
from aedit.types import News, Verdict
from benchmarks.chaos_parts.accounts import (
    abandoned,
    attempts,
    chain_of,
    conflicts,
    digest_on_disk,
    journaled,
    owed,
    read,
    received,
)
from benchmarks.chaos_parts.swarm import (
    HEALS_WITHIN_S,
    Scene,
    SwarmShape,
    SwarmStory,
    finish,
    machine_places,
    mistakes,
    newest,
    staged,
)
from benchmarks.kit import netns
from benchmarks.kit.cluster import left_behind
from benchmarks.kit.processes import ROOT, in_parallel
from benchmarks.kit.tables import Bar, Report
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import (
    Method,
    Setting,
    adopt_anchors,
    make_hub,
    node_of,
    start_model,
    train_step,
    warm_up,
)
from benchmarks.kit.virtual_hub import finish as finish_training

# -- Loss of runs with and without a partition: real gradients, nodes and parts of a swarm, in virtual time.


SPEEDS_S = (1.0, 0.8, 1.3, 1.0, 0.7, 1.6)
"""Seconds per step of the six nodes."""
PARTS, COPIES, EXPIRE_S = 3, 3, 10.0
CUT_AT, LASTS = 0.3, 0.2
"""Shares of the run: when the partition begins, and how long it lasts."""
SEEDS, STEPS, QUICK_STEPS = (0, 1, 2), 240, 24
RISE = 0.02


class Wires:
    """Connections between nodes and parts."""

    def __init__(self, sides: Sequence[int], seed: int) -> None:
        """Place the parts by keys that are drawn from a seed. sides: of each node."""
        keys = [hashlib.sha256(f"{seed} {node}".encode()).digest() for node in range(len(sides))]
        self._sides, self.is_cut = sides, False
        self._home = []
        for part in range(PARTS):
            count = Counter(sides[keys.index(key)] for key in hosts_of("loss", part, keys, COPIES))
            self._home.append(count.most_common(1)[0][0])

    def reaches(self, node: int, part: int) -> bool:
        """Return whether the owner of a part and a node can call each other."""
        return not self.is_cut or self._sides[node] == self._home[part]


@dataclass(slots=True)
class _Sent:
    """A push under way."""

    seq: int
    values: Vector
    facts: dict[str, int]
    number: int = 0
    """That it has at the hub; 0 until it has been delivered."""


class PartsLink:
    """A node's link to all parts: what cannot be delivered waits, as at its agent."""

    def __init__(self, parts: Sequence[InProcessHub], index: int, wires: Wires) -> None:
        """Join all parts."""
        self._parts, self._index, self._wires = parts, index, wires
        self._name = f"node-{index}"
        for part in parts:
            self.node = part.join(self._name)
        numels = [unit.numel for unit in parts[0].layout.units]
        self.anchors: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.outbox: Sequence[Vector] = [np.zeros(n, np.float32) for n in numels]
        self.bytes_sent = 0
        self._sent: dict[int, _Sent] = {}
        self._news = News(age_s=0.0, nodes=len(parts))
        self.longest = 0
        """Most steps of a push that was merged."""

    @property
    def is_member(self) -> bool:
        """Return True: a node that was given up joins again."""
        return True

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Fetch every unit; the first node brings the first anchors."""
        for unit, anchor in enumerate(self.anchors):
            if self._part(unit).hub.state.units[unit].version == 0:
                self._offer(unit, anchor, {"base": 0, "steps": 0, "tokens": 0})
        return tuple(self._fetch(unit) for unit in range(len(self.anchors)))

    def written(self, unit: int, seq: int) -> None:
        """See `Link.written`. There is one rank, which calls `send` next."""

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int, used: int = 0) -> None:
        """Push outbox[unit], at once or when the part can be reached."""
        facts = {"base": base, "steps": steps, "tokens": tokens}
        self._sent[unit] = _Sent(seq, self.outbox[unit].copy(), facts)
        self._deliver(unit)

    def answer(self, unit: int, seq: int) -> Answer | None:
        """Return the part's decision on push `seq` once there is one."""
        sent = self._sent[unit]
        self._deliver(unit)
        part = self._part(unit)
        part.tick()
        told = part.hub.state.members[self._node(unit)].decisions.get(unit)
        is_decided = sent.number and told is not None and told.seq == sent.number
        if not self._reaches(unit) or not is_decided or told is None or told.verdict == Verdict.NONE:
            return None
        if told.verdict == Verdict.MERGED:
            self.longest = max(self.longest, sent.facts["steps"])
        return Answer(seq, self._fetch(unit), told.verdict)

    def news(self) -> News:
        """Return what the owner of part 0 has said last."""
        part = self._parts[0]
        if self._wires.reaches(self._index, 0) and self._is_in(part):
            told = run_news(part.hub, part.hub.state.names[self._name], part.clock())
            self._news = News(round=told.round, pace_steps=told.pace_steps, nodes=told.nodes)
        return self._news

    def tell(self, progress: Progress) -> None:
        """Report nothing: heartbeats tell the speed."""

    def heartbeat(self, steps_per_s: float) -> None:
        """Say to all parts that can be reached that the node is there; join those again that gave it up."""
        for number, part in enumerate(self._parts):
            if self._wires.reaches(self._index, number):
                node = part.join(self._name) if not self._is_in(part) else part.hub.state.names[self._name]
                part.heartbeat(node, NodeReport(steps_per_s=steps_per_s, state="training"))

    def leases(self, upto: int = 0) -> Sequence[tuple[int, int]]:
        """Return nothing: the node has its own data."""
        return ()

    def residuals(self) -> Mapping[int, Vector]:
        """Return nothing: values are sent as they are."""
        return {}

    def leave(self, timeout_s: float) -> None:
        """Leave all parts."""
        for part in self._parts:
            part.leave(part.hub.state.names[self._name])

    def _part(self, unit: int) -> InProcessHub:
        return self._parts[unit % len(self._parts)]

    def _node(self, unit: int) -> int:
        return self._part(unit).hub.state.names[self._name]

    def _is_in(self, part: InProcessHub) -> bool:
        return part.hub.state.members[part.hub.state.names[self._name]].live

    def _reaches(self, unit: int) -> bool:
        return self._wires.reaches(self._index, unit % len(self._parts))

    def _deliver(self, unit: int) -> None:
        sent = self._sent[unit]
        if not sent.number and self._reaches(unit) and self._is_in(self._part(unit)):
            sent.number = self._offer(unit, sent.values, sent.facts)

    def _offer(self, unit: int, values: Vector, facts: dict[str, int]) -> int:
        part, node = self._part(unit), self._node(unit)
        number = part.hub.state.members[node].received.get(unit, 0) + 1
        layout = part.layout.units[unit]
        part.offer(make_push(values, layout, node=node, unit=unit, seq=number, **facts))
        self.bytes_sent += values.nbytes
        return number

    def _fetch(self, unit: int) -> int:
        version, values = self._part(unit).hub.anchor(unit)
        self.anchors[unit][:] = values
        return version


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a run."""

    loss: float
    """Held-out loss of the last anchors, nats per byte."""
    longest: int
    """Most steps of a push that was merged."""


def setting_of(seed: int, steps: int) -> Setting:
    """Return the setting: six nodes and a model of three units."""
    return Setting(seed=seed, step_s=SPEEDS_S, steps=steps, num_layers=2, warmup_steps=64)


def train(setting: Setting, sides: Sequence[int]) -> Outcome:
    """Train a swarm that is cut into these sides for a while, or never if all are on one."""
    config, clock, start = load(ROOT / "configs" / "swarm.toml", []).config, VirtualClock(), warm_up(setting)
    method = Method(
        hub=replace(config.hub, expire_s=EXPIRE_S, codec="fp32"),
        outer=config.outer,
        penalty=config.edit.penalty,
        pace="seconds",
    )
    models = [start_model(setting, start) for _ in sides]
    parts = [make_hub(setting, method, models[0][0], clock, (k, PARTS)) for k in range(PARTS)]
    wires = Wires(sides, setting.seed)
    links = [PartsLink(parts, index, wires) for index in range(len(sides))]
    nodes = [
        node_of(link, setting, method, index, pair, clock)
        for index, (link, pair) in enumerate(zip(links, models, strict=True))
    ]

    def tick() -> None:
        for part in parts:
            part.tick()

    for node in nodes:
        node.sync.__enter__()
    total = setting.steps * len(nodes)
    for done in range(total):
        wires.is_cut = CUT_AT <= done / total < CUT_AT + LASTS
        node = min(nodes, key=lambda node: node.next_s)
        clock.advance_to(node.next_s)
        for other in nodes:
            other.link.heartbeat(1 / other.step_s)
        tick()
        samples = node.shard.take(setting.batch_size)
        train_step(node.sync.model, node.sync.optimizers.outermost, setting.lr_after(done), samples)
        node.sync.step()
        node.next_s += node.step_s
    finish_training(tick, clock, nodes)
    adopt_anchors(probe := models[0][0], lambda unit: parts[unit % PARTS].hub.anchor(unit), nodes[0].sync)
    loss = held_out_loss(probe, setting.seq_len, setting.held_out)
    return Outcome(loss, max(link.longest for link in links))


def report(sizes: str, *, quick: bool) -> Report:
    """Return the table of runs with a partition into sides of these sizes, and without."""
    seeds, steps = (SEEDS[:1], QUICK_STEPS) if quick else (SEEDS, STEPS)
    sides = [side for side, size in enumerate(sizes.split(",")) for _ in range(int(size))]
    jobs = [(setting_of(seed, steps), cut) for seed in seeds for cut in ([0] * len(sides), sides)]
    outcomes = in_parallel(train, jobs)
    pairs = list(zip(outcomes[::2], outcomes[1::2], strict=True))
    rises = [cut.loss / calm.loss - 1 for calm, cut in pairs]
    rows = tuple(
        (str(seed), *(f"{one.loss:.4f}" for one in (calm, cut)), f"{rise:+.2%}", str(cut.longest))
        for seed, (calm, cut), rise in zip(seeds, pairs, rises, strict=True)
    )
    mean = sum(rises) / len(rises)
    return Report(
        "loss with a partition",
        (f"Real gradients in virtual time: six unequal nodes, {steps} steps each on average, {PARTS} parts.",
         f"Cut into sides of {sizes} from {CUT_AT:.0%} to {CUT_AT + LASTS:.0%} of it; `configs/swarm.toml`."),
        ("seed", "calm", "partition", "rise", "steps of the longest push"),
        rows,
        (Bar(f"held-out loss rises by {mean:+.2%}, wanted <= {RISE:.0%}", None if quick else mean <= RISE),),
        {"rises": rises, "outcomes": [asdict(one) for one in outcomes]},
    )  # fmt: skip


# -- the benchmark


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
    loss = report(sizes, quick=quick)
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
        count = Counter(digest_on_disk(folder) for folder in scene.ground.folders(part))
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
        told = journaled(folder, copies, ground.directory / f"whole_{part}")
        seen = received(ledgers, units)
        found.versions += len(seen)
        found.conflicts += conflicts(seen, told)
        found.abandoned += abandoned(copies, chain_of(folder, copies))
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
