"""Panel of a run, shared by `status`, `top` and the live progress."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aedit.launch.records import IN_WAIT, NodeRecords, Run
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import (
    held_out,
    newest,
    ratio,
    recent_rollout_tokens_per_s,
    recent_tokens_per_s,
    rl_held_out,
    rounds,
    total_known,
)
from aedit.launch.views.tables import (
    HEALTH,
    RL_COLUMNS,
    Detail,
    Learner,
    held_out_line,
    hub_tables,
    rl_cells,
    rl_lines,
    swarm_tables,
)

SILENT_AFTER_S = 120.0
COLOURS = {
    "training": "green",
    "warm-up": "green",
    "first step": "green",
    "waiting": "yellow",
    "silent": "red",
    "failed": "red",
    "done": "cyan",
    "left": "cyan",
}
COLUMNS = ("step", "round", "train loss", "tokens/s", "waited", "waited %")
ACTIVITY = {"round": "evaluating", "round_refused": "evaluating", "eval": "saving"}


DETAILS = (
    Detail(),
    Detail(spaced=False),
    Detail(spaced=False, trust=False),
    Detail(spaced=False, trust=False, rl=False, servers=False),
    Detail(spaced=False, trust=False, rl=False, servers=False, pace=False),
)
"""From the most to the least; `Fitted` then leaves out rows of nodes."""


def panel(
    run: Run,
    shown: Sequence[int],
    starting: Collection[int] = (),
    detail: Detail = DETAILS[0],
    subtitle: str = "",
) -> RenderableType:
    """Return progress, one row per node in `shown` (with files or not), and the last round or the hub.

    Nodes in `starting` are shown as starting, as their files are from an earlier attempt.
    """
    body = [_progress(run), *_table(run, shown, starting, detail), *_footer(run, detail)]
    return Panel(
        Group(*body),
        title=f"[bold]{escape(run.name)}[/]",
        title_align="left",
        subtitle=subtitle or None,
        subtitle_align="left",
        box=box.ROUNDED,
        padding=(1, 2) if detail.spaced else (0, 1),
    )


@dataclass(frozen=True, slots=True)
class Fitted:
    """Panel with as much detail as the terminal has lines for."""

    run: Run
    shown: Sequence[int]
    starting: Collection[int] = ()
    subtitle: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the most detailed panel that fits; with many nodes, as many of their rows as fit."""
        height = options.height or console.height
        free = options.update(height=None)
        # Without files of nodes, the hub's first table is always shown.
        for detail in DETAILS if self.shown else DETAILS[:-1]:
            picture = panel(self.run, self.shown, self.starting, detail, self.subtitle)
            over = len(console.render_lines(picture, free, pad=False)) - height
            if over <= 0:
                break
        if over > 0:
            num_rows = len(self.shown) or max((len(hub.last.nodes) for hub in self.run.hubs), default=0)
            cut = replace(detail, max_rows=max(1, num_rows - over - 1))  # one row for the number of others
            picture = panel(self.run, self.shown, self.starting, cut, self.subtitle)
        yield picture


def line(run: Run, shown: Sequence[int], starting: Collection[int] = ()) -> str:
    """Return the contents of the panel in one line, for logs."""
    done, elapsed_s, _ = times_of(run)
    if run.is_rl:
        answered = rl_held_out(run)
        held_out = f"solved {fmt.percent(answered[-1].solved if answered else nan)}"
    else:
        held_out = fmt.nats(_held_out_loss(run))
    head = [fmt.clock(elapsed_s), fmt.percent(done), f"held-out {held_out}"]
    nodes = {node.index: node for node in run.nodes}
    cells = []
    for index in shown:
        node = nodes.get(index)
        cell = f"node {index} {_state(run, index, node, starting)}"
        if node is not None and node.metrics:
            cell += f" step {node.metrics[-1].step} {_speed(node)}"
        cells.append(cell)
    if not shown:
        cells = [
            f"node {node.node} {node.state} step {fmt.count(node.steps)} {node.steps_per_s:.2f} steps/s"
            for hub in run.hubs
            for node in hub.last.nodes
        ]
    return " | ".join(["  ".join(head), *cells])


