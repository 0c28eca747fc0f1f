"""Tables of the peers and parts of a swarm for a terminal of 80 columns."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from aedit.launch.records import PartSample, PeerSample, SwarmSample
from aedit.launch.views import words
from aedit.launch.views.hubtable import spread
from aedit.proto.rpc import term_text

_PEERS = ("peer", "address", "role", "owns", "follows", "steps/s", "model", "state")
_PARTS = ("part", "owner", "term", "sync", "versions", "digest", "pending", "in", "out")
_WHOLE = ("address", "owner")
"""Columns that a narrow terminal does not fold: people copy them."""
_DIGITS = 8
"""Of a digest that are shown."""


def swarm_tables(swarm: SwarmSample) -> Iterator[RenderableType]:
    """Yield a table of the live peers and one of the parts."""
    yield Text()
    yield _table(_PEERS, [_peer(peer) for peer in swarm.peers], left=8)
    yield Text()
    yield _table(_PARTS, [_part(number, part) for number, part in enumerate(swarm.parts)], left=2)
    for number, part in enumerate(swarm.parts):
        if part.trouble:
            yield Text(f"part {number}: {part.trouble}", style="bold red" if part.hub is None else "dim")


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        whole = name in _WHOLE
        table.add_column(name, justify="left" if i < left else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*map(Text, row))  # no markup in names, which peers choose
    return table


def _peer(peer: PeerSample) -> list[str]:
    owns, keeps = (",".join(map(str, parts)) or words.UNKNOWN for parts in (peer.owns, peer.keeps))
    speed = words.decimals(peer.steps_per_s) if peer.steps_per_s else words.UNKNOWN
    role = peer.role.replace("keeps parts", "keeps")
    model = peer.model[:_DIGITS] or words.UNKNOWN
    return [peer.name, peer.address or "client", role, owns, keeps, speed, model, peer.state]


def _part(number: int, part: PartSample) -> list[str]:
    if part.hub is None:
        return [str(number), "none that answers", *[words.UNKNOWN] * 7]
    hub = part.hub
    digest = part.digest[:_DIGITS] or words.UNKNOWN
    told = [term_text(hub.term), str(part.in_sync), spread(hub.versions), digest, str(hub.pending)]
    return [str(number), part.owner, *told, words.size(part.bytes_in), words.size(part.bytes_out)]
