"""A rollout worker that is a process of this rank."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aedit.spec_rollout.workers.channel import Channel
from aedit.spec_rollout.workers.handle import WorkerHandle

MODULE = "aedit.spec_rollout.workers.worker"
END_S = 10.0
CODE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """First message and inherited files of a worker."""

    begin: Mapping[str, Any]
    """The first message; see `Worker`."""
    fds: tuple[int, ...]
    """File descriptors that the worker inherits."""
    rows: int
    """Samples that it decodes at a time."""
    logs: Path | None


@dataclass(slots=True)
class WorkerProcess:
    """A process at the other end of `channel`. Start it in a thread that lasts.

    The kernel ends it together with that thread.
    """

    what: str
    """Name in messages, such as `rollout worker 0`."""
    process: "subprocess.Popen[bytes]"
    channel: Channel

    @classmethod
    def start(cls, what: str, module: str, fds: tuple[int, ...], log: Path) -> "WorkerProcess":
        """Start a process and return at once.

        Args:
            what: Name in messages.
            module: Run with the process id of this process and the file descriptor of its socket.
            fds: File descriptors that it inherits besides.
            log: File of its output.

        Raises:
            OSError: No process could be started.
        """
        here, there = socket.socketpair()
        with there, open(log, "ab") as output:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(os.getpid()), str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(there.fileno(), *fds),
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it
                )
            except OSError:
                here.close()
                raise
        return cls(what, process, Channel(here))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    @property
    def name(self) -> str:
        """Return the process's name in messages."""
        return f"{self.what} (process {self.pid})"

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended."""
        return self.process.poll() is not None

    def death(self) -> str:
        """Return how it has ended."""
        try:
            code = self.process.wait(timeout=CODE_S)  # the connection ends a moment before the process
        except subprocess.TimeoutExpired:
            code = None
        return f"{self.name} {'has closed its connection' if code is None else f'ended with {code}'}"

    def end(self) -> None:
        """End the process, whatever it does, and wait until it is gone.

        Raises:
            subprocess.TimeoutExpired: It is still there after 10 s.
        """
        self.channel.close()
        self.process.kill()
        self.process.wait(timeout=END_S)


def start_worker(index: int, start: WorkerStart) -> WorkerHandle:
    """Start a worker and return at once.

    Raises:
        OSError: No process could be started.
    """
    log = log_file(f"worker_{index}.log", start.logs)
    process = WorkerProcess.start(f"rollout worker {index}", MODULE, start.fds, log)
    process.channel.send("begin", path=sys.path, **start.begin)
    return WorkerHandle(index, process, process.channel, start.rows)


def log_file(name: str, logs: Path | None) -> Path:
    """Return the file of a process's output; its directory is made."""
    if logs is None:
        return Path(os.devnull)
    logs.mkdir(parents=True, exist_ok=True)
    return logs / name
