"""The `aedit` command line."""

from aedit.launch.cli.main import main

__all__ = ["main"]
