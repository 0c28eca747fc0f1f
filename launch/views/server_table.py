"""Table of a run's rollout servers for a terminal of 80 columns, and what they are accused of."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import ServerSample
from aedit.launch.views import words
from aedit.launch.views.figures import ratio

COLUMNS = ("server", "address", "state", "lag", "tokens/s", "run/queue", "idle", "used")
_LEFT = ("server", "address", "state")
_LONGEST = 300
"""Characters of an accusation that are shown."""


def server_table(
    servers: Sequence[ServerSample], *, spaced: bool = True, max_rows: int | None = None
) -> Iterator[RenderableType]:
    """Yield the table of the servers, and a line for each one that is accused or banned."""
    if not servers:
        return
    live = sum(server.live for server in servers)
    yield Text(f"role rollout: {words.some(live, 'server')} of {len(servers)} live", style="dim")
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in COLUMNS:
        left = name in _LEFT
        table.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for server in servers[:max_rows]:
        table.add_row(*map(Text, _cells(server)))  # no markup in what servers choose
    yield table
    if max_rows is not None and len(servers) > max_rows:
        yield Text(words.more(len(servers) - max_rows, "server"), style="dim")
    for server in servers:
        yield from _accusations(server)
    if spaced:
        yield Text()


def accusation(server: ServerSample) -> str:
    """Return who accuses the server, and of what; "" if nobody does."""
    if not server.accused:
        return ""
    by = ", ".join(f"{name} ({count:,.0f})" for name, count in server.accused.items())
    evidence = f"; {server.evidence_line}" if server.evidence else ""
    return f"accused by {by}: {server.reason}{evidence}"[:_LONGEST]


def _accusations(server: ServerSample) -> Iterator[Text]:
    if told := accusation(server):
        yield Text(f"server {server.name} is {told}", style="yellow")
    if server.banned:
        yield Text(f"server {server.name} is banned: {server.banned}"[:_LONGEST], style="red")


def _cells(server: ServerSample) -> list[str]:
    used = words.percent(ratio(server.idle_used_s, server.idle_s))
    known = (
        words.count(server.lag),
        words.count(server.tokens_per_s),
        f"{words.count(server.running)}/{words.count(server.waiting)}",
        words.clock(server.idle_s),
        used,
    )
    numbers = known if server.live else (words.UNKNOWN,) * len(known)
    return [server.name, server.address, server.state, *numbers]
