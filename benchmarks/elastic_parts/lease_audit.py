"""Count from a hub's journal how often each sample was drawn, independently of the hub's ledger."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aedit.async_sgd.rules import Accepted, Founded, Joined, Leased, Left, Record, Used

NOBODY = -1
_ROOM = 1 << 20
"""Positions of the stream that an audit can follow."""


@dataclass(slots=True)
class Attempt:
    """One node between joining and leaving."""

    node: int
    blocks: list[tuple[int, int]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    """Steps in accepted pushes, by unit."""

    def drawn(self, unit: int, samples_per_step: int) -> list[tuple[int, int]]:
        """Return the positions whose gradients are in accepted pushes of the unit.

        A node draws its leases in order.
        """
        left, found = self.steps.get(unit, 0) * samples_per_step, []
        for start, end in self.blocks:
            found.append((start, min(end, start + left)))
            left = max(0, left - (end - start))
        return found


class Audit:
    """Audit of the leases; takes all records of a run, in order."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.holder = np.full(_ROOM, NOBODY, np.int32)
        self.used = np.zeros(_ROOM, np.int32)
        """Number of accepted pushes reported to contain each position."""
        self.at_two = 0
        """Positions leased while another node had them, or after they were used."""
        self.not_held = 0
        """Positions that a node has used up without having them."""
        self.num_samples = 1
        self.attempts: list[Attempt] = []
        self._now: dict[int, Attempt] = {}
        for record in records:
            self.take(record)

    def take(self, record: Record) -> None:
        """Process the next record."""
        match record:
            case Founded(_, _, num_samples):
                self.num_samples = num_samples
            case Joined(_, node):
                self._now[node] = Attempt(node)
                self.attempts.append(self._now[node])
            case Left(node):
                self.holder[self.holder == node] = NOBODY
            case Leased(node, start, end):
                self._lease(node, start, end)
            case Used(node, start, upto):
                self._use(node, slice(start, upto))
            case Accepted(push) if push.base:
                steps = self._now[push.node].steps
                steps[push.unit] = steps.get(push.unit, 0) + push.steps

    def _lease(self, node: int, start: int, end: int) -> None:
        free = (self.holder[start:end] == NOBODY) & (self.used[start:end] == 0)
        self.at_two += int((~free).sum())
        self.holder[start:end] = node
        self._now[node].blocks.append((start, end))

    def _use(self, node: int, here: slice) -> None:
        # Said again from the lease's start on, every time.
        new = self.holder[here] == node
        self.not_held += int((~new & (self.used[here] == 0)).sum())
        self.used[here] += new
        self.holder[here][new] = NOBODY

    @property
    def complete(self) -> int:
        """Return the number of epochs of which every sample has been drawn."""
        return int(np.argmax(self.used == 0)) // self.num_samples

    @property
    def wrong(self) -> int:
        """Return the samples of those epochs that were not drawn exactly once, by the hub's ledger."""
        return int((self.used[: self.complete * self.num_samples] != 1).sum())

    def drawn(self, unit: int, samples_per_step: int) -> NDArray[np.int32]:
        """Return how often each position is in an accepted push of the unit, by the nodes' steps."""
        counts = np.zeros(_ROOM, np.int32)
        for attempt in self.attempts:
            for start, end in attempt.drawn(unit, samples_per_step):
                counts[start:end] += 1
        return counts
