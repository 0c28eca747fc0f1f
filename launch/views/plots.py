"""Plots of nodes, rounds, hubs and rollout servers, and what all plots share.

Loss curves, bars of time and bytes, the heat map of norms, a hub's nodes and traffic.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from statistics import median
from typing import Any, cast

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from aedit.launch.records import (
    EvalEvent,
    HubSample,
    Metric,
    NodeRecords,
    NodeSample,
    Run,
    by_node,
    gained,
    totals,
)
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import WAITING, held_out, longest, or_zero, rounds, sum_so_far, uses_of

WAYS = (("compute", "tab:green"), ("waiting", "tab:orange"), ("waiting, used", "tab:blue"), ("other", "0.7"))
USES: Mapping[str, tuple[str, str]] = {
    "rollouts": ("rollouts", "tab:green"),
    "rewards": ("rewards", "tab:purple"),
    "training": ("training", "tab:cyan"),
    "waiting": ("waiting", "tab:orange"),
    "used": ("waiting, used", "tab:blue"),
    "other": ("other", "0.8"),
}
"""Label and colour by use of time, in a run of reinforcement learning."""
LABEL_ABOVE = 0.06
MAX_NODES = 8
MAX_PANEL_INCHES = 2.4
MAX_NAMES = 12
NO_NUMBER = "0.85"
MARK_STYLE: dict[str, Any] = {"color": "red", "linestyle": ""}
MARKS: dict[str, dict[str, Any]] = {
    "distrusted": {"marker": "x", "markersize": 6, "markeredgewidth": 1.5},
    "rolled back": {"marker": "s", "markersize": 8, "markerfacecolor": "none"},
}
"""Marks of units in a round, by name in `RoundEvent`."""
UP, DOWN = ("up", "tab:blue"), ("down", "tab:purple")


def loss_by_steps(run: Run) -> Figure | None:
    """Return the training loss of each node, and the run's held-out loss at the nodes' mean step."""
    figure = _loss(run, lambda point: point.step, "inner steps of the node")
    if figure is not None:
        whole_numbers(figure.axes[0].xaxis)
    return figure


def loss_by_time(run: Run) -> Figure | None:
    """Return the plot of `loss_by_steps` over wall-clock time."""
    unit_s, name = run_time_unit(run)
    return _loss(run, lambda point: point.t / unit_s, f"{name} since the run began")


def run_time_unit(run: Run) -> tuple[float, str]:
    """Return the unit of an axis of the run's time, as seconds and name."""
    return fmt.time_unit(max((node.metrics[-1].t for node in run.nodes if node.metrics), default=0.0))


def plot_effective_nodes(run: Run) -> Figure | None:
    """Return the effective number of nodes of each round: 1 / sum of squared weights, over its units."""
    points = []
    for id, rows in rounds(run).items():
        known = [n for _, landed in rows[:1] for n in landed.effective_nodes if isfinite(n)]
        if known:
            points.append((id, min(known), median(known), max(known), rows[0][1].num_nodes))
    if not points:
        return None
    ids, low, middle, high, took_part = zip(*points, strict=True)
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    axes.step(ids, took_part, where="mid", color="0.6", linestyle="--", label="nodes that took part")
    axes.fill_between(ids, low, high, alpha=0.25, linewidth=0, label="all units")
    axes.plot(ids, middle, marker=marker(len(ids)), label="median unit")
    axes.set(
        title="Effective nodes", xlabel="round", ylabel="effective nodes", ylim=(0, max(took_part) * 1.08)
    )
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    legend_beside(axes)
    return figure


def _loss(run: Run, where: Callable[[Metric | EvalEvent], float], label: str) -> Figure | None:
    if run.is_rl or not any(node.metrics for node in run.nodes):  # a policy loss is no measure of quality
        return None
    figure = Figure(figsize=(8, 4.5))
    axes = figure.add_subplot()
    for node in run.nodes:
        known = [metric for metric in node.metrics if isfinite(metric.loss)]
        axes.plot(
            [where(metric) for metric in known],
            [metric.loss for metric in known],
            color=f"C{node.index}",
            linewidth=1,
            alpha=0.75,
            marker=marker(len(known)),
            label=f"node {node.index}, training",
        )
    if evaluations := held_out(run):
        points = [where(evaluation) for evaluation in evaluations], [e.loss for e in evaluations]
        axes.plot(*points, color="black", linewidth=1.8, marker=marker(len(evaluations)), label="held-out")
    axes.set(title=f"Loss of {run.name}", xlabel=label, ylabel="loss (nats per token)")
    axes.set_xlim(left=0)
    legend_beside(axes)
    return figure


