"""Multiaddresses of hivemind's peers, such as /ip4/10.0.0.1/tcp/7000/p2p/12D3KooW..."""

import ipaddress
import re
import socket

from aedit.types import UserError, printable

_MADDR = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/[^/\s]+/.*/p2p/[1-9A-HJ-NP-Za-km-z]{20,80}")


def is_maddr(text: str) -> bool:
    """Return whether `text` is the multiaddress of a peer."""
    return bool(_MADDR.fullmatch(text))


def checked_maddrs(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return `texts`. Raise UserError that names the first one that is not the multiaddress of a peer."""
    for text in texts:
        if not is_maddr(text):
            raise UserError(
                f"{printable(text, 128)!r} is not the address of a peer, as in"
                " /ip4/10.0.0.1/tcp/7000/p2p/12D3KooW..."
            )
    return texts


def listening_maddr(listen: str, port: int) -> str:
    """Return the multiaddress of the host in HOST:PORT with another port; all interfaces if it is empty."""
    host = listen.rpartition(":")[0].strip("[]") or "0.0.0.0"
    try:
        found = ipaddress.ip_address(socket.gethostbyname(host) if ":" not in host else host)
    except (OSError, ValueError) as error:
        raise UserError(f"swarm.listen: {host!r} is no address of this machine ({error})") from None
    return f"/ip{found.version}/{found}/tcp/{port}"


def announced_maddr(host: str, port: int) -> str:
    """Return the multiaddress by which others reach a host name or an IP address."""
    try:
        return f"/ip{ipaddress.ip_address(host.strip('[]')).version}/{host.strip('[]')}/tcp/{port}"
    except ValueError:
        return f"/dns/{host}/tcp/{port}"
