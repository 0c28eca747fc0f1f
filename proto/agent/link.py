"""The interface between a trainer and its node agent: shared arrays and small messages.

Whether the agent is a process or a thread makes no difference here. For each unit there are two fp32 vectors
in the canonical layout (whole, unsharded): `anchors`, the newest anchor the node has taken, and `outbox`,
where each rank of the node writes its slices of the pseudo-gradient to send.

One exchange of a unit, numbered by `seq`:

    trainer  every rank writes its slices into outbox[unit] and calls `written(unit, seq)`; one calls `send`
    agent    pushes it (again and again while the hub is away), waits until the hub has decided, pulls the
             newest anchor into anchors[unit], publishes the Answer
    trainer  sees the Answer, lands the unit, and may write the outbox again

An exchange of 0 steps sends nothing: its Answer is the newest anchor, with the verdict NONE.

Between `send` and the Answer the trainer touches neither vector, and after it the agent does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aedit.types import News, Verdict


@dataclass(frozen=True, slots=True)
class Answer:
    """The hub has decided on the push, and anchors[unit] is the newest anchor.

    The verdict is NONE if nothing was pushed, as there were no steps.
    """

    seq: int
    version: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Progress:
    """The trainer's report to its agent after every step."""

    steps: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    wait_s: float = 0.0
    loss: float = float("nan")
    used: int = 0
    """Samples drawn for steps that are in pushes answered so far."""
    drawn: int = 0
    """Samples drawn in this attempt: more are leased ahead of them."""
    rl: Mapping[str, float] = field(default_factory=dict)
    """Reinforcement learning: finite values of names in `RL_REPORT`, those that are known."""


class Link(Protocol):
    """The trainer's end of the agent. Every call but `join` and `leave` returns at once.

    `send`, `tell`, `join` and `leave` are for the first rank only; all ranks may call the rest.
    """

    anchors: Sequence[NDArray[np.float32]]
    outbox: Sequence[NDArray[np.float32]]

    @property
    def node(self) -> int:
        """Return the index that the hub gave this node."""

    @property
    def bytes_sent(self) -> int:
        """Return the payload bytes handed to the network so far."""

    def join(self, timeout_s: float) -> tuple[int, ...]:
        """Wait until this node is a member and `anchors` holds every unit; return the version of each.

        If it is the first node of the run, `anchors` must hold its own parameters before, and they become
        version 1.
        """

    def written(self, unit: int, seq: int) -> None:
        """Say that this rank's slices of outbox[unit] are complete for exchange `seq`."""

    def send(self, unit: int, seq: int, *, base: int, steps: int, tokens: int, used: int = 0) -> None:
        """Start an exchange.

        base: version of the anchor that the pseudo-gradient was measured from. used: the first samples of
        this attempt that its steps, and all before them, have used; they are not leased again once it is
        accepted.
        """

    def answer(self, unit: int, seq: int) -> Answer | None:
        """Return the end of exchange `seq`, if it is there. The same on all ranks, sooner on some."""

    def news(self) -> News:
        """Return what the hub reported last."""

    def tell(self, progress: Progress) -> None:
        """Report the trainer's progress."""

    def leases(self, upto: int = 0) -> Sequence[tuple[int, int]]:
        """Return the blocks [start, end) of sample positions handed to this node so far, in order.

        A later call returns the same blocks and perhaps more: what is missing to `upto` samples, from the
        first of this attempt on, is asked for.
        """

    def residuals(self) -> Mapping[int, NDArray[np.float32]]:
        """Return the error feedback by unit, for a checkpoint; empty for codecs without.

        Only with nothing under way.
        """

    def leave(self, timeout_s: float) -> None:
        """Push what is under way, leave the run, stop the agent. Raises TimeoutError."""
