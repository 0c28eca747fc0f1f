"""Kill nodes and the hub and cut links for ten minutes, and compare all accounts to the step.

Real processes: one hub, six nodes of a fixed pace, each in a network namespace of its own where the machine
permits it. Every step of a node adds 1 to its own elements of every unit, so the anchors show how many steps
of each node have been merged. Goodput is compared with the same run without faults.

    python -m benchmarks.chaos --standby 2

runs two standbys beside the hub, and hubs fail as well as nodes (`chaos_parts/failover.py`).

    python -m benchmarks.chaos --swarm

runs six machines without a hub; whole machines fail, and the processes of hivemind's hash table by which two
find the others (`chaos_parts/swarm.py`).

    python -m benchmarks.chaos --partition 3,3

cuts six such machines into two sides for a minute (`chaos_parts/swarm_partition.py`).
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from aedit.launch.hub import read_accounts
from aedit.launch.records import SampleVerdict
from benchmarks.chaos_parts import failover, swarm, swarm_partition
from benchmarks.chaos_parts.accounts import Books, compare, journal_kept
from benchmarks.chaos_parts.failover import NODES, network_of
from benchmarks.chaos_parts.swarm import KILLED_S
from benchmarks.kit import netns
from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import until
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main

NODE = PacedNode(
    hub="", name="", ledger="", every=25, large_numel=270_000, large_every=250, call_timeout_s=3.0
)
"""Its large unit has more than one message holds; its calls give up while a wire is cut."""
AIM_S = 3.0
"""How long a kill waits for a node that is pushing its large unit."""
BACK_S = 5.0
GOODPUT = 0.90


@dataclass(frozen=True, slots=True)
class Plan:
    """Duration, and number of faults."""

    seconds: float
    calm_s: float
    """Without faults, for comparison."""
    kill_every_s: float
    hub_kills: int
    cuts: int
    cut_s: float


FULL = Plan(seconds=600, calm_s=60, kill_every_s=20, hub_kills=5, cuts=8, cut_s=10)
QUICK = Plan(seconds=40, calm_s=10, kill_every_s=8, hub_kills=2, cuts=2, cut_s=6)


@dataclass(slots=True)
class Story:
    """Faults applied and results."""

    node_kills: int = 0
    half_sent: int = 0
    """Of those, nodes whose large unit was on its way."""
    cuts: int = 0
    half_open: int = 0
    hub_back_s: list[float] = field(default_factory=list)
    died: int = 0
    """Nodes that ended though nobody had killed them, or not with exit code 0."""
    longest_s: float = 0.0
    """Longest step of the nodes' last attempts."""
    leave_s: float = 0.0
    """From asking all nodes to leave to the last one's end."""
    left_behind: int = 0
    books: Books | None = None
    samples: str = ""
    """What `aedit ledger` says."""
    samples_agree: bool = False
    samples_twice: int = 0
    """Samples that were trained twice."""


