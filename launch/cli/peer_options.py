"""Options of `aedit peer`, and the call that they stand for."""

import argparse
from pathlib import Path

from aedit.launch.cli.hub_options import STAY
from aedit.types import UserError


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
    words = text.split(",") if text else []
    if not all(word.isdecimal() for word in words):
        raise UserError(f"--force-found: expected numbers of parts, such as 1 or 0,3, got {text!r}")
    return tuple(sorted(set(map(int, words))))
