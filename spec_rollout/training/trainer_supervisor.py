"""Supervision of the trainer process: start, detect death and hangs, restart."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aedit.spec_rollout.training.restarts import Restarts
from aedit.spec_rollout.training.suspended_process import ProcessSpec, SuspendedProcess
from aedit.spec_rollout.training.trainer_memory import StatusWord, TrainerState, TrainerStatus
from aedit.types import NonNegativeFloat, PositiveFloat, PositiveInt, check, checked

POLL_S = 0.05
"""Interval of checks in seconds while the trainer runs. While it is suspended there are none."""
START_TIMEOUT_S = 60.0
CLOSE_S = 30.0
WORKED_STEPS = 100
"""Microbatches of a process after which its death counts as the first."""
CUMULATIVE_WORDS = (
    StatusWord.STEPS,
    StatusWord.PUBLISHED,
    StatusWord.REFUSED,
    StatusWord.CHECKPOINTS,
    StatusWord.CHECKPOINTS_FAILED,
    StatusWord.CPU_US,
)


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class IdleConfig:
    """Settings of the trainer process."""

    threads: PositiveInt = 1
    niceness: int = 19
    """19 also means SCHED_IDLE where it is available: only time that no other process wants."""
    memory_bytes: int | None = None
    """Limit of its memory beyond torch itself. None: no limit."""
    checkpoint: Path | None = None
    """File of the checkpoint. None: a new process continues from the last publication."""
    checkpoint_every_s: NonNegativeFloat = 30.0
    """Interval in seconds of the trainer's own processor time."""
    hung_after_s: PositiveFloat = 60.0
    """Seconds of windows without a heartbeat after which it is killed and restarted."""
    starts_within_s: PositiveFloat = 300.0
    """The same before its first heartbeat: it loads torch and its checkpoint."""
    restarts: Restarts = field(default_factory=Restarts)
    log: Path | None = None
    """File of its output, with the traceback of an error. None discards it; `status` has the last line."""

    def __post_init__(self) -> None:
        check(0 <= self.niceness <= 19, "niceness", "must be between 0 and 19", self.niceness)


