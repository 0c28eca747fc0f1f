"""The first call to a hub: who may make it, and what the hub replies."""

from pathlib import Path

import aedit
from aedit.proto.rpc.client import HubClient
from aedit.proto.rpc.hub_pb2 import HelloReply, HelloRequest
from aedit.proto.rpc.retry import HubRefused, HubUnreachable
from aedit.proto.rpc.security import ClientKeys, client_keys, is_loopback
from aedit.types import UserError

PROTOCOL = 5
"""Equal on everybody who takes part in one run. It changes with whatever an older build would misunderstand
or compute otherwise: messages, journal records, arithmetic, defaults of settings that decide the result."""

HELLO_LIMIT_S = 10.0


def caller_keys(addresses: str, keys: Path | None, insecure: bool) -> ClientKeys:
    """Return what a node shows to the hubs at `addresses`.

    Args:
        addresses: HOST:PORT, or several separated by commas.
        keys: Folder with the node's token and certificates; None connects without TLS.
        insecure: Allow a connection without TLS to another machine.

    Raises:
        UserError: A file is missing, or the connection would be readable by others.
    """
    for place in addresses.split(","):
        check_address(place)
    if keys is not None:
        return client_keys(keys)
    open_to_others = [place for place in addresses.split(",") if not is_loopback(place)]
    if open_to_others and not insecure:
        raise UserError(
            f"{open_to_others[0]} is another machine: name what `aedit keys` made for this node with --keys,"
            " or say --insecure if the network is closed"
        )
    return ClientKeys()


def check_address(place: str) -> None:
    """Raise UserError unless `place` is HOST:PORT with a port from 1 to 65535."""
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"{place}: expected the hub's HOST:PORT, as in 10.0.0.1:7000, with a port below 65536"
        )


def greet(addresses: str, keys: ClientKeys) -> HelloReply:
    """Return what the first hub of `addresses` says about its run.

    Args:
        addresses: HOST:PORT, or several separated by commas.
        keys: What this node shows, as `caller_keys` returns it.

    Raises:
        UserError: No hub answers there within 10 seconds, or it refuses this node.
    """
    client = HubClient(addresses.split(",")[0], keys, call_timeout_s=HELLO_LIMIT_S)
    try:
        return client.hello(HelloRequest(protocol=PROTOCOL, version=aedit.__version__))
    except (HubUnreachable, HubRefused) as error:
        raise UserError(str(error)) from None
    finally:
        client.close()
