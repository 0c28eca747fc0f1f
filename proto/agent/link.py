"""What lies between a trainer and its node agent: shared arrays and small messages.

Whether the agent is a process or a thread makes no difference here. For each unit there are two fp32 vectors
in the canonical layout (whole, unsharded): `anchors`, the newest anchor the node has taken, and `outbox`,
where the node's ranks put the pseudo-gradient they want to have sent, each its own slices.

One exchange of a unit, numbered by `seq`:
  trainer  every rank writes its slices into outbox[unit] and calls `written(unit, seq)`; one calls `send`
  agent    pushes it (again and again while the hub is away), waits until the hub has decided, pulls the
           newest anchor into anchors[unit], publishes the Answer
  trainer  sees the Answer, lands the unit, and may write the outbox again
Between `send` and the Answer the trainer touches neither vector, and after it the agent does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aedit.types import News, Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """The hub has decided on the push, and anchors[unit] is the newest anchor."""

    seq: int
    version: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Progress:
    """What the trainer tells its agent after every step."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    loss: float = float("nan")
    used: int = 0
    """Samples drawn for steps that are in pushes answered so far."""
    drawn: int = 0
    """Samples drawn in this attempt: more are leased ahead of them."""


class Link(Protocol):
    """The trainer's end. Every call but `join` and `leave` returns at once. `send`, `tell`, `join` and
    `leave` are the first rank's; the rest is everybody's."""

    anchors: Sequence[NDArray[np.float32]]
    outbox: Sequence[NDArray[np.float32]]

    @property
    def node(self) -> int:
        """The index that the hub gave this node."""

    @property
    def bytes_sent(self) -> int:
        """Payload bytes handed to the network so far."""

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until this node is a member and `anchors` holds every unit; the version of each. If it founds
        the run, `anchors` must hold its own parameters before, and they become version 1."""

    def written(self, unit: int, seq: int) -> None:
        """This rank's slices of outbox[unit] are there for exchange `seq`."""

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int) -> None:
        """Start an exchange."""

    def answer(self, unit: int, seq: int) -> Answer | None:
        """The end of exchange `seq`, if it is there. The same on all ranks, sooner on some."""

    def news(self) -> News: ...

    def tell(self, progress: Progress) -> None: ...

    def leases(self) -> Sequence[tuple[int, int]]:
        """Blocks [start, end) of sample positions handed to this node so far, in order; more come by
        themselves as they are used. A later call gives the same blocks and perhaps more."""

    def residuals(self) -> Mapping[int, NDArray[np.float32]]:
        """Error feedback by unit, for a checkpoint; empty for codecs without. Only with nothing under way."""

    def leave(self, timeout_s: float) -> None:
        """Push what is under way, say goodbye, stop the agent. Raises TimeoutError."""
