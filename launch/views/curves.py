"""Line plots: loss by steps and by time, and effective nodes by round."""

from collections.abc import Callable
from math import isfinite
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aedit.launch.records import EvalEvent, Metric, Run
from aedit.launch.views import words
from aedit.launch.views.axes import whole_numbers
from aedit.launch.views.figures import held_out, rounds


def loss_by_steps(run: Run) -> Figure | None:
    """Return the training loss of each node, and the run's held-out loss at the nodes' mean step."""
    figure = _loss(run, lambda point: point.step, "inner steps of the node")
    if figure is not None:
        whole_numbers(figure.axes[0].xaxis)
    return figure


def loss_by_time(run: Run) -> Figure | None:
    """Return the plot of `loss_by_steps` over wall-clock time."""
    longest_s = max((node.metrics[-1].t for node in run.nodes if node.metrics), default=0.0)
    unit_s, name = words.time_unit(longest_s)
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
        told = [metric for metric in node.metrics if isfinite(metric.loss)]
        axes.plot(
            [where(metric) for metric in told],
            [metric.loss for metric in told],
            color=f"C{node.index}",
            linewidth=1,
            alpha=0.75,
            marker=_marker(len(told)),
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
