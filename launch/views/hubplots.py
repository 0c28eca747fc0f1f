"""Plots of a run from its hub's records: nodes over time, and their traffic."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import isfinite

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from aedit.launch.records import HubRecords, HubSample, NodeSample, Run, by_node, gained, totals
from aedit.launch.views import words
from aedit.launch.views.axes import from_zero, in_bytes, stacked_bars, whole_numbers

HIDDEN, SHOWN = ("hidden under training", "tab:green"), ("waited for", "tab:orange")
UP, DOWN = ("up", "tab:blue"), ("down", "tab:purple")


def hub_nodes(run: Run) -> Figure | None:
    """Return speed, staleness and weight of each node over time, from the records of the first hub."""
    lines = _longest(run.hubs)
    if not lines:
        return None
    unit_s, unit = words.time_unit(lines[-1].t)
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
    unit_s, unit = words.time_unit(lines[-1].t)
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
    unit_s, unit = words.time_unit(max(a + b for a, b in zip(wait_s, hidden_s, strict=True)))
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
