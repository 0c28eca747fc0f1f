"""Lines of the report about a run's rollout servers."""

from collections.abc import Iterator, Mapping
from statistics import fmean

from aedit.launch.records import Run, ServerWork
from aedit.launch.views import words
from aedit.launch.views.figures import ratio
from aedit.launch.views.rl_figures import newest
from aedit.launch.views.server_table import accusation

_MOST_NAMED = 8


def server_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact; nothing for a run without servers."""
    yield from _directory(run)
    for node in run.nodes:
        rl = newest(node)
        if rl is not None and rl.servers:
            yield "from servers", f"node {node.index}: {_work(rl.servers)}"


def _directory(run: Run) -> Iterator[tuple[str, str]]:
    hub = run.hubs[0] if run.hubs else None
    last = hub.last.servers if hub and hub.lines else ()
    if hub is None or not last:
        return
    most = max(sum(server.live for server in line.servers) for line in hub.lines)
    speeds: dict[str, list[float]] = {}
    for line in hub.lines:
        for server in line.servers:
            if server.live:
                speeds.setdefault(server.name, []).append(server.tokens_per_s)
    named = [f"{server.name} {_of(server.name, speeds)}" for server in last[:_MOST_NAMED]]
    if len(last) > _MOST_NAMED:
        named.append(words.more(len(last) - _MOST_NAMED, "server"))
    yield "rollout servers", f"{most} at a time at most: {', '.join(named)}"
    idle_s = sum(server.idle_s for server in last)
    used = words.percent(ratio(sum(server.idle_used_s for server in last), idle_s))
    yield "their idle time", f"{words.seconds(idle_s)} without a request, {used} of it trained the drafter"
    for server in last:
        if told := accusation(server):
            yield "accused", f"{server.name}: {told}"
        if server.banned:
            yield "banned", f"{server.name}: {server.banned}"


def _work(servers: Mapping[str, ServerWork]) -> str:
    busiest = sorted(servers.items(), key=lambda item: -item[1].tokens)
    named = [
        f"{name} {words.count(work.tokens)} tokens in {words.some(int(work.samples), 'sample')}"
        for name, work in busiest[:_MOST_NAMED]
    ]
    if len(busiest) > _MOST_NAMED:
        named.append(words.more(len(busiest) - _MOST_NAMED, "server"))
    taken_back, losses, violations = (
        int(sum(getattr(work, name) for work in servers.values()))
        for name in ("taken_back", "losses", "violations")
    )
    if taken_back:
        named.append(f"{words.some(taken_back, 'sample')} finished elsewhere")
    if losses:
        ended = f"{words.some(losses, 'connection')} lost"
        named.append(
            f"{ended}, {violations} of them because of what the server sent" if violations else ended
        )
    return ", ".join(named)


def _of(name: str, speeds: dict[str, list[float]]) -> str:
    return f"{words.count(fmean(speeds[name]) if name in speeds else float('nan'))} tokens/s"
