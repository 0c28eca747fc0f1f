"""Options of `aedit audit`, without importing torch, which takes seconds."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.cli.arguments import Parser
from aedit.types import UserError

DTYPES = ("fp32", "bf16", "fp64")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """Recorded rollouts, and the policies to check them with."""

    file: Path
    models: tuple[str, ...] = ()
    """`PLACE` or `VERSION=PLACE`."""
    dtype: str = ""
    """Dtype of the engines that have generated; empty: that of the model."""
    calibration: Path | None = None
    trusted: tuple[str, ...] = ()
    calibrate: Path | None = None
    """File to write the calibrations of trusted servers to."""


def add_audit_options(parser: Parser) -> None:
    """Add the arguments of `aedit audit` to its parser."""
    add = parser.add_argument
    does = "rollouts.jsonl of a run with audit.record = true; or a proof against the owner of a part (.json)"
    add("file", metavar="FILE", type=Path, help=does)
    does = "weights of a policy version: a run, or a model directory; repeatable (default: those beside FILE)"
    add("--model", metavar="[VERSION=]DIR", action="append", default=[], help=does)
    add("--dtype", choices=DTYPES, default="", help="dtype of the servers' engines (default: the model's)")
    does = "measured numerical differences (default: wide limits by dtype)"
    add("--calibration", metavar="FILE", type=Path, help=does)
    does = "take this server's rollouts as true, to measure the difference; repeatable"
    add("--trust", metavar="SERVER", action="append", default=[], help=does)
    add("--calibrate", metavar="OUT", type=Path, help="write the measured differences to this file")


def audit_request(options: Namespace) -> AuditRequest:
    """Return the options as a request. Raises UserError if one is missing."""
    if bool(options.trust) != bool(options.calibrate):
        raise UserError("--trust and --calibrate: give both, or none")
    if not options.file.is_file():
        raise UserError(f"{options.file}: no such file; a run with audit.record = true writes rollouts.jsonl")
    return AuditRequest(
        file=options.file,
        models=tuple(options.model),
        dtype=options.dtype,
        calibration=options.calibration,
        trusted=tuple(options.trust),
        calibrate=options.calibrate,
    )
