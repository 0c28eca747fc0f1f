"""Drafter training in a process of its own: start, windows, detection of death and hangs, restart."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from aedit.child import Restarts
from aedit.spec_rollout.training.publishing import Publication, SlotLayout
from aedit.spec_rollout.training.suspended_process import ProcessSpec, SuspendedProcess, pickled
from aedit.spec_rollout.training.trainer_memory import (
    StatusWord,
    TrainerMemory,
    TrainerPlan,
    TrainerState,
    TrainerStatus,
    Training,
)
from aedit.spec_rollout.training.trainer_process import TrainerArguments
from aedit.spec_rollout.training.windows import Windows
from aedit.system import anonymous_memory
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


MODULE = "aedit.spec_rollout.training.trainer_process"


class DrafterTraining:
    """`IdleWork` by a trainer process. Also a context manager: leaving it ends the process.

    Entering and leaving a window takes microseconds and waits for nothing. Windows of several threads may
    overlap; the trainer runs while at least one is open.
    """

    def __init__(
        self, plan: TrainerPlan, config: IdleConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        pickled(plan)  # fail before there are resources to release
        self._fd = anonymous_memory("aedit-drafter", sum(plan.regions.values()))
        self._memory = TrainerMemory(plan, self._fd)
        spec = ProcessSpec(
            MODULE, pickled(TrainerArguments(self._fd, plan)), (self._fd,), config.niceness, config.log
        )
        self._lock = threading.Lock()
        """Protects a few numbers and a signal, and is never held for longer."""
        self.windows = Windows()
        self._supervisor = TrainerSupervisor(spec, self._memory.trainer_status, config, self._lock, clock)
        self._paused = False

    @staticmethod
    def of(
        make: Callable[[TrainerMemory], Training],
        *,
        drafter: Mapping[str, Tensor],
        policy: Mapping[str, Tensor],
        version: int = 0,
        feature_bytes: int = 0,
        config: IdleConfig | None = None,
    ) -> "DrafterTraining":
        """Start a trainer process, suspended.

        Args:
            make: Function that makes the training in the trainer process: a function of an importable module
                or a `functools.partial` of one, not of `__main__`.
            drafter: Tensors to be trained.
            policy: The policy's embedding and head.
            version: Version of the policy.
            feature_bytes: Size of the shared memory for a ring of features.
            config: How the process is run.

        Raises:
            ValueError: `make` cannot be sent to another process.
        """
        config = config or IdleConfig()
        plan = TrainerPlan(
            make=make,
            drafter=SlotLayout.of(drafter),
            policy=SlotLayout.of(policy),
            feature_bytes=feature_bytes,
            checkpoint=config.checkpoint,
            checkpoint_every_s=config.checkpoint_every_s,
            threads=config.threads,
            memory_bytes=config.memory_bytes,
        )
        made = DrafterTraining(plan, config)
        made._memory.drafter.publish(drafter, version)
        made._memory.policy.publish(policy, version)
        made._supervisor.start()
        return made

    @contextmanager
    def window(self, cause: str) -> Iterator[None]:
        """Let the trainer run inside the context. Leaving it does not wait."""
        with self._lock:
            began_s = self._clock()
            if self.windows.enter(began_s) and not self._paused:
                self._supervisor.resume()
        try:
            yield
        finally:
            with self._lock:
                if self.windows.leave(cause, began_s, self._clock(), self.used_s):
                    self._supervisor.suspend()

    def newest(self, after: int = 1) -> Publication | None:
        """Return a copy of the newest drafter if its number is above `after`, else None.

        Number 1 is the initial drafter. Returns None also for a corrupt publication: keep the current drafter
        then. Without a new drafter the call takes microseconds.
        """
        return self._memory.drafter.newest(after)

    def update_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Publish the policy's current embedding and head to the trainer.

        Args:
            policy: Embedding and head; they are copied.
            version: Version of the policy.

        Raises:
            ValueError: Names, shapes or dtypes differ from those given to `of`.
        """
        self._memory.policy.publish(policy, version)

    def offer(self, drafter: Mapping[str, Tensor]) -> int:
        """Let the trainer continue from these tensors; return the number of the newest publication so far.

        What it publishes later than that has been compared with them, except for a microbatch that is under
        way.

        Raises:
            ValueError: Names, shapes or dtypes differ from those given to `of`.
        """
        newest = self._memory.drafter.newest_number
        self._memory.offered.publish(drafter, newest)
        return newest

    @property
    def features(self) -> memoryview:
        """Return the shared memory for a ring of features, to which this process writes."""
        return self._memory.features

    def pause(self) -> None:
        """Keep the trainer suspended, also in windows, until `unpause`."""
        with self._lock:
            self._paused = True
            self._supervisor.suspend()

    def unpause(self) -> None:
        """Let the trainer run in windows again."""
        with self._lock:
            self._paused = False
            if self.windows.num_open:
                self._supervisor.resume()

    @property
    def used_s(self) -> float:
        """Return the processor time of all trainer processes in seconds.

        It is measured at the end of each microbatch.
        """
        return 1e-6 * self._supervisor.counted(StatusWord.CPU_US)

    def status(self) -> dict[str, Any]:
        """Return the state by name, for logs and metrics.

        `utilization` is the trainer's processor time over the idle time. `allowed_s` are the seconds in which
        it was let run, and `has_work` is false while it has nothing to learn.
        """
        with self._lock:
            idle_s, supervisor = self.windows.idle_s(self._clock()), self._supervisor.status()
            by_cause, used = dict(self.windows.by_cause), dict(self.windows.used_by_cause)
        words = (
            StatusWord.STEPS,
            StatusWord.PUBLISHED,
            StatusWord.REFUSED,
            StatusWord.CHECKPOINTS,
            StatusWord.CHECKPOINTS_FAILED,
        )
        return {
            **supervisor,
            "paused": self._paused,
            "has_work": self._memory.trainer_status.state in (TrainerState.STARTING, TrainerState.TRAINING),
            "windows": self.windows.count,
            "idle_s": idle_s,
            "idle_by_cause_s": by_cause,
            "used_by_cause_s": used,
            "cpu_s": self.used_s,
            "utilization": self.used_s / idle_s if idle_s else 0.0,
            **{status_word.name.lower(): self._supervisor.counted(status_word) for status_word in words},
            "checkpoint_error": self._memory.trainer_status.checkpoint_error,
            "torn": self._memory.drafter.torn,
            "corrupt": self._memory.drafter.corrupt,
            "feature_bytes": len(self.features),
            "training": self._memory.trainer_status.metrics,
        }

    def close(self) -> None:
        """End the trainer. What it has learned since its last publication or checkpoint is lost.

        Raises:
            TimeoutError: It could not be ended.
        """
        self._supervisor.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "DrafterTraining":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
