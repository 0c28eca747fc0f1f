"""Options of `aedit hub`, and the call that they stand for."""

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
    does = "file in which a peer of a swarm keeps where the other replicas of the part are"
    hub.add_argument("--replicas", metavar="FILE", type=Path, help=does)
    does = "begin the journal with the term after this one: of a part that is founded again"
    hub.add_argument("--term-above", metavar="N", type=int, default=0, help=does)
    does = "lead without a vote, and with what is left of the journal, whatever may be lost"
    hub.add_argument("--force-lead", action="store_true", help=does)
    hub.add_argument("--stay", action="store_true", help=STAY)


def run_hub(options: argparse.Namespace) -> int:
    """Serve as the options say; return the exit code. Raises UserError."""
    from aedit.launch.config import load
    from aedit.launch.hub import hub

    config = load(options.config, options.flags, strict=True).config
    part, _, parts = options.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and int(part) < int(parts)):
        raise UserError(f"--part: expected K/N with K below N, got {options.part}")
    return hub(
        config,
        address=options.address or None,
        directory=options.directory or Path(config.dir) / config.name / "hub",
        part=(int(part), int(parts)),
        standby=options.standby,
        standby_number=options.standby_number,
        term_above=options.term_above,
        force_lead=options.force_lead,
        stay=options.stay,
        replicas=options.replicas,
        keys=options.keys,
        insecure=options.insecure,
    )
