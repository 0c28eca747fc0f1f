"""Measure nodes that come and go, 1 -> 4 -> 2 -> 6 -> 3, without a restart: waits, repeated samples, loss.

Two runs of the same schedule. Real processes of a fixed pace draw samples that the hub leases to them: its
journal shows which node has drawn which sample. And real gradients in virtual time, where the held-out loss
of the anchors is measured throughout.
"""

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from aedit.async_sgd.rules import Accepted, Founded, Joined, Leased, Left, Record, Used
from aedit.clock import VirtualClock
from aedit.launch.config import load
from aedit.launch.hub import records_of
from aedit.launch.node import make_inners, set_lr
from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import LATE_S, PacedNode
from benchmarks.kit.processes import ROOT, in_parallel, until
from benchmarks.kit.small_llama import inner_step
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.two_domains import held_out_loss
from benchmarks.kit.virtual_hub import (
    Method,
    Node,
    Setting,
    adopt_anchors,
    make_hub,
    make_node,
    start_model,
    warm_up,
)

# -- part of `benchmarks.elastic` with real gradients
#
# Held-out loss while nodes come and go, in virtual time.


LEAVE_S = 200.0
"""Virtual seconds after which a node that leaves must have its answer."""
SPEEDS_S = (1.0, 0.8, 1.3, 1.0, 0.7, 1.6)
"""Seconds per step of the nodes, in the order in which they come."""


@dataclass(frozen=True, slots=True)
class Membership:
    """Members of one phase. killed: those of the nodes leaving at its start that leave without a message."""

    nodes: frozenset[int]
    killed: frozenset[int] = frozenset()


PHASES = (
    Membership(frozenset({0})),
    Membership(frozenset({0, 1, 2, 3})),
    Membership(frozenset({0, 3}), killed=frozenset({2})),
    Membership(frozenset({0, 1, 2, 3, 4, 5})),
    Membership(frozenset({1, 3, 5}), killed=frozenset({2, 4})),
)
"""1 -> 4 -> 2 -> 6 -> 3, and the founder goes, too."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Held-out loss of the anchors, at equal distances of virtual time."""

    at_s: tuple[float, ...]
    loss: tuple[float, ...]

    def jump(self, changed_s: float, window_s: float) -> float:
        """Return how far the loss rises above that before the change, as a share; below 0 it only fell."""
        before = [loss for at_s, loss in zip(self.at_s, self.loss, strict=True) if at_s <= changed_s][-1]
        after = [
            loss
            for at_s, loss in zip(self.at_s, self.loss, strict=True)
            if changed_s < at_s <= changed_s + window_s
        ]
        return max(after) / before - 1

    @property
    def largest_rise(self) -> float:
        """Return the largest rise between two neighbours, as a share: the loss's own fluctuation."""
        return max(b / a - 1 for a, b in zip(self.loss, self.loss[1:], strict=False))


def setting(seed: int, phase_s: float) -> Setting:
    """Return the setting, whose local steps are those of the schedule as a mean over six nodes."""
    steps = sum(phase_s / SPEEDS_S[node] for phase in PHASES for node in phase.nodes)
    return Setting(seed=seed, step_s=SPEEDS_S, steps=round(steps / len(SPEEDS_S)), held_out=64)


