"""Tables of a hub's state for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import HubRecords, HubSample, NodeSample
from aedit.launch.views import words
from aedit.launch.views.figures import ratio
from aedit.launch.views.rl_table import Learner, hub_learners, rl_lines
from aedit.launch.views.server_table import server_table
from aedit.proto.rpc import term_text

LEFT = ("name", "state", "refused")
PACE = ("node", "name", "state", "steps", "steps/s", "pace", "waited %", "wire", "hidden")
TRUST = ("node", "accepted", "staleness", "weight", "up", "down", "refused")
MAX_STATE = 22


@dataclass(frozen=True, slots=True)
class HubDetail:
    """Amount of detail of a hub's tables."""

    spaced: bool = True
    pace: bool = True
    """Whether to show the table of the nodes' speed."""

    trust: bool = True
    """Whether to show the table of their pushes."""

    max_rows: int | None = None
    rl: bool = True
    """True shows the tables of reinforcement learning."""

    servers: bool = True
    """Show the table of the rollout servers."""


FULL = HubDetail()


def hub_table(now: HubSample, detail: HubDetail = FULL) -> Iterator[RenderableType]:
    """Yield tables of the nodes' speed, of their pushes, and the versions."""
    if now.follows:
        yield Text(
            f"follows the hub at {now.follows}, term {term_text(now.term)}; versions {spread(now.versions)}"
        )
        return
    nodes = now.nodes[: detail.max_rows]
    for wanted, columns, cells in ((detail.pace, PACE, _pace), (detail.trust, TRUST, _trust)):
        if wanted and nodes:
            yield _table(columns, map(cells, nodes), fold=detail.spaced)
            if detail.spaced:
                yield Text()
    if detail.rl:
        yield from _rl(nodes, spaced=detail.spaced)
    if detail.servers:
        yield from server_table(now.servers, spaced=detail.spaced, max_rows=detail.max_rows)
    if len(nodes) < len(now.nodes):
        yield Text(words.more(len(now.nodes) - len(nodes), "node"), style="dim")
    if now.left_out:
        known = words.some(now.left_out, "other node")
        yield Text(f"the hub knows {known}, and lists live ones and those that left last", style="dim")
    if detail.trust and now.founder is not None:
        yield Text(f"the first anchors of the run were {words.size(now.anchor_bytes)}", style="dim")
    pending = f"{words.some(now.pending, 'push', 'pushes')} waiting for a quorum"
    journal = f"journal {words.size(now.journal_bytes)}"
    facts = [f"term {term_text(now.term)}", f"versions {spread(now.versions)}", pending, journal]
    yield Text(", ".join(facts), style="dim")
    for node in now.nodes:
        if node.excluded:
            yield Text(f"node {node.node} {node.name}: {node.excluded}", style="red")


def hub_tables(hubs: Sequence[HubRecords], detail: HubDetail = FULL) -> Iterator[RenderableType]:
    """Yield the newest state of the hubs that split the units, and their latest notices."""
    for k, hub in enumerate(hubs):
        part = f" {k} of {len(hubs)}" if len(hubs) > 1 else ""
        last = hub.last
        if detail.spaced:
            yield Text()
        yield Text(f"hub{part}, {words.clock(last.t)} into the run", style="bold")
        yield from hub_table(last, detail)
        leads = [notice for notice in hub.notices if notice.event == "lead"]
        if len(leads) > 1:
            yield Text(f"another hub took over at {words.clock(leads[-1].t)}", style="yellow")


def hub_cells(now: HubSample) -> list[str]:
    """Return each node in a few words, for a line of a log."""
    return [
        f"node {node.node} {node.state} step {words.count(node.steps)} {node.steps_per_s:.2f} steps/s"
        for node in now.nodes
    ]


def spread(versions: Sequence[int]) -> str:
    """Return `3 to 5` for different versions, one number if all are equal."""
    if not versions:
        return "none yet"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def reasons(refused: Mapping[str, int]) -> str:
    """Return the counts as `12 stale, 1 norm`, the most frequent first."""
    ordered = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _rl(nodes: Sequence[NodeSample], *, spaced: bool) -> Iterator[RenderableType]:
    """Yield what the nodes report of reinforcement learning; nothing in a run on text."""
    learners = [Learner(node.node, node.rl) for node in nodes]
    if not any(learner.rl for learner in learners):
        return
    yield hub_learners(learners)
    if spaced:
        yield Text()
        yield from rl_lines(learners)
        yield Text()


def _table(columns: Sequence[str], rows: "map[list[str]]", *, fold: bool) -> Table:
    """Return a table whose numbers are never cut; in narrow terminals, text columns are folded or cut."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        words_in_it = name in LEFT
        table.add_column(
            name, justify="left" if words_in_it else "right", overflow="fold", no_wrap=not words_in_it
        )
    # Text columns shrink; their cells wrap only with `fold`.
    cut: dict[str, Any] = {} if fold else {"no_wrap": True, "overflow": "ellipsis"}
    for row in rows:
        table.add_row(*(Text(cell, **cut) for cell in row))  # no markup in names, which nodes choose
    return table


def _pace(node: NodeSample) -> list[str]:
    state = "excluded" if node.excluded else node.state[:MAX_STATE]
    if not node.reports:
        return [str(node.node), node.name, state, *[words.UNKNOWN] * 6]
    return [
        str(node.node),
        node.name,
        state,
        words.count(node.steps),
        f"{node.steps_per_s:.2f}",
        words.count(node.pace_steps),
        words.percent(ratio(node.wait_s, node.busy_s + node.wait_s)),
        words.seconds(node.wire_s),
        words.percent(1 - min(1.0, ratio(node.wait_s, node.wire_s))),
    ]


def _trust(node: NodeSample) -> list[str]:
    known = node.reports
    return [
        str(node.node),
        words.count(node.accepted),
        words.count(node.staleness),
        words.percent(node.weight) if node.accepted else words.UNKNOWN,
        words.size(node.bytes_up) if known else words.UNKNOWN,
        words.size(node.bytes_down) if known else words.UNKNOWN,
        reasons(node.refused) or words.UNKNOWN,
    ]
