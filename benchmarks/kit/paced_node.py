"""Run a node without a model: steps of a fixed duration, and values that can be checked exactly.

Every step adds 1 to the node's own elements of every unit: each 64th one, so that all parts of a push have
some. Over a hub that averages with rate 1 and merges every arrival, each of those elements of the anchor is
therefore the number of steps of this node that have been merged: a push that is lost, counted twice or
applied in part is detected. No torch, so that it starts in half a second and sixty-four of them fit on two
cores.

    python -m benchmarks.kit.paced_node '{"hub": "127.0.0.1:7000", "name": "a", ...}'     fields of PacedNode

Writes one JSON line per event to its ledger: joined, sent, answered, late, left.
"""

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from aedit.launch.records import PositionLog
from aedit.proto.agent import AgentLink, AgentPlan, Answer, Progress, replicas_of_parts, start_agent
from aedit.types import TensorLayout, UnitLayout, Verdict

_OWNERS_S = 300.0
"""Longest time until all parts of a swarm have an owner."""
LATE_S = 0.1
"""A step that takes so much longer than it should is put on record."""
STRIDE = 64
"""Nodes that have elements of their own, and elements from one of a node's to its next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PacedNode:
    """Plan of one node."""

    hub: str
    name: str
    ledger: str
    run: str = "paced"
    standby: str = ""
    replicas: str = ""
    """File in which its peer keeps where the parts of a swarm are, in place of `hub` and `standby`."""
    units: int = 4
    numel: int = 4096
    step_s: float = 0.02
    every: int = 10
    """Steps between two pushes."""
    large_numel: int = 0
    """Elements of unit 0, if it is larger than the others."""
    large_every: int = 0
    """Steps between two pushes of unit 0; 0: as of the others."""
    max_steps_ahead: int = 100_000
    samples_per_step: int = 4
    num_samples: int = 1_000_000
    codec: str = "fp32"
    heartbeat_s: float = 0.25
    expire_s: float = 5.0
    call_timeout_s: float = 30.0
    join_s: float = 60.0
    """Longest time until it is a member of all parts."""
    max_steps: int = 10**9
    prefers: int | None = None
    mode: str = "thread"
    lease_samples: int = 2048
    donor: str = ""
    """HOST:PORT where it gives anchors to others; empty: it does not."""
    rejoin: str = ""
    """Secret of the node, kept over restarts; empty: a killed node comes back when its place has expired."""
    votes: str = ""
    """Folder that keeps its votes over restarts; empty: a new process is another voter."""

    @property
    def numels(self) -> list[int]:
        """Return the number of elements of each unit."""
        return [self.large_numel or self.numel, *[self.numel] * (self.units - 1)]

    @property
    def intervals(self) -> list[int]:
        """Return the steps between two pushes of each unit."""
        return [self.large_every or self.every, *[self.every] * (self.units - 1)]


@dataclass(slots=True)
class Unit:
    """One unit as the node sees it. `steps`: its own element minus the anchor's, whether sent or not."""

    version: int
    seq: int = 0
    steps: int = 0
    sent: int = 0
    """Steps in the push under way; 0 without one."""
    round: int = 0
    """Number of that push among those of all units."""


