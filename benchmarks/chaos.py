"""Ten minutes of faults: nodes and the hub are killed, wires are cut, and the books must balance to the step.

Real processes: one hub, six nodes of a fixed pace, each in a network namespace of its own where this machine
lets us have them. Every step of a node adds 1 to its own element of every unit, so the anchors say how many
steps of whom have been merged. Goodput is compared with the same run without faults.
"""

import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from aedit.launch.hub.replay import anchors_of, pushes_of

from benchmarks import netns
from benchmarks.field import Field, answered
from benchmarks.netns import Place
from benchmarks.paced_node import PacedNode
from benchmarks.table import Bar, Report, main, percent

NODES = tuple(f"node-{i}" for i in range(6))
RATE_MBIT = 1000
BACK_S = 5.0
GOODPUT = 0.90


@dataclass(frozen=True, slots=True)
class Plan:
    """How long, and how much goes wrong."""

    seconds: float
    calm_s: float
    """Without faults, for comparison."""
    kill_every_s: float
    hub_kills: int
    cuts: int
    cut_s: float


FULL = Plan(seconds=600, calm_s=60, kill_every_s=20, hub_kills=5, cuts=8, cut_s=10)
QUICK = Plan(seconds=40, calm_s=10, kill_every_s=8, hub_kills=2, cuts=2, cut_s=4)


@dataclass(slots=True)
class Story:
    """What was done and what was seen."""

    node_kills: int = 0
    cuts: int = 0
    half_open: int = 0
    hub_back_s: list[float] = field(default_factory=list)
    goodput: float = 0.0
    """Accepted steps per second."""
    lost: int = 0
    """Steps that are in answered or journaled pushes and not in the anchors, or the other way round."""
    unknown: int = 0
    """Pushes that a node saw accepted and the journal lacks."""
    died: int = 0
    """Nodes that ended though nobody had killed them."""
    longest_s: float = 0.0
    """Longest step of a survivor."""
    replayed: bool = False
    left_behind: int = 0


def measure(quick: bool) -> Report:
    plan = QUICK if quick else FULL
    calm = _run(Plan(plan.calm_s, 0, 1e9, 0, 0, 0), random.Random(0))
    story = _run(plan, random.Random(1))
    share = story.goodput / calm.goodput
    bars = (
        Bar(f"goodput {percent(share)} of the calm run, wanted >= {percent(GOODPUT, 0)}", share >= GOODPUT),
        Bar(f"steps lost or counted twice: {story.lost}; accepted pushes not in the journal: {story.unknown}",
            story.lost == story.unknown == 0),
        Bar(f"hub back within {BACK_S:g} s of its start: longest {max(story.hub_back_s, default=0):.2f} s",
            max(story.hub_back_s, default=0) <= BACK_S),
        Bar("replaying the journal gives the same anchors, bit for bit", story.replayed),
        Bar(f"nodes that ended though nobody killed them: {story.died}", story.died == 0),
        Bar(f"processes left behind: {story.left_behind}", story.left_behind == 0),
    )  # fmt: skip
    why = netns.why_not()
    wires = "each in a network namespace" if why is None else f"on one network ({why}), so no wire is cut"
    return Report(
        "chaos",
        (f"One hub and {len(NODES)} nodes of a fixed pace, {wires}; {plan.seconds:g} s of faults.",
         f"Calm: the same for {plan.calm_s:g} s without faults. Steps are those in accepted pushes."),
        ("run", "steps/s", "nodes killed", "hub killed", "wires cut", "half-open", "longest step s"),
        tuple(_row(name, s) for name, s in (("calm", calm), ("faults", story))),
        bars,
        {"share": share, "calm": asdict(calm), "faults": asdict(story)},
    )  # fmt: skip


def _row(name: str, story: Story) -> tuple[str, ...]:
    numbers = (story.node_kills, len(story.hub_back_s), story.cuts, story.half_open)
    return (name, f"{story.goodput:.1f}", *map(str, numbers), f"{story.longest_s:.2f}")


def _run(plan: Plan, chance: random.Random) -> Story:
    with tempfile.TemporaryDirectory() as name, _places() as places:
        paced = PacedNode(hub="", name="", ledger="")
        with Field(Path(name), paced, places=places) as ground:
            story = Story()
            ground.start_hub()
            for node in NODES:
                ground.start_node(node)
            _until(lambda: all(ground.lines(node) for node in NODES), 60, "every node to join")
            _disturb(ground, plan, chance, story)
            _end(ground, story)
        story.left_behind = len(ground.left_behind())
        return story


