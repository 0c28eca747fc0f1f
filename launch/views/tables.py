"""Tables of hubs, rollout servers and swarms for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import (
    HubRecords,
    HubSample,
    NodeSample,
    PartSample,
    PeerSample,
    ServerSample,
    SwarmSample,
)
from aedit.launch.views import formatting
from aedit.launch.views.figures import ratio
from aedit.launch.views.rl_table import Learner, hub_learners, rl_lines
from aedit.proto.rpc import term_text

LEFT = ("name", "state", "refused")
PACE = ("node", "name", "state", "steps", "steps/s", "pace", "waited %", "wire", "hidden")
TRUST = ("node", "accepted", "staleness", "weight", "up", "down", "refused")
MAX_STATE = 22
_SERVERS = ("server", "address", "state", "lag", "tokens/s", "run/queue", "idle", "used")
_SERVERS_LEFT = ("server", "address", "state")
_LONGEST = 300
"""Characters of an accusation that are shown."""
_PEERS = ("peer", "address", "role", "owns", "follows", "steps/s", "model", "state")
_PARTS = ("part", "owner", "term", "sync", "versions", "digest", "pending", "in", "out")
_WHOLE = ("address", "owner")
"""Columns that a narrow terminal does not fold, so that they can be copied."""
_DIGITS = 8
"""Of a digest that are shown."""


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
        yield Text(formatting.more(len(now.nodes) - len(nodes), "node"), style="dim")
    if now.left_out:
        known = formatting.some(now.left_out, "other node")
        yield Text(f"the hub knows {known}, and lists live ones and those that left last", style="dim")
    if detail.trust and now.founder is not None:
        yield Text(f"the first anchors of the run were {formatting.size(now.anchor_bytes)}", style="dim")
    pending = f"{formatting.some(now.pending, 'push', 'pushes')} waiting for a quorum"
    journal = f"journal {formatting.size(now.journal_bytes)}"
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
        yield Text(f"hub{part}, {formatting.clock(last.t)} into the run", style="bold")
        yield from hub_table(last, detail)
        leads = [notice for notice in hub.notices if notice.event == "lead"]
        if len(leads) > 1:
            yield Text(f"another hub took over at {formatting.clock(leads[-1].t)}", style="yellow")


def hub_cells(now: HubSample) -> list[str]:
    """Return each node in a few words, for a line of a log."""
    return [
        f"node {node.node} {node.state} step {formatting.count(node.steps)} {node.steps_per_s:.2f} steps/s"
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
        return [str(node.node), node.name, state, *[formatting.UNKNOWN] * 6]
    return [
        str(node.node),
        node.name,
        state,
        formatting.count(node.steps),
        f"{node.steps_per_s:.2f}",
        formatting.count(node.pace_steps),
        formatting.percent(ratio(node.wait_s, node.busy_s + node.wait_s)),
        formatting.seconds(node.wire_s),
        formatting.percent(1 - min(1.0, ratio(node.wait_s, node.wire_s))),
    ]


def _trust(node: NodeSample) -> list[str]:
    known = node.reports
    return [
        str(node.node),
        formatting.count(node.accepted),
        formatting.count(node.staleness),
        formatting.percent(node.weight) if node.accepted else formatting.UNKNOWN,
        formatting.size(node.bytes_up) if known else formatting.UNKNOWN,
        formatting.size(node.bytes_down) if known else formatting.UNKNOWN,
        reasons(node.refused) or formatting.UNKNOWN,
    ]


def server_table(
    servers: Sequence[ServerSample], *, spaced: bool = True, max_rows: int | None = None
) -> Iterator[RenderableType]:
    """Yield the table of the servers, and a line for each one that is accused or banned."""
    if not servers:
        return
    live = sum(server.live for server in servers)
    yield Text(f"role rollout: {formatting.some(live, 'server')} of {len(servers)} live", style="dim")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in _SERVERS:
        left = name in _SERVERS_LEFT
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for server in servers[:max_rows]:
        table.add_row(*map(Text, _cells(server)))  # no markup in what servers choose
    yield table
    if max_rows is not None and len(servers) > max_rows:
        yield Text(formatting.more(len(servers) - max_rows, "server"), style="dim")
    for server in servers:
        yield from _accusations(server)
    if spaced:
        yield Text()


def accusation(server: ServerSample) -> str:
    """Return who accuses the server, and of what; "" without accusations."""
    if not server.accused:
        return ""
    by = ", ".join(f"{name} ({count:,.0f})" for name, count in server.accused.items())
    evidence = f"; {server.evidence_line}" if server.evidence else ""
    return f"accused by {by}: {server.reason}{evidence}"[:_LONGEST]


def _accusations(server: ServerSample) -> Iterator[Text]:
    if accused := accusation(server):
        yield Text(f"server {server.name} is {accused}", style="yellow")
    if server.banned:
        yield Text(f"server {server.name} is banned: {server.banned}"[:_LONGEST], style="red")


def _cells(server: ServerSample) -> list[str]:
    used = formatting.percent(ratio(server.idle_used_s, server.idle_s))
    known = (
        formatting.count(server.lag),
        formatting.count(server.tokens_per_s),
        f"{formatting.count(server.running)}/{formatting.count(server.waiting)}",
        formatting.clock(server.idle_s),
        used,
    )
    numbers = known if server.live else (formatting.UNKNOWN,) * len(known)
    return [server.name, server.address, server.state, *numbers]


def swarm_tables(swarm: SwarmSample) -> Iterator[RenderableType]:
    """Yield a table of the live peers and one of the parts."""
    yield Text()
    yield _swarm_table(_PEERS, [_peer(peer) for peer in swarm.peers], left=8)
    yield Text()
    yield _swarm_table(_PARTS, [_part(number, part) for number, part in enumerate(swarm.parts)], left=2)
    for number, part in enumerate(swarm.parts):
        if part.trouble:
            yield Text(f"part {number}: {part.trouble}", style="bold red" if part.hub is None else "dim")


def _swarm_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        whole = name in _WHOLE
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(Text, row))  # no markup in names, which peers choose
    return table


def _peer(peer: PeerSample) -> list[str]:
    owns, keeps = (",".join(map(str, parts)) or formatting.UNKNOWN for parts in (peer.owns, peer.keeps))
    speed = formatting.decimals(peer.steps_per_s) if peer.steps_per_s else formatting.UNKNOWN
    role = peer.role.replace("keeps parts", "keeps")
    model = peer.model[:_DIGITS] or formatting.UNKNOWN
    return [peer.name, peer.address or "client", role, owns, keeps, speed, model, peer.state]


def _part(number: int, part: PartSample) -> list[str]:
    if part.hub is None:
        return [str(number), "none that answers", *[formatting.UNKNOWN] * 7]
    hub = part.hub
    digest = part.digest[:_DIGITS] or formatting.UNKNOWN
    cells = [term_text(hub.term), str(part.in_sync), spread(hub.versions), digest, str(hub.pending)]
    return [str(number), part.owner, *cells, formatting.size(part.bytes_in), formatting.size(part.bytes_out)]