def marker(num_points: int, kind: str = "o") -> str:
    """Return the marker of each point: none for many points, whose line is seen without."""
    return kind if num_points <= 40 else ""


def legend_beside(axes: Axes, **style: float) -> None:
    """Draw the legend to the right of the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), **style)


def time_per_node(run: Run) -> Figure | None:
    """Return one bar per node: compute, waiting, waiting used by idle work, evaluation and checkpoints."""
    nodes = [node for node in run.nodes if node.metrics]
    if not nodes:
        return None
    ways, spent_s = (USES.values(), _spent_rl) if run.is_rl else (WAYS, _spent)
    unit_s, unit = fmt.time_unit(max(sum(spent_s(node.metrics[-1])) for node in nodes))
    spent = [tuple(s / unit_s for s in spent_s(node.metrics[-1])) for node in nodes]
    by_way = zip(*spent, strict=True)
    parts = {name: (colour, times) for (name, colour), times in zip(ways, by_way, strict=True)}
    figure = Figure(figsize=(8 if len(parts) == len(WAYS) else 10, 1.7 + 0.42 * len(nodes)))
    axes = figure.add_subplot()
    stacked_bars(axes, [f"node {node.index}" for node in nodes], parts)
    for bars, (_, times) in zip(axes.containers, parts.values(), strict=True):
        shares = [time / (sum(row) or 1.0) for time, row in zip(times, spent, strict=True)]
        known = [f"{share:.0%}" if share >= LABEL_ABOVE else "" for share in shares]
        axes.bar_label(cast(BarContainer, bars), known, label_type="center", fontsize=9)
    axes.set_xlabel(unit)
    figure.suptitle("Where the time went", x=0.01, ha="left", fontsize=12)
    figure.legend(loc="outside upper right", ncols=len(parts), fontsize=9)
    return figure


def _spent(last: Metric) -> tuple[float, ...]:
    """Return the seconds of `WAYS`."""
    spent = uses_of(last)
    return spent["training"], _waiting_s(spent), spent["idle work"], spent["other"]


def _spent_rl(last: Metric) -> tuple[float, ...]:
    """Return the seconds of `USES`."""
    spent = uses_of(last)
    of_rl = tuple(spent.get(use, 0.0) for use in ("rollouts", "rewards", "training"))
    return *of_rl, _waiting_s(spent), spent["idle work"], spent["other"]


def _waiting_s(spent: Mapping[str, float]) -> float:
    return sum(seconds for use, seconds in spent.items() if use.startswith(WAITING))


def bytes_per_round(run: Run) -> Figure | None:
    """Return the payload bytes of each round, stacked over the nodes that sent them."""
    by_id = rounds(run)
    if not by_id:
        return None
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    # The bars of a long run touch, or the gaps between them would make stripes.
    width = 0.8 if len(by_id) <= 100 else 1.0
    below = [0.0] * len(by_id)
    for node in run.nodes:
        sent = [
            sum(or_zero(row.bytes) for index, row in rows if index == node.index) for rows in by_id.values()
        ]
        if node.rounds:
            style: dict[str, Any] = {"width": width, "color": f"C{node.index}", "label": f"node {node.index}"}
            axes.bar(list(by_id), sent, bottom=below, **style)
        below = [b + s for b, s in zip(below, sent, strict=True)]
    note, hub = "", totals(run.hubs)
    if hub is not None and hub.founder:
        note = f" (the first of {hub.founder} with the initial anchors, {fmt.size(hub.anchor_bytes)})"
    axes.set(title="Bytes sent per round", xlabel=f"round{note}", ylabel="payload")
    in_bytes(axes)
    whole_numbers(axes.xaxis)
    axes.grid(visible=False, axis="x")
    legend_beside(axes)
    return figure


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only, for counts such as rounds and nodes."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def from_zero(axes: Axes, at_least: float) -> None:
    """Set the y axis from 0 to the largest value, or to `at_least` if all values are smaller.

    By default matplotlib zooms in on a constant series.
    """
    axes.set_ylim(0, max(axes.get_ylim()[1], at_least))


def in_bytes(axes: Axes) -> None:
    """Label the y axis in bytes, kB and MB, starting at zero."""
    from_zero(axes, 1000)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))


def stacked_bars(axes: Axes, names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    """Draw one horizontal bar per name, from the top down.

    Args:
        axes: What to draw on.
        names: Labels of the bars.
        parts: For each part of a bar its colour and one length per name, from left to right.
    """
    begun = [0.0] * len(names)
    for label, (colour, lengths) in parts.items():
        axes.barh(range(len(names)), lengths, left=begun, color=colour, height=0.7, label=label)
        begun = [b + length for b, length in zip(begun, lengths, strict=True)]
    axes.set_xlim(0, max([*begun, 0.0]) * 1.02 or 1.0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")


def norms(run: Run) -> Figure | None:
    """Return one panel per node.

    Rounds to the right, units downwards, norms as colours on a shared log scale.
    """
    nodes = [node for node in run.nodes if node.rounds]
    if not nodes:
        return None
    shown = nodes[:MAX_NODES]
    most_units = max((len(landed.norms) for node in shown for landed in node.rounds), default=0)
    named = next((node.starts[-1].units for node in run.nodes if node.starts), ())
    units = named or tuple(str(i) for i in range(most_units))
    ids = range(min(n.rounds[0].id for n in shown), max(n.rounds[-1].id for n in shown) + 1)
    grids = [_grid(node, ids, max(len(units), most_units)) for node in shown]
    known = np.concatenate([grid[grid > 0] for grid in grids])
    scale = Normalize(0, known.max() if known.size else 1)
    if known.size and known.min() < known.max():
        scale = LogNorm(known.min(), known.max())
    colours = colormaps["viridis"].with_extremes(bad=NO_NUMBER)
    figure = Figure(figsize=(9, 1.4 + len(shown) * min(max(1.3, 0.2 * len(units) + 0.5), MAX_PANEL_INCHES)))
    rows = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, node, grid in zip(rows, shown, grids, strict=True):
        axes.grid(visible=False)
        extent = (ids.start - 0.5, ids.stop - 0.5, grid.shape[0] - 0.5, -0.5)
        image = axes.imshow(
            grid, aspect="auto", cmap=colours, norm=scale, extent=extent, interpolation="nearest"
        )
        for name, mark in MARKS.items():
            judged = [(r.id, u) for r in node.rounds for u in getattr(r, name.replace(" ", "_"))]
            cells = [id for id, _ in judged], [unit for _, unit in judged]
            axes.plot(*cells, **MARK_STYLE | mark | {"markeredgewidth": 1.5})
        axes.set_title(f"node {node.index}", fontsize=10)
        every = -(-len(units) // MAX_NAMES) or 1
        axes.set_yticks(range(0, len(units), every), units[::every], fontsize=8)
    rows[-1].set_xlabel("round")
    whole_numbers(rows[-1].xaxis)
    figure.colorbar(image, ax=list(rows), label="norm", pad=0.01, fraction=0.03, aspect=40)
    omitted = f" (first {MAX_NODES} of {len(nodes)} nodes)" if len(nodes) > MAX_NODES else ""
    figure.suptitle(f"Pseudo-gradient norms{omitted}", x=0.01, ha="left", fontsize=12)
    handles = [*(Line2D([], [], **MARK_STYLE | mark) for mark in MARKS.values()), Patch(color=NO_NUMBER)]
    figure.legend(handles, [*MARKS, "no number"], loc="outside upper right", ncols=3, fontsize=9)
    return figure


def _grid(node: NodeRecords, ids: range, num_units: int) -> NDArray[np.float64]:
    """Return norms of shape (units, rounds), NaN where there is none."""
    grid = np.full((num_units, len(ids)), nan)
    for landed in node.rounds:
        grid[: len(landed.norms), landed.id - ids.start] = landed.norms
    grid[~np.isfinite(grid)] = nan
    return grid


def hub_nodes(run: Run) -> Figure | None:
    """Return speed, staleness and weight of each node over time, from the records of the first hub."""
    lines = longest(run.hubs)
    if not lines:
        return None
    unit_s, unit = fmt.time_unit(lines[-1].t)
    figure = Figure(figsize=(8, 7.5))
    speed, staleness, weight = figure.subplots(3, sharex=True)
    names = {node.node: node.name for line in lines for node in line.nodes}

    def draw(axes: Axes, value: Callable[[NodeSample], float]) -> None:
        for index, name in sorted(names.items()):
            there = [[n for n in line.nodes if n.node == index and n.reports] for line in lines]
            points = [value(own[0]) if own else nan for own in there]
            _over_time(axes, lines, unit_s, points, f"C{index}", f"{index} {name}")

    draw(speed, lambda node: node.steps_per_s)
    draw(staleness, lambda node: node.staleness)
    draw(weight, lambda node: node.weight if node.accepted else nan)
    speed.set(title="Inner steps per second, waits left out")
    from_zero(speed, 0.1)
    staleness.set(title="Staleness of the last push (versions)")
    staleness.set_ylim(-0.1, max(staleness.get_ylim()[1], 1.1))
    whole_numbers(staleness.yaxis)
    age = f"age of the run ({unit})"
    weight.set(title="Weight of the last push in its merge", ylim=(0, 1.05), xlabel=age)
    weight.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right upper")
    return figure


def servers(run: Run) -> Figure | None:
    """Return speed and lag of each rollout server over time; None in a run without servers."""
    lines = run.hubs[0].lines if run.hubs else ()
    names = sorted({server.name for line in lines for server in line.servers})
    if not names:
        return None
    unit_s, unit = fmt.time_unit(lines[-1].t)
    figure = Figure(figsize=(8, 5))
    speed, lag = figure.subplots(2, sharex=True)
    for axes, field in ((speed, "tokens_per_s"), (lag, "lag")):
        for i, name in enumerate(names):
            there = [[one for one in line.servers if one.name == name and one.live] for line in lines]
            points = [getattr(own[0], field) if own else nan for own in there]
            _over_time(axes, lines, unit_s, points, f"C{i}", name)
    speed.set(title="Tokens per second of each rollout server")
    from_zero(speed, 1.0)
    lag.set(title="Policy versions behind the hub", xlabel=f"age of the run ({unit})")
    from_zero(lag, 1.0)
    whole_numbers(lag.yaxis)
    figure.legend(*speed.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _over_time(
    axes: Axes, lines: Sequence[HubSample], unit_s: float, points: Sequence[float], colour: str, label: str
) -> None:
    """Draw one value per line of a hub, with gaps where it is NaN."""
    # A single point between two gaps is visible only by its marker.
    few = marker(sum(map(isfinite, points)), ".")
    axes.plot([line.t / unit_s for line in lines], points, colour, lw=1, marker=few, label=label[:24])
    axes.set_xlim(left=0)


def hub_traffic(run: Run) -> Figure | None:
    """Return transfer time, bytes, versions, and refused pushes by reason."""
    lines, found = longest(run.hubs), totals(run.hubs)
    if not lines or found is None:
        return None
    figure = Figure(figsize=(10, 6.5))
    (wire, sent), (versions, refused) = figure.subplots(2, 2)
    unit_s, unit = fmt.time_unit(lines[-1].t)
    age = f"age of the run ({unit})"
    _wire(wire, lines)
    for (name, colour), field in ((UP, "bytes_up"), (DOWN, "bytes_down")):
        sent.plot([line.t / unit_s for line in lines], sum_so_far(lines, field), color=colour, label=name)
    sent.set(title="Bytes of all nodes", xlabel=age)
    in_bytes(sent)
    sent.legend()
    for k, hub in enumerate(run.hubs):
        known = [line for line in hub.lines if line.versions]
        times = [line.t / unit_s for line in known]
        low, high = [min(line.versions) for line in known], [max(line.versions) for line in known]
        versions.fill_between(times, low, high, color=f"C{k}", alpha=0.35, linewidth=0)
        versions.plot(times, high, color=f"C{k}", label=f"hub {k}")
        for before, after in pairwise(known):
            if after.term > before.term:
                versions.axvline(after.t / unit_s, color="0.5", linestyle="--", linewidth=1)
    if len(run.hubs) > 1:
        versions.legend()
    versions.set(title="Newest versions, all units", xlabel=age)
    from_zero(versions, 1)
    whole_numbers(versions.yaxis)
    by_count = sorted(found.refused.items(), key=lambda item: (-item[1], item[0]))
    refused.barh([reason for reason, _ in by_count], [count for _, count in by_count], color="tab:red")
    refused.invert_yaxis()
    refused.grid(visible=False, axis="y")
    whole_numbers(refused.xaxis)
    num_refused = f"{sum(found.refused.values()):,} pushes"
    refused.set(title=f"Did not count: {num_refused}; accepted: {found.accepted:,}")
    if not by_count:
        refused.set(xticks=[], yticks=[])
        refused.text(0.5, 0.5, "none", ha="center", va="center", transform=refused.transAxes, color="0.4")
    return figure


def _wire(axes: Axes, lines: Sequence[HubSample]) -> None:
    """Draw one bar per node: transfers that training has hidden, and those that it waited for."""
    names = {node.node: node.name for line in lines for node in line.nodes}
    whole, waits = by_node(lines, "wire_s"), by_node(lines, "wait_s")
    wait_s = [gained(waits.get(i, [])) for i in sorted(names)]
    hidden_s = [max(gained(whole.get(i, [])) - s, 0.0) for i, s in zip(sorted(names), wait_s, strict=True)]
    unit_s, unit = fmt.time_unit(max(a + b for a, b in zip(wait_s, hidden_s, strict=True)))
    parts = {
        "hidden under training": ("tab:green", [s / unit_s for s in hidden_s]),
        "waited for": ("tab:orange", [s / unit_s for s in wait_s]),
    }
    stacked_bars(axes, [f"{i} {names[i]}"[:16] for i in sorted(names)], parts)
    axes.set(title="Time on the wire", xlabel=unit)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=9)
