"""Sample positions that a hub has leased to this node, in the order in which they are drawn."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aedit.edit.waiting import Waiter
from aedit.proto.agent import Link

Positions = NDArray[np.int64]


class LeasedPositions:
    """The hub's endless stream of positions 0, 1, 2, ..., as far as it is leased to this node.

    No position is leased to two nodes at a time, and what a dead node has not used goes to others.
    """

    def __init__(self, link: Link, waiter: Waiter) -> None:
        """Read leases from `link`; `waiter` waits when the hub was away longer than its leases last."""
        self.link, self.waiter = link, waiter
        self.drawn = 0
        """Samples drawn so far, in this attempt."""
        self._block = 0  # the next draw is from this block of the leases,
        self._before = 0  # which begins after so many draws

    @property
    def next(self) -> int:
        """Position of the next draw; the end of the last lease if all are drawn, 0 if there was none."""
        blocks = self.link.leases()
        if not blocks:
            return 0
        block, before = self._find(blocks)
        if block == len(blocks):
            return blocks[-1][1]
        return blocks[block][0] + self.drawn - before

    def take(self, k: int, *, or_end: bool = False) -> Positions:
        """Draw the next k positions. All ranks of the node call it together and get the same.

        Args:
            k: Number of samples.
            or_end: Return none instead of waiting when the hub has said that the run is finished.

        Raises:
            PeersMissing: The hub leased no more of them within the waiter's deadline.
        """
        more = _More(self, k, or_end)
        positions = self.waiter.wait_together(more, f"a lease of {k} samples from the hub")
        if or_end and not self.waiter.shards.all([len(positions) == k])[0]:
            return np.zeros(0, np.int64)
        self.drawn += k
        return positions

    def go_back(self, drawn: int) -> None:
        """Draw again what was drawn after the first `drawn` samples of this attempt."""
        self.drawn = drawn
        self._block = self._before = 0

    def peek(self, k: int) -> Positions | None:
        """Return the next k positions without drawing them; None while the leases have fewer."""
        blocks = self.link.leases(self.drawn + k)
        self._block, self._before = self._find(blocks)
        found: list[Positions] = []
        missing, skip = k, self.drawn - self._before
        for start, end in blocks[self._block :]:
            part = np.arange(start + skip, min(start + skip + missing, end), dtype=np.int64)
            found.append(part)
            missing, skip = missing - len(part), 0
            if not missing:
                return np.concatenate(found)
        return None if missing else np.zeros(0, np.int64)

    def _find(self, blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """Return the block of the next draw, and how many draws come before it."""
        block, before = self._block, self._before
        while block < len(blocks) and before + blocks[block][1] - blocks[block][0] <= self.drawn:
            before += blocks[block][1] - blocks[block][0]
            block += 1
        return block, before


class _More:
    """`Pending` until the leases have k positions more, or the run has ended."""

    def __init__(self, leased: LeasedPositions, k: int, or_end: bool) -> None:
        self._leased, self._k, self._or_end = leased, k, or_end
        self._positions: Positions | None = None

    def done(self) -> bool:
        if self._positions is None:
            self._positions = self._leased.peek(self._k)
        if self._positions is None and self._or_end and self._leased.link.news().finished:
            self._positions = np.zeros(0, np.int64)
        return self._positions is not None

    def result(self) -> Positions:
        assert self._positions is not None
        return self._positions
