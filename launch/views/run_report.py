"""Report of a finished run, which `aedit run` prints at the end: nodes, RL and rollout servers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from math import isfinite
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from aedit.launch.records import NodeRecords, Run, ServerWork, Totals, read_run, totals
from aedit.launch.views import formatting
from aedit.launch.views.figures import (
    LAST_LINES,
    Pace,
    first_loss,
    held_out,
    last_evaluation_step,
    last_loss,
    mean_known,
    pace,
    ratio,
    rounds,
    share_of_solo,
    total_known,
)
from aedit.launch.views.plot import draw
from aedit.launch.views.rl_figures import (
    RLTotals,
    after_warm_up,
    first_and_last,
    newest,
    rl_held_out,
    rl_totals,
)
from aedit.launch.views.tables import accusation, reasons, spread
from aedit.types import UserError

WIDTH = 120
OF_SOLO = "of the sum of the nodes' solo speeds"
_MOST_NAMED = 8
COLUMNS = (
    "node",
    "steps",
    "groups",
    "rollout tokens/s",
    "speed-up",
    "accepted length",
    "staleness",
    "idle",
    "idle used",
    "reward",
    "solved",
)


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
    parts = [formatting.some(len(out.nodes), "node"), formatting.clock(out.wall_s)]
    if out.hub is not None:
        parts.append(formatting.some(out.hub.merges, "merge"))
    elif not out.has_hub:
        parts.append(formatting.some(out.num_rounds, "round"))
    return f"run {out.name}: " + ", ".join(parts) + "\n"


def _facts(out: Summary) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_row("", "held-out loss", _held_out(out))
    facts.add_row("", "train loss", _change(out.train_loss))
    facts.add_row(
        "",
        "speed",
        f"{formatting.count(out.tokens_per_s)} tokens/s, {formatting.percent(out.share_of_solo)} {OF_SOLO}",
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
    yield "sent", f"{formatting.size(out.bytes)} in {formatting.some(out.num_rounds, 'round')}"
    judged = f"{formatting.some(out.num_distrusted, 'pseudo-gradient')} distrusted"
    yield "penalty", f"{judged}, {formatting.some(out.num_rolled_back, 'unit')} rolled back"


def _of_averages(out: Summary) -> Iterator[tuple[str, str]]:
    yield "sent", f"{formatting.size(out.bytes)} to other peers, by calculation"
    failed = f"{out.num_failed_rounds:,} failed, {out.num_differing:,} with different averages"
    yield "rounds", f"{out.num_rounds:,} per node; of all nodes' {failed}"


def _of_hub(out: Summary) -> Iterator[tuple[str, str]]:
    """Yield the figures of the hub, which knows all nodes.

    Without its folder, of the nodes whose files are here.
    """
    hub = out.hub
    if hub is None:
        yield "sent", f"{formatting.size(out.bytes)} to the hub"
        again = ", sent once more" if out.num_refused else ""
        yield "refused", formatting.some(out.num_refused, "push", "pushes") + again
    else:
        up = max(
            out.bytes, hub.bytes_up
        )  # either may lack bytes: of other machines' nodes, or sent after the hub's last line
        first = f"{formatting.size(hub.anchor_bytes)} of it the initial anchors, from {hub.founder}"
        of_it = f" ({first})" if hub.founder else ""
        yield "sent", f"{formatting.size(up)} up{of_it}, {formatting.size(hub.bytes_down)} down"
        why = f" ({reasons(hub.refused)})" if hub.refused else ""
        yield "pushes", f"{hub.accepted:,} accepted, {sum(hub.refused.values()):,} did not count{why}"
        units = formatting.some(len(hub.versions), "unit")
        yield "anchors", f"{formatting.some(hub.merges, 'merge')}, {units} at version {spread(hub.versions)}"
        for name, reason in hub.excluded:
            yield "excluded", f"{name}: {reason}"
    yield "penalty", f"{formatting.some(out.num_distrusted, 'pseudo-gradient')} distrusted by their own nodes"


def _change(loss: tuple[float, float]) -> str:
    return f"{formatting.nats(loss[0])} -> {formatting.nats(loss[1])} nats/token"


def _held_out(out: Summary) -> str:
    """Return the held-out loss, with its step if that is not the end."""
    if not isfinite(out.held_out_loss[1]) and not isfinite(out.held_out_loss[0]):
        return f"{formatting.UNKNOWN} (no evaluation ran)"
    if out.evaluated_at is None:
        return _change(out.held_out_loss)
    step, last = map(formatting.count, out.evaluated_at)
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
            formatting.count(node.steps),
            formatting.count(node.tokens),
            formatting.count(node.pace.tokens_per_s),
            formatting.count(node.pace.solo_tokens_per_s),
            formatting.seconds(node.wait_s),
            formatting.percent(node.pace.waited),
            formatting.seconds(node.idle_used_s),
            formatting.nats(node.train_loss),
        )
    return table


def server_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact; nothing for a run without servers."""
    yield from _directory(run)
    for node in run.nodes:
        rl = newest(node)
        if rl is not None and rl.servers:
            yield "from servers", f"node {node.index}: {_work(rl.servers)}"


