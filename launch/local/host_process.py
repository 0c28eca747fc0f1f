"""A hub or peer process of a run on this machine."""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.child import Child
from aedit.types import UserError

START_LIMIT_S = 60.0
POLL_S = 0.05


@dataclass(slots=True)
class HostProcess:
    """One hub or peer of the run, restarted if it fails."""

    words: list[str]
    directory: Path
    log: Path
    restarts: int
    child: Child | None = None

    def start(self) -> None:
        """Start it."""
        (self.directory / "address").unlink(missing_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.child = Child(self.words, self.log)

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
        if self.child.running() or not self.restarts or self.child.exit_code() in (0, 2):
            return
        self.restarts -= 1
        self.child.kill()
        self.child = Child(self.words, self.log)


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _last_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("aedit: ")]
    return lines[-1].removeprefix("aedit: ") if lines else ""
