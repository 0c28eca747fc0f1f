"""`aedit status PLACE`: print the state of a run once."""

from pathlib import Path

from rich.console import Console

from aedit.launch.views.panel import panel
from aedit.launch.views.sources import open_source


def main(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> None:
    """Print progress, each node, and the hub or the last round.

    Raises UserError if there is no run at `place`.
    """
    with open_source(place, keys, insecure=insecure) as source:
        run = source.poll()
    Console().print(panel(run, run.indices))
