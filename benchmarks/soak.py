"""Run a thousand rounds while a fifth of the members is exchanged repeatedly, and measure growth.

A hub and paced nodes run as real processes. Most nodes stay, and their agents are processes of their own, so
that they can be measured; the others are killed or leave every few rounds, and are replaced by turns by new
nodes and by former members.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import until
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main

GROWTH = 0.05
LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Numbers of nodes. Every `turn` rounds all `guests` are exchanged.

    With `residents` they are the members.
    """

    rounds: int
    turn: int
    residents: int
    guests: int
    step_s: float
    every: int

    @property
    def plan(self) -> PacedNode:
        return PacedNode(
            hub="",
            name="",
            ledger="",
            numel=1024,
            step_s=self.step_s,
            every=self.every,
            num_samples=5000,
            lease_samples=64,
            max_steps_ahead=8 * self.every,
            expire_s=2.0,
        )


FULL = Size(rounds=1000, turn=10, residents=8, guests=2, step_s=0.05, every=5)
QUICK = Size(rounds=60, turn=10, residents=4, guests=1, step_s=0.02, every=5)
SNAPSHOTS = f"snapshot_bytes = {4 * 2**20}"


@dataclass(frozen=True, slots=True)
class Look:
    """Resources of one process."""

    rss_bytes: int
    descriptors: int


@dataclass(slots=True)
class Soaked:
    """Results. hub, agents: one measurement per turn, the agents' as a mean and a maximum over residents."""

    rounds: list[int] = field(default_factory=list)
    hub: list[Look] = field(default_factory=list)
    agents: list[list[Look]] = field(default_factory=list)
    killed: int = 0
    left: int = 0
    failed: int = 0
    """Nodes that did not leave in good order, or ended though nobody had asked them to."""

    def growth(self, looks: Sequence[float]) -> float:
        """Return the last tenth over the value after the first fifth, as a share."""
        n = len(looks)
        warm = looks[n // 5 : n // 5 + max(1, n // 10)]
        return fmean(looks[-max(1, n // 10) :]) / fmean(warm) - 1


def measure(quick: bool) -> Report:
    size = QUICK if quick else FULL
    soaked = soak(size)
    series = {
        "hub, MB": [look.rss_bytes / 1e6 for look in soaked.hub],
        "hub, descriptors": [float(look.descriptors) for look in soaked.hub],
        "agents, MB": [fmean(look.rss_bytes / 1e6 for look in looks) for looks in soaked.agents],
        "agents, descriptors": [fmean(look.descriptors for look in looks) for looks in soaked.agents],
        "largest agent, MB": [max(look.rss_bytes / 1e6 for look in looks) for looks in soaked.agents],
    }
    members = size.residents + size.guests
    return Report(
        f"soak: {soaked.rounds[-1]} rounds",
        (
            f"{members} paced nodes, {size.every} steps of {size.step_s:g} s a push; {size.guests} of them "
            f"go every {size.turn} rounds, others come.",
            f"{soaked.killed} were killed and {soaked.left} left. Warm: after a fifth of the rounds.",
        ),
        ("of", "warm", "end", "growth"),
        tuple(_row(name, looks, soaked.growth(looks)) for name, looks in series.items()),
        (
            *(
                Bar(
                    f"{name}: growth {percent(soaked.growth(looks))}, wanted <= {percent(GROWTH, 0)}",
                    None if quick else soaked.growth(looks) <= GROWTH,
                )
                for name, looks in series.items()
            ),
            Bar(f"nodes that ended badly: {soaked.failed}", soaked.failed == 0),
        ),
        {"series": series, "rounds": soaked.rounds, "size": asdict(size)},
    )


def _row(name: str, looks: Sequence[float], growth: float) -> tuple[str, ...]:
    return name, f"{looks[len(looks) // 5]:.1f}", f"{looks[-1]:.1f}", percent(growth)


class Guests:
    """Members that are exchanged.

    They leave by turns in good order and by a kill; some of those that join were members before.
    """

    def __init__(self, ground: Field, num: int, soaked: Soaked) -> None:
        self._ground, self._soaked = ground, soaked
        self._new = (f"guest-{i}" for i in count())
        self._gone: list[str] = []
        self._attempts = Counter[str]()
        self._here = [self._welcome(next(self._new)) for _ in range(num)]

    def exchange(self) -> None:
        """Exchange all guests, all of which must be members."""
        for place, name in enumerate(self._here):
            self._send_off(name)
            self._gone.append(name)
            again = len(self._gone) > len(self._here) and self._soaked.killed % 2
            self._here[place] = self._welcome(self._gone.pop(0) if again else next(self._new))

    def settle(self) -> None:
        """Wait until all guests are members; a node that is not cannot leave."""
        until(lambda: all(self._has_joined(name) for name in self._here), f"{self._here} to join")

    def _welcome(self, name: str) -> str:
        self._ground.start_node(name)
        self._attempts[name] += 1
        return name

    def _has_joined(self, name: str) -> bool:
        joined = [line for line in self._ground.lines(name) if line["event"] == "joined"]
        return len(joined) == self._attempts[name]

    def _send_off(self, name: str) -> None:
        if (self._soaked.killed + self._soaked.left) % 2:
            self._ground.kill_node(name)
            self._soaked.killed += 1
        else:
            self._soaked.failed += self._ground.end_node(name, LIMIT_S) != 0
            self._soaked.left += 1
        del self._ground.nodes[name]


def soak(size: Size) -> Soaked:
    """Run the benchmark."""
    soaked = Soaked()
    with (
        tempfile.TemporaryDirectory(prefix="aedit-") as name,
        Field(Path(name), size.plan, more=SNAPSHOTS) as ground,
    ):
        ground.start_hub()
        residents = [f"resident-{i}" for i in range(size.residents)]
        for resident in residents:
            ground.start_node(resident, mode="process")
        guests = Guests(ground, size.guests, soaked)
        until(lambda: _rounds(ground, residents) > 0, "the first round")
        while (done := _rounds(ground, residents)) < size.rounds:
            wanted = done + size.turn
            until(lambda wanted=wanted: _rounds(ground, residents) >= wanted, "rounds")  # type: ignore[misc]
            guests.settle()
            _note(ground, residents, soaked)
            guests.exchange()
        guests.settle()
        soaked.failed += sum(process.poll() is not None for process in ground.nodes.values())
        soaked.failed += sum(code != 0 for code in ground.end_nodes(LIMIT_S).values())
        ground.end_hub()
    return soaked


def _note(ground: Field, residents: Sequence[str], soaked: Soaked) -> None:
    agents = [psutil.Process(ground.nodes[name].pid).children()[0] for name in residents]
    assert ground.hub is not None
    soaked.rounds.append(_rounds(ground, residents))
    soaked.hub.append(_look(psutil.Process(ground.hub.pid)))
    soaked.agents.append([_look(agent) for agent in agents])


def _look(process: psutil.Process) -> Look:
    with process.oneshot():
        return Look(process.memory_info().rss, process.num_fds())


def _rounds(ground: Field, residents: Sequence[str]) -> int:
    """Return the pushes of all units that the hub has accepted of every resident."""
    status = ground.status()
    nodes = {node["name"]: node["accepted"] for node in status["nodes"]} if status else {}
    accepted: int = min(nodes.get(name, 0) for name in residents)
    return accepted // ground.plan.units


if __name__ == "__main__":
    main("soak", "A thousand rounds of coming and going: memory and descriptors.", measure)
