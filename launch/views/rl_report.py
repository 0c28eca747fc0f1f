"""Reinforcement learning in the report of a finished run."""

from collections.abc import Iterator
from math import isfinite

from rich.table import Table

from aedit.launch.records import NodeRecords, Run
from aedit.launch.views import words
from aedit.launch.views.figures import LAST_LINES, mean_known, ratio
from aedit.launch.views.rl_figures import (
    RLTotals,
    after_warm_up,
    first_and_last,
    newest,
    rl_held_out,
    rl_totals,
)

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


def rl_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of each figure of the run."""
    totals = rl_totals(newest(node) for node in run.nodes)
    yield "held-out solved", _held_out(run)
    reward, solved = (first_and_last(run, value) for value in (lambda rl: rl.reward, lambda rl: rl.solved))
    yield "reward", f"{words.decimals(reward[0])} -> {words.decimals(reward[1])}, {_solved(solved)}"
    yield "rollouts", _speed(totals)
    yield "arms", words.shares(totals.arms)
    yield "groups", _groups(totals)
    yield "policy", _policy(run)
    yield "idle", _idle(totals)
    if any(rl.drafter is not None for rl in map(newest, run.nodes) if rl is not None):
        yield "drafter", _drafter(totals)
    if failed := sum(notice.event == "reward_error" for node in run.nodes for notice in node.notices):
        yield "rewards", f"{words.some(failed, 'error')} in reward functions; see events.jsonl of the nodes"


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
        return [str(node.index), *[words.UNKNOWN] * (len(COLUMNS) - 1)]
    totals, states = rl_totals([rl]), [metric.rl for metric in node.metrics if metric.rl is not None]
    return [
        str(node.index),
        words.count(node.metrics[-1].step),
        words.count(totals.groups),
        words.count(totals.tokens_per_s),
        words.times(totals.speed_up),
        words.decimals(totals.accepted),
        words.decimals(mean_known(state.staleness for state in states), 1),
        words.seconds(totals.waited_s),
        words.percent(ratio(totals.idle_used_s, totals.waited_s)),
        words.decimals(mean_known(state.reward for state in states[-LAST_LINES:])),
        words.percent(mean_known(state.solved for state in states[-LAST_LINES:])),
    ]


def _held_out(run: Run) -> str:
    evaluations, since = rl_held_out(run), after_warm_up(run)
    if not evaluations:
        return f"{words.UNKNOWN} (no evaluation ran)"
    first, last = (since or evaluations)[0], evaluations[-1]
    change = f"{words.percent(first.solved)} -> {words.percent(last.solved)}"
    before = f"; {words.percent(evaluations[0].solved)} before the warm-up" if evaluations[0] != first else ""
    times = f"at {words.clock(first.t)} and {words.clock(last.t)}"
    return f"{change} of {words.count(last.problems)} problems, {times}{before}"


def _solved(share: tuple[float, float]) -> str:
    return f"{words.percent(share[0])} -> {words.percent(share[1])} solved"


def _speed(totals: RLTotals) -> str:
    speed = f"{words.count(totals.tokens_per_s)} tokens/s while generating"
    accepted = f"accepted length {words.decimals(totals.accepted)}"
    if not isfinite(totals.speed_up):
        return f"{speed}; {accepted}; no plain step was timed"
    return f"{speed}; decoding {words.times(totals.speed_up)} as fast as without drafts; {accepted}"


def _groups(totals: RLTotals) -> str:
    made = f"{words.count(totals.groups)} ({words.count(totals.rollouts)} rollouts)"
    no_signal = f"{words.percent(totals.no_signal)} without signal"
    retried = f"{words.count(totals.retried)} retried"
    return ", ".join([made, no_signal, retried, f"{words.count(totals.excluded)} rollouts without reward"])


def _policy(run: Run) -> str:
    states = [metric.rl for node in run.nodes for metric in node.metrics if metric.rl is not None]
    highest = max((rl.staleness_max for rl in states if rl.staleness_max >= 0), default=float("nan"))
    return (
        f"staleness {words.decimals(mean_known(rl.staleness for rl in states), 1)} versions "
        f"(max {words.count(highest)}), "
        f"mismatch KL {words.tiny(mean_known(rl.mismatch_kl for rl in states))}, "
        f"{words.percent(mean_known(rl.clip_share for rl in states))} of the tokens clipped"
    )


def _idle(totals: RLTotals) -> str:
    if totals.waited_s < 0.05:
        return "none"
    used = f"{words.seconds(totals.idle_used_s)} of {words.seconds(totals.waited_s)} used"
    return f"{used}; {words.durations(totals.idle_s)}"


def _drafter(totals: RLTotals) -> str:
    trained = (
        f"{words.count(totals.drafter_steps)} steps of training, {words.count(totals.published)} published"
    )
    return (
        f"{trained}, {words.count(totals.refused)} refused by the gate, {words.count(totals.adopted)} taken"
    )
