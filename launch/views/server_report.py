"""Lines of the report about a run's rollout servers."""

from collections.abc import Iterator
from statistics import fmean

from aedit.launch.rundir.reader import Run
from aedit.launch.views import words
from aedit.launch.views.figures import ratio
from aedit.launch.views.server_table import accusation

_MOST_NAMED = 8


def server_facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and text of each fact; nothing for a run without servers."""
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


def _of(name: str, speeds: dict[str, list[float]]) -> str:
    return f"{words.count(fmean(speeds[name]) if name in speeds else float('nan'))} tokens/s"
