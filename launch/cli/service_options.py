"""Options of `aedit hub`, `aedit peer` and `aedit serve`, and the calls that they stand for.

Imports no torch.
"""

import argparse
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from aedit.launch.cli.arguments import Parser
from aedit.system import host_name
from aedit.types import UserError, name_fault

if TYPE_CHECKING:
    from aedit.launch.config import RunConfig
    from aedit.launch.serve import ServeRequest


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
    from aedit.launch.config import load
    from aedit.launch.swarm import PeerOptions, peer
    from aedit.proto.rpc import name_of

    config = load(options.config, options.flags, strict=True).config
    forced = options.force_found.split(",") if options.force_found else []
    if not all(part.isdecimal() for part in forced):
        raise UserError(
            f"--force-found: expected numbers of parts, such as 1 or 0,3, got {options.force_found!r}"
        )
    name = options.name or name_of(options.keys) or host_name()
    if fault := name_fault(name):
        raise UserError(f"--as: {fault}")
    default = Path(config.dir) / config.name / "peers" / name
    own = PeerOptions(
        directory=options.directory or default,
        name=name,
        peers=options.peers,
        founds=options.found,
        forces=tuple(sorted(set(map(int, forced)))),
        stays=options.stay,
        keys=options.keys,
        insecure=options.insecure,
    )
    return peer(config, own)


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
    does = "aedit (default), or vllm in a process of its own: name --rollout.vllm.python"
    command.add_argument("--engine", metavar="ENGINE", choices=("aedit", "vllm"), default="aedit", help=does)
    add_model_options(command)


def serve_request(options: argparse.Namespace) -> "ServeRequest":
    """Return what the options ask for."""
    from aedit.launch.serve import Addresses, ServeRequest, ServerPlaces

    keys: Path | None = options.keys
    http = None
    if options.http:
        http = Addresses.of_run(options.http, options.api_key_file, insecure=options.insecure)
    return ServeRequest(
        hub=options.place,
        flags=options.flags,
        engine=options.engine,
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


def model_flags(options: argparse.Namespace) -> "RunConfig":
    """Return device, settings of vLLM and traces, which are configuration flags for runs, in a configuration.

    Raises:
        UserError: There are other flags, or some that have no effect with this engine.
    """
    from aedit.launch.config import RunConfig, check_effects, flag_keys, with_flags
    from aedit.launch.serve import check_served_engine

    for flag in options.flags:
        name = flag.partition("=")[0]
        known = name == "--device" or name.startswith(("--rollout.vllm.", "--traces."))
        if name.startswith("--") and not known:
            raise UserError(f"{name} has no effect with MODEL_DIR: remove it")
    config = with_flags(RunConfig(), list(options.flags))
    of_traces = flag_keys(options.flags) & {"traces.endpoint", "traces.ratio"}
    check_effects(config, dict.fromkeys(of_traces, 1), defaultdict(lambda: "flag"))
    check_served_engine(options.engine, config.rollout.vllm)
    if options.engine == "vllm":
        refuse_options(options.command, options, ("arm", "drafter"), "--engine vllm")
    return config


def is_model_folder(place: str) -> bool:
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
