"""Text that `aedit hub` prints when it is ready: its address, and the commands that reach it."""

import shlex
import socket

from aedit.launch.hub.endpoint import HubEndpoint
from aedit.proto.rpc import is_loopback

_EVERYWHERE = ("0.0.0.0", "::", "")


def welcome(endpoint: HubEndpoint, address: str) -> str:
    """Return the lines for the hub at `endpoint` that listens at `address`."""
    what = "standby" if endpoint.standby else "hub"
    lines = [f"run {endpoint.config.name}: {what} at {address}, journal in {endpoint.directory}"]
    if endpoint.replicas is not None:
        return f"run {endpoint.config.name}: replica of part {endpoint.part[0]} at {address}"
    if endpoint.standby:
        return f"{lines[0]}\nIt takes over when more than half of the nodes ask for it. Ctrl-C ends it."
    reach = ",".join(map(_public_address, endpoint.addresses() if endpoint.part[1] > 1 else (address,)))
    words = f"{reach}{_tls_options(endpoint, reach)}"
    lines += [f"  a node joins with  aedit join {words}", f"  see it with        aedit top {words}"]
    if endpoint.keys and "KEYS" in words:
        lines.append("  KEYS is the folder that `aedit keys` made for the node")
    if all(map(is_loopback, reach.split(","))):
        lines.append(
            "  Only this machine can connect; for others: --hub.address HOST:PORT and keys of `aedit keys`."
        )
    return "\n".join([*lines, "  Ctrl-C ends the hub; the same command continues the run."])


def open_to_others(endpoint: HubEndpoint, address: str) -> str:
    """Return what a hub without keys allows to others; "" if it has keys, or only this machine reaches it."""
    if endpoint.keys is not None or is_loopback(address):
        return ""
    return (
        f"--insecure: anybody who reaches {address} can join under any name, change the model, put nodes out,"
        " read the model and the journal, and end the run. Use this in a closed network only; else make keys"
        " with `aedit keys` and name them with --keys."
    )


def _public_address(address: str) -> str:
    """Return HOST:PORT for other machines: the host name if the hub listens at all addresses."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host.strip("[]") in _EVERYWHERE else address


def _tls_options(endpoint: HubEndpoint, reach: str) -> str:
    """Return the command-line options with which a node connects: its keys, or `--insecure`."""
    if endpoint.keys is None:
        return "" if all(map(is_loopback, reach.split(","))) else " --insecure"
    shared = endpoint.keys.parent / "nodes"
    return f" --keys {shlex.quote(str(shared))}" if shared.is_dir() else " --keys KEYS"
