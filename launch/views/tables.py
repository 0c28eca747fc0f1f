"""Tables of hubs, rollout servers, swarms and reinforcement learning for a terminal of 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import (
    HubRecords,
    HubSample,
    NodeRecords,
    NodeSample,
    PartSample,
    PeerSample,
    RLMetric,
    Run,
    ServerSample,
    SwarmSample,
    text,
)
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import (
    after_warm_up,
    ledger,
    ratio,
    recent_rollout_tokens_per_s,
    rl_held_out,
    rl_totals,
)
from aedit.proto.rpc import term_text

PACE = ("node", "name", "state", "steps", "steps/s", "pace", "waited %", "wire", "hidden")
TRUST = ("node", "accepted", "staleness", "weight", "up", "down", "refused")
SERVERS = ("server", "address", "state", "lag", "tokens/s", "run/queue", "idle", "used")
PEERS = ("peer", "address", "role", "owns", "follows", "steps/s", "model", "state")
PARTS = ("part", "owner", "term", "sync", "versions", "digest", "pending", "in", "out")
HEALTH = ("node", "staleness", "mismatch", "clipped", "no signal", "idle", "used", "drafter")
LEARNERS = ("node", "reward", "solved", "rollout tokens/s", "speed-up", "accepted", "staleness")
RL_COLUMNS = (
    "node",
    "step",
    "round",
    "reward",
    "solved",
    "rollout\ntokens/s",
    "speed-up",
    "accepted\nlength",
)
_TEXT = ("name", "state", "refused", "server", "address")
"""Columns of text in the tables of a hub."""
_MAX_STATE = 22
_MAX_ACCUSATION = 300
_MAX_PARTS = 5
"""Arms and causes that are named, the most frequent ones."""
_DIGITS = 8
"""Of a digest that are shown."""

Learner = tuple[int, RLMetric | None]
"""Index of a node, and its reinforcement learning, from its own files or from its hub."""


@dataclass(frozen=True, slots=True)
class Detail:
    """Amount of detail of the panel of a run and of its tables."""

    spaced: bool = True
    """Whether to draw blank lines and margins."""

    trust: bool = True
    """Whether to show the table of the nodes' pushes to a hub."""

    rl: bool = True
    """Whether to show the tables of reinforcement learning: staleness, mismatch and idle time."""

    servers: bool = True
    """Whether to show the table of the rollout servers."""

    pace: bool = True
    """Whether to show the hub's table of the nodes' speed."""

    max_rows: int | None = None
    """Most rows of a table of nodes; the number of others is shown below it."""


FULL = Detail()


def hub_table(now: HubSample, detail: Detail = FULL) -> Iterator[RenderableType]:
    """Yield tables of the nodes' speed, of their pushes, and the versions."""
    versions = f"versions {fmt.spread(now.versions)}"
    for place in now.set_aside:
        yield Text(f"records that a leader did not have are set aside: {place}")
    for twins in now.twins:
        yield Text(f"started from copies of one folder: {twins}")
    if now.disk_full:
        yield Text(f"the disk is full: {now.disk_full}")
    if now.follows:
        yield Text(f"follows the hub at {now.follows}, term {term_text(now.term)}; {versions}")
        return
    nodes = now.nodes[: detail.max_rows]
    for wanted, columns, cells in ((detail.pace, PACE, pace_cells), (detail.trust, TRUST, trust_cells)):
        if wanted and nodes:
            yield fmt.table(columns, map(cells, nodes), left=_TEXT, wraps=_TEXT, cut=not detail.spaced)
            if detail.spaced:
                yield Text()
    learners = [(node.node, node.rl) for node in nodes]
    if detail.rl and any(rl for _, rl in learners):
        yield fmt.table(LEARNERS, (rl_cells(LEARNERS, *each) for each in learners))
        if detail.spaced:
            yield Text()
            yield from rl_lines(learners)
            yield Text()
    if detail.servers and now.servers:
        yield from _server_table(now.servers, detail)
    if len(nodes) < len(now.nodes):
        yield Text(fmt.more(len(now.nodes) - len(nodes), "node"), style="dim")
    if now.nodes_left_out:
        others = fmt.some(now.nodes_left_out, "other node")
        yield Text(f"the hub knows {others}, and lists live ones and those that left last", style="dim")
    if detail.trust and now.founder is not None:
        yield Text(f"the first anchors of the run were {fmt.size(now.anchor_bytes)}", style="dim")
    pending = f"{fmt.some(now.pending, 'push', 'pushes')} waiting for a quorum"
    journal = f"journal {fmt.size(now.journal_bytes)}"
    yield Text(f"term {term_text(now.term)}, {versions}, {pending}, {journal}", style="dim")
    for node in now.nodes:
        if node.excluded:
            yield Text(f"node {node.node} {node.name}: {node.excluded}", style="red")


