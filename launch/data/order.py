"""Which sample is drawn when: one endless stream that all nodes share without a word between them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from aedit.types import UserError


class Order(Protocol):
    """Which samples a node draws next."""

    def take(self, k: int) -> NDArray[np.int64]:
        """Draw the next k sample indices."""

    def state(self) -> dict[str, int]:
        """Plain numbers for a checkpoint."""

    def resume(self, state: dict[str, int]) -> "Order":
        """Go on exactly where `state()` was taken."""


class SampleOrder:
    """Sample indices for one node, in a seeded permutation of its own for every epoch.

    Position p of the stream is sample p % num_samples of permutation p // num_samples. Node i of N draws
    positions base + i, base + i + N, ...: no position twice, whatever the nodes' speeds, and every sample
    exactly once per epoch when they draw equally. All nodes must have the same corpus and seed.
    """

    def __init__(self, num_samples: int, seed: int, node: int = 0, nodes: int = 1) -> None:
        assert num_samples > 0, "an empty corpus has no order"
        assert 0 <= node < nodes, f"node {node} of {nodes}"
        self._state = {"num_samples": num_samples, "seed": seed, "node": node, "nodes": nodes}
        self._state |= {"base": 0, "drawn": 0}

    @classmethod
    def resume(cls, state: dict[str, int]) -> "SampleOrder":
        """Go on exactly where `state()` was taken."""
        order = cls(state["num_samples"], state["seed"], state["node"], state["nodes"])
        order._state = dict(state)
        return order

    @classmethod
    def restart(cls, states: Sequence[dict[str, int]], node: int, nodes: int) -> "SampleOrder":
        """Go on with another number of nodes, above everything that any node of `states` has drawn."""
        streams = {(state["num_samples"], state["seed"]) for state in states}
        if len(streams) != 1:
            raise UserError("the nodes' checkpoints are of different corpora or seeds: resume one run only")
        num_samples, seed = streams.pop()
        order = cls(num_samples, seed, node, nodes)
        order._state["base"] = max(first_free(state) for state in states)
        return order

    @property
    def num_samples(self) -> int:
        """Samples per epoch; differs from the corpus at hand if that has changed since the checkpoint."""
        return self._state["num_samples"]

    @property
    def epoch(self) -> float:
        """Epochs of the whole run that lie behind this node's next draw."""
        return int(self._positions(1)[0]) / self.num_samples

    def take(self, k: int) -> NDArray[np.int64]:
        """Draw the next k sample indices."""
        positions = self._positions(k)
        self._state["drawn"] += k
        indices = np.empty(k, dtype=np.int64)
        epochs, offsets = np.divmod(positions, self.num_samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = permutation(self.num_samples, self._state["seed"], int(epoch))[offsets[here]]
        return indices

    def state(self) -> dict[str, int]:
        """Plain numbers for a checkpoint."""
        return dict(self._state)

    def _positions(self, k: int) -> NDArray[np.int64]:
        s = self._state
        return s["base"] + s["node"] + s["nodes"] * np.arange(s["drawn"], s["drawn"] + k, dtype=np.int64)


@lru_cache(maxsize=4)
def permutation(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A read-only permutation of range(num_samples), equal on all machines and NumPy releases.

    NumPy promises the raw bits of Philox for ever, but not what its own shuffle makes of them.
    """
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    indices = np.argsort(np.random.Philox(key=key).random_raw(num_samples), kind="stable")
    indices.flags.writeable = False
    return indices


def first_free(state: dict[str, int]) -> int:
    """The position behind the last one that the stream of `state` has drawn."""
    if state["drawn"] == 0:
        return state["base"]
    return state["base"] + state["node"] + state["nodes"] * (state["drawn"] - 1) + 1
