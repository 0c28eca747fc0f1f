"""`aedit status PLACE`: print the state of a run, or of a rollout server's folder, once."""

from pathlib import Path

from rich.console import Console

from aedit.launch.records import is_server_folder, read_server
from aedit.launch.views.panel import panel
from aedit.launch.views.server_folder_view import server_panel
from aedit.launch.views.sources import open_source


def status_command(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> None:
    """Print progress, each node, and the hub or the last round; of a server's folder, what it has done.

    Raises UserError if there is neither at `place`.
    """
    if is_server_folder(Path(place)):
        Console().print(server_panel(read_server(Path(place))))
        return
    with open_source(place, keys, insecure=insecure) as source:
        run = source.poll()
    Console().print(panel(run, run.indices))
