"""Tables and lines of reinforcement learning for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import NodeRecords, RLMetric, Run
from aedit.launch.views import formatting
from aedit.launch.views.figures import ratio
from aedit.launch.views.rl_figures import (
    after_warm_up,
    newest,
    recent_rollout_tokens_per_s,
    rl_held_out,
    rl_totals,
)

COLUMNS = ("step", "round", "reward", "solved", "rollout\ntokens/s", "speed-up", "accepted\nlength")
HEALTH = ("node", "staleness", "mismatch", "clipped", "no signal", "idle", "used", "drafter")
MAX_PARTS = 5
"""Arms and causes that are named, the most frequent ones."""


@dataclass(frozen=True, slots=True)
class Learner:
    """One node's reinforcement learning, from its own files or from its hub."""

    node: int
    rl: RLMetric | None


def rl_cells(node: NodeRecords | None) -> list[str]:
    """Return the cells of `COLUMNS` for one node."""
    rl = newest(node) if node else None
    if node is None or rl is None:
        return [formatting.UNKNOWN] * len(COLUMNS)
    last, totals = node.metrics[-1], rl_totals([rl])
    return [
        formatting.count(last.step),
        str(last.round),
        formatting.decimals(rl.reward),
        formatting.percent(rl.solved),
        formatting.count(recent_rollout_tokens_per_s(node.metrics)),
        formatting.times(totals.speed_up),
        formatting.decimals(totals.accepted),
    ]


def rl_cell(node: NodeRecords) -> str:
    """Return a node's reinforcement learning in a few words, for a line of a log."""
    rl = newest(node)
    if rl is None:
        return ""
    speed = formatting.count(recent_rollout_tokens_per_s(node.metrics))
    reward, solved = formatting.decimals(rl.reward), formatting.percent(rl.solved)
    return f"reward {reward} solved {solved} {speed} rollout tokens/s"


def rl_health(learners: Sequence[Learner]) -> Table:
    """Return the table of `HEALTH`: whether samples fit the weights, and the use of idle time."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in HEALTH:
        table.add_column(name, justify="right")
    for learner in learners:
        table.add_row(str(learner.node), *_health(learner.rl))
    return table


def hub_learners(learners: Sequence[Learner]) -> Table:
    """Return the table of nodes whose files are not here, without what their hub shows elsewhere."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in ("node", "reward", "solved", "rollout tokens/s", "speed-up", "accepted", "staleness"):
        table.add_column(name, justify="right")
    for learner in learners:
        rl = learner.rl
        if rl is None:
            table.add_row(str(learner.node), *[formatting.UNKNOWN] * 6)
            continue
        totals = rl_totals([rl])
        table.add_row(
            str(learner.node),
            formatting.decimals(rl.reward),
            formatting.percent(rl.solved),
            formatting.count(totals.tokens_per_s),
            formatting.times(totals.speed_up),
            formatting.decimals(totals.accepted),
            _staleness(rl),
        )
    return table


def rl_lines(learners: Sequence[Learner]) -> Iterator[RenderableType]:
    """Yield the engine's arms and the idle time by cause, over all nodes."""
    totals = rl_totals(learner.rl for learner in learners)
    yield _wrapped("arms", formatting.shares(_first(totals.arms)))
    used = formatting.percent(ratio(totals.idle_used_s, totals.waited_s))
    idle = formatting.durations(_first(totals.idle_s)) + (f"; {used} used" if totals.waited_s >= 0.05 else "")
    yield _wrapped("idle", idle)


def held_out_line(run: Run) -> Text:
    """Return the newest held-out answers."""
    evaluations = after_warm_up(run) or rl_held_out(run)[-1:]
    if not evaluations:
        return Text(f"held-out solved  {formatting.UNKNOWN}")
    first, last = evaluations[0], evaluations[-1]
    change = f"{formatting.percent(first.solved)} -> " if len(evaluations) > 1 else ""
    of = f" of {formatting.count(last.problems)} problems at {formatting.clock(last.t)}"
    return Text(f"held-out solved  {change}{formatting.percent(last.solved)}{of}")


def _health(rl: RLMetric | None) -> list[str]:
    if rl is None:
        return [formatting.UNKNOWN] * (len(HEALTH) - 1)
    totals = rl_totals([rl])
    version = rl.drafter.version if rl.drafter else float("nan")
    return [
        _staleness(rl),
        formatting.tiny(rl.mismatch_kl),
        formatting.percent(rl.clip_share),
        formatting.percent(totals.no_signal),
        formatting.seconds(totals.waited_s),
        formatting.percent(ratio(totals.idle_used_s, totals.waited_s)),
        f"v{formatting.count(version)}" if rl.drafter else formatting.UNKNOWN,
    ]


def _staleness(rl: RLMetric) -> str:
    highest = formatting.count(rl.staleness_max)
    return f"{formatting.decimals(rl.staleness, 1)} (max {highest})"


def _first(parts: Mapping[str, float]) -> dict[str, float]:
    return dict(list(parts.items())[:MAX_PARTS])


def _wrapped(name: str, text: str) -> Table:
    """Return a line that continues under its own text."""
    grid = Table.grid(padding=0)
    grid.add_column(width=len("held-out solved  "), no_wrap=True)
    grid.add_column()
    grid.add_row(Text(name), Text(text))
    return grid