class Elastic:
    """One run under `PHASES`."""

    def __init__(self, of: Setting, method: Method, phase_s: float, look_s: float) -> None:
        """Set up the run; look_s: virtual seconds between two measurements of the loss."""
        self.setting, self.method, self.phase_s, self.look_s = of, method, phase_s, look_s
        self.start = warm_up(of)
        self.probe: nn.Module = start_model(of, self.start)[0]
        self.clock = VirtualClock()
        self.hub = make_hub(of, method, self.probe, self.clock)
        self.nodes: dict[int, Node] = {}
        self.done = self.joined = 0

    def run(self) -> Curve:
        """Train through all phases. Every phase but the first begins with the change of membership."""
        curve: list[tuple[float, float]] = []
        for number, phase in enumerate(PHASES):
            self._change(phase)
            end_s = (number + 1) * self.phase_s
            while (look_at_s := len(curve) * self.look_s) < end_s:
                self._walk(look_at_s)
                curve.append((look_at_s, self._loss()))
            self._walk(end_s)
        curve.append((self.clock.now_s, self._loss()))
        return Curve(tuple(at_s for at_s, _ in curve), tuple(loss for _, loss in curve))

    def _change(self, phase: Membership) -> None:
        for index in phase.killed:  # the hub finds out about those by their silence
            del self.nodes[index]
        for index in sorted(self.nodes.keys() - phase.nodes):
            self._leave(self.nodes.pop(index))
        for index in sorted(phase.nodes - self.nodes.keys()):
            self.nodes[index] = self._join(index)

    def _leave(self, node: Node) -> None:
        """Let a node leave. Its last push may wait for others, so time goes on until it has an answer."""
        leaving = Thread(target=node.sync.__exit__, args=(None, None, None), daemon=True)
        leaving.start()
        late_s = self.clock.now_s + LEAVE_S
        while leaving.is_alive():
            if self.clock.now_s > late_s:
                raise TimeoutError(f"a node that leaves has no answer after {LEAVE_S:.0f} virtual seconds")
            leaving.join(0.05)
            self._at(self.clock.now_s + 0.1)

    def _join(self, index: int) -> Node:
        model, inners = start_model(self.setting, self.start)
        if self.joined:  # a node that joins later has no optimizer state yet
            inners = make_inners(model, self.setting.train)
        shard = self.setting.shard(index, seed=2 + self.joined)
        node = make_node(self.hub, self.setting, self.method, index, (model, inners), shard)
        node.sync.__enter__()
        self.joined += 1
        return node

    def _walk(self, end_s: float) -> None:
        """Take all steps that end by `end_s`."""
        while (node := min(self.nodes.values(), key=lambda node: node.next_s)).next_s <= end_s:
            self._at(max(node.next_s, self.clock.now_s))
            set_lr(node.sync.inner, self.setting.lr_after(self.done))
            inner_step(node.sync.model, node.sync.inner, node.shard.take(self.setting.batch_size))
            node.sync.step()
            node.next_s += node.step_s
            self.done += 1
        self._at(max(end_s, self.clock.now_s))

    def _at(self, now_s: float) -> None:
        self.clock.advance_to(now_s)
        for node in self.nodes.values():
            node.link.heartbeat(1 / node.step_s)
        self.hub.tick()

    def _loss(self) -> float:
        adopt_anchors(self.probe, self.hub.hub.anchor, next(iter(self.nodes.values())).sync)
        return held_out_loss(self.probe, self.setting.seq_len, self.setting.held_out)


def jumps(curves: Sequence[Curve], phase_s: float, window_s: float) -> list[float]:
    """Return the largest jump over all runs, for each change."""
    changes_s = [number * phase_s for number in range(1, len(PHASES))]
    return [max(curve.jump(at_s, window_s) for curve in curves) for at_s in changes_s]


# -- count from a hub's journal how often each sample was drawn, independently of the hub's ledger


NOBODY = -1
_ROOM = 1 << 20
"""Positions of the stream that an audit can follow."""


@dataclass(slots=True)
class Attempt:
    """One node between joining and leaving."""

    node: int
    blocks: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    """Steps in accepted pushes, by unit."""

    def drawn(self, unit: int, samples_per_step: int) -> list[tuple[int, int]]:
        """Return the positions whose gradients are in accepted pushes of the unit.

        A node draws its leases in order.
        """
        left, found = self.steps.get(unit, 0) * samples_per_step, []
        for start, end in self.blocks:
            found.append((start, min(end, start + left)))
            left = max(0, left - (end - start))
        return found


class Audit:
    """Audit of the leases; takes all records of a run, in order."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.holder = np.full(_ROOM, NOBODY, np.int32)
        self.used = np.zeros(_ROOM, np.int32)
        """Number of accepted pushes reported to contain each position."""
        self.at_two = 0
        """Positions leased while another node had them, or after they were used."""
        self.not_held = 0
        """Positions that a node has used up without having them."""
        self.num_samples = 1
        self.attempts: list[Attempt] = []
        self._now: dict[int, Attempt] = {}
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Process the next record."""
        match record:
            case Founded(_, _, num_samples):
                self.num_samples = num_samples
            case Joined(_, node):
                self._now[node] = Attempt(node)
                self.attempts.append(self._now[node])
            case Left(node):
                self.holder[self.holder == node] = NOBODY
            case Leased(node, start, end):
                self._lease(node, start, end)
            case Used(node, start, upto):
                self._use(node, slice(start, upto))
            case Accepted(push) if push.base:
                steps = self._now[push.node].steps
                steps[push.unit] = steps.get(push.unit, 0) + push.steps

    def _lease(self, node: int, start: int, end: int) -> None:
        free = (self.holder[start:end] == NOBODY) & (self.used[start:end] == 0)
        self.at_two += int((~free).sum())
        self.holder[start:end] = node
        self._now[node].blocks.append((start, end))

    def _use(self, node: int, here: slice) -> None:
        # Said again from the lease's start on, every time.
        new = self.holder[here] == node
        self.not_held += int((~new & (self.used[here] == 0)).sum())
        self.used[here] += new
        self.holder[here][new] = NOBODY

    @property
    def complete(self) -> int:
        """Return the number of epochs of which every sample has been drawn."""
        return int(np.argmax(self.used == 0)) // self.num_samples

    @property
    def wrong(self) -> int:
        """Return the samples of those epochs that were not drawn exactly once, by the hub's ledger."""
        return int((self.used[: self.complete * self.num_samples] != 1).sum())

    def drawn(self, unit: int, samples_per_step: int) -> NDArray[np.int32]:
        """Return how often each position is in an accepted push of the unit, by the nodes' steps."""
        counts = np.zeros(_ROOM, np.int32)
        for attempt in self.attempts:
            for start, end in attempt.drawn(unit, samples_per_step):
                counts[start:end] += 1
        return counts


