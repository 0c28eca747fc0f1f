"""Memory that a node shares with its trainer process, and its contents."""

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aedit.spec_rollout.training.publishing import SharedSlots, SlotLayout
from aedit.spec_rollout.training.slot_memory import BLOCK_BYTES
from aedit.system import memory_fence

TEXT_BYTES = 4096


class Training(Protocol):
    """Work of the trainer process. It is made there by a function that can be pickled."""

    def set_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Use this embedding and head of the policy. Called first, and after each change."""

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        """Train these tensors from now on. Called before `resume`, and for each drafter that is offered."""

    def microbatch(self) -> bool:
        """Train for about 50 ms at most; return false if there is nothing to learn from now."""

    def to_publish(self) -> Mapping[str, Tensor] | None:
        """Return the trained tensors if they are better than the published ones, else None.

        Called after every microbatch. The result is published.
        """

    def state(self) -> Mapping[str, Tensor]:
        """Return the tensors that `resume` needs, without the policy's."""

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the `state` of an earlier process.

        Raises:
            ValueError: It belongs to another drafter.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return readable figures, such as steps, loss and held-out match."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Arguments of the trainer process."""

    make: "Callable[[TrainerMemory], Training]"
    """Function of a module that both processes can import; not of `__main__`."""
    drafter: SlotLayout
    """Layout of the trained tensors."""
    policy: SlotLayout
    """Layout of embedding and head."""
    feature_bytes: int
    checkpoint: Path | None = None
    """File of the checkpoint. None: a new process continues from the last publication."""
    checkpoint_every_s: float = 30.0
    """Interval in seconds of the trainer's own processor time."""
    threads: int = 1
    memory_bytes: int | None = None
    """Limit of its memory beyond torch itself, so that a leak does not affect the node. None: no limit."""

    @property
    def regions(self) -> dict[str, int]:
        """Return the size in bytes of each part of the shared memory, in order.

        All parts start at page boundaries.
        """
        parts = {
            "board": TrainerStatus.NUM_BYTES,
            "drafter": self.drafter.num_bytes,
            "offered": self.drafter.num_bytes,
            "policy": self.policy.num_bytes,
            "features": self.feature_bytes,
        }
        return {name: -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES for name, num_bytes in parts.items()}


class StatusWord(IntEnum):
    """Words of the trainer's status, all written by the trainer."""

    STATE = 0
    HEARTBEATS = 1
    """Increases while the trainer is alive."""
    STEPS = 2
    PUBLISHED = 3
    REFUSED = 4
    """Number of results that were not published because they were not finite."""
    CHECKPOINTS = 5
    CHECKPOINTS_FAILED = 6
    CPU_US = 7
    """Processor time of this process since it was first resumed, all threads, in microseconds."""
    METRICS = 8
    """Number of times that metrics were written. They alternate between two texts, so that the trainer may be
    suspended while it writes."""


class TrainerState(IntEnum):
    """State of the trainer process."""

    STARTING = 0
    TRAINING = 1
    NOTHING_TO_LEARN = 2
    FAILED = 3
    """It has ended by itself; `TrainerStatus.error` contains the reason."""


class TrainerStatus:
    """Status that the trainer writes and the node reads at any time."""

    NUM_BYTES = BLOCK_BYTES + 4 * TEXT_BYTES

    def __init__(self, memory: memoryview) -> None:
        self.words: NDArray[np.int64] = np.frombuffer(memory, np.int64, BLOCK_BYTES // 8)
        texts = np.frombuffer(memory, np.uint8, 4 * TEXT_BYTES, BLOCK_BYTES)
        self._error, self._checkpoint_error, *self._metrics = np.split(texts, 4)

    def begin(self) -> None:
        """Clear the status for a new process."""
        self.words[:] = 0
        for text in (self._error, self._checkpoint_error, *self._metrics):
            text[:] = 0

    def get(self, word: StatusWord) -> int:
        """Return one word."""
        return int(self.words[word])

    @property
    def state(self) -> TrainerState:
        """Return the state of the process."""
        return TrainerState(self.get(StatusWord.STATE))

    def fail(self, error: str) -> None:
        """Record why the trainer ends."""
        _write(self._error, error)
        self.words[StatusWord.STATE] = TrainerState.FAILED

    @property
    def error(self) -> str:
        """Return why the trainer has ended; empty if it has not failed."""
        return _read(self._error)

    @property
    def checkpoint_error(self) -> str:
        """Return why the last checkpoint could not be written or read; empty if there was no error."""
        return _read(self._checkpoint_error)

    @checkpoint_error.setter
    def checkpoint_error(self, text: str) -> None:
        if text != self.checkpoint_error:
            _write(self._checkpoint_error, text)

    def set_metrics(self, figures: Mapping[str, float]) -> None:
        """Write the training's metrics."""
        count = self.get(StatusWord.METRICS) + 1
        _write(self._metrics[count % 2], json.dumps(dict(figures)))
        memory_fence()
        self.words[StatusWord.METRICS] = count

    @property
    def metrics(self) -> dict[str, float]:
        """Return the metrics that were written last."""
        while count := self.get(StatusWord.METRICS):
            memory_fence()
            text = _read(self._metrics[count % 2])
            memory_fence()
            if self.get(StatusWord.METRICS) == count:
                return dict(json.loads(text))
        return {}


class TrainerMemory:
    """The shared memory of node and trainer. Both processes map the same bytes."""

    def __init__(self, plan: TrainerPlan, fd: int) -> None:
        sizes = plan.regions
        memory = memoryview(mmap.mmap(fd, sum(sizes.values())))
        starts = np.cumsum([0, *sizes.values()]).tolist()
        parts = {
            name: memory[start : start + size]
            for (name, size), start in zip(sizes.items(), starts, strict=False)
        }
        self.plan = plan
        self.trainer_status = TrainerStatus(parts["board"])
        self.drafter = SharedSlots(plan.drafter, parts["drafter"])
        """The node publishes number 1, the initial drafter; then the trainer publishes."""
        self.offered = SharedSlots(plan.drafter, parts["offered"])
        """The node publishes drafters of other origin, to be trained from then on. The version is the number
        of the newest publication at that time."""
        self.policy = SharedSlots(plan.policy, parts["policy"])
        """The node publishes, the trainer reads."""
        self.features = parts["features"][: plan.feature_bytes]
        """Ring of features: the node writes, the trainer reads."""


def _write(memory: NDArray[np.uint8], text: str) -> None:
    """Write the last bytes of the text that fit."""
    data = text.encode()[-len(memory) :]
    memory[len(data) :] = 0
    memory[: len(data)] = np.frombuffer(data, np.uint8)


def _read(memory: NDArray[np.uint8]) -> str:
    return memory.tobytes().rstrip(b"\0").decode(errors="replace")
