"""Command line: `aedit`."""

from aedit.launch.cli.main import main

__all__ = ["main"]
