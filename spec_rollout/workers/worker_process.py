"""The rank's side of one rollout worker: its process, its connection, and the samples that it has."""

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aedit.spec_rollout.migration.reallocate import EngineSpeed, SampleKey
from aedit.spec_rollout.workers.channel import Channel, Message

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
    logs: Path | None


@dataclass(slots=True)
class WorkerProcess:
    """A running worker. Start it in a thread that lasts: the kernel ends it together with that thread."""

    index: int
    process: "subprocess.Popen[bytes]"
    channel: Channel
    is_ready: bool = False
    """It has made its engine."""
    quiet_s: float = 0.0
    """Seconds that the rank has waited since the last message."""
    samples: dict[SampleKey, None] = field(default_factory=dict)
    """Keys of the samples that it was given and has not finished, oldest first."""
    cancelled: Counter[SampleKey] = field(default_factory=Counter)
    """Cancellations by sample that the worker has not confirmed yet. Its messages about such a sample are
    older than the cancellation, and are ignored."""
    speed: EngineSpeed | None = None
    finished: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Last error that the worker has sent."""

    @classmethod
    def start(cls, index: int, start: WorkerStart) -> "WorkerProcess":
        """Start a process and return at once.

        Raises:
            OSError: No process could be started.
        """
        here, there = socket.socketpair()
        with there, open(_log(index, start.logs), "ab") as log:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(os.getpid()), str(there.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(there.fileno(), *start.fds),
                    start_new_session=True,  # Ctrl-C in the terminal must not reach it
                )
            except OSError:
                here.close()
                raise
        worker = cls(index, process, Channel(here))
        worker.channel.send("begin", path=sys.path, **start.begin)
        return worker

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self.process.pid

    def receive(self) -> Sequence[Message]:
        """Return what has arrived; any message is a sign of life."""
        messages = self.channel.receive()
        if messages:
            self.quiet_s = 0.0
        return messages

    def cancel(self) -> None:
        """Take all samples away."""
        for key in self.samples:
            self.channel.send("remove", key=key)
            self.cancelled[key] += 1
        self.samples.clear()

    def confirm_cancel(self, key: SampleKey) -> bool:
        """Note that the worker has removed a sample; return whether that is because it was cancelled."""
        if key not in self.cancelled:
            return False
        self.cancelled -= Counter([key])
        return True

    def read_figures(self, message: Message) -> None:
        """Keep the figures of a report."""
        self.figures = message["figures"]
        if message["speed"] is not None:
            self.speed = EngineSpeed(*message["speed"])

    @property
    def name(self) -> str:
        """Return the worker's name in messages."""
        return f"rollout worker {self.index} (process {self.pid})"

    @property
    def is_dead(self) -> bool:
        """Return whether the process has ended or has closed its connection."""
        return self.channel.closed or self.process.poll() is not None

    def death(self) -> str:
        """Return why it is dead. Read all its messages first."""
        try:
            code = self.process.wait(timeout=CODE_S)  # the connection ends a moment before the process
        except subprocess.TimeoutExpired:
            code = None
        ended = "has closed its connection" if code is None else f"ended with {code}"
        return f"{self.name} {ended}{self.error and ': ' + self.error}"

    def end(self) -> None:
        """End the process, whatever it does, and wait until it is gone.

        Raises:
            subprocess.TimeoutExpired: It is still there after 10 s.
        """
        self.channel.close()
        self.process.kill()
        self.process.wait(timeout=END_S)


def _log(index: int, logs: Path | None) -> Path:
    if logs is None:
        return Path(os.devnull)
    logs.mkdir(parents=True, exist_ok=True)
    return logs / f"worker_{index}.log"