class TrainerSupervisor:
    """Thread that owns the trainer process.

    Other threads call only `resume` and `suspend`, under `lock`, which costs them a signal. The thread
    starts, reaps and kills the process outside of the lock.
    """

    def __init__(
        self,
        spec: ProcessSpec,
        status: TrainerStatus,
        config: IdleConfig,
        lock: threading.Lock,
        clock: Callable[[], float],
    ) -> None:
        self._spec, self._status, self._config, self._lock, self._clock = spec, status, config, lock, clock
        self._process: SuspendedProcess | None = None
        self._restarts = config.restarts
        self._previous: Counter[StatusWord] = Counter()
        self._hung, self._error = 0, ""
        self._is_running, self._running_since_s, self._allowed_s = False, 0.0, 0.0
        self._heartbeats, self._heartbeat_s = 0, 0.0
        self._open, self._closing = threading.Event(), threading.Event()
        # The kernel ends the trainer with the thread that starts it: this one lasts as long as the node.
        self._thread = threading.Thread(target=self._run, name="drafter-supervisor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def resume(self) -> None:
        """Let the trainer run, this process or the next one. Call it under the lock."""
        if self._is_running:
            return
        self._is_running, self._running_since_s = True, self._clock()
        if self._process:
            self._process.resume()
        self._open.set()

    def suspend(self) -> None:
        """Suspend the trainer. Call it under the lock."""
        if not self._is_running:
            return
        self._is_running, self._allowed_s = False, self.allowed_s
        if self._process:
            self._process.suspend()
        self._open.clear()

    @property
    def allowed_s(self) -> float:
        """Return the seconds in which the trainer was allowed to run."""
        return self._allowed_s + (self._clock() - self._running_since_s if self._is_running else 0.0)

    def counted(self, word: StatusWord) -> int:
        """Return the sum of a status word over all processes so far."""
        return self._previous[word] + self._status.get(word)

    def status(self) -> dict[str, Any]:
        """Return the state by name. Call it under the lock."""
        return {
            "state": self._state(),
            "pid": self._process.pid if self._process else None,
            "allowed_s": self.allowed_s,
            "deaths": self._restarts.total,
            "hung": self._hung,
            "error": self._error,
        }

    def close(self) -> None:
        """End the process and the thread.

        Raises:
            TimeoutError: They did not end in time.
        """
        self._closing.set()
        self._open.set()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise TimeoutError(f"the drafter's trainer did not end within {CLOSE_S:g} s")

    # --- in the thread

    def _run(self) -> None:
        try:
            self._start()
            while not self._closing.is_set():
                self._check()
                self._closing.wait(POLL_S)
                # A suspended process does not change, and checks would take time from the foreground.
                self._open.wait()
        except Exception as error:
            # The node continues without a trainer; `status` shows the error.
            self._error = f"the supervision of the trainer has failed: {type(error).__name__}: {error}"
        finally:
            process = self._detach()
            if process:
                process.kill()

    def _check(self) -> None:
        with self._lock:
            process, allowed_s = self._process, self.allowed_s
            code = process.exit_code() if process else None
        if process is None:
            if self._restarts.may_start(self._clock()):
                self._start()
        elif code is not None:
            self._detach()
            self._record_death(self._status.error or f"process {process.pid} ended with {code}")
        elif self._is_stuck(process, allowed_s):
            self._detach()
            process.kill()
            self._hung += 1
            self._record_death(
                f"process {process.pid} gave no sign of life for {allowed_s - self._heartbeat_s:.1f} s"
            )

    def _start(self) -> None:
        try:
            process = SuspendedProcess(self._spec)
        except OSError as error:
            self._record_death(f"no process could be started: {error}")
            return
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not process.is_ready:
            is_late = time.monotonic() > give_up_s and not process.is_starved(START_TIMEOUT_S)
            if is_late or self._closing.is_set():
                process.kill()
                self._record_death(f"process {process.pid} did not begin within {START_TIMEOUT_S:g} s")
                return
            self._closing.wait(POLL_S)
        with self._lock:
            self._process = process
            self._heartbeats, self._heartbeat_s = 0, self.allowed_s
            if self._is_running:
                process.resume()

    def _detach(self) -> SuspendedProcess | None:
        """Return the process and forget it, so that it gets no more signals."""
        with self._lock:
            process, self._process = self._process, None
            return process

    def _is_stuck(self, process: SuspendedProcess, allowed_s: float) -> bool:
        """Return true if the process slept or computed too long without a heartbeat.

        A process that is runnable but gets no core from the machine is not stuck.
        """
        heartbeats = self._status.get(StatusWord.HEARTBEATS)
        if heartbeats != self._heartbeats:
            self._heartbeats, self._heartbeat_s = heartbeats, allowed_s
        patience_s = self._config.hung_after_s if heartbeats else self._config.starts_within_s
        if allowed_s - self._heartbeat_s <= patience_s:
            return False
        return not process.is_starved(1e-6 * self._status.get(StatusWord.CPU_US) + patience_s)

    def _record_death(self, error: str) -> None:
        worked = self._status.get(StatusWord.STEPS) >= WORKED_STEPS
        with self._lock:
            self._error = error
            self._restarts = self._restarts.died(self._clock(), worked=worked)
            self._previous.update({word: self._status.get(word) for word in CUMULATIVE_WORDS})
            self._status.begin()

    def _state(self) -> str:
        if self._closing.is_set():
            return "closed"
        if self._process is None:
            return "given up" if self._restarts.given_up or not self._thread.is_alive() else "not running"
        if not self._is_running:
            return "stopped"
        return {TrainerState.STARTING: "starting", TrainerState.TRAINING: "training"}.get(
            self._status.state, "nothing to learn"
        )
