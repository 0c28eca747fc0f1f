"""The values of `swarm.exchange`: what each needs of a configuration and of a start on this machine."""

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from aedit.async_sgd.rules import HubConfig
from aedit.types import UserError, check

if TYPE_CHECKING:
    from aedit.launch.config.config import RunConfig
    from aedit.launch.config.placement import Placement


class PeerExchange(Protocol):
    """One kind of exchange between the peers of a swarm."""

    def check(self, config: "RunConfig") -> None:
        """Raise ValueError for a value that this exchange does not take."""

    def check_start(self, config: "RunConfig", placement: "Placement") -> None:
        """Raise UserError if the peers of this machine cannot begin a run."""

    def how_to_join(self, config: "RunConfig", placement: "Placement", place: str) -> str:
        """Return where a further node is started, and its command. place: what the first peer is found by."""


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
        """See `PeerExchange.how_to_join`."""
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
        """See `PeerExchange.how_to_join`. place: file with the addresses of the first peer."""
        return f'in another terminal: aedit run CONFIG --dir OTHER --swarm.peers "$(cat {place})"'


PEER_EXCHANGES: Mapping[str, PeerExchange] = {"parts": OwnedParts(), "hivemind": HivemindAverages()}
"""By the value of `swarm.exchange`."""