# -- measurements, tables and bars


JUMP = 0.02
CONFIG = ROOT / "configs" / "async.toml"
PLAN = PacedNode(
    hub="",
    name="",
    ledger="",
    step_s=0.05,
    every=20,
    max_steps_ahead=40,
    samples_per_step=4,
    num_samples=1500,
    lease_samples=64,
    expire_s=2.0,
)
LIMIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Durations of the benchmark.

    phase_s: of paced nodes, in real time. virtual_s: of those with gradients. window_s: for so long after a
    change the loss must not rise.
    """

    phase_s: float
    virtual_s: float
    look_s: float
    window_s: float
    seeds: int


FULL = Size(phase_s=12, virtual_s=96, look_s=8, window_s=64, seeds=3)
QUICK = Size(phase_s=4, virtual_s=20, look_s=5, window_s=20, seeds=1)


@dataclass(slots=True)
class Change:
    """One change of membership, as the processes saw it."""

    joined: list[str]
    left: list[str]
    killed: list[str]
    at_s: float
    """By the machine's monotonic clock."""
    members: int = 0
    """That the hub counts on at the end of the phase."""
    first_push: float = 0.0
    """Intervals from the end of a joiner's transfer to its first push; the longest of all joiners'."""
    late: int = 0
    """Steps of the others that came more than `LATE_S` late, up to the end of the phase."""
    worst_s: float = 0.0


@dataclass(slots=True)
class Story:
    """Results of the processes."""

    changes: list[Change] = field(default_factory=list)
    audit: dict[str, Any] = field(default_factory=dict)
    kills: int = 0
    failed: int = 0
    """Nodes that were asked to leave and did not do it in good order."""


def measure(quick: bool) -> Report:
    size = QUICK if quick else FULL
    story = walk(PLAN, size.phase_s)
    curves = _curves(size)
    rises = jumps(curves, size.virtual_s, size.window_s)
    return Report(
        "elastic: 1 -> 4 -> 2 -> 6 -> 3 nodes, nothing restarted",
        (
            f"Paced processes, {PLAN.step_s:g} s a step, {PLAN.every} a push; {PLAN.num_samples} samples an "
            f"epoch; {size.phase_s:g} s a phase.",
            f"Loss: {CONFIG.name}, {size.seeds} seeds, a small Llama in virtual time; the highest within "
            f"{size.window_s:g} s after the change to that before.",
        ),
        ("change", "joined", "left", "killed", "first push", "late steps", "latest ms", "loss"),
        tuple(_row(number, story.changes[number], rises) for number in range(len(PHASES))),
        _bars(story, rises, quick),
        {"story": asdict(story), "jumps": rises, "curves": [asdict(curve) for curve in curves]},
    )


def _row(number: int, change: Change, rises: Sequence[float]) -> tuple[str, ...]:
    before = len(PHASES[number - 1].nodes) if number else 0
    counts = (len(change.joined), len(change.left), len(change.killed))
    return (
        f"{before} -> {change.members}",
        *map(str, counts),
        f"{change.first_push:.2f}" if change.joined else "",
        str(change.late),
        f"{1e3 * change.worst_s:.0f}",
        f"{100 * rises[number - 1]:+.1f} %" if number else "",
    )


def _bars(story: Story, rises: Sequence[float], quick: bool) -> tuple[Bar, ...]:
    audit = story.audit
    wanted = [len(phase.nodes) for phase in PHASES]
    found = [change.members for change in story.changes]
    late = sum(change.late for change in story.changes)
    first_push = max(change.first_push for change in story.changes)
    exact = audit["wrong"] == audit["at_two"] == audit["not_held"] == 0 and audit["complete"] > 0
    worst = max(rises)
    return (
        Bar(f"members {found}, wanted {wanted}; nodes that did not leave in good order: {story.failed}",
            found == wanted and not story.failed),
        Bar(f"{audit['complete']} whole epochs: samples not drawn exactly once by the ledgers "
            f"{audit['wrong']}, with two nodes {audit['at_two']}, used unleased {audit['not_held']}",
            exact),
        Bar(f"drawn again after {story.kills} kills, as nobody had heard that they were used: "
            f"{audit['again']} of {audit['total']} samples", audit["again"] <= story.kills * audit["push"]),
        Bar(f"a joiner's first push within {first_push:.2f} intervals of its transfer's end, wanted <= 1.1",
            None if quick else first_push <= 1.1),
        Bar(f"steps of others more than {1e3 * LATE_S:.0f} ms late: {late}", None if quick else late == 0),
        Bar(f"largest rise of the held-out loss at a change {percent(worst)}, wanted <= {percent(JUMP, 0)}",
            None if quick else worst <= JUMP),
    )  # fmt: skip


