"""Worker processes of a rank: started, watched, ended, and started again."""

import time
from collections.abc import Callable
from subprocess import TimeoutExpired

from aedit.spec_rollout.workers.channel import Channel
from aedit.spec_rollout.workers.config import WorkerConfig
from aedit.spec_rollout.workers.worker_process import WorkerProcess, WorkerStart


class WorkerPool:
    """Up to `config.processes` workers by index. Used by one thread, which must last."""

    def __init__(
        self, start: WorkerStart, config: WorkerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.workers: dict[int, WorkerProcess] = {}
        """Those that run or start."""
        self.last_error = ""
        self.deaths = 0
        self.silent = 0
        """Number of workers that were ended because they fell silent."""
        self._start, self._config, self._clock = start, config, clock
        self._restarts = dict.fromkeys(range(config.processes), config.restarts)

    @property
    def given_up(self) -> bool:
        """Return whether no worker is left and none will be started."""
        return not self.workers and all(each.given_up for each in self._restarts.values())

    def start_due(self) -> list[WorkerProcess]:
        """Start the missing workers whose pause is over, and return them."""
        started = []
        for index, restarts in self._restarts.items():
            if index in self.workers or not restarts.may_start(self._clock()):
                continue
            try:
                self.workers[index] = WorkerProcess.start(index, self._start)
            except OSError as error:
                self._record(index, f"rollout worker {index} could not be started: {error}", worked=False)
            else:
                started.append(self.workers[index])
        return started

    def find_dead(self) -> list[WorkerProcess]:
        """Return the workers that have died or have been silent for too long."""
        return [worker for worker in self.workers.values() if worker.is_dead or self._is_silent(worker)]

    def bury(self, dead: list[WorkerProcess]) -> list[tuple[WorkerProcess, str]]:
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
            self._record(worker.index, reason, worked=worker.finished > 0)
            buried.append((worker, reason))
        return buried

    def wait(self, timeout_s: float) -> None:
        """Wait for a message of any worker, and count the time as silence of all."""
        began_s = self._clock()
        Channel.wait([worker.channel for worker in self.workers.values()], timeout_s)
        passed_s = self._clock() - began_s
        for worker in self.workers.values():
            worker.quiet_s += passed_s

    def close(self) -> None:
        """End all workers."""
        while self.workers:
            self._end(self.workers.popitem()[1])

    def _is_silent(self, worker: WorkerProcess) -> bool:
        limit_s = self._config.silent_s if worker.is_ready else self._config.starts_within_s
        return worker.quiet_s > limit_s

    def _silence(self, worker: WorkerProcess) -> str:
        self.silent += 1
        return f"{worker.name} gave no sign of life for {worker.quiet_s:.1f} s and was ended"

    def _end(self, worker: WorkerProcess) -> None:
        try:
            worker.end()
        except TimeoutExpired:  # it hangs in the kernel; its signal is waiting there
            self.last_error = f"process {worker.pid} does not end"

    def _record(self, index: int, reason: str, *, worked: bool) -> None:
        self.deaths += 1
        self.last_error = reason
        self._restarts[index] = self._restarts[index].died(self._clock(), worked=worked)
