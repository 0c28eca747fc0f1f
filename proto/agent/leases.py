"""Which data a node holds, and what of it is in accepted pushes."""

from collections.abc import Sequence
from dataclasses import dataclass

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Leases:
    """Blocks [start, end) of positions, in the order in which the node draws them. A value: every change
    makes a new one."""

    blocks: tuple[Block, ...] = ()
    """Without those that the hub knows to be used up."""
    settled: int = 0
    """Samples in the blocks that are left out."""

    @property
    def num_samples(self) -> int:
        """Leased so far, in this attempt."""
        return self.settled + sum(end - start for start, end in self.blocks)

    def more(self, blocks: Sequence[Block]) -> "Leases":
        return Leases((*self.blocks, *blocks), self.settled)

    def consumed(self, used: int) -> list[Block]:
        """(start, upto) of the blocks that the first `used` samples of all reach into."""
        found, left = [], used - self.settled
        for start, end in self.blocks:
            if left <= 0:
                break
            found.append((start, min(end, start + left)))
            left -= end - start
        return found

    def settle(self, used: int) -> "Leases":
        """The hub has heard `consumed(used)`: of whole blocks no more need be said."""
        whole = [block for block in self.consumed(used) if block in self.blocks]
        samples = sum(end - start for start, end in whole)
        return Leases(self.blocks[len(whole) :], self.settled + samples)
