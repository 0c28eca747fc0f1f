"""Options of `aedit serve`: of a server of a run, and of one of a model directory. Imports no torch."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aedit.launch.cli.arguments import Parser
from aedit.types import UserError

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
    """Return what the options ask for."""
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


DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_model_options(command: Parser) -> None:
    """Add the options of a server of a model directory."""
    add = command.add_argument_group("with MODEL_DIR").add_argument
    add("--host", metavar="NAME", default="127.0.0.1", help="interface for HTTP (default 127.0.0.1)")
    add("--port", metavar="PORT", type=int, default=8000, help="port, 0: a free one (default 8000)")
    add("--api-key-file", metavar="FILE", type=Path, help="file of keys that clients need, one a line")
    add("--control", metavar="HOST:PORT", default="", help="second address, with control routes")
    add("--control-key-file", metavar="FILE", type=Path, help="file of keys for the second address")
    add("--weights-root", metavar="DIR", type=Path, help="update_weights reads directories below it only")
    add("--served-name", metavar="NAME", default="", help="name of the model (default: MODEL_DIR's)")
    add("--rows", metavar="N", type=int, default=16, help="samples that are decoded at a time (default 16)")
    add(
        "--max-waiting",
        metavar="N",
        type=int,
        default=256,
        help="samples that may wait beyond them (default 256)",
    )
    add("--max-tokens", metavar="N", type=int, help="of prompt and answer (default: up to 4096)")
    add(
        "--dtype", metavar="DTYPE", choices=DTYPES, default="auto", help="dtype of the weights (default auto)"
    )
    add("--drafter", metavar="FILE", help="a trained drafter, or none (default: the model's)")
    add("--arm", metavar="ARM", default="auto", help="auto, off, or a fixed arm such as suffix:4")
    add("--end-s", metavar="S", type=float, default=30.0, help="seconds for answers at the end (default 30)")


MODEL_OPTIONS = (
    *("host", "port", "api_key_file", "control", "control_key_file", "weights_root", "served_name", "rows"),
    *("max_waiting", "max_tokens", "dtype", "drafter", "arm", "end_s"),
)
RUN_OPTIONS = ("name", "address", "announce", "http", "keys", "insecure")


def refuse_options(command: Parser, options: argparse.Namespace, names: tuple[str, ...], place: str) -> None:
    """Raise UserError for an option that has no effect with this kind of place."""
    for name in names:
        if getattr(options, name) != command.get_default(name):
            shown = "--as" if name == "name" else f"--{name.replace('_', '-')}"
            raise UserError(f"{shown} has no effect with {place}: remove it")


def device_flag(flags: Sequence[str]) -> str:
    """Return the value of --device, which is a configuration flag for runs, or "".

    Raises:
        UserError: There are other flags.
    """
    parts = [part for flag in flags for part in flag.split("=", 1)]
    if parts[:1] == ["--device"] and len(parts) == 2:
        return parts[1]
    if parts:
        raise UserError(f"{parts[0]} has no effect with MODEL_DIR: remove it")
    return ""


def is_model(place: str) -> bool:
    """Return true if the argument of `aedit serve` is a directory, false for HOST:PORT.

    Raises:
        UserError: It is neither.
    """
    if Path(place).is_dir():
        return True
    if not place.rpartition(":")[2].isdigit():
        raise UserError(f"{place}: no such directory, and no HOST:PORT of a hub")
    return False


def check_model_options(options: argparse.Namespace) -> None:
    """Check what can be checked before torch is imported.

    Raises:
        UserError: An option is not valid.
    """
    for name in ("rows", "max_waiting", "max_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if not 0 <= options.port < 1 << 16:
        raise UserError(f"--port must be 0 to 65535, got {options.port}")
    if not 0 <= options.end_s < float("inf"):
        raise UserError(f"--end-s must be 0 or more, got {options.end_s}")
    if options.control and options.control_key_file is None:
        raise UserError("--control needs --control-key-file: its routes change the server")
    if not options.control and (options.control_key_file or options.weights_root):
        raise UserError("--control-key-file and --weights-root need --control HOST:PORT")
    if options.control:
        control_address(options.control)
    if options.weights_root is not None and not options.weights_root.is_dir():
        raise UserError(f"--weights-root {options.weights_root}: no such directory")


def control_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT.

    Raises:
        UserError: It is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) >= 1 << 16:
        raise UserError(f"--control must be HOST:PORT, such as 127.0.0.1:8001, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
