"""Credentials that a node shows to its hub."""

from pathlib import Path

from aedit.proto.wire.security import ClientKeys, client_keys, is_loopback
from aedit.types import UserError


def member_keys(addresses: str, keys: Path | None, insecure: bool) -> ClientKeys:
    """Return the credentials that a node shows to its hub.

    Raises UserError if the hub is on another machine and neither keys nor `insecure` were given.
    """
    if keys is not None:
        return client_keys(keys)
    open_to_others = [place for place in addresses.split(",") if not is_loopback(place)]
    if open_to_others and not insecure:
        raise UserError(
            f"{open_to_others[0]} is another machine: name what `aedit keys` made for this node with --keys,"
            " or say --insecure if the network is closed"
        )
    return ClientKeys()
