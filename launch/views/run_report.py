"""Report of a finished run, which `aedit run` prints at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aedit.launch.records import NodeRecords, Run, Totals, read_run, totals
from aedit.launch.views import words
from aedit.launch.views.figures import (
    Pace,
    first_loss,
    held_out,
    last_evaluation_step,
    last_loss,
    mean_known,
    pace,
    rounds,
    share_of_solo,
    total_known,
)
from aedit.launch.views.hubtable import reasons, spread
from aedit.launch.views.plot import draw
from aedit.launch.views.rl_report import rl_facts, rl_per_node
from aedit.launch.views.server_report import server_facts
from aedit.types import UserError

WIDTH = 120


@dataclass(frozen=True, slots=True)
class NodeSummary:
    """Figures of one node."""

    index: int
    steps: int
    tokens: float
    pace: Pace
    wait_s: float
    """Seconds over the whole run; `pace.waited` is a share between the first and the last metrics line."""

    idle_used_s: float
    train_loss: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Losses are in nats per token; NaN if unknown."""

    name: str
    wall_s: float
    nodes: tuple[NodeSummary, ...]
    train_loss: tuple[float, float]
    """First and last training loss, mean over nodes."""

    held_out_loss: tuple[float, float]
    tokens_per_s: float
    share_of_solo: float
    """Speed as a share of the sum of the nodes' solo speeds, see `figures.share_of_solo`."""

    num_rounds: int
    bytes: float
    """Payload bytes that all nodes sent in rounds."""

    num_distrusted: int
    """Number of pseudo-gradients (of one unit and node) that rounds left out."""

    num_rolled_back: int
    """Number of units whose anchor a round rolled back."""

    num_refused: int
    """Number of pseudo-gradients sent again after a hub had refused them, as counted by these nodes."""

    evaluated_at: tuple[float, float] | None
    """Steps of the last evaluation and of the end, if there was no evaluation at the end; see
    `figures.last_evaluation_step`."""

    num_failed_rounds: int
    """Number of rounds of a node in which it got no average of its peers."""

    num_differing: int
    """Number of averages that were found to differ from those of other peers."""

    has_hub: bool
    averages: bool
    """The nodes average with each other by hivemind."""

    hub: Totals | None
    """Totals of the run's hubs, if their folders are here."""


def summary(run: Run) -> Summary:
    """Return the figures of the run from its records."""
    nodes = tuple(_of_node(node) for node in run.nodes)
    by_id = rounds(run)
    landed = [row for rows in by_id.values() for _, row in rows]
    losses = [evaluation.loss for evaluation in held_out(run)] or [float("nan")]
    return Summary(
        name=run.name,
        wall_s=max((node.metrics[-1].t for node in run.nodes if node.metrics), default=float("nan")),
        nodes=nodes,
        train_loss=(mean_known(map(first_loss, run.nodes)), mean_known(map(last_loss, run.nodes))),
        held_out_loss=(losses[0], losses[-1]),
        tokens_per_s=total_known(node.pace.tokens_per_s for node in nodes),
        share_of_solo=share_of_solo(node.pace for node in nodes),
        num_rounds=len(by_id),
        bytes=total_known(row.bytes for row in landed),
        num_distrusted=sum(len(row.distrusted) for row in landed),
        num_rolled_back=sum(len({u for _, row in rows for u in row.rolled_back}) for rows in by_id.values()),
        num_refused=sum(len(row.refused) for row in landed),
        evaluated_at=last_evaluation_step(run),
        num_failed_rounds=sum(len(row.refused) > 0 for row in landed),
        num_differing=sum(each.event == "averages_differ" for node in run.nodes for each in node.notices),
        has_hub=run.has_hub,
        averages=run.averages,
        hub=totals(run.hubs),
    )


