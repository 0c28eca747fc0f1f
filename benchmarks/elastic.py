"""Measure nodes that come and go, 1 -> 4 -> 2 -> 6 -> 3, without a restart: waits, repeated samples, loss.

Two runs of the same schedule. Real processes of a fixed pace draw samples that the hub leases to them: its
journal shows which node has drawn which sample. And real gradients in virtual time, where the held-out loss
of the anchors is measured throughout.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aedit.launch.config import load
from aedit.launch.hub import records_of
from benchmarks.elastic_parts.lease_audit import Audit
from benchmarks.elastic_parts.quality import PHASES, Curve, Elastic, jumps, setting
from benchmarks.kit.cluster import Field
from benchmarks.kit.paced_node import LATE_S, PacedNode
from benchmarks.kit.processes import ROOT, in_parallel, until
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.virtual_hub import Method

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
QUICK = Size(phase_s=4, virtual_s=4, look_s=2, window_s=4, seeds=1)


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
