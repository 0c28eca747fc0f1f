"""Workers of a rank: their processes, which are started again, and the rank's side of each.

A worker is a process of the rank, or a rollout server behind `LinkProcess`, which comes, goes and comes back.
Both speak rollouts.proto, each in a lane of a channel.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from aedit.child import Restarts, end_group, start_module
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.sampling import SampleKey
from aedit.spec_rollout.server import WORKER_LANE, Channel, Message
from aedit.types import ImportPath, PositiveFloat, PositiveInt, check, checked

if TYPE_CHECKING:
    from aedit.spec_rollout.remote.servers import LinkProcess

MAKE_ENGINE = ImportPath("aedit.spec_rollout.server.worker_engine:make_engine")
MODULE = "aedit.spec_rollout.server.worker"
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
    python: Path | None = None
    """Interpreter of the processes, in an environment of its own such as that of vLLM; None: this one."""

    def __post_init__(self) -> None:
        check(bool(self.arms), "WorkerConfig: arms", "must name at least one arm", self.arms)
        for arm in self.arms:
            parse_arm(arm)


class Lane:
    """The messages of one stream, over a channel that others may share."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number, self.channel = number, channel
        self.inbox: deque[pb.ToTrainer] = deque()
        self.reason = ""
        """Why the stream has ended; empty while it has not."""

    def send(self, message: pb.ToServer) -> None:
        """Queue a message, unless the stream has ended."""
        if not self.reason:
            self.channel.send_frame(self.number, message.SerializeToString())

    def receive(self) -> Sequence[pb.ToTrainer]:
        """Return the messages that have arrived."""
        found = list(self.inbox)
        self.inbox.clear()
        return found


@dataclass(slots=True)
class ChildProcess:
    """A process at the other end of `channel`. Start it in a thread that lasts.

    The kernel ends it together with that thread.
    """

    what: str
    """Name in messages, such as `rollout worker 0`."""
    process: "subprocess.Popen[bytes]"
    channel: Channel
    lanes: dict[int, Lane] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        what: str,
        module: str,
        begin: Mapping[str, Any],
        fds: tuple[int, ...],
        log: Path | None,
        python: Path | None = None,
    ) -> "ChildProcess":
        """Start a process and return at once.

        Args:
            what: Name in messages.
            module: Started with `start_module` and the file descriptor of its socket.
            begin: Fields of its first message.
            fds: File descriptors that it inherits besides.
            log: File of its output, whose directory is made; None discards the output.
            python: Interpreter of another environment; None: that of this process.

        Raises:
            OSError: No process could be started.
        """
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        here, there = socket.socketpair()
        with there, open(log or os.devnull, "ab") as output:
            try:
                fd = there.fileno()
                process = start_module(
                    module,
                    [str(fd)],
                    fds=(fd, *fds),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    python=python,
                )
            except OSError:
                here.close()
                raise
        made = cls(what, process, Channel(here))
        # Modules that belong to another environment are not those of this one.
        made.channel.send("begin", path=sys.path if python is None else None, **begin)
        return made

    def lane(self, number: int) -> Lane:
        """Return a new lane of this number."""
        self.lanes[number] = Lane(number, self.channel)
        return self.lanes[number]

    def receive(self) -> tuple[Sequence[Message], bool]:
        """Put what has arrived into the lanes; return the messages that have none, and whether any came.

        Those of lanes that are not there are dropped.
        """
        self.channel.flush()
        found, frames = [], self.channel.receive()
        for number, data in frames:
            if not number:
                found.append(json.loads(data))
            elif number in self.lanes:
                self.lanes[number].inbox.append(pb.ToTrainer.FromString(data))
        return found, bool(frames)

    @property
    def name(self) -> str:
        """Return the process's name in messages."""
        return f"{self.what} (process {self.process.pid})"

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
        end_group(self.process)


@dataclass(slots=True)
class WorkerHandle:
    """A worker that runs or starts, and the samples that it has."""

    index: int
    """Equal for all workers that follow each other in one place."""
    name: str
    """Name in messages; that of a server is its own."""
    lane: Lane
    rows: int
    """Samples that it decodes at a time."""
    process: ChildProcess | None = None
    """None for a server. A process has the rank's weights as soon as they are published."""
    room: int | None = None
    """Most samples that it takes; None: any number."""
    is_ready: bool = False
    """It has made its engine."""
    version: int = 0
    """Newest policy version that it has; counts for a server."""
    ready_in_s: float = 0.0
    """Expected seconds until it has the newest version, while it does not."""
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

    @property
    def is_local(self) -> bool:
        """Return whether it is a process of this rank."""
        return self.process is not None

    @property
    def pid(self) -> int | None:
        """Return the process id; None for a server."""
        return None if self.process is None else self.process.process.pid

    @property
    def is_dead(self) -> bool:
        """Return whether it has ended or has closed its connection."""
        if self.process is None:
            return bool(self.lane.reason)
        return self.lane.channel.closed or self.process.is_dead

    def death(self) -> str:
        """Return why it is dead. Read all its messages first."""
        if self.process is None:
            return f"rollout server {self.name}: {self.lane.reason}"
        return f"{self.process.death()}{self.error and ': ' + self.error}"

    def has(self, version: int) -> bool:
        """Return whether a sample for this version can be given to it."""
        return self.is_local or self.version >= version

    def receive(self) -> Sequence[pb.ToTrainer]:
        """Return what has arrived; any message is a sign of life."""
        if self.process is not None:
            messages, any_came = self.process.receive()
            for message in messages:
                self.error = message["message"]
            self.quiet_s = 0.0 if any_came else self.quiet_s
        return self.lane.receive()

    def remove(self, key: SampleKey, *, drop: bool = False) -> None:
        """Ask for a sample back."""
        self.lane.send(pb.ToServer(remove=pb.Remove(rollout=key[0], sample=key[1], drop=drop)))

    def cancel(self, keys: Collection[SampleKey]) -> None:
        """Take samples away, as far as they are here."""
        for key in [key for key in self.samples if key in keys]:
            self.remove(key, drop=True)
            self.cancelled[key] += 1
            del self.samples[key]

    def read_figures(self, found: pb.Figures) -> list[tuple[int, int, int]]:
        """Keep the figures; return (rollout, sample, tokens) that are drawn and will be reported later."""
        figures = json.loads(found.json)
        link = figures.pop("link", {})
        self.figures, self.version = figures, found.version
        self.ready_in_s, self.room = link.get("ready_in_s", 0.0), link.get("room")
        speed = EngineSpeed(found.fixed_s, found.row_s, found.prefill_s)
        if speed.fixed_s or speed.row_s:
            self.speed = speed
        elif not self.is_local:
            self.speed = None  # it was forgotten, so that the server is tried again
        return link.get("progress", [])  # type: ignore[no-any-return]


