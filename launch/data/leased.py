"""Sample order of a node of a hub, which leases the sample stream in blocks."""

import numpy as np
from numpy.typing import NDArray

from aedit.edit import LeasedPositions, Waiter
from aedit.launch.data.order import samples_at
from aedit.proto.agent import Link


class LeasedOrder:
    """Sample indices for one node, from positions of the stream that the hub leases to it.

    The stream is that of `SampleOrder`; positions are drawn in the order of the leases.
    """

    def __init__(self, link: Link, num_samples: int, seed: int, waiter: Waiter) -> None:
        assert num_samples > 0, "an empty corpus has no order"
        self.num_samples, self.seed, self.waiter = num_samples, seed, waiter
        self._leased = LeasedPositions(link, waiter)

    @property
    def drawn(self) -> int:
        """Return the number of samples drawn in this attempt."""
        return self._leased.drawn

    @property
    def epoch(self) -> float:
        """Return the position of this node's next draw in the whole run, in epochs."""
        return self._leased.next / self.num_samples

    def draw(self, k: int) -> NDArray[np.int64]:
        """Return the next k positions, equal on all ranks of the node, which call this together.

        Raises PeersMissing if the hub leases no more samples in time.
        """
        return self._leased.take(k)

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at these positions."""
        return samples_at(positions, self.num_samples, self.seed)

    def take(self, k: int) -> NDArray[np.int64]:
        """Return the sample indices at the next k positions, as `draw` does."""
        return self.samples(self.draw(k))

    def state(self) -> dict[str, int]:
        """Return plain numbers for `resume` within this attempt.

        A node that reconnects receives new leases.
        """
        return {"num_samples": self.num_samples, "seed": self.seed, "drawn": self.drawn}

    def resume(self, state: dict[str, int]) -> "LeasedOrder":
        """Return the order as it was when `state` was taken in this attempt."""
        self._leased.go_back(state["drawn"])
        return self
