"""Which sample is drawn when, in a run whose nodes come and go: the hub leases out the stream in blocks."""

import numpy as np
from numpy.typing import NDArray

from aedit.edit.hub_lease import LeasedPositions
from aedit.edit.waiting import Waiter
from aedit.launch.data.order import permutation
from aedit.proto.agent.link import Link


class LeasedOrder:
    """Sample indices for one node: the endless stream of `SampleOrder`, at the positions that the hub has
    leased to this node, in the order of the leases.

    num_samples: of the corpus. waiter: the node's `LayerSync`, which waits once the hub has been away for
    longer than what it had leased out lasts.
    """

    def __init__(self, link: Link, num_samples: int, seed: int, waiter: Waiter) -> None:
        assert num_samples > 0, "an empty corpus has no order"
        self.num_samples, self.seed, self.waiter = num_samples, seed, waiter
        self._leased = LeasedPositions(link, waiter)

    @property
    def drawn(self) -> int:
        """Samples so far, in this attempt."""
        return self._leased.drawn

    @property
    def epoch(self) -> float:
        """Epochs of the whole run that lie behind this node's next draw."""
        return self._leased.next / self.num_samples

    def take(self, k: int) -> NDArray[np.int64]:
        """Draw the next k sample indices; all ranks of the node together, and alike. Raises PeersMissing if
        the hub leases no more of them in time."""
        positions = self._leased.take(k)
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
        self._leased.go_back(state["drawn"])
        return self
