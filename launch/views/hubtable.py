"""What a hub says of its run, for a terminal of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.rundir.hub_records import Hub, HubAt, NodeAt
from aedit.launch.views import words
from aedit.launch.views.figures import ratio

LEFT = ("name", "state", "refused")
PACE = ("node", "name", "state", "steps", "steps/s", "pace", "waited %", "wire", "hidden")
TRUST = ("node", "accepted", "staleness", "weight", "up", "down", "refused")
MAX_STATE = 22


def hub_table(now: HubAt) -> RenderableType:
    """How fast each node is, what is made of what it brings, and the versions."""
    if now.follows:
        return Text(f"follows the hub at {now.follows}, term {now.term}; versions {spread(now.versions)}")
    pace, trust = _table(PACE, map(_pace, now.nodes)), _table(TRUST, map(_trust, now.nodes))
    pending = f"{words.some(now.pending, 'push', 'pushes')} waiting for a quorum"
    journal = f"journal {words.size(now.journal_bytes)}"
    facts = [f"term {now.term}", f"versions {spread(now.versions)}", pending, journal]
    out = [Text(f"node {n.node} {n.name}: {n.put_out}", style="red") for n in now.nodes if n.put_out]
    return Group(pace, Text(), trust, Text(), Text(", ".join(facts), style="dim"), *out)


def hub_tables(hubs: Sequence[Hub]) -> list[RenderableType]:
    """The last lines of the hubs that split the units, and what was of note last."""
    found: list[RenderableType] = []
    for k, hub in enumerate(hubs):
        part = f" {k} of {len(hubs)}" if len(hubs) > 1 else ""
        last = hub.last
        found += [
            Text(),
            Text(f"hub{part}, {words.clock(last.t)} into the run", style="bold"),
            hub_table(last),
        ]
        leads = [notice for notice in hub.notices if notice.event == "lead"]
        if len(leads) > 1:
            found.append(Text(f"another hub took over at {words.clock(leads[-1].t)}", style="yellow"))
    return found


def hub_line(now: HubAt) -> str:
    """The same in one plain line, for logs."""
    head = f"{words.clock(now.t)}  {words.percent(now.progress)}  term {now.term}"
    cells = (
        f"{node.node} {node.state} {words.count(node.steps)} steps, {node.steps_per_s:.2f}/s"
        for node in now.nodes
    )
    return " | ".join([head, *cells])


def spread(versions: Sequence[int]) -> str:
    """`3 to 5`, or how it is when all are alike."""
    if not versions:
        return "none yet"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def reasons(refused: Mapping[str, int]) -> str:
    """`12 stale, 1 norm`, the most frequent first."""
    ordered = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def _table(columns: Sequence[str], rows: "map[list[str]]") -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in LEFT else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # a node chose its name: no markup in it
    return table


def _pace(node: NodeAt) -> list[str]:
    state = "put out" if node.put_out else node.state[:MAX_STATE]
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


def _trust(node: NodeAt) -> list[str]:
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
