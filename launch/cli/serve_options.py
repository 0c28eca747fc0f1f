"""Options of `aedit serve`: of a server of a run, and of one of a model directory."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from aedit.launch.cli.arguments import Parser
from aedit.launch.cli.model_options import add_model_options

if TYPE_CHECKING:
    from aedit.launch.serve import ServeRequest


def add_serve_options(command: Parser) -> None:
    """Add the options of both kinds of servers. That of a run takes configuration flags, too."""
    command.add_argument(
        "place", metavar="HOST:PORT | MODEL_DIR", help="hub of a run, or a directory of save_pretrained"
    )
    command.add_argument(
        "--as", dest="name", metavar="NAME", default="", help="name of this server in the run"
    )
    command.add_argument(
        "--address",
        metavar="HOST:PORT",
        default="127.0.0.1:0",
        help="address for trainers and other servers to listen at (default: a free port of this machine)",
    )
    command.add_argument(
        "--announce",
        metavar="HOST:PORT",
        default="",
        help="address at which they reach it, if that is another one than --address",
    )
    command.add_argument(
        "--http",
        metavar="HOST:PORT",
        default="",
        help="address to serve the run's policy over HTTP at, too (default: not at all)",
    )
    add_model_options(command)


def serve_request(options: argparse.Namespace) -> "ServeRequest":
    """Return what the words of the command line ask for."""
    from aedit.launch.serve import HttpPlace, ServeRequest, ServerPlaces

    keys: Path | None = options.keys
    http = (
        HttpPlace.of(options.http, options.api_key_file, insecure=options.insecure) if options.http else None
    )
    return ServeRequest(
        hub=options.place,
        flags=options.flags,
        name=options.name,
        places=ServerPlaces(options.address, options.announce, http),
        keys=keys,
        insecure=options.insecure,
    )
