"""Parser of the command line, and what is checked of a command before its own module imports torch.

That takes seconds. Errors have one line, with suggestions for misspelt commands, choices and options.
"""

import argparse
import difflib
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, get_args, get_origin

from aedit.types import UserError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UserError, and whose `--help` also lists the configuration flags."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message and a suggestion."""
        # Without metavar and list of all commands.
        short = re.sub(r"^argument COMMAND: invalid choice: '(.*?)' \(.*\)", r"unknown command '\1'", message)
        raise UserError(f"{short}{self._suggestion(message)}; see {self.prog} --help")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the command's own options and, if it takes them, all configuration flags."""
        super().print_help(file)
        if self.get_default("takes_flags"):
            from aedit.launch.config import flags_help

            print(f"\nconfiguration flags, each also a key of the file:\n{flags_help()}", file=file)

    def _suggestion(self, message: str) -> str:
        """Return `; did you mean X?` for a misspelt command, choice or option, else ""."""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            given, known = choice[1], re.findall(r"[\w.:-]+", choice[2])
        elif unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            given, known = unknown[1], sorted(set(_options(self)))
        else:
            return ""
        # An option that another command has is known as it is: it is not what was meant here.
        close = [] if given in known else difflib.get_close_matches(given, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield all options of the parser and its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)


def add_keys_options(keys: argparse.ArgumentParser) -> None:
    """Add the options to the command."""
    keys.add_argument("out", metavar="DIR", type=Path, help="folder for them")

    def several(flag: str, metavar: str, does: str) -> None:
        keys.add_argument(
            f"--{flag}", metavar=metavar, action="append", default=[], help=f"{does}; repeatable"
        )

    several("host", "NAME", "host name or IP of the hub; not for a swarm")
    several("node", "NAME", "name of a node")
    several("server", "NAME=HOST[,HOST]", "rollout server, and hosts at which trainers reach it")
    several("standby", "NAME=HOST[,HOST]", "standby, and hosts at which nodes reach it")
    several("peer", "NAME=HOST[,HOST]", "peer of a swarm, and hosts at which other peers reach it")
    several("reader", "NAME", "who may look at the run and copy its model, and nothing else")
    several("revoke", "NAME", "end the keys in DIR/NAME, at a running hub too; without other options")


SAMPLING: dict[str, tuple[type, str, float, str]] = {
    "temperature": (float, "T", 1.0, "0 is greedy (default 1)"),
    "top_k": (int, "K", 0, "sample from the K most likely tokens only"),
    "top_p": (float, "P", 1.0, "sample from the most likely tokens with total probability P"),
    "min_p": (float, "P", 0.0, "sample from tokens with at least P times the largest probability"),
    "repetition_penalty": (float, "R", 1.0, "above 1: tokens of prompt and answer get less likely"),
    "frequency_penalty": (float, "F", 0.0, "subtracted from a token's logit each time it was generated"),
    "presence_penalty": (float, "F", 0.0, "subtracted from the logits of generated tokens"),
    "top_logprobs": (int, "N", 0, "print each token's log-probability and those of the N best"),
}
"""Fields of `Sampling` that are options: type, metavar, default, help."""


def add_generate_options(parser: Parser) -> None:
    """Add the arguments of `aedit generate` to its parser."""
    parser.add_argument("place", metavar="RUN", help="a run, or a directory written by save_pretrained")
    add = parser.add_argument
    add("--prompt", metavar="TEXT", action="append", required=True, help="text to continue; repeatable")
    does = "tokens per sample (default 256, or the model's limit)"
    add("--max-new-tokens", metavar="N", type=int, help=does)
    for name, (kind, metavar, default, does) in SAMPLING.items():
        add(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, default=default, help=does)
    add("--samples", metavar="N", type=int, default=1, help="samples per prompt (default 1)")
    add("--seed", metavar="N", type=int, default=0, help="the same seed gives the same text")
    does = "auto, bandit, off, suffix:8, layer:4, layer:4x2x8 or module:Chooser"
    add("--arm", metavar="ARM", default="auto", help=does)
    does = "file or folder of a trained drafter, module:Drafter, or none (default: the model's own)"
    add("--drafter", metavar="FILE", type=Path, help=does)
    does = "generate again without speculation; print speed-up and equality"
    add("--compare", action="store_true", help=does)


