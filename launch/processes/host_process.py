"""A hub or peer process of a run on this machine."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.child import Child
from aedit.launch.records import how
from aedit.types import UserError

USER_ERROR = 2
"""Exit code of a process that a restart does not mend."""
START_LIMIT_S = 60.0
POLL_S = 0.05


@dataclass(slots=True)
class HostProcess:
    """One hub or peer of the run, restarted if it fails."""

    name: str
    """For messages: the hub, a standby of it, or the peer of a node."""
    command: list[str]
    directory: Path
    log: Path
    restarts: int
    """Restarts that are left."""
    may_end: bool = True
    """Whether an end without error is none: a peer may leave, and ends with a run that it has joined."""
    child: Child | None = None

    def start(self) -> None:
        """Start it."""
        (self.directory / "address").unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.child = Child(self.command, self.log)

    def address(self) -> str:
        """Return the address it listens at, once it has started. Raises UserError if it cannot start."""
        assert self.child is not None
        deadline = time.monotonic() + START_LIMIT_S
        while not (text := _read(self.directory / "address")):
            if not self.child.running() or time.monotonic() > deadline:
                raise UserError(_last_line(self.child.output()) or f"it did not start: see {self.log}")
            time.sleep(POLL_S)
        return text

    def running(self) -> bool:
        """Return whether it runs."""
        assert self.child is not None
        return self.child.running()

    @property
    def is_over(self) -> bool:
        """Return whether it ended without error: the run is over, and no members were left."""
        assert self.child is not None
        return not self.child.running() and self.child.exit_code() == 0

    def mend(self) -> None:
        """Restart it if it has failed; it continues its journal at the same address."""
        assert self.child is not None
        if self.running() or self.is_over or self.fault:
            return
        self.restarts -= 1
        self.child.kill()
        self.child = Child(self.command, self.log)

    @property
    def fault(self) -> str:
        """Return why it has failed and is not restarted; "" otherwise."""
        assert self.child is not None
        if self.child.running() or (self.is_over and self.may_end):
            return ""
        code = self.child.exit_code()
        if code == 0:
            return f"{self.name} was stopped; see {self.log}"
        if self.restarts and code != USER_ERROR:
            return ""
        error = _last_line(self.child.output()) if code > 0 else ""
        again = "" if code == USER_ERROR else " more often than restarts allows"
        return f"{self.name} has failed{again} ({how(code)}){': ' if error else ''}{error}; see {self.log}"


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _last_line(output: str) -> str:
    """Return the last message of `aedit` in the output, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("aedit: ")]
    return (ours or lines or [""])[-1].removeprefix("aedit: ")