def _speed(node: NodeRecords) -> str:
    """Return what the node has reached and its speed in a few words."""
    if (rl := newest(node)) is not None:
        speed = fmt.count(recent_rollout_tokens_per_s(node.metrics))
        reached = f"reward {fmt.decimals(rl.reward)} solved {fmt.percent(rl.solved)}"
        return f"{reached} {speed} rollout tokens/s"
    speed = fmt.count(recent_tokens_per_s(node.of_attempt))
    return f"loss {fmt.nats(node.metrics[-1].loss)} {speed} tokens/s"


def state(node: NodeRecords, warmup_steps: int = 0) -> str:
    """Return the activity of a node, inferred from its files, which may lag behind."""
    latest = node.latest.event if node.latest else ""
    if latest == "stop":
        assert node.latest is not None
        return "left" if node.latest.text == "signal" else "done"
    if latest == "error":
        return "failed"
    if node.quiet_s > SILENT_AFTER_S:
        return "silent"
    if not node.of_attempt:
        return "first step" if node.starts else "starting"
    return _pause(node) or ("warm-up" if node.metrics[-1].step < warmup_steps else "training")


def _pause(node: NodeRecords) -> str:
    """Return the reason why the node takes no steps now, "" if it does."""
    *_, before, last = (node.of_attempt[0], *node.of_attempt)
    interval_s = last.t - before.t
    in_wait = node.latest is not None and node.latest.text == IN_WAIT
    story = ACTIVITY.get(node.latest.event, "") if node.latest and not in_wait else ""
    if node.quiet_s > max(3.0, 3 * interval_s):
        return story if node.latest and node.latest.t >= last.t and story else "waiting"
    if last.wait_s - before.wait_s > interval_s / 2 > 0:
        return "waiting"
    if last.other_s - before.other_s > interval_s / 2 > 0:
        return story or "saving"
    return ""


def _state(run: Run, index: int, node: NodeRecords | None, starting: Collection[int]) -> str:
    if node is None or index in starting:
        return "starting"
    rl = newest(node)
    if rl is not None and rl.supervised_steps > 0 and not rl.groups > 0:
        return state(node, warmup_steps=node.metrics[-1].step + 1)
    warmup_steps = run.config.get("edit", {}).get("warmup_steps", 0)
    return state(node, warmup_steps if isinstance(warmup_steps, int) else 0)


def _progress(run: Run) -> RenderableType:
    done, elapsed_s, left_s = times_of(run)
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=done if isfinite(done) else 0.0, width=40)
    left = f"about {fmt.clock(left_s)} left" if isfinite(left_s) and done < 1 else ""
    row.add_row(bar, f"{100 * done:.0f} %" if isfinite(done) else "", f"{fmt.clock(elapsed_s)} elapsed", left)
    return row


def times_of(run: Run) -> tuple[float, float, float]:
    """Return the share of the run that is done, its seconds so far, and the estimated seconds left."""
    last = [node.metrics[-1] for node in run.nodes if node.metrics]
    if not last and run.hubs:
        done, elapsed_s = run.hubs[0].last.progress, run.hubs[0].last.t
    else:
        done = max((metric.progress for metric in last if isfinite(metric.progress)), default=nan)
        elapsed_s = max([m.t for m in last] + [n.latest.t for n in run.nodes if n.latest], default=0.0)
    return done, elapsed_s, elapsed_s * (1 - done) / done if done > 0 else nan