def check_generate_options(options: Namespace) -> None:
    """Raise UserError if an option of `aedit generate` is wrong, or there is no such policy."""
    policy_folder(options.place)
    # Lone surrogates stand for bytes of the command line that are not UTF-8.
    if any("\ud800" <= character <= "\udfff" for text in options.prompt for character in text):
        raise UserError("--prompt: a prompt is not valid UTF-8")
    if options.samples < 1:
        raise UserError(f"--samples must be above 0, got {options.samples}")
    if not 0 <= options.seed < 1 << 31:
        raise UserError(f"--seed must be from 0 to {(1 << 31) - 1}, got {options.seed}")


AUDIT_DTYPES = ("fp32", "bf16", "fp64")


def add_audit_options(parser: Parser) -> None:
    """Add the arguments of `aedit audit` to its parser."""
    add = parser.add_argument
    does = "rollouts.jsonl of a run with audit.record = true; or a proof against the owner of a part (.json)"
    add("file", metavar="FILE", type=Path, help=does)
    does = "weights of a policy version: a run, or a model directory; repeatable (default: those beside FILE)"
    add("--model", metavar="[VERSION=]DIR", action="append", default=[], help=does)
    add(
        "--dtype",
        choices=AUDIT_DTYPES,
        default="",
        help="dtype of the servers' engines (default: the model's)",
    )
    does = "measured numerical differences (default: wide limits by dtype)"
    add("--calibration", metavar="FILE", type=Path, help=does)
    does = "take this server's rollouts as true, to measure the difference; repeatable"
    add("--trust", metavar="SERVER", action="append", default=[], help=does)
    add("--calibrate", metavar="OUT", type=Path, help="write the measured differences to this file")


def check_audit_options(options: Namespace) -> None:
    """Raise UserError if an option of `aedit audit` or its file is missing."""
    if bool(options.trust) != bool(options.calibrate):
        raise UserError("--trust and --calibrate: give both, or none")
    if not options.file.is_file():
        raise UserError(f"{options.file}: no such file; a run with audit.record = true writes rollouts.jsonl")


PATHS = ("CONFIG", "A", "B", "RUN", "OUT", "DIR", "FILE")
"""Metavariables of arguments that are files or directories."""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the script of `aedit completion` for one of shtab's shells; changes `parser`."""
    import shtab

    _complete(parser)
    script: str = shtab.complete(parser, shell)
    return script


def _complete(parser: argparse.ArgumentParser) -> None:
    """Mark values that are paths for shtab, and add the configuration flags to commands that take them."""
    import shtab

    from aedit.launch.config import hints

    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete(command)
        elif action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if parser.get_default("takes_flags"):
        for name, hint in hints().items():
            table, _, key = name.rpartition(".")
            if hint is bool:
                parser.add_argument(
                    f"--{name}", f"--{table}.no_{key}" if table else f"--no_{key}", action="store_true"
                )
            elif name != "model.sizes":  # its keys are the model family's
                choices = get_args(hint) if get_origin(hint) is Literal else None
                parser.add_argument(f"--{name}", choices=choices)


RUNS = Path("runs")


def policy_folder(place: str) -> Path:
    """Return the directory of the run or model that `place` names, here or in `runs`. Raises UserError."""
    for path in (Path(place), RUNS / place):
        if (path / "run.toml").is_file() or (path / "config.json").is_file():
            return path
    hint = "name one that has a run.toml or a config.json"
    raise UserError(f"{place}: no run and no model directory, here or in {RUNS}; {hint}")


def check_model_folder(place: str) -> None:
    """Raise UserError unless `place` is a model directory."""
    path = Path(place)
    if (path / "run.toml").is_file():
        raise UserError(f"{place}: a run, not a model directory: `aedit export {place} OUT`, then serve OUT")
    if not (path / "config.json").is_file():
        raise UserError(f"{place}: no model directory: it has no config.json")


def check_run_place(place: str) -> None:
    """Raise UserError unless `place` is a run directory, the folder of a hub, or HOST:PORT."""
    from aedit.launch.records import require_run
    from aedit.launch.views import is_hub

    if not is_hub(place):
        require_run(Path(place))
