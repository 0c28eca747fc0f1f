"""Configuration of a run without a hub, whose peers own the parts of the model. Imports no torch."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from aedit.types import Range, check, checked

_KEY = re.compile(r"[0-9a-f]{64}")


@checked("swarm")
@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """A run without a hub: each part of the model is owned by one of the peers, and others follow it."""

    discovery: Literal["", "file", "hivemind"] = ""
    """How peers find each other: `file` is a list of addresses, `hivemind` a distributed hash table. Empty:
    no swarm."""

    exchange: Literal["parts", "hivemind"] = "parts"
    """What peers exchange: `parts` have owners, who take the outer step; with `hivemind`, a baseline for
    comparison, the peers average their parameters by hivemind at equal times, and each steps by itself."""

    peers: str = ""
    """Peers to begin with: HOST:PORT or, with `hivemind`, multiaddresses, separated by commas; or a file with
    a HOST:PORT per line. Empty for the first peer of a run."""

    listen: str = "127.0.0.1:0"
    """HOST:PORT at which this peer answers others; port 0 takes a free one. The parts that it hosts take free
    ports of the same host. Other machines do not reach the default. Empty: a client, for example behind a
    firewall, which only calls others and hosts nothing."""

    announce: str = ""
    """Host name or address by which others reach this peer, if it is another than that of `listen`."""

    parts: Annotated[int, Range(least=1, most=64)] = 4
    """Parts of the model, each of which has an owner of its own: unit i belongs to part i % parts."""

    copies: Annotated[int, Range(least=1, most=7)] = 3
    """Peers that keep a part, its owner included. A push is acknowledged when all that are in sync have it on
    disk, and these are most of the copies."""

    lease_s: Annotated[float, Range(least=2, most=300)] = 6.0
    """Time without a new card after which a peer is no longer live. A peer calls others ten times in it, and
    at most once a second."""

    lost_s: float = 300.0
    """Time without an owner after which a part is lost: then a peer that most peers vote for founds it again
    from the newest anchor of any node. Choose more than a cut or a restart takes; 0: never."""

    averaging_s: Annotated[float, Range(least=15, most=3600)] = 60.0
    """Longest time of a round with hivemind, after which the peer goes on alone."""

    allow: tuple[str, ...] = ()
    """Public keys, in hexadecimal digits, of the peers that may take part; empty: everybody with the run's
    keys."""

    @property
    def on(self) -> bool:
        """Return whether the run is a swarm."""
        return bool(self.discovery)

    @property
    def has_parts(self) -> bool:
        """Return whether the peers own parts of the model."""
        return self.on and self.exchange == "parts"

    def reached_at(self, address: str) -> str:
        """Return the HOST:PORT by which others reach what listens at `address` here."""
        return f"{self.announce}:{address.rpartition(':')[2]}" if self.announce and address else address

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        named = not self.listen or (bool(host) and port.isdecimal())
        check(named, "swarm.listen", "must be HOST:PORT, or empty for a client", repr(self.listen))
        reached = host not in ("0.0.0.0", "[::]") or bool(self.announce)
        check(reached, "swarm.announce", "must name this machine if swarm.listen is", repr(host))
        is_late = self.lost_s == 0 or self.lost_s > self.lease_s
        check(is_late, "swarm.lost_s", "must be 0, or above swarm.lease_s", self.lost_s)
        for key in self.allow:
            check(bool(_KEY.fullmatch(key)), "swarm.allow", "must be 64 hexadecimal digits", repr(key))
