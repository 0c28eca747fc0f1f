"""Bar plots: time of each node by use, and bytes per round."""

from collections.abc import Mapping
from math import isfinite
from typing import cast

from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from aedit.launch.records import Metric, Run, totals
from aedit.launch.views import words
from aedit.launch.views.axes import in_bytes, stacked_bars, whole_numbers
from aedit.launch.views.figures import rounds
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


def time_per_node(run: Run) -> Figure | None:
    """Return one bar per node: compute, waiting, waiting used by idle work, evaluation and checkpoints."""
    nodes = [node for node in run.nodes if node.metrics]
    if not nodes:
        return None
    ways, spent_s = (USES.values(), _spent_rl) if run.is_rl else (WAYS, _spent)
    unit_s, unit = words.time_unit(max(sum(spent_s(node.metrics[-1])) for node in nodes))
    spent = [tuple(s / unit_s for s in spent_s(node.metrics[-1])) for node in nodes]
    by_way = zip(*spent, strict=True)
    parts = {name: (colour, times) for (name, colour), times in zip(ways, by_way, strict=True)}
    figure = Figure(figsize=(8 if len(parts) == len(WAYS) else 10, 1.7 + 0.42 * len(nodes)))
    axes = figure.add_subplot()
    stacked_bars(axes, [f"node {node.index}" for node in nodes], parts)
    for bars, (_, times) in zip(axes.containers, parts.values(), strict=True):
        shares = [time / (sum(row) or 1.0) for time, row in zip(times, spent, strict=True)]
        told = [f"{share:.0%}" if share >= LABEL_ABOVE else "" for share in shares]
        axes.bar_label(cast(BarContainer, bars), told, label_type="center", fontsize=9)
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
    return f" (the first of {sent.founder} with the initial anchors, {words.size(sent.anchor_bytes)})"


def _known(value: float) -> float:
    return value if isfinite(value) else 0.0
