"""Options of a hub process, and what they say of its place among the hubs of the run."""

from pathlib import Path
from typing import TypedDict

from aedit.launch.config import RunConfig
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.swarm import ReplicasFile
from aedit.types import UserError


class HubOptions(TypedDict, total=False):
    """Options of the hub process, beside the configuration."""

    address: str | None
    """HOST:PORT to listen at instead of the configured one."""
    part: tuple[int, int]
    """(k, n): it owns the units i with i % n == k."""
    standby: bool
    """Follow the hub that leads, and lead once elected."""
    standby_number: int
    """Number of a standby among those in `hub.standby`, from 1."""
    replicas: Path | None
    """File in which a peer of a swarm keeps where the other replicas of the part are."""
    term_above: int
    """A hub of a swarm that begins a journal does so with the term after this one."""
    force_lead: bool
    """Lead without a vote, and with what is left of the journal, whatever may be lost."""
    stay: bool
    """Serve until a signal arrives, also after the run is over, for nodes that come late."""
    keys: Path | None
    """Folder of keys that `aedit keys` made for this hub."""
    insecure: bool
    """Listen without TLS at an address that other machines can reach."""


def endpoint_of(config: RunConfig, directory: Path, options: HubOptions) -> HubEndpoint:
    """Return the place of the hub. Raises UserError if the options do not match the configuration."""
    (k, n), stays = options.get("part", (0, 1)), options.get("stay", False)
    if (replicas := options.get("replicas")) is not None:
        return HubEndpoint(
            config,
            directory,
            (k, n),
            options.get("standby", False),
            options.get("address") or config.swarm.listen,
            options.get("keys"),
            replicas=ReplicasFile(replicas),
            copies=config.swarm.copies,
            stays=stays,
        )
    standby, number = options.get("standby", False), options.get("standby_number", 1)
    configured, standbys = config.hub.addresses, config.hub.standbys_of(k)
    if not configured:
        raise UserError("hub.address is empty: set it to the HOST:PORT that the hub listens at")
    if n != len(configured) and n > 1:
        raise UserError(
            f"--part: K/{n} does not match the {len(configured)} addresses of hub.address;"
            f" use K/{len(configured)}"
        )
    if standby and not standbys:
        raise UserError(
            "--standby: hub.standby is empty; set it to HOST:PORT of the standby, so that the nodes find it"
        )
    if standby and not 1 <= number <= len(standbys):
        raise UserError(
            f"--standby-number: expected 1 to {len(standbys)}, the addresses in hub.standby, got {number}"
        )
    address = options.get("address") or (standbys[number - 1] if standby else configured[k])
    keys = options.get("keys")
    return HubEndpoint(config, directory, (k, n), standby, address, keys, number, stays=stays)
