"""Plots of reinforcement learning: reward, time of each step by use, drafter and arms, policy."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite, nan
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from aedit.launch.records import EvalEvent, Metric, NodeRecords, RLMetric, Run
from aedit.launch.views.figures import (
    Split,
    mean_step,
    rl_held_out,
    rl_lines_of,
    splits,
    steps_of_layer,
    warm_up_end,
)
from aedit.launch.views.plots import (
    MAX_NODES,
    USES,
    from_zero,
    legend_beside,
    marker,
    run_time_unit,
    whole_numbers,
)

MAX_BARS = 120
MAX_ARMS = 7

Point = Metric | EvalEvent


def reward_by_steps(run: Run) -> Figure | None:
    """Return reward and solved share of each node's batches, and the solved share of held-out problems."""

    def where(point: Point) -> float:
        return point.step if isinstance(point, Metric) else mean_step(run, point.t)

    figure = _reward(run, where, "inner steps of the node; held-out: mean over nodes")
    if figure is not None:
        whole_numbers(figure.axes[1].xaxis)
    return figure


def reward_by_time(run: Run) -> Figure | None:
    """Return the plot of `reward_by_steps` over wall-clock time."""
    unit_s, name = run_time_unit(run)
    return _reward(run, lambda point: point.t / unit_s, f"{name} since the run began", unit_s)


def step_split(run: Run) -> Figure | None:
    """Return one panel per node: seconds of each step by use."""
    panels = [(node, found) for node in run.nodes if (found := splits(node))][:MAX_NODES]
    if not panels:
        return None
    figure = Figure(figsize=(9, 0.8 + 2.1 * len(panels)))
    for axes, (node, found) in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        merged = _merged(found)
        edges = [merged[0][0] - merged[0][1], *(step for step, _, _ in merged)]
        _stack(axes, edges, {USES[use]: [spent[use] for _, _, spent in merged] for use in USES})
        axes.set(title=f"node {node.index}: seconds per step", ylabel="seconds")
        axes.set_xlim(0, edges[-1])
        axes.grid(visible=False, axis="x")
        whole_numbers(axes.xaxis)
    axes.set_xlabel("inner steps of the node")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper right", ncols=len(USES), fontsize=9)
    return figure


def drafter(run: Run) -> Figure | None:
    """Return the accepted length of each node over time, and the share of the engine's steps by arm."""
    nodes = [node for node in run.nodes if len(rl_lines_of(node)) > 1]
    if not nodes:
        return None
    unit_s, unit = run_time_unit(run)
    figure = Figure(figsize=(9, 6.5))
    accepted, arms = figure.subplots(2, sharex=True)
    for node in nodes:
        points = [
            (metric.t / unit_s, (rl.rollout_tokens - was.rollout_tokens) / (rl.passes - was.passes))
            for (_, was), (metric, rl) in pairwise(rl_lines_of(node))
            if rl.passes > was.passes  # the node generated between the two lines
        ]
        _line(accepted, points, f"C{node.index}", f"node {node.index}", _pauses(node, unit_s))
        # Points, as the layer may have drafted in a few steps only: between them nothing was measured.
        trained = [(t / unit_s, length) for t, length in _drafted(node) if isfinite(length)]
        if trained:
            label = f"node {node.index}, steps of the layer"
            accepted.plot(*zip(*trained, strict=True), f"C{node.index}x", ms=5, label=label)
    accepted.set(title="Accepted length (tokens per pass of a sample; 1 without drafts)", ylabel="tokens")
    accepted.set_ylim(bottom=0.9)
    legend_beside(accepted, fontsize=9)
    _arms(arms, nodes, unit_s)
    arms.set(title="Steps of the engine by arm, all nodes", xlabel=f"{unit} since the run began", ylim=(0, 1))
    arms.set_xlim(left=0)
    arms.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


def policy_health(run: Run) -> Figure | None:
    """Return mismatch, staleness, clipped share and entropy of each node over its steps."""
    nodes = [node for node in run.nodes if rl_lines_of(node)]
    if not nodes:
        return None
    figure = Figure(figsize=(10, 6.5))
    panels: Sequence[tuple[str, Callable[[RLMetric], float]]] = (
        ("Mismatch KL (nats per token)", lambda rl: rl.mismatch_kl),
        ("Staleness (versions)", lambda rl: rl.staleness),
        ("Tokens clipped by the loss", lambda rl: rl.clip_share),
        ("Entropy (nats per token)", lambda rl: rl.entropy),
    )
    for axes, (title, value) in zip(figure.subplots(2, 2).flat, panels, strict=True):
        for node in nodes:
            points = [(metric.step, value(rl)) for metric, rl in rl_lines_of(node)]
            _line(axes, points, f"C{node.index}", f"node {node.index}")
        axes.set(title=title, xlabel="inner steps of the node")
        axes.set_xlim(left=0)
        from_zero(axes, 1e-9)
        whole_numbers(axes.xaxis)
    figure.axes[2].yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside right upper")
    return figure