def report(run_dir: Path) -> str:
    """Return the summary as aligned ASCII text; draw the plots and list them.

    Raises UserError if `run_dir` is not a run directory.
    """
    run = read_run(run_dir)
    out = summary(run)
    console = Console(file=StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    facts, table = (_rl_facts(run, out), rl_per_node(run)) if run.is_rl else (_facts(out), _per_node(out))
    for name, text in server_facts(run):
        facts.add_row("", name, text)
    console.print(_headline(out), facts, "", table, sep="\n", highlight=False, markup=False)
    text = console.file.getvalue()  # type: ignore[attr-defined]  # it is the StringIO above
    lines = [row.rstrip() for row in text.splitlines()]
    # Paths are appended as text, as a console would wrap long ones.
    return "\n".join([*lines, *_plots(run)])


def _plots(run: Run) -> list[str]:
    try:
        paths: list[object] = [*draw(run)]
    except UserError as error:  # on a full disk print the figures without plots
        paths = [error]
    return ["", "  plots", *(f"    {path}" for path in paths)] if paths else []


def _of_node(node: NodeRecords) -> NodeSummary:
    nan = float("nan")
    last = node.metrics[-1] if node.metrics else None
    return NodeSummary(
        index=node.index,
        steps=last.step if last else 0,
        tokens=last.tokens if last else nan,
        pace=pace(node),
        wait_s=last.wait_s if last else nan,
        idle_used_s=last.idle_used_s if last else nan,
        train_loss=last_loss(node),
    )


def _headline(out: Summary) -> str:
    parts = [words.some(len(out.nodes), "node"), words.clock(out.wall_s)]
    if out.hub is not None:
        parts.append(words.some(out.hub.merges, "merge"))
    elif not out.has_hub:
        parts.append(words.some(out.num_rounds, "round"))
    return f"run {out.name}: " + ", ".join(parts) + "\n"


def _facts(out: Summary) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row("", "held-out loss", _held_out(out))
    facts.add_row("", "train loss", _change(out.train_loss))
    facts.add_row(
        "", "speed", f"{words.count(out.tokens_per_s)} tokens/s, {words.percent(out.share_of_solo)} {OF_SOLO}"
    )
    found = _of_averages(out) if out.averages else _of_hub(out) if out.has_hub else _of_rounds(out)
    for name, text in found:
        facts.add_row("", name, text)
    return facts


def _rl_facts(run: Run, out: Summary) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    for name, text in (*rl_facts(run), *(_of_hub(out) if out.has_hub else _of_rounds(out))):
        facts.add_row("", name, text)
    return facts


def _of_rounds(out: Summary) -> Iterator[tuple[str, str]]:
    yield "sent", f"{words.size(out.bytes)} in {words.some(out.num_rounds, 'round')}"
    judged = f"{words.some(out.num_distrusted, 'pseudo-gradient')} distrusted"
    yield "penalty", f"{judged}, {words.some(out.num_rolled_back, 'unit')} rolled back"


def _of_averages(out: Summary) -> Iterator[tuple[str, str]]:
    yield "sent", f"{words.size(out.bytes)} to other peers, by calculation"
    failed = f"{out.num_failed_rounds:,} failed, {out.num_differing:,} with different averages"
    yield "rounds", f"{out.num_rounds:,} per node; of all nodes' {failed}"


def _of_hub(out: Summary) -> Iterator[tuple[str, str]]:
    """Yield the figures of the hub, which knows all nodes.

    Without its folder, of the nodes whose files are here.
    """
    hub = out.hub
    if hub is None:
        yield "sent", f"{words.size(out.bytes)} to the hub"
        again = ", sent once more" if out.num_refused else ""
        yield "refused", words.some(out.num_refused, "push", "pushes") + again
    else:
        up = max(
            out.bytes, hub.bytes_up
        )  # either may lack bytes: of other machines' nodes, or sent after the hub's last line
        first = f"{words.size(hub.anchor_bytes)} of it the initial anchors, from {hub.founder}"
        of_it = f" ({first})" if hub.founder else ""
        yield "sent", f"{words.size(up)} up{of_it}, {words.size(hub.bytes_down)} down"
        why = f" ({reasons(hub.refused)})" if hub.refused else ""
        yield "pushes", f"{hub.accepted:,} accepted, {sum(hub.refused.values()):,} did not count{why}"
        units = words.some(len(hub.versions), "unit")
        yield "anchors", f"{words.some(hub.merges, 'merge')}, {units} at version {spread(hub.versions)}"
        for name, reason in hub.excluded:
            yield "excluded", f"{name}: {reason}"
    yield "penalty", f"{words.some(out.num_distrusted, 'pseudo-gradient')} distrusted by their own nodes"


OF_SOLO = "of the sum of the nodes' solo speeds"


def _change(loss: tuple[float, float]) -> str:
    return f"{words.nats(loss[0])} -> {words.nats(loss[1])} nats/token"


def _held_out(out: Summary) -> str:
    """Return the held-out loss, with its step if that is not the end."""
    if not isfinite(out.held_out_loss[1]) and not isfinite(out.held_out_loss[0]):
        return f"{words.UNKNOWN} (no evaluation ran)"
    if out.evaluated_at is None:
        return _change(out.held_out_loss)
    step, last = map(words.count, out.evaluated_at)
    return f"{_change(out.held_out_loss)} at step {step} of {last}; no evaluation ran at the end"


def _per_node(out: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for name in (
        "node",
        "steps",
        "tokens",
        "tokens/s",
        "solo tokens/s",
        "waited",
        "waited %",
        "idle used",
        "train loss",
    ):
        table.add_column(name, justify="right")
    for node in out.nodes:
        table.add_row(
            "",
            str(node.index),
            words.count(node.steps),
            words.count(node.tokens),
            words.count(node.pace.tokens_per_s),
            words.count(node.pace.solo_tokens_per_s),
            words.seconds(node.wait_s),
            words.percent(node.pace.waited),
            words.seconds(node.idle_used_s),
            words.nats(node.train_loss),
        )
    return table
