"""Sources of views: a run directory or a hub."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from aedit.launch.records import Run, RunFollower, require_run


class Source(Protocol):
    """Run that can be read repeatedly."""

    def poll(self) -> Run:
        """Return the state of the run now. Raises UserError if it cannot be read any more."""

    def history(self) -> Run:
        """Return the run with all past records of the source."""


class DirectorySource:
    """Source that reads a run directory."""

    def __init__(self, run_dir: Path) -> None:
        """Read `run_dir`. Raises UserError if it is not a run directory."""
        require_run(run_dir)
        self._follower = RunFollower(run_dir)

    def poll(self) -> Run:
        """Return all records of the run up to now."""
        return self._follower.poll()

    history = poll


@contextmanager
def open_source(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> Iterator[Source]:
    """Yield the source of the run at `place`, a directory or HOST:PORT. Raises UserError if there is none.

    Args:
        place: A run directory, or the address of a hub; a directory of that name has precedence.
        keys: Directory of this machine's certificate, for a hub with TLS.
        insecure: Connect to a hub on another machine without TLS.
    """
    if not is_hub(place):
        yield DirectorySource(Path(place))
        return
    from aedit.launch.views.hubview import HubSource  # gRPC takes half a second to import

    source = HubSource(str(place), keys, insecure=insecure)
    try:
        yield source
    finally:
        source.close()


def is_hub(place: Path | str) -> bool:
    """Return whether `place` is HOST:PORT and no directory."""
    host, _, port = str(place).rpartition(":")
    return bool(host) and port.isdecimal() and not Path(place).exists()