@contextmanager
def _places() -> Iterator[list[Place]]:
    if netns.why_not() is not None:
        yield []
        return
    with netns.network(1 + len(NODES), RATE_MBIT) as places:
        yield places


def _disturb(ground: Field, plan: Plan, chance: random.Random, story: Story) -> None:
    """Let `plan` happen, in real time."""
    before, began = _accepted(ground), time.monotonic()
    for at_s, act in _faults(plan, chance, bool(ground.places)):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        story.died += sum(process.poll() is not None for process in ground.nodes.values())
        act(ground, story)
    time.sleep(max(0.0, began + plan.seconds - time.monotonic()))
    story.died += sum(process.poll() is not None for process in ground.nodes.values())
    story.goodput = (_accepted(ground) - before) / (time.monotonic() - began)


Act = Callable[[Field, Story], None]


def _faults(plan: Plan, chance: random.Random, wires: bool) -> list[tuple[float, Act]]:
    """(second, what) in order."""
    acts: list[tuple[float, Act]] = []
    at_s = plan.kill_every_s
    while at_s < plan.seconds - 5:
        acts.append((at_s, _kill(chance.choice(NODES))))
        at_s += plan.kill_every_s
    for k in range(plan.hub_kills):
        acts.append((plan.seconds * (k + 0.7) / (plan.hub_kills + 0.5), _kill_hub))
    for k in range(plan.cuts if wires else 0):
        at_s = plan.seconds * (k + 0.4) / (plan.cuts + 0.5)
        name, kills = chance.choice(NODES), k % 4 == 3
        acts.append((at_s, _cut(name, kills)))
        acts.append((at_s + plan.cut_s, _mend(name, kills)))
    return sorted(acts, key=lambda entry: entry[0])


def _kill(name: str) -> Act:
    def act(ground: Field, story: Story) -> None:
        ground.kill_node(name)
        ground.start_node(name)  # as torchrun would
        story.node_kills += 1

    return act


def _kill_hub(ground: Field, story: Story) -> None:
    ground.kill_hub()
    story.hub_back_s.append(ground.start_hub())


def _cut(name: str, kills: bool) -> Act:
    """With `kills` the node also dies behind the cut: the hub keeps a connection to nobody."""

    def act(ground: Field, story: Story) -> None:
        ground.cut(name)
        story.cuts += 1
        if kills:
            ground.kill_node(name)
            ground.start_node(name)
            story.half_open += 1

    return act


def _mend(name: str, kills: bool) -> Act:
    return lambda ground, story: ground.mend(name)


def _accepted(ground: Field) -> float:
    """Steps in merged pushes that the nodes know of, mean over units."""
    done = [push for name in NODES for push in answered(ground.lines(name)) if push.verdict == "MERGED"]
    return sum(push.steps for push in done) / ground.plan.units


def _end(ground: Field, story: Story) -> None:
    """Everybody leaves in good order, and then the books are compared."""
    codes = ground.end_nodes()
    story.died += sum(code != 0 for code in codes.values())
    ground.end_hub()
    last = [lines[-1] for name in NODES if (lines := ground.lines(name))]
    story.longest_s = max((line.get("longest_s", 0.0) for line in last), default=0.0)
    directory = ground.directory / "hub"
    journal = Counter[tuple[int, int]]()
    for push in pushes_of(directory):
        journal[push.node, push.unit] += push.steps
    seen = Counter[tuple[int, int]]()
    for name in NODES:
        for done in answered(ground.lines(name)):
            seen[done.node, done.unit] += done.steps if done.verdict == "MERGED" else 0
    story.unknown = sum(max(0, seen[key] - journal[key]) for key in seen)
    anchors = anchors_of(directory)
    story.lost = sum(abs(int(anchors[unit][node]) - steps) for (node, unit), steps in journal.items())
    story.replayed = _digests(anchors) == _digests(anchors_of(directory, from_the_beginning=True))


def _digests(anchors: dict[int, np.ndarray]) -> list[str]:
    return [hashlib.sha256(anchors[unit].tobytes()).hexdigest() for unit in sorted(anchors)]


def _until(true: Callable[[], bool], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s for {what}"
        time.sleep(0.1)


if __name__ == "__main__":
    main("chaos", "Faults for ten minutes: what is lost, and how much work still gets done.", measure)
