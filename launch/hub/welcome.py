"""What `aedit hub` prints when it is ready: where it is, and how others reach it."""

import shlex
import socket

from aedit.launch.hub.place import Place
from aedit.proto.wire.security import is_loopback

_EVERYWHERE = ("0.0.0.0", "::", "")


def welcome(place: Place, address: str) -> str:
    """Return the lines for the hub at `place` that listens at `address`."""
    what = "standby" if place.standby else "hub"
    lines = [f"run {place.config.name}: {what} at {address}, journal in {place.directory}"]
    if place.standby:
        return f"{lines[0]}\nIt leads when more than half of the nodes ask it to. Ctrl-C ends it."
    reach = ",".join(map(_reachable, place.addresses() if place.part[1] > 1 else (address,)))
    words = f"{reach}{_trust(place, reach)}"
    lines += [f"  a node joins with  aedit join {words}", f"  see it with        aedit top {words}"]
    if place.keys and "KEYS" in words:
        lines.append("  KEYS is the folder that `aedit keys` made for the node")
    if all(map(is_loopback, reach.split(","))):
        lines.append(
            "  Only this machine can reach it; for others: --hub.address HOST:PORT, and keys of `aedit keys`."
        )
    return "\n".join([*lines, "  Ctrl-C ends the hub; the same command goes on."])


def _reachable(address: str) -> str:
    """Return HOST:PORT as another machine may know it, where the hub listens at every address it has."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _EVERYWHERE else address


def _trust(place: Place, reach: str) -> str:
    """Return the options of a node for TLS, or for going without."""
    if place.keys is None:
        return "" if all(map(is_loopback, reach.split(","))) else " --insecure"
    shared = place.keys.parent / "nodes"
    return f" --keys {shlex.quote(str(shared))}" if shared.is_dir() else " --keys KEYS"