def hub_tables(hubs: Sequence[HubRecords], detail: Detail) -> Iterator[RenderableType]:
    """Yield the newest state of the hubs that split the units, and their latest notices."""
    for k, hub in enumerate(hubs):
        part = f" {k} of {len(hubs)}" if len(hubs) > 1 else ""
        last = hub.last
        if detail.spaced:
            yield Text()
        yield Text(f"hub{part}, {fmt.clock(last.t)} into the run", style="bold")
        yield from hub_table(last, detail)
        leads = [notice for notice in hub.notices if notice.event == "lead"]
        if len(leads) > 1:
            yield Text(f"another hub took over at {fmt.clock(leads[-1].t)}", style="yellow")


def pace_cells(node: NodeSample) -> list[str]:
    """Return the cells of `PACE`."""
    state = "excluded" if node.excluded else node.state[:_MAX_STATE]
    if not node.reports:
        return [str(node.node), node.name, state, *[fmt.UNKNOWN] * 6]
    return [
        str(node.node),
        node.name,
        state,
        fmt.count(node.steps),
        f"{node.steps_per_s:.2f}",
        fmt.count(node.pace_steps),
        fmt.percent(ratio(node.wait_s, node.busy_s + node.wait_s)),
        fmt.seconds(node.wire_s),
        fmt.percent(1 - min(1.0, ratio(node.wait_s, node.wire_s))),
    ]


def trust_cells(node: NodeSample) -> list[str]:
    """Return the cells of `TRUST`."""
    return [
        str(node.node),
        fmt.count(node.accepted),
        fmt.count(node.staleness),
        fmt.percent(node.weight) if node.accepted else fmt.UNKNOWN,
        fmt.size(node.bytes_up) if node.reports else fmt.UNKNOWN,
        fmt.size(node.bytes_down) if node.reports else fmt.UNKNOWN,
        fmt.reasons(node.refused) or fmt.UNKNOWN,
    ]


def _server_table(servers: Sequence[ServerSample], detail: Detail) -> Iterator[RenderableType]:
    """Yield the table of the servers, and a line for each one that is accused or banned."""
    live = sum(server.live for server in servers)
    yield Text(f"role rollout: {fmt.some(live, 'server')} of {len(servers)} live", style="dim")
    yield fmt.table(SERVERS, map(server_cells, servers[: detail.max_rows]), left=_TEXT, wraps=_TEXT)
    if detail.max_rows is not None and len(servers) > detail.max_rows:
        yield Text(fmt.more(len(servers) - detail.max_rows, "server"), style="dim")
    for server in servers:
        if accused := accusation_text(server):
            yield Text(f"server {server.name} is {accused}", style="yellow")
        if server.banned:
            yield Text(f"server {server.name} is banned: {server.banned}"[:_MAX_ACCUSATION], style="red")
    if detail.spaced:
        yield Text()


def server_cells(server: ServerSample) -> list[str]:
    """Return the cells of `SERVERS`."""
    known = [
        fmt.count(server.lag),
        fmt.count(server.tokens_per_s),
        f"{fmt.count(server.running)}/{fmt.count(server.waiting)}",
        fmt.clock(server.idle_s),
        fmt.percent(ratio(server.idle_used_s, server.idle_s)),
    ]
    return [server.name, server.address, server.state, *(known if server.live else [fmt.UNKNOWN] * 5)]


def accusation_text(server: ServerSample) -> str:
    """Return who accuses the server, and of what; "" without accusations."""
    if not server.accused:
        return ""
    by = ", ".join(f"{name} ({count:,.0f})" for name, count in server.accused.items())
    facts = ", ".join(f"{text(name)} {text(value)}" for name, value in server.evidence.items())
    return f"accused by {by}: {server.reason}{facts and f'; {facts}'}"[:_MAX_ACCUSATION]


def swarm_tables(swarm: SwarmSample) -> Iterator[RenderableType]:
    """Yield a table of the live peers and one of the parts."""
    for columns, rows, left in (
        (PEERS, map(peer_cells, swarm.peers), PEERS),
        (PARTS, map(part_cells, range(len(swarm.parts)), swarm.parts), PARTS[:2]),
    ):
        yield Text()
        # Addresses are not folded, so that they can be copied.
        yield fmt.table(columns, rows, left=left, wraps=set(columns) - {"address", "owner"})
    for number, part in enumerate(swarm.parts):
        if part.trouble:
            yield Text(f"part {number}: {part.trouble}", style="bold red" if part.hub is None else "dim")