def _directory(run: Run) -> Iterator[tuple[str, str]]:
    hub = run.hubs[0] if run.hubs else None
    last = hub.last.servers if hub and hub.lines else ()
    if hub is None or not last:
        return
    most = max(sum(server.live for server in line.servers) for line in hub.lines)
    speeds: dict[str, list[float]] = {}
    for line in hub.lines:
        for server in line.servers:
            if server.live:
                speeds.setdefault(server.name, []).append(server.tokens_per_s)
    named = [f"{server.name} {_of(server.name, speeds)}" for server in last[:_MOST_NAMED]]
    if len(last) > _MOST_NAMED:
        named.append(formatting.more(len(last) - _MOST_NAMED, "server"))
    yield "rollout servers", f"{most} at a time at most: {', '.join(named)}"
    idle_s = sum(server.idle_s for server in last)
    used = formatting.percent(ratio(sum(server.idle_used_s for server in last), idle_s))
    yield (
        "their idle time",
        f"{formatting.seconds(idle_s)} without a request, {used} of it trained the drafter",
    )
    for server in last:
        if accused := accusation(server):
            yield "accused", f"{server.name}: {accused}"
        if server.banned:
            yield "banned", f"{server.name}: {server.banned}"


def _work(servers: Mapping[str, ServerWork]) -> str:
    busiest = sorted(servers.items(), key=lambda item: -item[1].tokens)
    named = [
        f"{name} {formatting.count(work.tokens)} tokens in {formatting.some(int(work.samples), 'sample')}"
        for name, work in busiest[:_MOST_NAMED]
    ]
    if len(busiest) > _MOST_NAMED:
        named.append(formatting.more(len(busiest) - _MOST_NAMED, "server"))
    taken_back, losses, violations = (
        int(sum(getattr(work, name) for work in servers.values()))
        for name in ("taken_back", "losses", "violations")
    )
    if taken_back:
        named.append(f"{formatting.some(taken_back, 'sample')} finished elsewhere")
    if losses:
        ended = f"{formatting.some(losses, 'connection')} lost"
        named.append(
            f"{ended}, {violations} of them because of what the server sent" if violations else ended
        )
    return ", ".join(named)


def _of(name: str, speeds: dict[str, list[float]]) -> str:
    return f"{formatting.count(fmean(speeds[name]) if name in speeds else float('nan'))} tokens/s"


def rl_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of each figure of the run."""
    totals = rl_totals(newest(node) for node in run.nodes)
    yield "held-out solved", _rl_held_out(run)
    reward, solved = (first_and_last(run, value) for value in (lambda rl: rl.reward, lambda rl: rl.solved))
    yield "reward", f"{formatting.decimals(reward[0])} -> {formatting.decimals(reward[1])}, {_solved(solved)}"
    yield "rollouts", _speed(totals)
    yield "arms", formatting.shares(totals.arms)
    yield "groups", _groups(totals)
    yield "policy", _policy(run)
    yield "idle", _idle(totals)
    if any(rl.drafter is not None for rl in map(newest, run.nodes) if rl is not None):
        yield "drafter", _drafter(totals)
    if failed := sum(notice.event == "reward_error" for node in run.nodes for notice in node.notices):
        yield (
            "rewards",
            f"{formatting.some(failed, 'error')} in reward functions; see events.jsonl of the nodes",
        )


def rl_per_node(run: Run) -> Table:
    """Return the table with one row per node."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for node in run.nodes:
        table.add_row("", *_row(node))
    return table