def _table(
    run: Run, shown: Sequence[int], starting: Collection[int], detail: Detail
) -> Iterator[RenderableType]:
    if not shown:
        if not any(hub.last.nodes for hub in run.hubs):
            yield Text("\nno node has started yet\n", style="dim")
        return
    style = box.SIMPLE_HEAD if detail.spaced else None
    # One space between columns: eight columns with the largest numbers must fit into 80.
    padding = (0, 0) if detail.spaced else (0, 1, 0, 0)
    table = Table(box=style, pad_edge=False, padding=padding, header_style="bold")
    columns, found = node_rows(run, shown[: detail.max_rows], starting)
    table.add_column("node", justify="right")
    table.add_column("state", min_width=10)
    for name in columns[2:]:
        table.add_column(name, justify="right")
    rows = list(found)
    for index, doing, *cells in rows:
        table.add_row(index, Text(doing, style=COLOURS.get(doing, "")), *cells)
    yield table
    if len(rows) < len(shown):
        yield Text(fmt.more(len(shown) - len(rows), "node"), style="dim")


def node_rows(
    run: Run, shown: Sequence[int], starting: Collection[int] = ()
) -> tuple[tuple[str, ...], Iterator[list[str]]]:
    """Return the columns and the rows of the table of these nodes: index, state, and newest values."""
    nodes = {node.index: node for node in run.nodes}

    def row(index: int) -> list[str]:
        node = nodes.get(index)
        if run.is_rl:
            _, *cells = rl_cells(RL_COLUMNS, index, newest(node) if node else None, node)
        else:
            cells = _cells(node)
        return [str(index), _state(run, index, node, starting), *cells]

    return ("node", "state", *(RL_COLUMNS[1:] if run.is_rl else COLUMNS)), map(row, shown)


def _cells(node: NodeRecords | None) -> list[str]:
    """Return the cells of `COLUMNS` for one node."""
    if node is None or not node.metrics:
        return [fmt.UNKNOWN] * len(COLUMNS)
    last = node.metrics[-1]
    return [
        fmt.count(last.step),
        str(last.round),
        fmt.nats(last.loss),
        fmt.count(recent_tokens_per_s(node.of_attempt)),
        fmt.clock(last.wait_s),
        fmt.percent(ratio(last.wait_s, last.busy_s + last.wait_s)),
    ]


def _footer(run: Run, detail: Detail) -> Iterator[RenderableType]:
    if run.is_rl and run.nodes:
        learners: list[Learner] = [(node.index, newest(node)) for node in run.nodes]
        if detail.rl:
            shown = learners[: detail.max_rows]
            yield fmt.table(HEALTH, (rl_cells(HEALTH, *each) for each in shown))
            if detail.spaced:
                yield Text()
        yield held_out_line(run)
        yield from rl_lines(learners)
    elif run.nodes or not run.hubs:  # a hub does not evaluate
        yield Text(f"held-out loss  {fmt.nats(_held_out_loss(run))}")
    if not run.has_hub and (by_id := rounds(run)):
        id, rows = list(by_id.items())[-1]
        sent = fmt.size(total_known(landed.bytes for _, landed in rows))
        num_distrusted = sum(len(landed.distrusted) for _, landed in rows)
        judged = f", {fmt.some(num_distrusted, 'pseudo-gradient')} distrusted" if num_distrusted else ""
        yield Text(f"last round     {id}: {fmt.some(rows[0][1].num_nodes, 'node')}, {sent} sent{judged}")
    for alert in run.alerts:
        yield Text(f"alert: {alert}", style="bold red")
    for node in run.nodes:
        if node.notices:
            notice = node.notices[-1]
            kind = f"{notice.event.replace('_', ' ')}: " if notice.event != "heal" else ""
            yield Text(f"node {node.index} at {fmt.clock(notice.t)}: {kind}{notice.text}", style="red")
    elsewhere = {node.node for hub in run.hubs for node in hub.last.nodes} - set(run.indices)
    max_rows = None if run.nodes else detail.max_rows
    yield from hub_tables(run.hubs, replace(detail, max_rows=max_rows, rl=detail.rl and bool(elsewhere)))
    if run.swarm:
        yield from swarm_tables(run.swarm)


def _held_out_loss(run: Run) -> float:
    evaluations = held_out(run)
    return evaluations[-1].loss if evaluations else nan
