"""Workers of a rank: their settings and their processes.

Processes are started, watched, ended and started again; remote workers come and go.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

import torch

from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.remote.handle import RemoteWorkers, WorkerHandle
from aedit.spec_rollout.server import Channel
from aedit.spec_rollout.training import Restarts
from aedit.types import ImportPath, PositiveFloat, PositiveInt, check, checked

MAKE_ENGINE = ImportPath("aedit.spec_rollout.server.serving:make_engine")


MODULE = "aedit.spec_rollout.server.worker"


END_S = 10.0


CODE_S = 1.0


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """Number of processes, their engines, and the time after which a silent one is replaced."""

    processes: PositiveInt = 1
    rows: PositiveInt
    """Samples that each process decodes at a time."""
    max_tokens: PositiveInt
    """Upper limit of prompt and answer of one sample, in tokens."""
    dtype: torch.dtype = torch.float32
    """Dtype of the policy in the workers."""
    device: str = "cpu"
    threads: PositiveInt = 1
    """Processor threads of each process."""
    arms: tuple[str, ...] = ("off",)
    """Speculation settings between which each engine chooses, such as `off`, `suffix:4`, `layer:4`."""
    tokenizer: Path | None = None
    """Directory of a saved tokenizer. Stop strings need it."""
    silent_s: PositiveFloat = 60.0
    """Seconds of waiting for a process without a message after which it is ended and replaced."""
    starts_within_s: PositiveFloat = 300.0
    """The same before its first message: it loads torch and builds the model."""
    wait_s: PositiveFloat = 0.05
    """Longest wait of one `WorkerSource.step`."""
    restarts: Restarts = field(default_factory=lambda: Restarts(pause_s=0.25))
    """Deaths in a row, of a process or around a sample without progress, after which generation fails."""
    logs: Path | None = None
    """Directory of the processes' output; None discards it."""
    make: ImportPath = MAKE_ENGINE
    """Function of the worker that returns its engine; see `make_engine`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further options for `make`, which JSON can hold."""

    def __post_init__(self) -> None:
        check(bool(self.arms), "WorkerConfig: arms", "must name at least one arm", self.arms)
        for arm in self.arms:
            parse_arm(arm)


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
class ChildProcess:
    """A process at the other end of `channel`. Start it in a thread that lasts.

    The kernel ends it together with that thread.
    """

    what: str
    """Name in messages, such as `rollout worker 0`."""
    process: "subprocess.Popen[bytes]"
    channel: Channel

    @classmethod
    def start(cls, what: str, module: str, fds: tuple[int, ...], log: Path) -> "ChildProcess":
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
    process = ChildProcess.start(f"rollout worker {index}", MODULE, start.fds, log)
    process.channel.send("begin", path=sys.path, **start.begin)
    return WorkerHandle(index, process, process.channel, start.rows)


def log_file(name: str, logs: Path | None) -> Path:
    """Return the file of a process's output; its directory is made."""
    if logs is None:
        return Path(os.devnull)
    logs.mkdir(parents=True, exist_ok=True)
    return logs / name


class WorkerPool:
    """Up to `config.processes` workers by index, and remote ones. Used by one thread, which must last."""

    def __init__(
        self,
        start: WorkerStart,
        config: WorkerConfig,
        clock: Callable[[], float] = time.monotonic,
        remote: RemoteWorkers | None = None,
    ) -> None:
        self.workers: dict[int, WorkerHandle] = {}
        """Those that run or start."""
        self.last_error = ""
        self.deaths = 0
        """Number of processes that have ended."""
        self.silent = 0
        """Number of processes that were ended because they fell silent."""
        self.remote = remote
        self._start, self._config, self._clock = start, config, clock
        self._restarts = dict.fromkeys(range(config.processes), config.restarts)

    @property
    def given_up(self) -> bool:
        """Return whether no worker is left and no process will be started."""
        return not self.workers and all(each.given_up for each in self._restarts.values())

    def start_due(self) -> list[WorkerHandle]:
        """Start the missing processes whose pause is over, and return them."""
        started = []
        for index, restarts in self._restarts.items():
            if index in self.workers or not restarts.may_start(self._clock()):
                continue
            try:
                self.workers[index] = start_worker(index, self._start)
            except OSError as error:
                self._record(index, f"rollout worker {index} could not be started: {error}", worked=False)
            else:
                started.append(self.workers[index])
        return started

    def find_dead(self) -> list[WorkerHandle]:
        """Return the workers that have died or have been silent for too long."""
        return [worker for worker in self.workers.values() if worker.is_dead or self._is_silent(worker)]

    def look_for_remote(self) -> None:
        """Take up the remote workers that were connected to."""
        for worker in self.remote.look() if self.remote is not None else ():
            self.workers[worker.index] = worker

    def bury(self, dead: list[WorkerHandle]) -> list[tuple[WorkerHandle, str]]:
        """Remove these workers, which `find_dead` has returned, and return them with the reasons.

        One that was silent and has sent something since then stays.
        """
        buried = []
        for worker in dead:
            if not worker.is_dead and not self._is_silent(worker):
                continue
            reason = worker.death() if worker.is_dead else self._silence(worker)
            del self.workers[worker.index]
            self._end(worker)
            if worker.is_local:
                self._record(worker.index, reason, worked=worker.finished > 0)
            buried.append((worker, reason))
        return buried

    def wait(self, timeout_s: float) -> None:
        """Wait for a message of any worker, and count the time as silence of all."""
        began_s = self._clock()
        channels = [each.channel for each in self.workers.values() if isinstance(each.channel, Channel)]
        Channel.wait([*channels, *(self.remote.channels() if self.remote else ())], timeout_s)
        passed_s = self._clock() - began_s
        for worker in self.workers.values():
            worker.quiet_s += passed_s
        if self.remote is not None:
            self.remote.waited(passed_s)

    def close(self) -> None:
        """End all workers."""
        while self.workers:
            self._end(self.workers.popitem()[1])
        if self.remote is not None:
            self.remote.close()

    def _is_silent(self, worker: WorkerHandle) -> bool:
        """Return whether a process is silent; `RemoteWorkers` look after their own."""
        limit_s = self._config.silent_s if worker.is_ready else self._config.starts_within_s
        return worker.is_local and worker.quiet_s > limit_s

    def _silence(self, worker: WorkerHandle) -> str:
        self.silent += 1
        return f"{worker.name} gave no sign of life for {worker.quiet_s:.1f} s and was ended"

    def _end(self, worker: WorkerHandle) -> None:
        try:
            worker.life.end()
        except TimeoutExpired:  # it hangs in the kernel; its signal is waiting there
            self.last_error = f"process {worker.pid} does not end"

    def _record(self, index: int, reason: str, *, worked: bool) -> None:
        self.deaths += 1
        self.last_error = reason
        self._restarts[index] = self._restarts[index].died(self._clock(), worked=worked)
