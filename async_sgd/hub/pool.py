"""Leases of training samples: positions of one endless stream, each held by one node at a time."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

Block = tuple[int, int]
"""Positions start..end of the stream, the end not included."""


@dataclass(slots=True)
class Pool:
    """Leases blocks and takes them back. Positions below the watermark are used, leased or returned."""

    watermark: int = 0
    """First position that was never leased."""
    returned: list[Block] = field(default_factory=list)
    """Given back unused; sorted, none touches another. Handed out before anything new."""
    leases: dict[int, dict[int, Block]] = field(default_factory=dict)
    """Position up to which a lease is used, and its end, by node and first position."""

    def offer(self, samples: int, withheld: Iterable[Block] = ()) -> list[Block]:
        """Return the blocks that a node gets that asks for this many samples. Changes nothing.

        withheld: positions that it does not get though they were returned.
        """
        blocks: list[Block] = []
        for start, end in _without(self.returned, withheld):
            if samples == 0:
                return blocks
            taken = min(samples, end - start)
            blocks.append((start, start + taken))
            samples -= taken
        return [*blocks, (self.watermark, self.watermark + samples)] if samples else blocks

    def lease(self, node: int, start: int, end: int) -> None:
        """Give positions start..end to the node; they must have been offered."""
        if start >= self.watermark:
            assert start == self.watermark, f"position {self.watermark} would be left out"
            self.watermark = end
        else:
            inside = any(first <= start and end <= last for first, last in self.returned)
            assert inside, f"{(start, end)} is not there to be leased"
            self.returned = _without(self.returned, [(start, end)])
        self.leases.setdefault(node, {})[start] = (start, end)

    def use(self, node: int, start: int, upto: int) -> None:
        """Mark positions of that lease below `upto` as used. Repeating it changes nothing."""
        used, end = self.leases.get(node, {}).get(start, (upto, upto))
        if upto >= end:
            self.leases.get(node, {}).pop(start, None)
        elif upto > used:
            self.leases[node][start] = (upto, end)

    def give_back(self, node: int) -> None:
        """Return the node's unused positions to the pool."""
        self.returned = _joined([*self.returned, *self.leases.pop(node, {}).values()])

    def outstanding(self, node: int) -> list[Block]:
        """Return the node's unused blocks, in order."""
        return sorted(self.leases.get(node, {}).values())

    def unknown(self, node: int, held: Iterable[Block]) -> list[Block]:
        """Return the node's unused blocks that begin in none of `held`, which do not overlap, in order."""
        known = sorted(held)
        before = [bisect_right(known, (start, inf)) - 1 for start, _ in self.outstanding(node)]
        pairs = zip(self.outstanding(node), before, strict=True)
        return [block for block, i in pairs if i < 0 or known[i][1] <= block[0]]


def _joined(blocks: Sequence[Block]) -> list[Block]:
    """Return the same positions in the fewest blocks, in order."""
    whole: list[Block] = []
    for start, end in sorted(blocks):
        if whole and whole[-1][1] == start:
            whole[-1] = (whole[-1][0], end)
        else:
            whole.append((start, end))
    return whole


def _without(blocks: Iterable[Block], taken: Iterable[Block]) -> list[Block]:
    """Return the positions of `blocks` that are in none of `taken`; blocks are in order, without overlap."""
    rest, gone, first = list[Block](), sorted(taken), 0
    for start, end in blocks:
        while first < len(gone) and gone[first][1] <= start:
            first += 1
        at = first
        while at < len(gone) and gone[at][0] < end:
            if start < gone[at][0]:
                rest.append((start, gone[at][0]))
            start, at = max(start, gone[at][1]), at + 1
        if start < end:
            rest.append((start, end))
    return rest
