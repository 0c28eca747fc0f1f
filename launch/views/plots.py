"""Plots of nodes, rounds, hubs and rollout servers.

Loss curves, bars of time and bytes, the heat map of norms, a hub's nodes and traffic. `rl_plots` uses the
formats of axes too.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite, nan
from statistics import median
from typing import cast

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import LogNorm, Normalize
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from aedit.launch.records import (
    EvalEvent,
    HubRecords,
    HubSample,
    Metric,
    NodeRecords,
    NodeSample,
    Run,
    ServerSample,
    by_node,
    gained,
    totals,
)
from aedit.launch.views import formatting
from aedit.launch.views.figures import held_out, rounds, units_of
from aedit.launch.views.rl_figures import seconds_by_use

WAYS = (("compute", "tab:green"), ("waiting", "tab:orange"), ("waiting, used", "tab:blue"), ("other", "0.7"))
USES: Mapping[str, tuple[str, str]] = {
    "rollouts": ("rollouts", "tab:green"),
    "rewards": ("rewards", "tab:purple"),
    "training": ("training", "tab:cyan"),
    "waiting": ("waiting", "tab:orange"),
    "used": ("waiting, used", "tab:blue"),
    "other": ("other", "0.8"),
}
"""Label and colour by name in `Split`, in a run of reinforcement learning."""
LABEL_ABOVE = 0.06
MAX_NODES = 8
MAX_PANEL_INCHES = 2.4
MAX_NAMES = 12
NO_NUMBER = "0.85"
MARKS = {
    "distrusted": Line2D([], [], color="red", marker="x", linestyle="", markersize=6, markeredgewidth=1.5),
    "rolled back": Line2D(
        [], [], color="red", marker="s", linestyle="", markersize=8, markerfacecolor="none"
    ),
}
HIDDEN, SHOWN = ("hidden under training", "tab:green"), ("waited for", "tab:orange")
UP, DOWN = ("up", "tab:blue"), ("down", "tab:purple")
_FEW = 40
"""Lines up to which each point has a marker: one between two gaps would not be seen."""


def loss_by_steps(run: Run) -> Figure | None:
    """Return the training loss of each node, and the run's held-out loss at the nodes' mean step."""
    figure = _loss(run, lambda point: point.step, "inner steps of the node")
    if figure is not None:
        whole_numbers(figure.axes[0].xaxis)
    return figure


def loss_by_time(run: Run) -> Figure | None:
    """Return the plot of `loss_by_steps` over wall-clock time."""
    longest_s = max((node.metrics[-1].t for node in run.nodes if node.metrics), default=0.0)
    unit_s, name = formatting.time_unit(longest_s)
    return _loss(run, lambda point: point.t / unit_s, f"{name} since the run began")


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
    axes.plot(ids, middle, marker=_marker(len(ids)), label="median unit")
    axes.set(
        title="Effective nodes", xlabel="round", ylabel="effective nodes", ylim=(0, max(took_part) * 1.08)
    )
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    _legend(axes)
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
            marker=_marker(len(known)),
            label=f"node {node.index}, training",
        )
    if evaluations := held_out(run):
        points = [where(evaluation) for evaluation in evaluations], [e.loss for e in evaluations]
        axes.plot(*points, color="black", linewidth=1.8, marker=_marker(len(evaluations)), label="held-out")
    axes.set(title=f"Loss of {run.name}", xlabel=label, ylabel="loss (nats per token)")
    axes.set_xlim(left=0)
    _legend(axes)
    return figure


def _marker(num_points: int) -> str:
    return "o" if num_points <= 40 else ""


def _legend(axes: Axes) -> None:
    """Draw the legend beside the axes."""
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def time_per_node(run: Run) -> Figure | None:
    """Return one bar per node: compute, waiting, waiting used by idle work, evaluation and checkpoints."""
    nodes = [node for node in run.nodes if node.metrics]
    if not nodes:
        return None
    ways, spent_s = (USES.values(), _spent_rl) if run.is_rl else (WAYS, _spent)
    unit_s, unit = formatting.time_unit(max(sum(spent_s(node.metrics[-1])) for node in nodes))
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
    used_s = _known(last.idle_used_s)
    return _known(last.busy_s), max(_known(last.wait_s) - used_s, 0.0), used_s, _known(last.other_s)


def _spent_rl(last: Metric) -> tuple[float, ...]:
    if last.rl is None:
        return _known(last.busy_s), 0.0, 0.0, _known(last.wait_s), 0.0, _known(last.other_s)
    spent = seconds_by_use(last.rl)
    spent["waiting"] -= spent["used"]
    all_s = _known(last.busy_s) + _known(last.wait_s) + _known(last.other_s)
    return (*(spent[use] for use in USES if use != "other"), max(all_s - sum(spent.values()), 0.0))


def bytes_per_round(run: Run) -> Figure | None:
    """Return the payload bytes of each round, stacked over the nodes that sent them."""
    by_id = rounds(run)
    if not by_id:
        return None
    figure = Figure(figsize=(8, 4))
    axes = figure.add_subplot()
    below = [0.0] * len(by_id)
    for node in run.nodes:
        sent = [
            sum(_known(row.bytes) for index, row in rows if index == node.index) for rows in by_id.values()
        ]
        if node.rounds:
            # The bars of a long run touch, or the gaps between them would make stripes.
            width = 0.8 if len(by_id) <= 100 else 1.0
            axes.bar(
                list(by_id),
                sent,
                bottom=below,
                width=width,
                color=f"C{node.index}",
                label=f"node {node.index}",
            )
        below = [b + s for b, s in zip(below, sent, strict=True)]
    axes.set(title="Bytes sent per round", xlabel=f"round{_anchors_note(run)}", ylabel="payload")
    in_bytes(axes)
    whole_numbers(axes.xaxis)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def _anchors_note(run: Run) -> str:
    """Return a note on the founder's first round, which includes the initial anchors in a run with a hub."""
    sent = totals(run.hubs)
    if sent is None or not sent.founder:
        return ""
    return f" (the first of {sent.founder} with the initial anchors, {formatting.size(sent.anchor_bytes)})"


