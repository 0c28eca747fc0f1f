"""The first peers that a peer comes to know: from addresses, or a file of them."""

import tempfile
import time
from pathlib import Path

from aedit.proto.swarm.card import decoded
from aedit.proto.swarm.discovery import Discovery
from aedit.proto.swarm.peer_file import PeerFile

from aedit.system import write_atomically
from aedit.types import UserError, address_fault

_GIVEN = "given_peers.txt"
_LIMIT_S, _LOOK_S = 20.0, 0.2


def make_discovery(kind: str, peers: str, *, directory: Path, run: str) -> Discovery:
    """Return the discovery of a peer.

    Args:
        kind: `swarm.discovery`.
        peers: `swarm.peers`: a file, addresses, or multiaddresses; addresses and files serve in any swarm.
        directory: Folder of the peer.
        run: Name of the run.

    Raises:
        UserError: `peers` is none of these.
    """
    if is_addresses(peers):
        given = directory / _GIVEN
        write_atomically(given, "".join(f"{address}\n" for address in peers.split(",")))
        return PeerFile(given)
    is_file = bool(peers) and not peers.startswith(("/ip4/", "/ip6/", "/dns"))
    if kind == "file" or is_file:
        return PeerFile(Path(peers) if peers else directory / _GIVEN)
    # Imported here: the extra `swarm` may be missing where it is not used.
    from aedit.proto.swarm.dht import Dht

    return Dht(run, initial=[one for one in peers.split(",") if one], directory=directory / "dht")


def is_addresses(peers: str) -> bool:
    """Return whether `peers` is HOST:PORT, or several separated by commas."""
    return bool(peers) and not any(address_fault(one) for one in peers.split(","))


def introduced(peers: str) -> tuple[str, ...]:
    """Return the addresses of peers that a file or multiaddresses lead to.

    Raises:
        UserError: None is found in time.
    """
    with tempfile.TemporaryDirectory() as directory:
        discovery = make_discovery("hivemind", peers, directory=Path(directory), run="")
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while not (found := [address for hint in discovery.found() if (address := _address(hint))]):
                if time.monotonic() > deadline_s:
                    why = discovery.state or "nobody is listed there"
                    raise UserError(f"{peers}: no peer was found within {_LIMIT_S:g} s ({why})")
                time.sleep(_LOOK_S)
            return tuple(dict.fromkeys(found))
        finally:
            discovery.close()


def _address(hint: str | bytes) -> str:
    """Return the address in a hint; "" if there is none."""
    if isinstance(hint, str):
        return hint
    try:
        return decoded(hint).address
    except ValueError:
        return ""
