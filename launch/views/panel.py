"""Panel of a run, shared by `status`, `top` and the live progress."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aedit.launch.records import NodeRecords, Run
from aedit.launch.views import formatting
from aedit.launch.views.figures import held_out, recent_tokens_per_s, rounds, total_known
from aedit.launch.views.rl_figures import newest, rl_held_out
from aedit.launch.views.rl_table import (
    COLUMNS,
    Learner,
    held_out_line,
    rl_cell,
    rl_cells,
    rl_health,
    rl_lines,
)
from aedit.launch.views.tables import HubDetail, hub_cells, hub_tables, swarm_tables

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
STORY = {"round": "evaluating", "round_refused": "evaluating", "eval": "saving"}


@dataclass(frozen=True, slots=True)
class Detail:
    """Amount of detail of the panel."""

    spaced: bool = True
    """Whether to draw blank lines and margins."""

    hub: HubDetail = field(default_factory=HubDetail)
    max_rows: int | None = None
    """Most rows of a table of nodes; the number of others is shown below it."""

    rl: bool = True
    """True shows each node's staleness, mismatch and idle time."""


DETAILS = (
    Detail(),
    Detail(spaced=False, hub=HubDetail(spaced=False)),
    Detail(spaced=False, hub=HubDetail(spaced=False, trust=False)),
    Detail(spaced=False, hub=HubDetail(spaced=False, trust=False, rl=False, servers=False), rl=False),
    Detail(
        spaced=False, hub=HubDetail(spaced=False, trust=False, pace=False, rl=False, servers=False), rl=False
    ),
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
        picture: RenderableType = ""
        over = 0
        for detail in self._details():
            picture = panel(self.run, self.shown, self.starting, detail, self.subtitle)
            over = len(console.render_lines(picture, free, pad=False)) - height
            if over <= 0:
                break
        if over > 0:
            rows = max(1, self._num_rows - over - 1)  # one row for the number of others
            cut = replace(detail, max_rows=rows)
            picture = panel(self.run, self.shown, self.starting, cut, self.subtitle)
        yield picture

    def _details(self) -> Sequence[Detail]:
        """Return the levels of detail; without files of nodes, the hub's first table is always shown."""
        return DETAILS if self.shown else DETAILS[:-1]

    @property
    def _num_rows(self) -> int:
        return len(self.shown) or max((len(hub.last.nodes) for hub in self.run.hubs), default=0)


def line(run: Run, shown: Sequence[int], starting: Collection[int] = ()) -> str:
    """Return the contents of the panel in one line, for logs."""
    done, elapsed_s, _ = _times(run)
    held_out = (
        f"solved {formatting.percent(_solved(run))}" if run.is_rl else formatting.nats(_held_out_loss(run))
    )
    head = [formatting.clock(elapsed_s), formatting.percent(done), f"held-out {held_out}"]
    nodes = {node.index: node for node in run.nodes}
    cells = [
        _cell(index, nodes.get(index), _state(run, index, nodes.get(index), starting)) for index in shown
    ]
    if not shown:
        cells = [cell for hub in run.hubs for cell in hub_cells(hub.last)]
    return " | ".join(["  ".join(head), *cells])


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
    story = STORY.get(node.latest.event, "") if node.latest else ""
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
    done, elapsed_s, left_s = _times(run)
    row = Table.grid(padding=(0, 2))
    bar = ProgressBar(total=1.0, completed=done if isfinite(done) else 0.0, width=40)
    left = f"about {formatting.clock(left_s)} left" if isfinite(left_s) and done < 1 else ""
    row.add_row(
        bar, f"{100 * done:.0f} %" if isfinite(done) else "", f"{formatting.clock(elapsed_s)} elapsed", left
    )
    return row


def _times(run: Run) -> tuple[float, float, float]:
    """Return the share of the run that is done, its seconds so far, and the estimated seconds left."""
    newest = [node.metrics[-1] for node in run.nodes if node.metrics]
    if not newest and run.hubs:
        last = run.hubs[0].last
        return last.progress, last.t, _left_s(last.progress, last.t)
    done = max((metric.progress for metric in newest if isfinite(metric.progress)), default=float("nan"))
    elapsed_s = max([m.t for m in newest] + [n.latest.t for n in run.nodes if n.latest], default=0.0)
    return done, elapsed_s, _left_s(done, elapsed_s)


def _left_s(done: float, elapsed_s: float) -> float:
    return elapsed_s * (1 - done) / done if done > 0 else float("nan")


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
    table.add_column("node", justify="right")
    table.add_column("state", min_width=10)
    for name in COLUMNS if run.is_rl else ("step", "round", "train loss", "tokens/s", "waited", "waited %"):
        table.add_column(name, justify="right")
    nodes = {node.index: node for node in run.nodes}
    rows = shown[: detail.max_rows]
    for index in rows:
        node = nodes.get(index)
        doing = _state(run, index, node, starting)
        cells = rl_cells(node) if run.is_rl else _numbers(node)
        table.add_row(str(index), Text(doing, style=COLOURS.get(doing, "")), *cells)
    yield table
    if len(rows) < len(shown):
        yield Text(formatting.more(len(shown) - len(rows), "node"), style="dim")


def _numbers(node: NodeRecords | None) -> list[str]:
    if node is None or not node.metrics:
        return [formatting.UNKNOWN] * 6
    last = node.metrics[-1]
    trained_s = last.busy_s + last.wait_s
    return [
        formatting.count(last.step),
        str(last.round),
        formatting.nats(last.loss),
        formatting.count(recent_tokens_per_s(node.of_attempt)),
        formatting.clock(last.wait_s),
        formatting.percent(last.wait_s / trained_s if trained_s > 0 else float("nan")),
    ]


def _cell(index: int, node: NodeRecords | None, doing: str) -> str:
    if node is None or not node.metrics:
        return f"node {index} {doing}"
    last = node.metrics[-1]
    speed = formatting.count(recent_tokens_per_s(node.of_attempt))
    shown = rl_cell(node) or f"loss {formatting.nats(last.loss)} {speed} tokens/s"
    return f"node {index} {doing} step {last.step} {shown}"


def _footer(run: Run, detail: Detail) -> list[RenderableType]:
    facts: list[RenderableType] = []
    if run.is_rl and run.nodes:
        facts += _rl_footer(run, detail)
    elif run.nodes or not run.hubs:  # a hub does not evaluate
        facts.append(Text(f"held-out loss  {formatting.nats(_held_out_loss(run))}"))
    if not run.has_hub and (by_id := rounds(run)):
        id, rows = list(by_id.items())[-1]
        sent = formatting.size(total_known(landed.bytes for _, landed in rows))
        text = f"last round     {id}: {formatting.some(rows[0][1].num_nodes, 'node')}, {sent} sent"
        facts.append(Text(text + _judgement([landed.distrusted for _, landed in rows])))
    for node in run.nodes:
        if node.notices:
            notice = node.notices[-1]
            shown = f"{notice.event.replace('_', ' ')}: " if notice.event != "heal" else ""
            facts.append(
                Text(f"node {node.index} at {formatting.clock(notice.t)}: {shown}{notice.text}", style="red")
            )
    max_rows = None if run.nodes else detail.max_rows
    elsewhere = {node.node for hub in run.hubs for node in hub.last.nodes} - set(run.indices)
    hub = replace(detail.hub, max_rows=max_rows, rl=detail.hub.rl and bool(elsewhere))
    peers = swarm_tables(run.swarm) if run.swarm else ()
    return [*facts, *hub_tables(run.hubs, hub), *peers]


def _rl_footer(run: Run, detail: Detail) -> Iterator[RenderableType]:
    learners = [Learner(node.index, newest(node)) for node in run.nodes]
    if detail.rl:
        yield rl_health(learners[: detail.max_rows])
        if detail.spaced:
            yield Text()
    yield held_out_line(run)
    yield from rl_lines(learners)


def _judgement(distrusted: list[tuple[int, ...]]) -> str:
    num = sum(map(len, distrusted))
    return f", {formatting.some(num, 'pseudo-gradient')} distrusted" if num else ""


def _solved(run: Run) -> float:
    evaluations = rl_held_out(run)
    return evaluations[-1].solved if evaluations else float("nan")


def _held_out_loss(run: Run) -> float:
    evaluations = held_out(run)
    return evaluations[-1].loss if evaluations else float("nan")
