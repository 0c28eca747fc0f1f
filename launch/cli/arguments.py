"""Argument parser of the command line: errors of one line, with suggestions for misspelt words."""

import argparse
import difflib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from aedit.types import UserError

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UserError, and whose `--help` also lists the configuration flags."""

    def error(self, message: str) -> NoReturn:
        """Raise UserError with argparse's message and a suggestion."""
        raise UserError(f"{_short(message)}{self._suggestion(message)}; see {self.prog} --help")

    def print_help(self, file: "SupportsWrite[str] | None" = None) -> None:
        """Print the command's own options and, if it takes them, all configuration flags."""
        super().print_help(file)
        if self.get_default("takes_flags"):
            from aedit.launch.config import flags_help

            print(f"\nconfiguration flags, each also a key of the file:\n{flags_help()}", file=file)

    def _suggestion(self, message: str) -> str:
        """Return `; did you mean X?` for a misspelt command, choice or option, else ""."""
        if choice := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            word, known = choice[1], re.findall(r"[\w.:-]+", choice[2])
        elif unknown := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            word, known = unknown[1], sorted(set(_options(self)))
        else:
            return ""
        # An option that another command has is known as it is: it is not what was meant here.
        close = [] if word in known else difflib.get_close_matches(word, known, n=1)
        return f"; did you mean {close[0]}?" if close else ""


def _short(message: str) -> str:
    """Return argparse's message without metavar and list of all commands."""
    return re.sub(r"^argument COMMAND: invalid choice: '(.*?)' \(.*\)", r"unknown command '\1'", message)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield all options of the parser and its subcommands."""
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _options(command)
