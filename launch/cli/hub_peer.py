"""`aedit hub` and `aedit peer`: their options, and the calls that they stand for."""

import argparse
from pathlib import Path

from aedit.types import UserError

STAY = "serve until a signal arrives, also after the run is over, for nodes that come late"


def add_hub_options(hub: argparse.ArgumentParser) -> None:
    """Add the options to the command."""
    hub.add_argument(
        "--address", metavar="HOST:PORT", default="", help="address to listen at (default: hub.address)"
    )
    hub.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="folder of its journal (default: hub in the run directory)",
    )
    hub.add_argument(
        "--part",
        metavar="K/N",
        default="0/1",
        help="index of this hub among N that split the units (default 0/1)",
    )
    hub.add_argument("--standby", action="store_true", help="follow the hub, and lead once elected")
    does = "which of the addresses in hub.standby it is, from 1 (default 1)"
    hub.add_argument("--standby-number", metavar="K", type=int, default=1, help=does)
    does = "lead without a vote, and with what is left of the journal, whatever may be lost"
    hub.add_argument("--force-lead", action="store_true", help=does)
    hub.add_argument("--stay", action="store_true", help=STAY)


def run_hub(options: argparse.Namespace) -> int:
    """Serve as the options say; return the exit code. Raises UserError."""
    from aedit.launch.config import load
    from aedit.launch.hub import HubOptions, hub

    config = load(options.config, options.flags, strict=True).config
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise UserError(f"--part: expected K/N with K below N, got {options.part}")
    own = HubOptions(
        directory=options.directory or Path(config.dir) / config.name / "hub",
        address=options.address,
        part=(int(part), int(parts)),
        standby=options.standby,
        standby_number=options.standby_number,
        force_lead=options.force_lead,
        stay=options.stay,
        keys=options.keys,
        insecure=options.insecure,
    )
    return hub(config, own)


def add_peer_options(peer: argparse.ArgumentParser) -> None:
    """Add the options to the command."""
    peer.add_argument(
        "--as",
        dest="name",
        metavar="NAME",
        default="",
        help="name of this peer (default: that of its keys, or the host name)",
    )
    peer.add_argument(
        "--directory",
        metavar="DIR",
        type=Path,
        help="folder of its key and replicas (default: peers/NAME in the run directory)",
    )
    does = "HOST:PORT of a peer that runs, or what swarm.peers may be; in place of swarm.peers"
    peer.add_argument("--peers", metavar="PEERS", default="", help=does)
    does = "begin the run; a peer that was in the run before goes on with what it has"
    peer.add_argument("--found", action="store_true", help=does)
    does = "found these lost parts again without a vote, whatever is lost; at one peer only"
    peer.add_argument("--force-found", metavar="K[,K...]", default="", help=does)
    peer.add_argument("--stay", action="store_true", help=STAY)


def run_peer(options: argparse.Namespace) -> int:
    """Take part in a swarm as the options say; return the exit code. Raises UserError."""
    import socket

    from aedit.launch.config import load
    from aedit.launch.records import file_name
    from aedit.launch.swarm import PeerOptions, peer
    from aedit.proto.rpc import name_of

    config = load(options.config, options.flags, strict=True).config
    name = options.name or name_of(options.keys) or socket.gethostname()
    default = Path(config.dir) / config.name / "peers" / file_name(name)
    own = PeerOptions(
        directory=options.directory or default,
        name=name,
        peers=options.peers,
        founds=options.found,
        forces=_parts(options.force_found),
        stays=options.stay,
        keys=options.keys,
        insecure=options.insecure,
    )
    return peer(config, own)


def _parts(text: str) -> tuple[int, ...]:
    parts = text.split(",") if text else []
    if not all(part.isdecimal() for part in parts):
        raise UserError(f"--force-found: expected numbers of parts, such as 1 or 0,3, got {text!r}")
    return tuple(sorted(set(map(int, parts))))