def _known(value: float) -> float:
    return value if isfinite(value) else 0.0


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
    units = units_of(run) or tuple(str(i) for i in range(_width(shown)))
    ids = range(min(n.rounds[0].id for n in shown), max(n.rounds[-1].id for n in shown) + 1)
    grids = [_grid(node, ids, max(len(units), _width(shown))) for node in shown]
    scale = _scale(grids)
    figure = Figure(figsize=(9, 1.4 + len(shown) * min(max(1.3, 0.2 * len(units) + 0.5), MAX_PANEL_INCHES)))
    rows = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, node, grid in zip(rows, shown, grids, strict=True):
        image = _image(axes, grid, ids, scale)
        _marks(axes, node)
        axes.set_title(f"node {node.index}", fontsize=10)
        _name_units(axes, units)
    rows[-1].set_xlabel("round")
    whole_numbers(rows[-1].xaxis)
    figure.colorbar(image, ax=list(rows), label="norm", pad=0.01, fraction=0.03, aspect=40)
    omitted = f" (first {MAX_NODES} of {len(nodes)} nodes)" if len(nodes) > MAX_NODES else ""
    figure.suptitle(f"Pseudo-gradient norms{omitted}", x=0.01, ha="left", fontsize=12)
    handles = [*MARKS.values(), Patch(color=NO_NUMBER)]
    figure.legend(handles, [*MARKS, "no number"], loc="outside upper right", ncols=3, fontsize=9)
    return figure


def _grid(node: NodeRecords, ids: range, num_units: int) -> NDArray[np.float64]:
    """Return norms of shape (units, rounds), NaN where there is none."""
    grid = np.full((num_units, len(ids)), nan)
    for landed in node.rounds:
        grid[: len(landed.norms), landed.id - ids.start] = landed.norms
    grid[~np.isfinite(grid)] = nan
    return grid


def _scale(grids: list[NDArray[np.float64]]) -> Normalize:
    known = np.concatenate([grid[grid > 0] for grid in grids])
    if known.size and known.min() < known.max():
        return LogNorm(known.min(), known.max())
    return Normalize(0, known.max() if known.size else 1)


def _image(axes: Axes, grid: NDArray[np.float64], ids: range, scale: Normalize) -> AxesImage:
    colours = colormaps["viridis"].with_extremes(bad=NO_NUMBER)
    extent = (ids.start - 0.5, ids.stop - 0.5, grid.shape[0] - 0.5, -0.5)
    axes.grid(visible=False)
    return axes.imshow(grid, aspect="auto", cmap=colours, norm=scale, extent=extent, interpolation="nearest")


