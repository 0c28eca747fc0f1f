"""Run a command as a child process that ends with this process, with all its descendants.

Torchrun or a hub.
"""

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import TracebackType

import psutil

from aedit.system import PARENT, end_with_parent


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
