"""`aedit completion SHELL`: completion script for commands, options, configuration flags and files."""

import argparse
from typing import Any, Literal, get_args, get_origin

import shtab

from aedit.launch.config import hints

PATHS = ("CONFIG", "A", "B", "RUN", "OUT", "DIR", "FILE")
"""Metavariables of arguments that are files or directories."""


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of `parser` for one of shtab's shells; changes `parser`."""
    _complete(parser)
    script: str = shtab.complete(parser, shell)
    return script


def _complete(parser: argparse.ArgumentParser) -> None:
    """Mark values that are paths for shtab, and add the configuration flags to commands that take them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete(command)
        elif action.metavar in PATHS:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    if parser.get_default("takes_flags"):
        for name, hint in hints().items():
            _add_flag(parser, name, hint)


def _add_flag(parser: argparse.ArgumentParser, name: str, hint: Any) -> None:
    if name == "model.sizes":  # its keys are the model family's
        return
    if hint is bool:
        table, _, key = name.rpartition(".")
        negated = f"--{table}.no_{key}" if table else f"--no_{key}"
        parser.add_argument(f"--{name}", negated, action="store_true")
    else:
        choices = get_args(hint) if get_origin(hint) is Literal else None
        parser.add_argument(f"--{name}", choices=choices)