def _marks(axes: Axes, node: NodeRecords) -> None:
    for name, cells in (
        ("distrusted", [(landed.id, unit) for landed in node.rounds for unit in landed.distrusted]),
        ("rolled back", [(landed.id, unit) for landed in node.rounds for unit in landed.rolled_back]),
    ):
        style = MARKS[name]
        axes.plot(
            [id for id, _ in cells],
            [unit for _, unit in cells],
            linestyle="",
            color="red",
            marker=style.get_marker(),
            markersize=style.get_markersize(),
            markerfacecolor=style.get_markerfacecolor(),
            markeredgewidth=1.5,
        )


def _name_units(axes: Axes, units: tuple[str, ...]) -> None:
    every = -(-len(units) // MAX_NAMES) or 1
    axes.set_yticks(range(0, len(units), every), units[::every], fontsize=8)


def _width(nodes: list[NodeRecords]) -> int:
    return max((len(landed.norms) for node in nodes for landed in node.rounds), default=0)


def hub_nodes(run: Run) -> Figure | None:
    """Return speed, staleness and weight of each node over time, from the records of the first hub."""
    lines = _longest(run.hubs)
    if not lines:
        return None
    unit_s, unit = formatting.time_unit(lines[-1].t)
    figure = Figure(figsize=(8, 7.5))
    speed, staleness, weight = figure.subplots(3, sharex=True)
    _over_time(speed, lines, unit_s, lambda node: node.steps_per_s)
    _over_time(staleness, lines, unit_s, lambda node: node.staleness)
    _over_time(weight, lines, unit_s, lambda node: node.weight if node.accepted else float("nan"))
    speed.set(title="Inner steps per second, waits left out")
    from_zero(speed, 0.1)
    staleness.set(title="Staleness of the last push (versions)")
    staleness.set_ylim(-0.1, max(staleness.get_ylim()[1], 1.1))
    whole_numbers(staleness.yaxis)
    weight.set(
        title="Weight of the last push in its merge", ylim=(0, 1.05), xlabel=f"age of the run ({unit})"
    )
    weight.yaxis.set_major_formatter(PercentFormatter(1.0))
    handles, names = speed.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper")
    return figure


def hub_traffic(run: Run) -> Figure | None:
    """Return transfer time, bytes, versions, and refused pushes by reason."""
    lines, found = _longest(run.hubs), totals(run.hubs)
    if not lines or found is None:
        return None
    figure = Figure(figsize=(10, 6.5))
    (wire, sent), (versions, refused) = figure.subplots(2, 2)
    _wire(wire, lines)
    unit_s, unit = formatting.time_unit(lines[-1].t)
    times = [line.t / unit_s for line in lines]
    for (name, colour), field in ((UP, "bytes_up"), (DOWN, "bytes_down")):
        sent.plot(times, _sum_so_far(lines, field), color=colour, label=name)
    sent.set(title="Bytes of all nodes", xlabel=f"age of the run ({unit})")
    in_bytes(sent)
    sent.legend()
    _versions(versions, run.hubs, unit_s)
    versions.set(title="Newest versions, all units", xlabel=f"age of the run ({unit})")
    from_zero(versions, 1)
    whole_numbers(versions.yaxis)
    _refused(refused, found.refused, found.accepted)
    return figure


def _longest(hubs: Sequence[HubRecords]) -> tuple[HubSample, ...]:
    """Return the longest record: each hub has reports of all nodes, so that one suffices."""
    lines = max((hub.lines for hub in hubs), key=len, default=())
    return lines if any(line.nodes for line in lines) else ()


def _over_time(
    axes: Axes, lines: Sequence[HubSample], unit_s: float, value: Callable[[NodeSample], float]
) -> None:
    """Draw one curve per node, with gaps while it is absent."""
    names = {node.node: node.name for line in lines for node in line.nodes}
    for index, name in sorted(names.items()):
        points = []
        for line in lines:
            there = [value(node) for node in line.nodes if node.node == index and node.reports]
            points.append(there[0] if there else float("nan"))
        times = [line.t / unit_s for line in lines]
        # A single point between two gaps is visible only by its marker.
        alone = sum(map(isfinite, points)) <= 40
        axes.plot(times, points, f"C{index}", lw=1, marker="." if alone else "", label=f"{index} {name}"[:24])
    axes.set_xlim(left=0)


def _wire(axes: Axes, lines: Sequence[HubSample]) -> None:
    names = {node.node: node.name for line in lines for node in line.nodes}
    indices = sorted(names)
    whole, waits = by_node(lines, "wire_s"), by_node(lines, "wait_s")
    wait_s = [gained(waits.get(i, [])) for i in indices]
    hidden_s = [max(gained(whole.get(i, [])) - s, 0.0) for i, s in zip(indices, wait_s, strict=True)]
    unit_s, unit = formatting.time_unit(max(a + b for a, b in zip(wait_s, hidden_s, strict=True)))
    parts = {
        HIDDEN[0]: (HIDDEN[1], [s / unit_s for s in hidden_s]),
        SHOWN[0]: (SHOWN[1], [s / unit_s for s in wait_s]),
    }
    stacked_bars(axes, [f"{i} {names[i]}"[:16] for i in indices], parts)
    axes.set(title="Time on the wire", xlabel=unit)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, fontsize=9)