class Walker:
    """Takes steps at a fixed pace, and exchanges after `every` steps once the last answer has arrived."""

    def __init__(
        self,
        plan: PacedNode,
        link: AgentLink,
        note: Callable[..., None],
        ending: threading.Event,
    ) -> None:
        """Set up the node; ending: set when it is to push what it owes and leave."""
        self.plan, self.link, self.note = plan, link, note
        self.records, self.rounds, self.blocks = PositionLog(), 0, list[tuple[int, int]]()
        self.steps = 0
        self.longest_s = 0.0
        """The longest step: how much a fault elsewhere has held this node up."""
        self.leased = 0
        self.ending = ending
        self.units = [Unit(version) for version in link.join(plan.join_s)]
        self.own = slice(link.node % STRIDE, None, STRIDE)
        note("joined", node=link.node)

    def walk(self) -> None:
        """Walk until the hub ends the run or a signal comes; then push what is owed."""
        ended_at = time.monotonic()
        while not (self.ending.is_set() or self.link.news().finished or self.steps >= self.plan.max_steps):
            deadline = ended_at + self.plan.step_s
            if self._may_go_on():
                self.steps += 1
                self.records.trained(self.steps, self._positions())
                for unit in self.units:
                    unit.steps += 1
            self._exchange(self.plan.intervals)
            self._tell()
            time.sleep(max(0.0, deadline - time.monotonic()))
            took_s = time.monotonic() - ended_at
            self.longest_s = max(self.longest_s, took_s)
            is_late = took_s > self.plan.step_s + LATE_S
            if is_late:
                self.note("late", by_s=took_s - self.plan.step_s)
            # A process that wakes up some milliseconds late takes the next step sooner: its pace is fixed.
            ended_at = time.monotonic() if is_late else deadline

    def leave(self, timeout_s: float) -> None:
        """Push the rest, wait for the answers, and leave."""
        deadline = time.monotonic() + timeout_s
        while any(unit.sent or unit.steps for unit in self.units):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.plan.name}: the hub did not answer within {timeout_s:g} s")
            self._exchange([1] * self.plan.units)
            time.sleep(0.01)
        self._tell()
        self.link.leave(timeout_s)
        self.records.stop(self.steps, "done")
        self.note("left", steps=self.steps, longest_s=self.longest_s)

    def _may_go_on(self) -> bool:
        has_data = self._leased() >= (self.steps + 1) * self.plan.samples_per_step
        return has_data and max(unit.steps for unit in self.units) < self.plan.max_steps_ahead

    def _leased(self) -> int:
        """Return the number of samples leased so far; the link is asked only when they are used up."""
        needed = (self.steps + 1) * self.plan.samples_per_step
        if self.leased < needed:
            self.blocks = list(self.link.leases(needed))
            self.leased = sum(end - start for start, end in self.blocks)
        return self.leased

    def _positions(self) -> list[int]:
        """Return the positions of the step that has just been taken."""
        last, found = self.steps * self.plan.samples_per_step, list[int]()
        before = 0
        for start, end in self.blocks:
            begin = max(last - self.plan.samples_per_step - before, 0)
            found += range(start + begin, min(end, start + last - before))
            before += end - start
        return found

    def _exchange(self, intervals: list[int]) -> None:
        for i, unit in enumerate(self.units):
            if unit.sent:
                self._land(i, unit, self.link.answer(i, unit.seq))
            elif unit.steps >= intervals[i]:
                self._send(i, unit)

    def _send(self, i: int, unit: Unit) -> None:
        outbox = self.link.outbox[i]
        outbox.fill(0.0)
        outbox[self.own] = -float(unit.steps)
        unit.seq, unit.sent = unit.seq + 1, unit.steps
        self.rounds += 1
        unit.round = self.rounds
        self.records.opened(unit.round, self.steps, (i,), numbers=(self.link.next_number(i),))
        self.note("sent", unit=i, seq=unit.seq, base=unit.version, steps=unit.sent)
        self.link.written(i, unit.seq)
        tokens, used = (n * self.plan.samples_per_step for n in (unit.sent, self.steps))
        self.link.send(i, unit.seq, base=unit.version, steps=unit.sent, tokens=tokens, used=used)

    def _land(self, i: int, unit: Unit, answer: Answer | None) -> None:
        if answer is None:
            return
        lost = answer.verdict == Verdict.REFUSED
        facts = {"version": answer.version, "verdict": answer.verdict.name}
        dropped = answer.verdict == Verdict.DISTRUSTED
        self.records.ended(unit.round, self.steps, refused=[i] * lost, distrusted=[i] * dropped)
        self.note("answered", unit=i, seq=unit.seq, steps=unit.sent, **facts)
        unit.version = answer.version
        unit.steps -= 0 if lost else unit.sent
        unit.sent = 0

    def _tell(self) -> None:
        busy_s, drawn = self.steps * self.plan.step_s, self.steps * self.plan.samples_per_step
        self.link.tell(Progress(self.steps, busy_s=busy_s, used=self._used(), drawn=drawn))

    def _used(self) -> int:
        return (self.steps - max(unit.steps for unit in self.units)) * self.plan.samples_per_step


@dataclass(slots=True)
class Ledger:
    """Node's own record of its events, one line each."""

    path: Path
    began: float = field(default_factory=time.monotonic)

    def note(self, event: str, **facts: Any) -> None:
        line = {"t": time.monotonic(), "event": event, **facts}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def agent_plan(plan: PacedNode) -> AgentPlan:
    """Return the plan of its agent; the run is the same for all nodes."""
    return AgentPlan(
        addresses=tuple(
            replicas_of_parts(Path(plan.replicas), _OWNERS_S) if plan.replicas else plan.hub.split(",")
        ),
        replicas=plan.replicas,
        standbys=tuple(plan.standby.split(",")) if plan.standby else (),
        name=plan.name,
        run=plan.run,
        units=tuple(
            UnitLayout(f"unit{i}", (TensorLayout("weight", (n,)),)) for i, n in enumerate(plan.numels)
        ),
        num_samples=plan.num_samples,
        samples_per_step=plan.samples_per_step,
        steps_ahead=plan.max_steps_ahead if plan.max_steps_ahead < 100_000 else 256,
        lease_samples=plan.lease_samples,
        codec=plan.codec,
        donor=plan.donor,
        heartbeat_s=plan.heartbeat_s,
        expire_s=plan.expire_s,
        call_timeout_s=plan.call_timeout_s,
        prefers=plan.prefers,
        rejoin=plan.rejoin,
        votes=plan.votes,
    )


def main(words: list[str]) -> int:
    plan = of_json(words[0])
    ledger, ending = Ledger(Path(plan.ledger)), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()

    signal.signal(signal.SIGTERM, end)
    link = start_agent(agent_plan(plan), ranks=1, mode="thread" if plan.mode == "thread" else "process")
    walker = Walker(plan, link, ledger.note, ending)
    walker.records = records_of(plan, link)
    walker.walk()
    walker.leave(60.0)
    walker.records.close()
    return 0


def records_of(plan: PacedNode, link: AgentLink) -> PositionLog:
    """Return the records of the samples of a node that has joined, in a folder beside its ledger."""
    directory = Path(plan.ledger).parent / "nodes" / str(link.node)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "positions.jsonl"
    attempt = 1 + (path.read_text().count('"start"') if path.exists() else 0)
    records = PositionLog(directory)
    records.start(
        attempt=attempt,
        node=link.node,
        name=plan.name,
        kind="text",
        step=0,
        units=[[0, plan.units]],
        leases=True,
        warmup=0,
    )
    return records


def of_json(text: str) -> PacedNode:
    fields: Mapping[str, Any] = json.loads(text)
    return PacedNode(**fields)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
