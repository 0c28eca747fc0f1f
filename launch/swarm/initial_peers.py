"""Discovery of the initial peers: from addresses, a file of them, or a DHT."""

import tempfile
import time
from pathlib import Path

from aedit.launch.config import SwarmConfig
from aedit.proto.dht import DhtDiscovery, DhtSettings, listening_maddr
from aedit.proto.swarm import PeerFile, decoded_card
from aedit.system import write_atomically
from aedit.types import UserError, address_fault

INTRODUCTION = "introduction"
"""File of a peer with what a further peer passes to `aedit join`."""
_GIVEN = "given_peers.txt"
_LIMIT_S, _LOOK_S = 40.0, 0.2
_ENTER_AVERAGING = (
    '; if the run has swarm.exchange = "hivemind", no peer can tell its configuration: copy that, and use'
    " aedit run CONFIG --swarm.peers {peers}"
)


def make_discovery(swarm: SwarmConfig, peers: str, *, directory: Path, run: str) -> PeerFile | DhtDiscovery:
    """Return the discovery of a peer.

    Args:
        swarm: Configuration of the swarm.
        peers: In place of `swarm.peers`: a file, addresses, or multiaddresses of a table. Addresses and files
            serve in any swarm.
        directory: Folder of the peer.
        run: Name of the run; "" finds the peers of any run.

    Raises:
        UserError: `peers` is none of these.
    """
    peers = peers or swarm.peers
    if is_addresses(peers):
        given = directory / _GIVEN
        write_atomically(given, "".join(f"{address}\n" for address in peers.split(",")))
        return PeerFile(given)
    if swarm.discovery == "file" or (peers and not is_maddrs(peers)):
        return PeerFile(Path(peers) if peers else directory / _GIVEN)
    return DhtDiscovery(
        DhtSettings(
            run=run,
            initial_peers=tuple(filter(None, peers.split(","))),
            listen=(listening_maddr(swarm.listen, 0),),
            identity=directory / "dht_key",
            client=not swarm.listen,
            allow=tuple(bytes.fromhex(key) for key in swarm.allow),
        )
    )


def is_addresses(peers: str) -> bool:
    """Return whether `peers` is HOST:PORT, or several separated by commas."""
    return bool(peers) and not any(address_fault(one) for one in peers.split(","))


def is_maddrs(peers: str) -> bool:
    """Return whether `peers` begins with a multiaddress, such as /ip4/10.0.0.1/tcp/7000/p2p/12D3..."""
    return peers.startswith(("/ip4/", "/ip6/", "/dns"))


def introduced(peers: str) -> tuple[str, ...]:
    """Return the addresses of peers that a file or multiaddresses lead to.

    Raises:
        UserError: None is found in time.
    """
    if not (is_maddrs(peers) or Path(peers).is_file()):
        raise UserError(
            f"{peers}: no such file; give HOST:PORT of a hub or a peer, a file of such addresses, or"
            " multiaddresses of a hash table"
        )
    with tempfile.TemporaryDirectory() as directory:
        anywhere = SwarmConfig(discovery="hivemind", listen="")
        discovery = make_discovery(anywhere, peers, directory=Path(directory), run="")
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while not (found := [address for hint in discovery.found() if (address := _address(hint))]):
                if time.monotonic() > deadline_s:
                    why = discovery.state or "nobody is listed there"
                    averages = _ENTER_AVERAGING.format(peers=peers) if is_maddrs(peers) else ""
                    raise UserError(f"{peers}: no peer was found within {_LIMIT_S:g} s ({why}){averages}")
                time.sleep(_LOOK_S)
            return tuple(dict.fromkeys(found))
        finally:
            discovery.close()


def _address(hint: str | bytes) -> str:
    """Return the address in a hint; "" if there is none."""
    if isinstance(hint, str):
        return hint
    try:
        return decoded_card(hint).address
    except ValueError:
        return ""