def peer_cells(peer: PeerSample) -> list[str]:
    """Return the cells of `PEERS`."""
    owns, keeps = (",".join(map(str, parts)) or fmt.UNKNOWN for parts in (peer.owns, peer.keeps))
    speed = fmt.decimals(peer.steps_per_s) if peer.steps_per_s else fmt.UNKNOWN
    role = peer.role.replace("keeps parts", "keeps")
    model = peer.model[:_DIGITS] or fmt.UNKNOWN
    return [peer.name, peer.address or "client", role, owns, keeps, speed, model, peer.state]


def part_cells(number: int, part: PartSample) -> list[str]:
    """Return the cells of `PARTS`."""
    hub = part.hub
    if hub is None:
        return [str(number), "none that answers", *[fmt.UNKNOWN] * 7]
    digest = part.digest[:_DIGITS] or fmt.UNKNOWN
    cells = [term_text(hub.term), str(part.in_sync), fmt.spread(hub.versions), digest, str(hub.pending)]
    return [str(number), part.owner, *cells, fmt.size(part.bytes_in), fmt.size(part.bytes_out)]


def rl_cells(
    columns: Sequence[str], index: int, rl: RLMetric | None, node: NodeRecords | None = None
) -> list[str]:
    """Return cells of a table of reinforcement learning. node: records of the node, if they are here."""
    if rl is None:
        return [str(index), *[fmt.UNKNOWN] * (len(columns) - 1)]
    totals = rl_totals([rl])
    last = node.metrics[-1] if node else None
    speed = recent_rollout_tokens_per_s(node.metrics) if node else totals.tokens_per_s
    cells = {
        "node": str(index),
        "step": fmt.count(last.step) if last else fmt.UNKNOWN,
        "round": str(last.round) if last else fmt.UNKNOWN,
        "reward": fmt.decimals(rl.reward),
        "solved": fmt.percent(rl.solved),
        "rollout tokens/s": fmt.count(speed),
        "speed-up": fmt.times(totals.speed_up),
        "accepted": fmt.decimals(totals.accepted),
        "accepted length": fmt.decimals(totals.accepted),
        "staleness": f"{fmt.decimals(rl.staleness, 1)} (max {fmt.count(rl.staleness_max)})",
        "mismatch": fmt.tiny(rl.mismatch_kl),
        "clipped": fmt.percent(rl.clip_share),
        "no signal": fmt.percent(totals.no_signal),
        "idle": fmt.seconds(totals.waited_s),
        "used": fmt.percent(ratio(totals.idle_used_s, totals.waited_s)),
        "drafter": f"v{fmt.count(rl.drafter['version'])}" if rl.drafter else fmt.UNKNOWN,
    }
    return [cells[name.replace("\n", " ")] for name in columns]


def rl_lines(learners: Sequence[Learner]) -> Iterator[RenderableType]:
    """Yield the engine's arms and the idle time by cause, over all nodes; what became of it, also by node."""
    totals = rl_totals(rl for _, rl in learners)
    used = fmt.percent(ratio(totals.idle_used_s, totals.waited_s))
    idle = fmt.durations(_first(totals.idle_s)) + (f"; {used} used" if totals.waited_s >= 0.05 else "")
    lines = [("arms", fmt.shares(_first(totals.arms))), ("idle", idle), ("ledger", ledger(totals))]
    if len(learners) > 1:
        lines += [(f"  node {index}", ledger(rl_totals([rl]))) for index, rl in learners]
    lines += [
        (
            "drafter",
            f"its trainer on node {index} gets less than a tenth of its windows' processor time: set"
            ' drafter.priority = "normal", or leave a processor free',
        )
        for index, rl in learners
        if rl is not None and rl.drafter.get("starved", 0) > 0
    ]
    for name, shown in lines:
        if not shown and name not in ("arms", "idle"):
            continue
        grid = Table.grid(padding=0)  # a line continues under its own text
        grid.add_column(width=len("held-out solved  "), no_wrap=True)
        grid.add_row(Text(name), Text(shown))
        yield grid


def held_out_line(run: Run) -> Text:
    """Return the newest held-out answers."""
    evaluations = after_warm_up(run) or rl_held_out(run)[-1:]
    if not evaluations:
        return Text(f"held-out solved  {fmt.UNKNOWN}")
    first, last = evaluations[0], evaluations[-1]
    change = f"{fmt.percent(first.solved)} -> " if len(evaluations) > 1 else ""
    of = f" of {fmt.count(last.problems)} problems at {fmt.clock(last.t)}"
    return Text(f"held-out solved  {change}{fmt.percent(last.solved)}{of}")


def _first(parts: Mapping[str, float]) -> dict[str, float]:
    return dict(islice(parts.items(), _MAX_PARTS))
