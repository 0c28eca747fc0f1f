"""Sample order: one infinite stream that all nodes share.

Without a hub they need no communication; a hub leases the stream in blocks.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from aedit.edit import LeasedPositions, Waiter
from aedit.proto.agent import Link
from aedit.types import UserError


class SampleOrder:
    """Sample indices for one node, in a new seeded permutation for each epoch.

    Position p of the stream is sample p % num_samples of permutation p // num_samples. Node i of N draws
    positions base + i, base + i + N, ...: no position twice, at any speed of the nodes, and each sample
    exactly once per epoch if all draw equally often. All nodes must have the same corpus and seed.
    """

    def __init__(self, num_samples: int, seed: int, node: int = 0, nodes: int = 1) -> None:
        assert num_samples > 0, "an empty corpus has no order"
        assert 0 <= node < nodes, f"node {node} of {nodes}"
        self._state = {"num_samples": num_samples, "seed": seed, "node": node, "nodes": nodes}
        self._state |= {"base": 0, "drawn": 0}

    @classmethod
    def resume(cls, state: dict[str, int]) -> "SampleOrder":
        """Return the order as it was when `state` was taken."""
        order = cls(state["num_samples"], state["seed"], state["node"], state["nodes"])
        order._state = dict(state)
        return order

    @classmethod
    def restart(cls, states: Sequence[dict[str, int]], node: int, nodes: int) -> "SampleOrder":
        """Return an order for another number of nodes, beyond all positions that `states` have drawn."""
        streams = {(state["num_samples"], state["seed"]) for state in states}
        if len(streams) != 1:
            raise UserError(
                f"checkpoints: their (num_samples, seed) differ: {sorted(streams)}; resume one run only"
            )
        num_samples, seed = streams.pop()
        order = cls(num_samples, seed, node, nodes)
        order._state["base"] = max(first_free(state) for state in states)
        return order

    @property
    def num_samples(self) -> int:
        """Return the samples per epoch.

        They differ from the corpus if it has changed since the checkpoint.
        """
        return self._state["num_samples"]

    @property
    def epoch(self) -> float:
        """Return the position of this node's next draw in the whole run, in epochs."""
        return int(self._positions(1)[0]) / self.num_samples

    def draw(self, k: int) -> NDArray[np.int64]:
        """Return the next k positions of the run's stream. No two nodes of the run draw the same."""
        positions = self._positions(k)
        self._state["drawn"] += k
        return positions

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sample indices at these positions."""
        return samples_at(positions, self.num_samples, self._state["seed"])

    def take(self, k: int) -> NDArray[np.int64]:
        """Return the sample indices at the next k positions."""
        return self.samples(self.draw(k))

    def state(self) -> dict[str, int]:
        """Return plain numbers for a checkpoint."""
        return dict(self._state)

    def _positions(self, k: int) -> NDArray[np.int64]:
        s = self._state
        return s["base"] + s["node"] + s["nodes"] * np.arange(s["drawn"], s["drawn"] + k, dtype=np.int64)


def samples_at(positions: NDArray[np.int64], num_samples: int, seed: int) -> NDArray[np.int64]:
    """Return the sample indices at positions of the stream: a new permutation for each epoch."""
    indices = np.empty(len(positions), dtype=np.int64)
    epochs, offsets = np.divmod(positions, num_samples)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        indices[here] = permutation(num_samples, seed, int(epoch))[offsets[here]]
    return indices


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return a read-only permutation of range(num_samples), equal on all machines and NumPy releases.

    NumPy guarantees the raw bits of Philox, but not the result of its own shuffle.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    indices = np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")
    indices.flags.writeable = False
    return indices


def first_free(state: dict[str, int]) -> int:
    """Return a position after all those that nodes have drawn which drew as often as that of `state`.

    The other nodes count although their states may be lost: what they drew has gone into the rounds.
    """
    return state["base"] + state["nodes"] * state["drawn"]


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


Order = SampleOrder | LeasedOrder
"""Order in which a node draws samples: no two nodes of the run draw the same positions of its stream."""
