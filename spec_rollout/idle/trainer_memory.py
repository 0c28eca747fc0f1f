"""The memory that a node and the process that trains its drafter share, and what each finds there."""

import json
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aedit.spec_rollout.idle.publishing import BLOCK_BYTES, SharedSlots, SlotLayout
from aedit.system import memory_fence

TEXT_BYTES = 4096


class Training(Protocol):
    """The work that the trainer's process does, made there by a function that can be pickled."""

    def set_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """The policy's embedding and head, at first and whenever they have changed."""

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        """Train these from now on; what a process does first that finds no checkpoint."""

    def microbatch(self) -> bool:
        """Learn a little, some 50 ms at most. False: there is nothing to learn from now."""

    def to_publish(self) -> Mapping[str, Tensor] | None:
        """Asked after every microbatch: the trained tensors if they are better than those that were published
        last, else None. What is returned is published."""

    def state(self) -> Mapping[str, Tensor]:
        """What a checkpoint must have for `resume`: nothing of the policy's."""

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Go on from an earlier process's `state`. Raises ValueError if it is of another drafter."""

    def metrics(self) -> Mapping[str, float]:
        """For people to see: steps, loss, held-out match."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """All that the process is told when it begins."""

    make: "Callable[[TrainerMemory], Training]"
    """Any function of a module that both processes can import; not one of `__main__`."""
    drafter: SlotLayout
    """The trained tensors, in the order they are published."""
    policy: SlotLayout
    """Embedding and head."""
    feature_bytes: int
    checkpoint: Path | None = None
    """None: a new process goes on from what was published last."""
    checkpoint_every_s: float = 30.0
    """Of the trainer's own processor time."""
    threads: int = 1
    memory_bytes: int | None = None
    """What it may take beyond torch itself, so that its leak is not the node's. None: no limit."""

    @property
    def regions(self) -> dict[str, int]:
        """Bytes of each part of the shared memory, in order; all begin on a page."""
        parts = {
            "board": TrainerStatus.NUM_BYTES,
            "moved": BLOCK_BYTES,
            "drafter": self.drafter.num_bytes,
            "policy": self.policy.num_bytes,
            "features": self.feature_bytes,
        }
        return {name: -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES for name, num_bytes in parts.items()}


class StatusWord(IntEnum):
    """Words of the board, all written by the trainer."""

    STATE = 0
    HEARTBEATS = 1
    """Grows as long as it is not stuck."""
    STEPS = 2
    PUBLISHED = 3
    REFUSED = 4
    """Tensors that were not finite, and therefore not published."""
    CHECKPOINTS = 5
    CHECKPOINTS_FAILED = 6
    CPU_US = 7
    """Processor time of this life since it was first let run, all threads, in microseconds."""
    METRICS = 8
    """How often figures were told: they are in one of two texts in turn, so that the trainer may be stopped
    while it writes."""


class TrainerState(IntEnum):
    STARTING = 0
    TRAINING = 1
    NOTHING_TO_LEARN = 2
    FAILED = 3
    """It has ended by itself; `TrainerStatus.error` says why."""


class TrainerStatus:
    """What the trainer tells about itself, and the node reads at any time."""

    NUM_BYTES = BLOCK_BYTES + 4 * TEXT_BYTES

    def __init__(self, memory: memoryview) -> None:
        self.words: NDArray[np.int64] = np.frombuffer(memory, np.int64, BLOCK_BYTES // 8)
        texts = np.frombuffer(memory, np.uint8, 4 * TEXT_BYTES, BLOCK_BYTES)
        self._error, self._checkpoint_error, *self._metrics = np.split(texts, 4)

    def begin(self) -> None:
        """A new life, of which nothing is known yet."""
        self.words[:] = 0
        for text in (self._error, self._checkpoint_error, *self._metrics):
            text[:] = 0

    def get(self, word: StatusWord) -> int:
        return int(self.words[word])

    @property
    def state(self) -> TrainerState:
        return TrainerState(self.get(StatusWord.STATE))

    def fail(self, error: str) -> None:
        """The trainer's last word."""
        _write(self._error, error)
        self.words[StatusWord.STATE] = TrainerState.FAILED

    @property
    def error(self) -> str:
        return _read(self._error)

    @property
    def checkpoint_error(self) -> str:
        """Why the last checkpoint could not be written; empty if it could."""
        return _read(self._checkpoint_error)

    @checkpoint_error.setter
    def checkpoint_error(self, text: str) -> None:
        if text != self.checkpoint_error:
            _write(self._checkpoint_error, text)

    def set_metrics(self, figures: Mapping[str, float]) -> None:
        count = self.get(StatusWord.METRICS) + 1
        _write(self._metrics[count % 2], json.dumps(dict(figures)))
        memory_fence()
        self.words[StatusWord.METRICS] = count

    @property
    def metrics(self) -> dict[str, float]:
        """What the trainer told last."""
        while count := self.get(StatusWord.METRICS):
            memory_fence()
            text = _read(self._metrics[count % 2])
            memory_fence()
            if self.get(StatusWord.METRICS) == count:
                return dict(json.loads(text))
        return {}


class TrainerMemory:
    """Both processes have one, over the same bytes."""

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
        self._moved: NDArray[np.float64] = np.frombuffer(parts["moved"], np.float64, 2)
        self.drafter = SharedSlots(plan.drafter, parts["drafter"])
        """The node begins with number 1, what is to be trained; then the trainer publishes."""
        self.policy = SharedSlots(plan.policy, parts["policy"])
        """The node publishes, the trainer takes."""
        self.features = parts["features"][: plan.feature_bytes]
        """For a ring of features: the node writes, the trainer reads."""

    @property
    def kl_nats(self) -> float:
        """How far the policy is, per token, from the one that the last publication was for; written by the
        node. Not a number: nobody has said so since."""
        number, kl_nats = self._moved.tolist()
        return kl_nats if number == self.drafter.newest_number else math.nan

    @kl_nats.setter
    def kl_nats(self, kl_nats: float) -> None:
        self._moved[:] = self.drafter.newest_number, kl_nats


def _write(memory: NDArray[np.uint8], text: str) -> None:
    """The end of it, where it is too long."""
    data = text.encode()[-len(memory) :]
    memory[len(data) :] = 0
    memory[: len(data)] = np.frombuffer(data, np.uint8)


def _read(memory: NDArray[np.uint8]) -> str:
    return memory.tobytes().rstrip(b"\0").decode(errors="replace")