# --- processes


def walk(plan: PacedNode, phase_s: float) -> Story:
    """Run the schedule with real processes."""
    story = Story()
    with tempfile.TemporaryDirectory(prefix="aedit-") as name, Field(Path(name), plan) as ground:
        ground.start_hub()
        for phase in PHASES:
            story.changes.append(_phase(ground, phase.nodes, phase.killed, phase_s, story))
        story.failed += sum(code != 0 for code in ground.end_nodes().values())
        ground.end_hub()
        story.audit = _audited(Audit(records_of(ground.directory / "hub")), plan)
        for number, change in enumerate(story.changes):
            _look(
                ground,
                change,
                story.changes[number + 1].at_s if number + 1 < len(PHASES) else time.monotonic(),
            )
    return story


def _phase(
    ground: Field, nodes: frozenset[int], killed: frozenset[int], phase_s: float, story: Story
) -> Change:
    """Apply the change, and wait until the phase is over."""
    present, wanted = set(ground.nodes), {f"node-{index}" for index in nodes}
    victims = {f"node-{index}" for index in killed}
    gone = present - wanted
    change = Change(sorted(wanted - present), sorted(gone - victims), sorted(victims), time.monotonic())
    for name in change.killed:
        ground.kill_node(name)
    for name in change.joined:
        ground.start_node(name, prefers=int(name.rpartition("-")[2]))
    for name in change.left:
        story.failed += ground.end_node(name, LIMIT_S) != 0
    for name in gone:
        del ground.nodes[name]
    story.kills += len(victims)
    until(lambda: _members(ground) == len(wanted), f"{len(wanted)} members", LIMIT_S)
    time.sleep(phase_s)
    change.members = _members(ground)
    return change


def _members(ground: Field) -> int:
    status = ground.status()
    states = [node["state"] for node in status["nodes"]] if status else []
    return sum(not state.startswith(("gone", "excluded")) for state in states)


def _look(ground: Field, change: Change, until_s: float) -> None:
    """Add the results of one phase from the nodes' ledgers."""
    everybody = [path.stem for path in ground.directory.glob("node-*.jsonl")]
    for name in everybody:
        lines = [line for line in ground.lines(name) if change.at_s <= line["t"]]
        if name in change.joined:
            change.first_push = max(change.first_push, _first_push(lines, ground.plan))
            continue
        late = [line["by_s"] for line in lines if line["event"] == "late" and line["t"] < until_s]
        change.late += len(late)
        change.worst_s = max(change.worst_s, *late, 0.0)


def _first_push(lines: list[dict[str, Any]], plan: PacedNode) -> float:
    """Return the intervals from the end of the transfer to the first push; infinite without a push."""
    joined_s = [line["t"] for line in lines if line["event"] == "joined"]
    sent_s = [line["t"] for line in lines if line["event"] == "sent"]
    return (sent_s[0] - joined_s[0]) / (plan.step_s * plan.every) if sent_s else float("inf")


def _audited(audit: Audit, plan: PacedNode) -> dict[str, Any]:
    """Return the results of the audit; again: the largest number in any unit, of all positions."""
    drawn = [audit.drawn(unit, plan.samples_per_step) for unit in range(plan.units)]
    return {
        "complete": audit.complete,
        "wrong": audit.wrong,
        "at_two": audit.at_two,
        "not_held": audit.not_held,
        "again": max(int((counts - 1).clip(min=0).sum()) for counts in drawn),
        "total": int(audit.used.sum()),
        "push": 2 * plan.every * plan.samples_per_step,
    }


# --- gradients


def _curves(size: Size) -> list[Curve]:
    """Return one curve per seed, computed two at a time."""
    return in_parallel(_curve, [(seed, size) for seed in range(size.seeds)], 2)


def _curve(seed: int, size: Size) -> Curve:
    config = load(CONFIG, []).config
    method = Method(hub=config.hub, outer=config.outer, penalty=config.edit.penalty)
    return Elastic(setting(seed, size.virtual_s), method, size.virtual_s, size.look_s).run()


if __name__ == "__main__":
    main("elastic", "Nodes come and go: books, lateness, loss.", measure)
