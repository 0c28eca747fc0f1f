"""Workers of a rank. Its processes are started, watched, ended and started again; remote ones come and go."""

import time
from collections.abc import Callable
from subprocess import TimeoutExpired

from aedit.spec_rollout.workers.channel import Channel
from aedit.spec_rollout.workers.config import WorkerConfig
from aedit.spec_rollout.workers.handle import WorkerHandle
from aedit.spec_rollout.workers.remote_workers import RemoteWorkers
from aedit.spec_rollout.workers.worker_process import WorkerStart, start_worker


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
