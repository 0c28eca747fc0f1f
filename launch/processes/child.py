"""Child processes: start, log, restarts, end with this process and all descendants; signals that ask to stop.

`Child` is any command, such as torchrun; `HostProcess` a hub or peer of a run, which is restarted.
`StopSignals` is the other side: the child catches what asks it to end.
"""

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

import psutil

from aedit.launch.records import how
from aedit.system import PARENT, end_with_parent
from aedit.types import UserError


class Child:
    """One command with all its descendants, which end with the block."""

    def __init__(
        self, command: list[str], log: Path, env: Mapping[str, str] | None = None, *, own: bool = False
    ) -> None:
        """Start the command; its output is appended to `log`.

        Args:
            command: Program and arguments.
            log: File of its output.
            env: In place of this process's environment.
            own: The command is `aedit`, which ends with this process by itself. Nothing of Python then runs
                between fork and exec, where a process with threads of gRPC may abort.
        """
        end = None if own else partial(end_with_parent, os.getpid(), signal.SIGTERM)
        env = {**(env or os.environ), PARENT: str(os.getpid())} if own else env
        with log.open("ab") as output:
            self._read_to = output.tell()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                # Ctrl-C in the terminal reaches only this process, which forwards signals to the nodes.
                start_new_session=True,
                preexec_fn=end,
            )
        self._log, self._own = log, own
        self._output = ""
        # Workers have sessions of their own: they are found through their parents while those run.
        self._seen: dict[int, psutil.Process] = {self._process.pid: psutil.Process(self._process.pid)}

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def running(self) -> bool:
        """Return whether the command runs. Also records its descendants, so call it about once a second.

        Those of `aedit` end by themselves and are not looked for: that takes longer the more processes run.
        """
        if not self._own:
            self._look()
        return self._process.poll() is None

    def exit_code(self) -> int:
        """Return the exit code. Only after `running` returned False or `kill` was called."""
        return self._process.wait(timeout=10)

    def output(self) -> str:
        """Return the output of the command, and of workers that had no log yet."""
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            self._output += file.read().decode(errors="replace")
            self._read_to = file.tell()
        return self._output

    def workers(self) -> list[psutil.Process]:
        """Return the live processes that the command started: for torchrun those of the node."""
        with contextlib.suppress(psutil.Error):
            return list(psutil.Process(self._process.pid).children())
        return []

    def terminate(self) -> None:
        """Send SIGTERM; torchrun gives its workers 30 s."""
        self._look()
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill all processes, and wait for their end for at most 10 s."""
        self._look()
        for process in self._seen.values():
            # psutil compares start times, so that a reused process id is not killed.
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(list(self._seen.values()), timeout=10)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _look(self) -> None:
        for known in list(self._seen.values()):
            with contextlib.suppress(psutil.Error):
                self._seen |= {p.pid: p for p in known.children() if p.pid not in self._seen}


class StopSignals:
    """Catches the first SIGINT or SIGTERM, which asks for the end; the second one ends the process."""

    def __init__(self) -> None:
        """Catch them, in the main thread; in another one `asked` is set by others only."""
        self.asked = threading.Event()
        self.by_hand = False
        """True after SIGINT (Ctrl-C), which often reaches the nodes too; a supervisor sends SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._caught)

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self.by_hand = number == signal.SIGINT
        self.asked.set()
        for again in (signal.SIGINT, signal.SIGTERM):
            signal.signal(again, signal.SIG_DFL)


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
