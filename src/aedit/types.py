"""Types that every package shares. Standard library only, so that configuration and `--help` stay fast."""

import hashlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Round:
    """One exchange of pseudo-gradients."""

    id: int
    """Number of the round, from 1; equal on all nodes that take part."""

    steps: int
    """Inner steps of this node since its previous round."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Name and whole (unsharded) shape of one parameter of a sync unit."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Canonical form of a sync unit: its parameters in registration order, whole, row-major, as fp32."""

    name: str
    tensors: tuple[TensorLayout, ...]

    @property
    def numel(self) -> int:
        """Return the number of elements of all parameters."""
        return sum(tensor.numel for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Layout:
    """The sync units of a model, in order. Equal on all nodes of a run."""

    units: tuple[UnitLayout, ...]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits of a SHA-256 over names and shapes."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]


class Verdict(IntEnum):
    """Decision of a hub about a push. The values are those of hub.proto."""

    NONE = 0
    """Not decided yet."""
    MERGED = 1
    REFUSED = 2
    """Not merged; the node keeps its progress and sends it again with the next push."""
    DISTRUSTED = 3
    """Not believed; the node takes the anchor as it is."""


@dataclass(frozen=True, slots=True)
class News:
    """State of the run as the hub last reported it."""

    age_s: float = float("inf")
    """Seconds since the report."""
    round: int = 0
    pace_steps: int = 0
    """Inner steps that the hub asks of this node before its next push; 0: the node decides."""
    nodes: int = 1
    """Live nodes."""
    total_steps: int = 0
    """Inner steps of all nodes."""
    total_tokens: int = 0
    elapsed_s: float = 0.0
    """Time that the run has lasted, in seconds."""
    progress: float = 0.0
    """Share of the run's budget that is used up, 0 to 1; `finished` comes with 1."""
    finished: bool = False
    evaluates: bool = False
    """Whether this node measures the held-out loss."""


class IdleWork(Protocol):
    """Interruptible work that a node does while it waits."""

    @property
    def used_s(self) -> float:
        """Return the processor time that the work has used so far, in seconds.

        Never decreases and never blocks. It may lag behind by the piece of work in progress.
        """

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Return a context manager that the node enters when a wait begins; its exit never blocks.

        cause: why the node waits, such as "round".
        """


class UserError(Exception):
    """Error that only the user can correct. The command line shows it as one line and exits with code 2."""


def check(ok: bool, name: str, rule: str, value: object) -> None:
    """Raise ValueError for a configuration value: `check(n > 0, "train.steps", "must be above 0", n)`."""
    if not ok:
        raise ValueError(f"{name} {rule}, got {value}")