def measure(args: argparse.Namespace) -> Report | list[Report]:
    """Return the table of the run that the options name."""
    if args.partition:
        return swarm_partition.measure(args.partition, args.minutes, args.seed, quick=args.quick)
    if args.swarm:
        return swarm.measure(
            args.minutes,
            args.seed,
            copies=args.copies,
            quick=args.quick,
            back_within_s=args.back_within,
        )
    if args.standby:
        return failover.measure(args.minutes, args.standby, args.seed, quick=args.quick)
    return _alone(args.quick)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run with standbys, and of a swarm."""
    about = "run N standbys (2 without a number); hubs fail as well as nodes"
    parser.add_argument("--standby", type=int, nargs="?", const=2, default=0, metavar="N", help=about)
    about = "run a swarm of six machines; all fail as a whole, owners and the first one included"
    parser.add_argument("--swarm", action="store_true", help=about)
    about = "copies of each part of a swarm (default 3): 2 f + 1 stand f machines that are away at once"
    parser.add_argument("--copies", type=int, choices=(3, 5), default=3, help=about)
    about = (
        f"a machine of a swarm that was killed, or another, starts within S seconds (default {KILLED_S:g})"
    )
    parser.add_argument("--back-within", type=float, default=KILLED_S, metavar="S", help=about)
    about = "run a swarm of six machines that is cut once into two sides of so many machines, and healed"
    parser.add_argument("--partition", choices=("3,3", "2,4"), metavar="3,3|2,4", help=about)
    about = (
        "minutes of faults (default 10, with --quick 1), or of the partition (default 1, with --quick 0.5)"
    )
    parser.add_argument("--minutes", type=float, metavar="M", help=about)
    about = "seed of the faults (default 1); not of a hub alone"
    parser.add_argument("--seed", type=int, default=1, help=about)


def _alone(quick: bool) -> Report:
    plan = QUICK if quick else FULL
    calm = tell(Plan(plan.calm_s, 0, 1e9, 0, 0, 0), random.Random(0))
    story = tell(plan, random.Random(1))
    assert calm.books is not None
    assert story.books is not None
    share = story.books.steps_per_s / calm.books.steps_per_s
    return Report(
        "chaos",
        (f"One hub and {len(NODES)} nodes of a fixed pace, {netns.wires()}; {plan.seconds:g} s of faults.",
         f"Calm: the same for {plan.calm_s:g} s without faults. Steps are those in accepted pushes."),
        ("run", "steps/s", "nodes killed", "in a push", "hub killed", "cuts", "half-open", "longest step s"),
        (_row("calm", calm, calm.books), _row("faults", story, story.books)),
        _bars(story, story.books, share, quick),
        {"share": share, "calm": asdict(calm), "faults": asdict(story)},
    )  # fmt: skip


def _bars(story: Story, books: Books, share: float, quick: bool) -> tuple[Bar, ...]:
    back_s = max(story.hub_back_s, default=0.0)
    reached = None if quick else share >= GOODPUT
    return (
        Bar(f"goodput {percent(share)} of the calm run, wanted >= {percent(GOODPUT, 0)}", reached),
        Bar(f"accepted steps that the journal lacks: {books.unknown}", books.unknown == 0),
        Bar(f"steps in the journal that nobody has made: {books.twice}", books.twice == 0),
        Bar(f"elements of anchors that are not the sum of accepted pushes: {books.lost}", books.lost == 0),
        Bar(f"steps of survivors that are in no accepted push: {books.owed}", books.owed == 0),
        Bar(f"hub back within {BACK_S:g} s of its start: longest {back_s:.2f} s", back_s <= BACK_S),
        Bar("replaying the journal gives the same anchors, bit for bit", books.replayed),
        Bar(f"calls that ended over 1 s after their deadline: {books.late_calls}", books.late_calls == 0),
        Bar(f"nodes that ended though nobody killed them: {story.died}", story.died == 0),
        Bar(f"processes left behind: {story.left_behind}", story.left_behind == 0),
        Bar(f"samples: {story.samples}", story.samples_agree),
        Bar(f"samples trained twice: {story.samples_twice}", story.samples_twice == 0),
    )


def _row(name: str, story: Story, books: Books) -> tuple[str, ...]:
    killed = (story.node_kills, story.half_sent, len(story.hub_back_s))
    numbers = (*killed, story.cuts, story.half_open)
    return (name, f"{books.steps_per_s:.1f}", *map(str, numbers), f"{story.longest_s:.2f}")


def tell(plan: Plan, chance: random.Random) -> Story:
    """Apply `plan` to a hub and its nodes in real time; compare the accounts."""
    with tempfile.TemporaryDirectory() as name, network_of(hubs=1) as places:
        with Field(Path(name), NODE, places=places) as ground, journal_kept(ground):
            story = Story()
            ground.start_hub()
            for node in NODES:
                ground.start_node(node)
            until(lambda: all(ground.lines(node) for node in NODES), "every node to join")
            _disturb(ground, plan, chance, story)
            _end(ground, story)
        story.left_behind = len(ground.left_behind())
        return story


def _disturb(ground: Field, plan: Plan, chance: random.Random, story: Story) -> None:
    began = time.monotonic()
    for at_s, act in _faults(plan, chance, bool(ground.places)):
        time.sleep(max(0.0, began + at_s - time.monotonic()))
        act(ground, story)
    time.sleep(max(0.0, began + plan.seconds - time.monotonic()))


Act = Callable[[Field, Story], None]


def _faults(plan: Plan, chance: random.Random, wires: bool) -> list[tuple[float, Act]]:
    """Return (second, fault) in order."""
    acts: list[tuple[float, Act]] = []
    at_s = plan.kill_every_s
    while at_s < plan.seconds - 5:
        acts.append((at_s, _kill(chance.choice(NODES), chance.uniform(0, 0.1))))
        at_s += plan.kill_every_s
    for k in range(plan.hub_kills):
        acts.append((plan.seconds * (k + 0.7) / (plan.hub_kills + 0.5), _kill_hub))
    for k in range(plan.cuts if wires else 0):
        at_s = plan.seconds * (k + 0.4) / (plan.cuts + 0.5)
        name, kills = chance.choice(NODES), k % 4 == 1
        acts.append((at_s, _cut(name, kills)))
        acts.append((at_s + plan.cut_s, _mend(name)))
    return sorted(acts, key=lambda entry: entry[0])


def _kill(name: str, after_s: float) -> Act:
    """Return a fault: kill the next node that pushes its large unit; `name` if none does soon.

    The kill comes `after_s` after the node was seen to push.
    """

    def act(ground: Field, story: Story) -> None:
        found, deadline = None, time.monotonic() + AIM_S
        while found is None and time.monotonic() < deadline:
            time.sleep(0.005)
            found = next((node for node in NODES if _pushes_large(ground, node)), None)
        time.sleep(after_s)
        _again(ground, found or name, story)
        story.half_sent += found is not None

    return act


def _pushes_large(ground: Field, name: str) -> bool:
    last = ground.latest(name)
    return last.get("event") == "sent" and last["unit"] == 0


def _again(ground: Field, name: str, story: Story) -> None:
    """Kill a node, and start it as torchrun would."""
    story.died += ground.nodes[name].poll() is not None
    ground.kill_node(name)
    ground.start_node(name)
    story.node_kills += 1


def _kill_hub(ground: Field, story: Story) -> None:
    ground.kill_hub()
    story.hub_back_s.append(ground.start_hub())


def _cut(name: str, kills: bool) -> Act:
    """Return a fault: cut a node off.

    With `kills` the node also dies during the cut, and the hub keeps its dead connection.
    """

    def act(ground: Field, story: Story) -> None:
        ground.cut(name)
        story.cuts += 1
        if kills:
            _again(ground, name, story)
            story.half_open += 1

    return act


def _mend(name: str) -> Act:
    return lambda ground, story: ground.mend(name)


def _end(ground: Field, story: Story) -> None:
    """Let all nodes leave in good order; then compare the accounts."""
    ended_s = time.monotonic()
    codes = ground.end_nodes()
    story.leave_s = time.monotonic() - ended_s
    story.died += sum(code != 0 for code in codes.values())
    ground.end_hub()
    story.longest_s = max(ground.lines(name)[-1].get("longest_s", 0.0) for name in NODES)
    story.books = compare(ground, ended_s)
    accounts = read_accounts(ground.directory)
    story.samples, story.samples_agree = accounts.summary(), not accounts.disagreements
    story.samples_twice = accounts.count(SampleVerdict.TWICE)


if __name__ == "__main__":
    about = "Faults for ten minutes: what is lost, and how much work still gets done."
    main("chaos", about, measure, options=options)
