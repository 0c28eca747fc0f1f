"""Which sample is drawn when, in a run whose nodes come and go: the hub leases out the stream in blocks."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from aedit.edit.waiting import Waiter
from aedit.launch.data.order import permutation
from aedit.proto.agent.link import Link

Positions = NDArray[np.int64]


class LeasedOrder:
    """Sample indices for one node: the endless stream of `SampleOrder`, at the positions that the hub has
    leased to this node, in the order of the leases.

    No position is with two nodes, and the hub gives what a dead one has not used to others. num_samples: of
    the corpus. waiter: the node's `LayerSync`, which waits once the hub has been away for longer than what it
    had leased out lasts.
    """

    def __init__(self, link: Link, num_samples: int, seed: int, waiter: Waiter) -> None:
        assert num_samples > 0, "an empty corpus has no order"
        self.link, self.num_samples, self.seed, self.waiter = link, num_samples, seed, waiter
        self.drawn = 0
        """Samples so far, in this attempt."""
        self._block = 0  # the next draw is from this block of the leases,
        self._before = 0  # which begins after so many draws

    @property
    def epoch(self) -> float:
        """Epochs of the whole run that lie behind this node's next draw."""
        blocks = self.link.leases()
        if not blocks:
            return 0.0
        block, before = self._find(blocks)
        if block == len(blocks):  # all drawn: the next lease lies behind the last one
            return blocks[-1][1] / self.num_samples
        return (blocks[block][0] + self.drawn - before) / self.num_samples

    def take(self, k: int) -> NDArray[np.int64]:
        """Draw the next k sample indices; all ranks of the node together, and alike. Raises PeersMissing if
        the hub leases no more of them in time."""
        positions = self.waiter.wait_together(_More(self, k), f"a lease of {k} samples from the hub")
        self.drawn += k
        indices = np.empty(k, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permutation(self.num_samples, self.seed, int(epoch))[offsets[here]]
        return indices

    def state(self) -> dict[str, int]:
        """Plain numbers for a checkpoint. A node that comes back gets new leases: only `resume` within the
        same attempt reads them."""
        return {"num_samples": self.num_samples, "seed": self.seed, "drawn": self.drawn}

    def resume(self, state: dict[str, int]) -> "LeasedOrder":
        """Go back to where `state()` was taken in this attempt: what was drawn since is drawn again."""
        self.drawn = state["drawn"]
        self._block = self._before = 0
        return self

    def positions(self, k: int) -> Positions | None:
        """The next k positions of the stream; None while the leases have fewer."""
        blocks = self.link.leases()
        self._block, self._before = self._find(blocks)
        found: list[NDArray[np.int64]] = []
        missing, skip = k, self.drawn - self._before
        for start, end in blocks[self._block :]:
            part = np.arange(start + skip, min(start + skip + missing, end), dtype=np.int64)
            found.append(part)
            missing, skip = missing - len(part), 0
            if not missing:
                return np.concatenate(found)
        return None

    def _find(self, blocks: Sequence[tuple[int, int]]) -> tuple[int, int]:
        """The block of the next draw, and how many draws come before it."""
        block, before = self._block, self._before
        while block < len(blocks) and before + blocks[block][1] - blocks[block][0] <= self.drawn:
            before += blocks[block][1] - blocks[block][0]
            block += 1
        return block, before


class _More:
    """`Pending` until the leases have k positions more."""

    def __init__(self, order: LeasedOrder, k: int) -> None:
        self._order, self._k = order, k
        self._positions: Positions | None = None

    def done(self) -> bool:
        if self._positions is None:
            self._positions = self._order.positions(self._k)
        return self._positions is not None

    def result(self) -> Positions:
        assert self._positions is not None
        return self._positions
