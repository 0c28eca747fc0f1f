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

from aedit.spec_rollout.idle.publishing import BLOCK_BYTES, Layout, Slots
from aedit.system import memory_fence

TEXT_BYTES = 4096


class Training(Protocol):
    """The work that the trainer's process does, made there by a function that can be pickled."""

    def follow(self, policy: Mapping[str, Tensor], version: int) -> None:
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

    def figures(self) -> Mapping[str, float]:
        """For people to see: steps, loss, held-out match."""


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """All that the process is told when it begins."""

    make: "Callable[[Desk], Training]"
    """Any function of a module that both processes can import; not one of `__main__`."""
    drafter: Layout
    """The trained tensors, in the order they are published."""
    policy: Layout
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
            "board": Board.NUM_BYTES,
            "moved": BLOCK_BYTES,
            "drafter": self.drafter.num_bytes,
            "policy": self.policy.num_bytes,
            "features": self.feature_bytes,
        }
        return {name: -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES for name, num_bytes in parts.items()}


class Word(IntEnum):
    """Words of the board, all written by the trainer."""

    STATE = 0
    BEATS = 1
    """Grows as long as it is not stuck."""
    STEPS = 2
    PUBLISHED = 3
    REFUSED = 4
    """Tensors that were not finite, and therefore not published."""
    CHECKPOINTS = 5
    CHECKPOINTS_FAILED = 6
    CPU_US = 7
    """Processor time of this life since it was first let run, all threads, in microseconds."""
    FIGURES = 8
    """How often figures were told: they are in one of two texts in turn, so that the trainer may be stopped
    while it writes."""


class State(IntEnum):
    STARTING = 0
    TRAINING = 1
    NOTHING_TO_LEARN = 2
    FAILED = 3
    """It has ended by itself; `Board.error` says why."""


class Board:
    """What the trainer tells about itself, and the node reads at any time."""

    NUM_BYTES = BLOCK_BYTES + 4 * TEXT_BYTES

    def __init__(self, memory: memoryview) -> None:
        self.words: NDArray[np.int64] = np.frombuffer(memory, np.int64, BLOCK_BYTES // 8)
        texts = np.frombuffer(memory, np.uint8, 4 * TEXT_BYTES, BLOCK_BYTES)
        self._error, self._trouble, *self._figures = np.split(texts, 4)

    def begin(self) -> None:
        """A new life, of which nothing is known yet."""
        self.words[:] = 0
        for text in (self._error, self._trouble, *self._figures):
            text[:] = 0

    def get(self, word: Word) -> int:
        return int(self.words[word])

    @property
    def state(self) -> State:
        return State(self.get(Word.STATE))

    def fail(self, error: str) -> None:
        """The trainer's last word."""
        _write(self._error, error)
        self.words[Word.STATE] = State.FAILED

    @property
    def error(self) -> str:
        return _read(self._error)

    @property
    def trouble(self) -> str:
        """Why the last checkpoint could not be written; empty if it could."""
        return _read(self._trouble)

    @trouble.setter
    def trouble(self, text: str) -> None:
        if text != self.trouble:
            _write(self._trouble, text)

    def tell(self, figures: Mapping[str, float]) -> None:
        count = self.get(Word.FIGURES) + 1
        _write(self._figures[count % 2], json.dumps(dict(figures)))
        memory_fence()
        self.words[Word.FIGURES] = count

    @property
    def figures(self) -> dict[str, float]:
        """What the trainer told last."""
        while count := self.get(Word.FIGURES):
            memory_fence()
            text = _read(self._figures[count % 2])
            memory_fence()
            if self.get(Word.FIGURES) == count:
                return dict(json.loads(text))
        return {}


class Desk:
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
        self.board = Board(parts["board"])
        self._moved: NDArray[np.float64] = np.frombuffer(parts["moved"], np.float64, 2)
        self.drafter = Slots(plan.drafter, parts["drafter"])
        """The node begins with number 1, what is to be trained; then the trainer publishes."""
        self.policy = Slots(plan.policy, parts["policy"])
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
