"""Contents of the page of a run: sections with charts, lanes and tables, as plain values of bounded size.

`contents` returns them for a run; `as_json` and `aedit.launch.views.page.html` write them.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from math import isfinite, nan
from typing import Any

from aedit.launch.records import HubSample, NodeSample, Run, totals
from aedit.launch.views import formatting as fmt
from aedit.launch.views.figures import (
    after_warm_up,
    held_out,
    idle_by_cause,
    ledger,
    longest,
    mean_known,
    newest,
    rl_held_out,
    rl_lines_of,
    rl_totals,
    rounds,
    share_of_solo,
    sum_so_far,
    total_known,
    whole_rounds,
)
from aedit.launch.views.page.histories import (
    BINS,
    History,
    end_of,
    histories,
    lane_shares,
    rates,
    totals_by_use,
)
from aedit.launch.views.panel import node_rows, times_of
from aedit.launch.views.tables import (
    HEALTH,
    LEARNERS,
    PACE,
    PARTS,
    PEERS,
    SERVERS,
    TRUST,
    Learner,
    accusation_text,
    held_out_line,
    pace_cells,
    part_cells,
    peer_cells,
    rl_cells,
    server_cells,
    trust_cells,
)
from aedit.proto.rpc import term_text

MOST_POINTS = 240
"""Points of a chart."""
MOST_CURVES = 8
"""Curves of a chart; of more nodes the smallest, median and largest value is shown."""
MOST_ROWS = 512
MOST_NOTICES = 50
MOST_TEXT = 300
"""Characters of a cell, which others may have chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTable:
    """One table; the first row of `rows` belongs to the first node, server or event."""

    name: str
    title: str = ""
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Values of one curve, NaN where there is none."""

    label: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PageChart:
    """Curves over one axis."""

    name: str
    title: str
    x: str
    """Name and unit of the axis."""
    y: str = ""
    xs: tuple[float, ...]
    series: tuple[Curve, ...]
    zero: bool = True
    """Whether the y axis begins at 0."""
    joined: bool = False
    """Whether a curve goes on where it has no value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLanes:
    """Shares of each node's time by use, in bins of equal length."""

    names: tuple[str, ...]
    uses: tuple[str, ...]
    bins: int
    end: str
    """Time of the end of the last bin."""
    shares: tuple[tuple[tuple[int, ...], ...], ...]
    """Percent by node, use and bin; () for a use that a node never has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """Part of the page under one heading."""

    name: str
    title: str
    note: str = ""
    lanes: PageLanes | None = None
    charts: tuple[PageChart, ...] = ()
    tables: tuple[PageTable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPage:
    """The page of a run."""

    title: str
    alerts: tuple[str, ...]
    sections: tuple[PageSection, ...]


def contents(run: Run) -> RunPage:
    """Return the page of a run as it is now."""
    found = histories(run)
    sections = (
        _summary(run),
        _nodes(run, found),
        _speed(run, found),
        _quality(run, found),
        _pushes(run),
        _refused(run),
        _bytes(run),
        _hubs(run),
        _servers(run),
        _learning(run),
        _notices(run),
    )
    return RunPage(
        title=run.name,
        alerts=tuple(text[:MOST_TEXT] for text in run.alerts),
        sections=tuple(filter(None, sections)),
    )


def as_json(page: RunPage) -> str:
    """Return the page as JSON in ASCII, safe inside of HTML; NaN and infinite values become null."""
    text = json.dumps(_plain(page), separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_digest(data: str) -> str:
    """Return a digest of a page as JSON, by which a browser names the one that it has."""
    return hashlib.blake2b(data.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if isfinite(value) else None
    if isinstance(value, tuple):
        return value if all(type(each) is int for each in value) else [_plain(each) for each in value]
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    return value


def page_table(
    name: str, columns: Iterable[str], rows: Iterable[Sequence[str]], title: str = ""
) -> PageTable:
    """Return a table of bounded size, with a last row that says how many rows are left out."""
    found = list(rows)
    cut = [tuple(cell.replace("\n", " ")[:MOST_TEXT] for cell in row) for row in found[:MOST_ROWS]]
    if len(found) > MOST_ROWS:
        cut.append((fmt.more(len(found) - MOST_ROWS, "row"),))
    heads = tuple(column.replace("\n", " ") for column in columns)
    return PageTable(name=name, title=title, columns=heads, rows=tuple(cut))


def _summary(run: Run) -> PageSection:
    done, elapsed_s, left_s = times_of(run)
    found, hub = [("elapsed", fmt.clock(elapsed_s)), ("done", fmt.percent(done))], totals(run.hubs)
    if isfinite(left_s) and done < 1:
        found.append(("left", f"about {fmt.clock(left_s)}"))
    if run.is_rl:
        found.append(("held-out solved", held_out_line(run).plain.removeprefix("held-out solved").strip()))
    elif evaluations := held_out(run):
        found.append(("held-out loss", f"{fmt.nats(evaluations[-1].loss)} nats per token"))
    if isfinite(share := share_of_solo(run.nodes)):
        found.append(("share of the nodes' solo speeds", fmt.percent(share)))
    if hub is not None:
        refused = sum(hub.refused.values())
        found.append(("pushes", f"{hub.accepted:,} accepted, {refused:,} refused"))
        found.append(("bytes", f"{fmt.size(hub.bytes_up)} up, {fmt.size(hub.bytes_down)} down"))
    return PageSection(name="run", title="Run", tables=(page_table("run", ("", ""), found),))


# -- nodes


def _nodes(run: Run, found: Sequence[History]) -> PageSection | None:
    """Return the lanes of the nodes, and tables of their state and of the use of their time."""
    tables = []
    if run.nodes:
        tables.append(page_table("nodes", *node_rows(run, run.indices)))
    if run.hubs and run.hubs[0].last.nodes:
        tables.append(page_table("pace", PACE, map(pace_cells, run.hubs[0].last.nodes), "At the hub"))
    if not found and not tables:
        return None
    uses, end_s = _uses(found), end_of(found)
    lanes = None
    if found and end_s > 0:
        lanes = PageLanes(
            names=tuple(each.name for each in found),
            uses=uses,
            bins=BINS,
            end=fmt.clock(end_s),
            shares=tuple(lane_shares(each, uses, end_s) for each in found),
        )
        times = [
            [each.name, *(fmt.seconds(totals_by_use(each, end_s).get(use, 0.0)) for use in uses)]
            for each in found
        ]
        tables.append(page_table("times", ("node", *uses), times, "Use of time"))
    note = "Each lane is a node. Colours show the use of its time; blank parts are times without a process."
    return PageSection(name="nodes", title="Nodes over time", note=note, lanes=lanes, tables=tuple(tables))


def _uses(found: Sequence[History]) -> tuple[str, ...]:
    """Return all uses of time, in the order of the lanes from the bottom up."""
    known = dict.fromkeys(use for each in found for use in each.uses)
    last = ("idle work", "other")
    return (*(use for use in known if use not in last), *last, "away") if found else ()


def _speed(run: Run, found: Sequence[History]) -> PageSection | None:
    """Return the speed of the run against the sum of the speeds that the nodes would have alone."""
    end_s = end_of(found)
    if not found or end_s <= 0:
        return None
    xs, unit = _bin_times(end_s)
    speed, solo = rates(found, end_s)
    what = "tokens" if run.nodes else "inner steps"
    chart = PageChart(
        name="speed",
        title=f"Speed against the sum of solo speeds ({what} per second)",
        x=unit,
        xs=xs,
        series=(Curve("run", speed), Curve("sum of solo speeds", solo)),
    )
    note = "A node's solo speed leaves its waits out. Both curves are equal while no node waits."
    return PageSection(name="speed", title="Speed", note=note, charts=(chart,))


def _bin_times(end_s: float) -> tuple[tuple[float, ...], str]:
    unit_s, unit = fmt.time_unit(end_s)
    return tuple((i + 0.5) * end_s / BINS / unit_s for i in range(BINS)), unit


# -- quality


def _quality(run: Run, found: Sequence[History]) -> PageSection | None:
    """Return held-out loss, or solved share, by time and by tokens."""
    if run.is_rl:
        evaluations = after_warm_up(run) or rl_held_out(run)
        values, what, title = [e.solved for e in evaluations], "share", "Held-out problems solved"
    else:
        evaluations = held_out(run)
        values, what, title = [e.loss for e in evaluations], "nats per token", "Held-out loss"
    if not evaluations:
        return None
    kept = _even(len(evaluations))
    unit_s, unit = fmt.time_unit(evaluations[-1].t)
    tokens = [sum(each.tokens_at(evaluations[i].t) for each in found) for i in kept]
    curve = (Curve(title.lower(), tuple(values[i] for i in kept)),)
    by_time = PageChart(
        name="quality-time",
        title=f"{title} by time",
        x=unit,
        y=what,
        xs=tuple(evaluations[i].t / unit_s for i in kept),
        series=curve,
        zero=run.is_rl,
    )
    order = sorted(range(len(kept)), key=lambda i: tokens[i])
    by_tokens = replace(
        by_time,
        name="quality-tokens",
        title=f"{title} by tokens of all nodes",
        x="tokens",
        xs=tuple(tokens[i] for i in order),
        series=(Curve(title.lower(), tuple(values[kept[i]] for i in order)),),
    )
    rows = [
        (fmt.clock(e.t), fmt.count(e.step), fmt.percent(e.solved) if run.is_rl else fmt.nats(e.loss))
        for e in evaluations[-MOST_NOTICES:]
    ]
    shown = page_table("quality", ("time", "step", title.lower()), rows)
    return PageSection(name="quality", title=title, charts=(by_time, by_tokens), tables=(shown,))


def _even(number: int) -> list[int]:
    """Return at most `MOST_POINTS` evenly spaced indices, with the first and the last one."""
    if number <= MOST_POINTS:
        return list(range(number))
    return sorted({i * (number - 1) // (MOST_POINTS - 1) for i in range(MOST_POINTS)})


# -- pushes


def _pushes(run: Run) -> PageSection | None:
    """Return staleness and weight of the pushes over time, of each node or of all."""
    lines = _some(longest(run.hubs))
    if lines:
        charts = (
            _by_node("staleness", "Staleness of the last push (versions)", lines, lambda n: n.staleness),
            _by_node("weight", "Weight of the last push in its merge", lines, lambda n: n.weight),
        )
        last = run.hubs[0].last.nodes
        shown = page_table("pushes", TRUST, map(trust_cells, last))
        return PageSection(name="pushes", title="Pushes", charts=charts, tables=(shown,))
    by_id = rounds(run)
    if not by_id:
        return None
    known = [
        (id, mean) for id, rows in by_id.items() if isfinite(mean := mean_known(rows[0][1].effective_nodes))
    ]
    kept = _even(len(known))
    effective = PageChart(
        name="effective",
        title="Effective nodes of each round, mean over its units",
        x="round",
        xs=tuple(float(known[i][0]) for i in kept),
        series=(Curve("effective nodes", tuple(known[i][1] for i in kept)),),
    )
    return PageSection(name="pushes", title="Rounds", charts=(effective,) if known else ())


def _some(lines: Sequence[HubSample]) -> list[HubSample]:
    return [lines[i] for i in _even(len(lines))]


def _by_node(
    name: str, title: str, lines: Sequence[HubSample], value: Callable[[NodeSample], float]
) -> PageChart:
    """Return a chart with one curve per node, or with smallest, median and largest value of many nodes."""
    unit_s, unit = fmt.time_unit(lines[-1].t)
    names = {node.node: node.name for line in lines for node in line.nodes}
    rows = [
        {n.node: value(n) for n in line.nodes if n.reports and n.accepted and isfinite(value(n))}
        for line in lines
    ]
    if len(names) <= MOST_CURVES:
        curves = tuple(
            Curve(f"{index} {node}"[:24], tuple(row.get(index, nan) for row in rows))
            for index, node in sorted(names.items())
        )
    else:
        ordered = [sorted(row.values()) for row in rows]
        places = (("smallest", 0.0), ("median", 0.5), ("largest", 1.0))
        curves = tuple(
            Curve(label, tuple(row[int(place * (len(row) - 1))] if row else nan for row in ordered))
            for label, place in places
        )
    times = tuple(line.t / unit_s for line in lines)
    return PageChart(name=name, title=title, x=unit, xs=times, series=curves)


def _refused(run: Run) -> PageSection | None:
    """Return refused pushes by node and reason, or distrusted pseudo-gradients and rolled-back units."""
    lines = longest(run.hubs)
    if lines:
        some = _some(lines)
        unit_s, unit = fmt.time_unit(some[-1].t)
        counts = {
            "accepted": tuple(float(sum(n.accepted for n in line.nodes)) for line in some),
            "refused": tuple(float(sum(sum(n.refused.values()) for n in line.nodes)) for line in some),
        }
        chart = PageChart(
            name="refused",
            title="Pushes so far",
            x=unit,
            xs=tuple(line.t / unit_s for line in some),
            series=tuple(Curve(name, values) for name, values in counts.items()),
        )
        rows = [
            (f"{node.node} {node.name}", reason, fmt.count(count))
            for hub in run.hubs
            for node in hub.last.nodes
            for reason, count in sorted(node.refused.items(), key=lambda item: -item[1])
        ]
        out = [(f"{n.node} {n.name}", n.excluded) for hub in run.hubs for n in hub.last.nodes if n.excluded]
        tables = [page_table("refused", ("node", "reason", "pushes"), rows or [("none", "", "")])]
        tables += [page_table("excluded", ("node", "reason"), out, "Excluded nodes")] if out else []
        return PageSection(name="refused", title="Refused pushes", charts=(chart,), tables=tuple(tables))
    if not any(node.rounds for node in run.nodes):
        return None
    judged = [
        (str(node.index), what, count)
        for node in run.nodes
        for what, count in (("distrusted", node.distrusted), ("rolled back", node.rolled_back))
    ]
    rows = [(node, what, fmt.count(count)) for node, what, count in judged if count]
    shown = page_table("refused", ("node", "what", "units of rounds"), rows or [("none", "", "")])
    return PageSection(name="refused", title="Distrusted pseudo-gradients", tables=(shown,))


def _bytes(run: Run) -> PageSection | None:
    """Return the bytes of all nodes so far, or those of each round."""
    if lines := longest(run.hubs):
        sums = {way: sum_so_far(lines, field) for way, field in (("up", "bytes_up"), ("down", "bytes_down"))}
        unit_s, unit = fmt.time_unit(lines[-1].t)
        kept = _even(len(lines))
        chart = PageChart(
            name="bytes",
            title="Bytes of all nodes so far",
            x=unit,
            xs=tuple(lines[i].t / unit_s for i in kept),
            series=tuple(Curve(way, tuple(found[i] for i in kept)) for way, found in sums.items()),
        )
    else:
        by_id = [(id, total_known(r.bytes for _, r in rows)) for id, rows in whole_rounds(run).items()]
        if not by_id:
            return None
        kept = _even(len(by_id))
        chart = PageChart(
            name="bytes",
            title="Bytes sent per round",
            x="round",
            xs=tuple(float(by_id[i][0]) for i in kept),
            series=(Curve("all nodes", tuple(by_id[i][1] for i in kept)),),
        )
    return PageSection(name="bytes", title="Bytes", charts=(chart,))


# -- hubs, servers


def _hubs(run: Run) -> PageSection | None:
    """Return hubs with terms and versions, and the peers and owners of parts of a swarm."""
    tables = []
    if run.hubs and run.swarm is None:
        columns = ("hub", "term", "versions", "waiting pushes", "journal", "changes of the leader", "state")
        rows = []
        for k, hub in enumerate(run.hubs):
            last, leads = hub.last, [notice for notice in hub.notices if notice.event == "lead"]
            trouble = f"the disk is full: {last.disk_full}" if last.disk_full else ""
            state = f"follows {last.follows}" if last.follows else trouble or "leads"
            cells = [term_text(last.term), fmt.spread(last.versions), str(last.pending)]
            cells += [fmt.size(last.journal_bytes), str(max(0, len(leads) - 1)), state]
            rows.append((str(k), *cells))
        tables.append(page_table("hubs", columns, rows))
    if run.swarm is not None:
        tables.append(page_table("peers", PEERS, map(peer_cells, run.swarm.peers), "Peers"))
        parts = map(part_cells, range(len(run.swarm.parts)), run.swarm.parts)
        tables.append(page_table("parts", PARTS, parts, "Parts and their owners"))
        troubles = [(str(k), part.trouble) for k, part in enumerate(run.swarm.parts) if part.trouble]
        tables += [page_table("troubles", ("part", "fault"), troubles)] if troubles else []
    if not tables:
        return None
    return PageSection(name="hubs", title="Hubs, terms and owners", tables=tuple(tables))


def _servers(run: Run) -> PageSection | None:
    """Return the rollout servers: lag, speed, and results of audits."""
    lines = _some(run.hubs[0].lines) if run.hubs else []
    names = sorted({server.name for line in lines for server in line.servers})
    if not names:
        return None
    unit_s, unit = fmt.time_unit(lines[-1].t)

    def chart(name: str, title: str, field: str) -> PageChart:
        by_name = [{s.name: float(getattr(s, field)) for s in line.servers if s.live} for line in lines]
        curves = (Curve(server[:24], tuple(row.get(server, nan) for row in by_name)) for server in names)
        xs = tuple(line.t / unit_s for line in lines)
        return PageChart(name=name, title=title, x=unit, xs=xs, series=tuple(islice(curves, MOST_CURVES)))

    last = run.hubs[0].last.servers
    audits = [
        (server.name, (server.banned and f"banned: {server.banned}") or accusation_text(server))
        for server in last
        if server.accused or server.banned
    ]
    return PageSection(
        name="servers",
        title="Rollout servers",
        charts=(
            chart("server-speed", "Tokens per second of each server", "tokens_per_s"),
            chart("server-lag", "Policy versions behind the hub", "lag"),
        ),
        tables=(
            page_table("servers", SERVERS, map(server_cells, last)),
            page_table("audits", ("server", "audits"), audits or [("all", "no accusations")], "Audits"),
        ),
    )


# -- reinforcement learning


def _learning(run: Run) -> PageSection | None:
    """Return rewards, mismatch, speed of rollouts and idle time."""
    learners: list[Learner] = [(node.index, newest(node)) for node in run.nodes]
    if not run.nodes and run.hubs:
        learners = [(node.node, node.rl) for node in run.hubs[0].last.nodes]
    learners = [(index, rl) for index, rl in learners if rl is not None]
    if not learners:
        return None
    found = rl_totals(rl for _, rl in learners)
    facts = [("idle time by cause", idle_by_cause(found)), ("arms", fmt.shares(found.arms))]
    facts += [("ledger", line)] if (line := ledger(found)) else []
    tables = (
        page_table("learners", LEARNERS, (rl_cells(LEARNERS, *each) for each in learners)),
        page_table("health", HEALTH, (rl_cells(HEALTH, *each) for each in learners), "Health"),
        page_table("idle", ("", ""), facts),
    )
    charts = tuple(filter(None, (_rl_chart(run, *each) for each in RL_CHARTS)))
    return PageSection(name="learning", title="Reinforcement learning", charts=charts, tables=tables)


RL_CHARTS = (
    ("reward", "Mean reward of the newest batch", "reward"),
    ("mismatch", "Mismatch of behaviour and trainer (nats per token)", "mismatch_kl"),
    ("length", "Tokens per rollout", "length"),
    ("rl-staleness", "Staleness of the rollouts (policy versions)", "staleness"),
)
"""Name, title and field of each chart of reinforcement learning."""


def _rl_chart(run: Run, name: str, title: str, field: str) -> PageChart | None:
    """Return a chart of one value by time, for up to `MOST_CURVES` nodes."""
    nodes = [node for node in run.nodes if newest(node) is not None][:MOST_CURVES]
    if not nodes:
        return None
    end_s = max(node.metrics[-1].t for node in nodes)
    xs, unit = _bin_times(end_s)
    curves = []
    for node in nodes:
        sums, counts = [0.0] * BINS, [0] * BINS
        for metric, rl in rl_lines_of(node):
            if isfinite(value := getattr(rl, field)):
                place = min(BINS - 1, max(0, int(metric.t / end_s * BINS))) if end_s > 0 else 0
                sums[place] += value
                counts[place] += 1
        means = tuple(total / count if count else nan for total, count in zip(sums, counts, strict=True))
        curves.append(Curve(f"node {node.index}", means))
    return PageChart(name=name, title=title, x=unit, xs=xs, series=tuple(curves), joined=True)


def _notices(run: Run) -> PageSection | None:
    """Return the newest errors and changes of nodes and hubs."""
    rows = sorted(_notice_rows(run), key=lambda row: -row[0])[:MOST_NOTICES]
    if not rows:
        return None
    shown = [(fmt.clock(t), who, event, text) for t, who, event, text in rows]
    return PageSection(
        name="events",
        title="Events",
        tables=(page_table("events", ("time", "source", "event", "text"), shown),),
    )


def _notice_rows(run: Run) -> Iterator[tuple[float, str, str, str]]:
    for node in run.nodes:
        yield from ((n.t, f"node {node.index}", n.event.replace("_", " "), n.text) for n in node.notices)
    for k, hub in enumerate(run.hubs):
        yield from ((n.t, f"hub {k}", n.event.replace("_", " "), n.text) for n in hub.notices)
