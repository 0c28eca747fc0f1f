"""Leased samples of a node, and how many of them are in accepted pushes."""

from collections.abc import Sequence
from dataclasses import dataclass

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leases:
    """Blocks [start, end) of positions, in the order in which the node draws them. Immutable."""

    blocks: tuple[Block, ...] = ()
    """Without those that the hub knows to be used up."""
    settled: int = 0
    """Samples in the blocks that are left out."""

    @property
    def num_samples(self) -> int:
        """Return the number of samples leased so far, in this attempt."""
        return self.settled + sum(end - start for start, end in self.blocks)

    def more(self, blocks: Sequence[Block]) -> "Leases":
        """Return leases with these blocks added."""
        return Leases((*self.blocks, *blocks), self.settled)

    def consumed(self, used: int) -> list[Block]:
        """Return (start, upto) of the blocks that the first `used` samples of all reach into."""
        found, left = [], used - self.settled
        for start, end in self.blocks:
            if left <= 0:
                break
            found.append((start, min(end, start + left)))
            left -= end - start
        return found

    def settle(self, used: int) -> "Leases":
        """Return leases after the hub has received `consumed(used)`: whole blocks are not reported again."""
        whole = [block for block in self.consumed(used) if block in self.blocks]
        samples = sum(end - start for start, end in whole)
        return Leases(self.blocks[len(whole) :], self.settled + samples)
