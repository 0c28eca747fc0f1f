"""A drafter learns while its node waits, and the node never waits for it.

The trainer is a process of its own at the lowest priority. Where a wait begins it is let go on; where the
wait ends it is stopped, by a signal that needs no answer. What it has learned lies in shared memory for
whoever looks (`newest`). If it dies it is started again in a later wait, and the last good drafter stays.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from aedit.spec_rollout.idle.publishing import Publication, SlotLayout
from aedit.spec_rollout.idle.suspended_process import ProcessSpec, pickled
from aedit.spec_rollout.idle.trainer_memory import (
    StatusWord,
    TrainerMemory,
    TrainerPlan,
    Training,
)
from aedit.spec_rollout.idle.trainer_process import TrainerArguments
from aedit.spec_rollout.idle.trainer_supervisor import IdleConfig, TrainerSupervisor
from aedit.spec_rollout.idle.windows import Windows
from aedit.system import anonymous_memory

MODULE = "aedit.spec_rollout.idle.trainer_process"


class DrafterTraining:
    """`IdleWork` by a trainer in a process of its own. Also a context manager: leaving it ends the trainer.

    Entering and leaving a window cost microseconds and wait for nothing: not for the trainer, and not for
    the thread that looks after it. Windows of several threads may overlap; the trainer runs as long as one
    is open.
    """

    def __init__(
        self, plan: TrainerPlan, config: IdleConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        pickled(plan)  # what cannot be sent is refused before there is anything to clean up
        self._fd = anonymous_memory("aedit-drafter", sum(plan.regions.values()))
        self._memory = TrainerMemory(plan, self._fd)
        spec = ProcessSpec(
            MODULE, pickled(TrainerArguments(self._fd, plan)), (self._fd,), config.niceness, config.log
        )
        self._lock = threading.Lock()
        """Around a few numbers and a signal: nobody holds it while anything takes time."""
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
        """Start a trainer, stopped.

        make: called in the trainer's process, so it must be a function of a module, or a `functools.partial`
        of one, and not of `__main__`. drafter: what is to be trained. policy: embedding and head, and their
        version. feature_bytes: shared memory for a ring of features. Raises ValueError.
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
        """The trainer runs inside, and is stopped at its end, which does not wait for that."""
        began_s = self._enter()
        try:
            yield
        finally:
            self._leave(cause, began_s)

    def newest(self, after: int = 1) -> Publication | None:
        """What has been learned, if it is newer than number `after` (1: what the training began with). None
        too if it is not whole: stay with what you have. A look costs microseconds, a new one a copy."""
        return self._memory.drafter.newest(after)

    def update_policy(self, policy: Mapping[str, Tensor], version: int, kl_nats: float = math.nan) -> None:
        """The policy's embedding and head have changed. Costs a copy of them. Raises ValueError.

        kl_nats: how far the policy is now, per token, from the one that the newest drafter was published for,
        if that is known: a trainer that has nothing to gain from so small a way may rest.
        """
        self._memory.policy.publish(policy, version)
        self._memory.kl_nats = kl_nats

    @property
    def features(self) -> memoryview:
        """Shared memory for a ring of features, of which this process is the writer."""
        return self._memory.features

    def pause(self) -> None:
        """There is no use in training now: windows still count, but the trainer stays stopped."""
        with self._lock:
            self._paused = True
            self._supervisor.suspend()

    def unpause(self) -> None:
        """There is use in it again."""
        with self._lock:
            self._paused = False
            if self.windows.num_open:
                self._supervisor.resume()

    @property
    def used_s(self) -> float:
        """Processor time of the trainer's processes in seconds, as of the last finished microbatch."""
        return 1e-6 * self._supervisor.counted(StatusWord.CPU_US)

    def status(self) -> dict[str, Any]:
        """For people and for the run's metrics. harvest: the trainer's processor time by the idle time."""
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
        """End the trainer. What it has learned since it last published or saved is lost. Raises TimeoutError
        if it cannot be ended."""
        self._supervisor.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "DrafterTraining":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _enter(self) -> float:
        with self._lock:
            now_s = self._clock()
            if self.windows.enter(now_s) and not self._paused:
                self._supervisor.resume()
            return now_s

    def _leave(self, cause: str, began_s: float) -> None:
        with self._lock:
            if self.windows.leave(cause, began_s, self._clock()):
                self._supervisor.suspend()
