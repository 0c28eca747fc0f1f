"""Configuration of a run without a hub, whose peers own the parts of the model. Imports no torch."""

import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from aedit.async_sgd.rules import HubConfig
from aedit.types import Range, UserError, check, checked

if TYPE_CHECKING:
    from aedit.launch.config.config import RunConfig
    from aedit.launch.config.placement import Placement

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
    """Public keys, in hexadecimal digits, of the peers that may take part; empty: all with the run's
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


class OwnedParts:
    """Parts of the model have owners, who take the outer step."""

    def check(self, config: "RunConfig") -> None:
        """Do nothing."""

    def check_start(self, config: "RunConfig", placement: "Placement") -> None:
        """Raise UserError if the peers cannot begin a run, or would begin a second one."""
        swarm = config.swarm
        if not swarm.listen:
            raise UserError(
                "swarm.listen: empty makes a client, which keeps no part and cannot begin a run;"
                " aedit join one"
            )
        if swarm.peers:
            raise UserError(
                f"swarm.peers = {swarm.peers}: aedit run would begin another run beside the one of these"
                f" peers; enter theirs with aedit join {swarm.peers}, or leave swarm.peers empty"
            )
        if placement.nodes > 1 and not swarm.listen.endswith(":0"):
            raise UserError(
                f"swarm.listen = {swarm.listen}: each of the {placement.nodes} peers of --local needs a port"
                f" of its own; use {swarm.listen.rpartition(':')[0]}:0"
            )

    def how_to_join(self, config: "RunConfig", placement: "Placement", place: str) -> str:
        """Return where a further node is started, and its command. place: what the first peer is found by."""
        from aedit.proto.rpc import is_loopback  # not with the configuration: it imports gRPC

        if is_loopback(place) or is_loopback(config.swarm.listen):
            return f"in another terminal: aedit join {place}"
        trust = f"--keys {placement.keys or 'DIR'}" if not placement.insecure else "--insecure"
        return f"on its machine: aedit join {place} --swarm.listen ITS_ADDRESS:7000 {trust}"


class HivemindAverages:
    """The peers average their parameters by hivemind, and each takes the outer step by itself."""

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for a value that cannot be in such a run."""
        swarm, edit = config.swarm, config.edit
        because = 'with swarm.exchange = "hivemind"'
        table = swarm.discovery == "hivemind"
        check(table, "swarm.discovery", f'must be "hivemind" {because}', repr(swarm.discovery))
        check(config.hub == HubConfig(), "hub", f"must be left out {because}: nobody owns a unit", "[hub]")
        timed = edit.schedule == "seconds"
        check(
            timed, "edit.schedule", f'must be "seconds" {because}: peers meet at equal times', edit.schedule
        )
        check(edit.every >= 10, "edit.every", f"must be at least 10 (s) {because}", edit.every)
        check(edit.fragments == 1, "edit.fragments", f"must be 1 {because}", edit.fragments)
        check(edit.warmup_steps == 0, "edit.warmup_steps", f"must be 0 {because}", edit.warmup_steps)
        check(not edit.offload, "edit.offload", f"must be false {because}", edit.offload)
        check(config.local.ranks == 1, "local.ranks", f"must be 1 {because}", config.local.ranks)
        fixed = not swarm.announce or not swarm.listen.endswith(":0")
        check(fixed, "swarm.listen", f"must name a port with swarm.announce {because}", repr(swarm.listen))

    def check_start(self, config: "RunConfig", placement: "Placement") -> None:
        """Raise UserError if a peer can neither find others nor be found."""
        from aedit.proto.dht import checked_maddrs  # not with the configuration: it imports gRPC

        if placement.keys or placement.insecure:
            raise UserError(
                '--keys, --insecure: no effect with swarm.exchange = "hivemind", which has its own TLS'
            )
        if importlib.util.find_spec("hivemind") is None:
            raise UserError("swarm.exchange = \"hivemind\" needs hivemind: pip install 'aedit[swarm]'")
        checked_maddrs(tuple(filter(None, config.swarm.peers.split(","))))
        if not config.swarm.listen and not config.swarm.peers:
            raise UserError(
                "swarm.listen: empty makes a client, which nobody can call; set swarm.peers to the address of"
                " another peer"
            )

    def how_to_join(self, config: "RunConfig", placement: "Placement", place: str) -> str:
        """Return where a further node is started, and its command. place: file with the peer's addresses."""
        return f'in another terminal: aedit run CONFIG --dir OTHER --swarm.peers "$(cat {place})"'


PEER_EXCHANGES: Mapping[str, OwnedParts | HivemindAverages] = {
    "parts": OwnedParts(),
    "hivemind": HivemindAverages(),
}
"""By the value of `swarm.exchange`: what each needs of a configuration and of a start on this machine."""
