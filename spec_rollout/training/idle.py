"""Drafter training in a process of its own that runs only while its node waits.

The trainer process has the lowest priority. A signal resumes it where a wait begins and suspends it where the
wait ends; neither needs an answer. Trained drafters are published in shared memory (`newest`). If the process
dies, it is started again in a later wait, and the last good drafter stays in use.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aedit.spec_rollout.training.publishing import Publication, SlotLayout
from aedit.spec_rollout.training.suspended_process import ProcessSpec, pickled
from aedit.spec_rollout.training.trainer_memory import (
    StatusWord,
    TrainerMemory,
    TrainerPlan,
    Training,
)
from aedit.spec_rollout.training.trainer_process import TrainerArguments
from aedit.spec_rollout.training.trainer_supervisor import IdleConfig, TrainerSupervisor
from aedit.spec_rollout.training.windows import Windows
from aedit.system import anonymous_memory

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
                if self.windows.leave(cause, began_s, self._clock()):
                    self._supervisor.suspend()

    def newest(self, after: int = 1) -> Publication | None:
        """Return a copy of the newest drafter if its number is above `after`, else None.

        Number 1 is the initial drafter. Returns None also for a corrupt publication: keep the current drafter
        then. Without a new drafter the call takes microseconds.
        """
        return self._memory.drafter.newest(after)

    def update_policy(self, policy: Mapping[str, Tensor], version: int, kl_nats: float = math.nan) -> None:
        """Publish the policy's current embedding and head to the trainer.

        Args:
            policy: Embedding and head; they are copied.
            version: Version of the policy.
            kl_nats: KL divergence per token between this policy and the one of the newest drafter, if known.
                The trainer may pause while it is small.

        Raises:
            ValueError: Names, shapes or dtypes differ from those given to `of`.
        """
        self._memory.policy.publish(policy, version)
        self._memory.kl_nats = kl_nats

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
        """Return the state by name, for people and metrics.

        `utilization` is the trainer's processor time over the idle time.
        """
        with self._lock:
            idle_s, supervisor = self.windows.idle_s(self._clock()), self._supervisor.status()
            by_cause = dict(self.windows.by_cause)
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
            "windows": self.windows.count,
            "idle_s": idle_s,
            "idle_by_cause_s": by_cause,
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
