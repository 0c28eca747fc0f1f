"""The page of the run as a child process of a hub or peer: `aedit view`, restarted if it dies."""

import logging
import sys
import time
from pathlib import Path

from aedit.child import USER_ERROR, Child, Restarts
from aedit.types import UserError

log = logging.getLogger(__name__)
WORKED_S = 30.0
"""A process that has lived so long has worked: its end counts as the first one."""
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


class PageProcess:
    """Serves the page of a run for as long as its hub or peer lives."""

    def __init__(self, place: str, listen: str, keys: Path | None, log_file: Path) -> None:
        """Start it.

        Args:
            place: Run directory, or HOST:PORT of the hub or peer itself.
            listen: HOST:PORT of the page.
            keys: Folder of the keys of the hub or peer.
            log_file: File of its output.
        """
        for host, own in _EVERYWHERE.items():
            place = place.replace(host, own, 1) if place.startswith(f"{host}:") else place
        self._command = [sys.executable, "-m", "aedit", "view", place, "--listen", listen]
        self._command += ["--keys", str(keys)] if keys else ["--insecure"]
        self._log = log_file
        self._restarts, self._is_first = Restarts(), True
        self._started_s = time.monotonic()
        self._child: Child | None = Child(self._command, self._log, own=True)

    def look(self) -> None:
        """Restart the process if it has died, with growing pauses.

        Raises UserError with its message if its first start was refused, as for an address in use.
        """
        now_s = time.monotonic()
        if self._child is not None and not self._child.running():
            refused = self._child.exit_code() == USER_ERROR
            said = self._child.output().strip().splitlines()[-1:] or [f"see {self._log}"]
            self._child = None
            worked = now_s - self._started_s >= WORKED_S
            was_first, self._is_first = self._is_first, False
            self._restarts = self._restarts.died(now_s, worked=worked)
            if refused and was_first and not worked:
                raise UserError(f"hub.view: {said[0].removeprefix('aedit: ').removeprefix('--listen: ')}")
            log.warning("the page of the run has ended: %s", said[0])
        if self._child is None and self._restarts.may_start(now_s):
            self._started_s = now_s
            self._child = Child(self._command, self._log, own=True)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.kill()
            self._child = None


def run_directory(folder: Path) -> str:
    """Return the run directory of the folder of a hub; "" for a folder that is somewhere else."""
    is_hub = folder.name == "hub" or (folder.name.startswith("hub_") and folder.name[4:].isdecimal())
    return str(folder.parent) if is_hub else ""