def _sum_so_far(lines: Sequence[HubSample], field: str) -> list[float]:
    """Return the running total over all nodes at each line, including earlier processes of a node."""
    total, before, out = 0.0, dict[int, float](), []
    for line in lines:
        for node in line.nodes:
            if node.reports:
                count, last = getattr(node, field), before.get(node.node, 0.0)
                total += count - last if count >= last else count
                before[node.node] = count
        out.append(total)
    return out


def _versions(axes: Axes, hubs: Sequence[HubRecords], unit_s: float) -> None:
    for k, hub in enumerate(hubs):
        known = [line for line in hub.lines if line.versions]
        times = [line.t / unit_s for line in known]
        low, high = [min(line.versions) for line in known], [max(line.versions) for line in known]
        axes.fill_between(times, low, high, color=f"C{k}", alpha=0.35, linewidth=0)
        axes.plot(times, high, color=f"C{k}", label=f"hub {k}")
        for before, after in pairwise(known):
            if after.term > before.term:
                axes.axvline(after.t / unit_s, color="0.5", linestyle="--", linewidth=1)
    if len(hubs) > 1:
        axes.legend()


def _refused(axes: Axes, refused: Mapping[str, int], accepted: int) -> None:
    by_count = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    axes.barh([reason for reason, _ in by_count], [count for _, count in by_count], color="tab:red")
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    whole_numbers(axes.xaxis)
    axes.set(title=f"Did not count: {sum(refused.values()):,} pushes; accepted: {accepted:,}")
    if not by_count:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color="0.4")


def servers(run: Run) -> Figure | None:
    """Return speed and lag of each rollout server over time; None in a run without servers."""
    lines = run.hubs[0].lines if run.hubs else ()
    if not any(line.servers for line in lines):
        return None
    unit_s, unit = formatting.time_unit(lines[-1].t)
    figure = Figure(figsize=(8, 5))
    speed, lag = figure.subplots(2, sharex=True)
    _servers_over_time(speed, lines, unit_s, lambda server: server.tokens_per_s)
    _servers_over_time(lag, lines, unit_s, lambda server: server.lag)
    speed.set(title="Tokens per second of each rollout server")
    from_zero(speed, 1.0)
    lag.set(title="Policy versions behind the hub", xlabel=f"age of the run ({unit})")
    from_zero(lag, 1.0)
    whole_numbers(lag.yaxis)
    handles, names = speed.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper")
    return figure


def _servers_over_time(
    axes: Axes, lines: Sequence[HubSample], unit_s: float, value: Callable[[ServerSample], float]
) -> None:
    """Draw one curve per server, with gaps while it is absent."""
    names = sorted({server.name for line in lines for server in line.servers})
    times = [line.t / unit_s for line in lines]
    for i, name in enumerate(names):
        points = [
            next((value(one) for one in line.servers if one.name == name and one.live), nan) for line in lines
        ]
        axes.plot(times, points, f"C{i}", lw=1, marker="." if len(lines) <= _FEW else "", label=name[:24])
    axes.set_xlim(left=0)