class WorkerPool:
    """Up to `config.processes` workers by index, and servers. Used by one thread, which must last."""

    def __init__(
        self,
        begin: Mapping[str, Any],
        fds: tuple[int, ...],
        config: WorkerConfig,
        link: "LinkProcess | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an empty pool.

        Args:
            begin: Fields of the first message of each process.
            fds: File descriptors that it inherits.
            config: Settings.
            link: Connects with rollout servers.
            clock: Monotonic seconds.
        """
        self.workers: dict[int, WorkerHandle] = {}
        """Those that run or start."""
        self.last_error = ""
        self.deaths = 0
        """Number of processes that have ended."""
        self.silent = 0
        """Number of processes that were ended because they fell silent."""
        self.link = link
        self._begin, self._fds, self._config, self._clock = begin, fds, config, clock
        self._restarts = dict.fromkeys(range(config.processes), config.restarts)

    @property
    def given_up(self) -> bool:
        """Return whether no worker is left and no process will be started."""
        return not self.workers and all(each.given_up for each in self._restarts.values())

    def start_due(self) -> None:
        """Start the missing processes whose pause is over."""
        config = self._config
        for index, restarts in self._restarts.items():
            if index in self.workers or not restarts.may_start(self._clock()):
                continue
            name = f"rollout worker {index}"
            log = config.logs and config.logs / f"worker_{index}.log"
            try:
                process = ChildProcess.start(name, MODULE, self._begin, self._fds, log, config.python)
            except OSError as error:
                self._record(index, f"{name} could not be started: {error}", worked=False)
            else:
                lane = process.lane(WORKER_LANE)
                self.workers[index] = WorkerHandle(index, process.name, lane, config.rows, process)

    def find_dead(self) -> list[WorkerHandle]:
        """Return the workers that have died or have been silent for too long."""
        return [worker for worker in self.workers.values() if worker.is_dead or self._is_silent(worker)]

    def bury(self, dead: list[WorkerHandle]) -> list[tuple[WorkerHandle, str]]:
        """Remove these workers, which `find_dead` has returned, and return them with the reasons.

        One that was silent and has sent something since then stays.
        """
        buried = []
        for worker in dead:
            if worker.is_dead:
                reason = worker.death()
            elif self._is_silent(worker):
                self.silent += 1
                reason = f"{worker.name} gave no sign of life for {worker.quiet_s:.1f} s and was ended"
            else:
                continue
            del self.workers[worker.index]
            self._end(worker)
            if worker.is_local:
                self._record(worker.index, reason, worked=worker.finished > 0)
            buried.append((worker, reason))
        return buried

    def wait(self, timeout_s: float) -> None:
        """Wait for a message of any worker, and count the time as silence of all."""
        began_s = self._clock()
        channels = [each.lane.channel for each in self.workers.values() if each.is_local]
        Channel.wait([*channels, *(self.link.channels() if self.link else ())], timeout_s)
        passed_s = self._clock() - began_s
        for worker in self.workers.values():
            worker.quiet_s += passed_s
        if self.link is not None:
            self.link.waited(passed_s)

    def close(self) -> None:
        """End all workers."""
        while self.workers:
            self._end(self.workers.popitem()[1])
        if self.link is not None:
            self.link.close()

    def _is_silent(self, worker: WorkerHandle) -> bool:
        """Return whether a process is silent; `LinkProcess` looks after servers."""
        limit_s = self._config.silent_s if worker.is_ready else self._config.starts_within_s
        return worker.is_local and worker.quiet_s > limit_s

    def _end(self, worker: WorkerHandle) -> None:
        if worker.process is None:
            return
        try:
            worker.process.end()
        except subprocess.TimeoutExpired:  # it hangs in the kernel; its signal is waiting there
            self.last_error = f"process {worker.pid} does not end"

    def _record(self, index: int, reason: str, *, worked: bool) -> None:
        self.deaths += 1
        self.last_error = reason
        self._restarts[index] = self._restarts[index].died(self._clock(), worked=worked)