def _row(node: NodeRecords) -> list[str]:
    rl = newest(node)
    if rl is None:
        return [str(node.index), *[formatting.UNKNOWN] * (len(COLUMNS) - 1)]
    totals, states = rl_totals([rl]), [metric.rl for metric in node.metrics if metric.rl is not None]
    return [
        str(node.index),
        formatting.count(node.metrics[-1].step),
        formatting.count(totals.groups),
        formatting.count(totals.tokens_per_s),
        formatting.times(totals.speed_up),
        formatting.decimals(totals.accepted),
        formatting.decimals(mean_known(state.staleness for state in states), 1),
        formatting.seconds(totals.waited_s),
        formatting.percent(ratio(totals.idle_used_s, totals.waited_s)),
        formatting.decimals(mean_known(state.reward for state in states[-LAST_LINES:])),
        formatting.percent(mean_known(state.solved for state in states[-LAST_LINES:])),
    ]


def _rl_held_out(run: Run) -> str:
    evaluations, since = rl_held_out(run), after_warm_up(run)
    if not evaluations:
        return f"{formatting.UNKNOWN} (no evaluation ran)"
    first, last = (since or evaluations)[0], evaluations[-1]
    change = f"{formatting.percent(first.solved)} -> {formatting.percent(last.solved)}"
    before = (
        f"; {formatting.percent(evaluations[0].solved)} before the warm-up" if evaluations[0] != first else ""
    )
    times = f"at {formatting.clock(first.t)} and {formatting.clock(last.t)}"
    return f"{change} of {formatting.count(last.problems)} problems, {times}{before}"


def _solved(share: tuple[float, float]) -> str:
    return f"{formatting.percent(share[0])} -> {formatting.percent(share[1])} solved"


def _speed(totals: RLTotals) -> str:
    speed = f"{formatting.count(totals.tokens_per_s)} tokens/s while generating"
    accepted = f"accepted length {formatting.decimals(totals.accepted)}"
    if not isfinite(totals.speed_up):
        return f"{speed}; {accepted}; no plain step was timed"
    return f"{speed}; decoding {formatting.times(totals.speed_up)} as fast as without drafts; {accepted}"


def _groups(totals: RLTotals) -> str:
    made = f"{formatting.count(totals.groups)} ({formatting.count(totals.rollouts)} rollouts)"
    no_signal = f"{formatting.percent(totals.no_signal)} without signal"
    retried = f"{formatting.count(totals.retried)} retried"
    return ", ".join(
        [made, no_signal, retried, f"{formatting.count(totals.excluded)} rollouts without reward"]
    )


def _policy(run: Run) -> str:
    states = [metric.rl for node in run.nodes for metric in node.metrics if metric.rl is not None]
    highest = max((rl.staleness_max for rl in states if rl.staleness_max >= 0), default=float("nan"))
    return (
        f"staleness {formatting.decimals(mean_known(rl.staleness for rl in states), 1)} versions "
        f"(max {formatting.count(highest)}), "
        f"mismatch KL {formatting.tiny(mean_known(rl.mismatch_kl for rl in states))}, "
        f"{formatting.percent(mean_known(rl.clip_share for rl in states))} of the tokens clipped"
    )


def _idle(totals: RLTotals) -> str:
    if totals.waited_s < 0.05:
        return "none"
    used = f"{formatting.seconds(totals.idle_used_s)} of {formatting.seconds(totals.waited_s)} used"
    return f"{used}; {formatting.durations(totals.idle_s)}"


def _drafter(totals: RLTotals) -> str:
    counts = (totals.drafter_steps, totals.published, totals.refused, totals.adopted)
    steps, published, refused, taken = map(formatting.count, counts)
    return f"{steps} steps of training, {published} published, {refused} refused by the gate, {taken} taken"