def _reward(run: Run, where: Callable[[Point], float], label: str, unit_s: float = inf) -> Figure | None:
    """Return the plot of reward and solved share. unit_s: of the x axis, infinite if that is not of time."""
    evaluations = rl_held_out(run)
    if not evaluations and not any(map(rl_lines_of, run.nodes)):
        return None
    figure = Figure(figsize=(8, 6.5))
    reward, solved = figure.subplots(2, sharex=True)
    for node in run.nodes:
        known = [(where(metric), rl) for metric, rl in rl_lines_of(node)]
        name = f"node {node.index}, rollouts"
        pauses = _pauses(node, unit_s)
        _line(reward, [(x, rl.reward) for x, rl in known], f"C{node.index}", name, pauses)
        _line(solved, [(x, rl.solved) for x, rl in known], f"C{node.index}", name, pauses)
    for axes, points in (
        (reward, [(where(e), e.reward) for e in evaluations]),
        (solved, [(where(e), e.solved) for e in evaluations]),
    ):
        if points:
            axes.plot(*zip(*points, strict=True), color="black", linewidth=1.8, marker="o", label="held-out")
    ends = {node.index: where(end) for node in run.nodes if (end := warm_up_end(node)) is not None}
    if any(rl.supervised_steps > 0 for node in run.nodes for _, rl in rl_lines_of(node)):
        going_on = [where(n.metrics[-1]) for n in run.nodes if n.metrics and n.index not in ends]
        for axes in (reward, solved):
            if first := min([*ends.values(), *going_on]):
                axes.axvspan(0, first, color="0.93", label="supervised warm-up of all nodes")
            for index, x in ends.items():
                name = f"node {index}, end of the warm-up"
                axes.axvline(x, color=f"C{index}", linestyle="--", linewidth=1, label=name)
    reward.set(title=f"Reward of {run.name}", ylabel="mean reward")
    solved.set(title="Solved share", xlabel=label, ylim=(0, 1.02))
    solved.set_xlim(left=0)
    solved.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_beside(reward, fontsize=9)
    return figure


def _merged(found: Sequence[Split]) -> list[Split]:
    """Return at most `MAX_BARS` splits: means over the steps of as many lines each."""
    size = -(-len(found) // MAX_BARS)
    merged: list[Split] = []
    for i in range(0, len(found), size):
        part = found[i : i + size]
        steps = sum(steps for _, steps, _ in part)
        means = {use: sum(spent[use] * n for _, n, spent in part) / steps for use in USES}
        merged.append((part[-1][0], steps, means))
    return merged


def _drafted(node: NodeRecords) -> list[tuple[float, float]]:
    """Return time and accepted length of the lines before which the layer has drafted."""
    lines = rl_lines_of(node)
    before = [0.0, *(steps_of_layer(rl) for _, rl in lines)]
    return [
        (metric.t, rl.drafter["accepted_length"])
        for (metric, rl), steps in zip(lines, before, strict=False)
        if rl.drafter and steps_of_layer(rl) != steps
    ]


def _arms(axes: Axes, nodes: Sequence[NodeRecords], unit_s: float) -> None:
    """Draw the shares of the arms in equal intervals of time."""
    pairs = [pair for node in nodes for pair in pairwise(rl_lines_of(node))]
    moments = [(metric.t, before, after) for (_, before), (metric, after) in pairs]
    longest_s = max((t for t, _, _ in moments), default=0.0)
    num_bins = max(1, min(MAX_BARS // 2, len(moments) // (2 * len(nodes))))
    width_s = longest_s / num_bins or 1.0
    by_bin = [Counter[str]() for _ in range(num_bins)]
    for t, before, after in moments:
        taken = {arm: count - before.arms.get(arm, 0.0) for arm, count in after.arms.items()}
        by_bin[min(int(t / width_s), num_bins - 1)].update({a: max(n, 0) for a, n in taken.items()})
    overall = sum(by_bin, Counter[str]()).most_common()
    named = [arm for arm, _ in overall[:MAX_ARMS]]
    rows = {arm: [counts[arm] for counts in by_bin] for arm in named}
    if len(overall) > MAX_ARMS:
        rows["others"] = [sum(n for arm, n in c.items() if arm not in named) for c in by_bin]
    totals = [sum(counts.values()) for counts in by_bin]
    parts = {}
    for i, (arm, counts) in enumerate(rows.items()):
        colour = "0.75" if arm == "off" else f"C{i}"
        shares = [n / total if total else 0.0 for n, total in zip(counts, totals, strict=True)]
        parts[arm, colour] = shares
    _stack(axes, [k * width_s / unit_s for k in range(num_bins + 1)], parts)
    axes.grid(visible=False, axis="x")
    if rows:
        legend_beside(axes, fontsize=9)


def _stack(axes: Axes, edges: Sequence[float], parts: Mapping[tuple[str, str], Sequence[float]]) -> None:
    """Draw heights between `edges` upon each other; `parts` has them by label and colour."""
    below = np.zeros(len(edges) - 1)
    for (label, colour), heights in parts.items():
        above = below + np.asarray(heights)
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=label)
        below = above
    axes.set_ylim(0, max(float(below.max(initial=0.0)) * 1.04, 1e-6))


def _line(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    colour: str,
    label: str,
    pauses: Sequence[float] = (),
) -> None:
    """Draw the points whose value is known, joined by a line that is interrupted at `pauses`."""
    known = [point for point in points if isfinite(point[1])]
    inner = [x for x in pauses if known and known[0][0] < x <= known[-1][0]]
    drawn = sorted([*known, *((x, nan) for x in inner)], key=lambda point: point[0])
    style: dict[str, Any] = {"linewidth": 1, "alpha": 0.75, "marker": marker(len(known)), "ms": 3}
    axes.plot([x for x, _ in drawn], [y for _, y in drawn], color=colour, label=label, **style)


def _pauses(node: NodeRecords, unit_s: float) -> list[float]:
    """Return the times at which the node has started again: it was away before."""
    return [start.t / unit_s for start in node.starts[1:]] if isfinite(unit_s) else []
