"""How far into the cache new tokens look, where rows are of unequal length.

One product reads as many slots of each row as the longest of them has. In a batch with a long tail that is
several times what is there; so rows, in their order, are cut into pieces that are read apart, wherever that
spares more than another call costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class KVExtent:
    """What the new tokens of some rows, one after the other, look at."""

    first_row: int
    num_rows: int
    context: int
    """Slots of a row that are read at all, C: at least the longest length with its new tokens."""
    needs_mask: bool = True
    """False only where every new token sees all C slots."""


def kv_extents(lengths: Sequence[int], q: int, min_saved_slots: int) -> list[KVExtent]:
    """Of the rows 0, 1, ... with q new tokens each after these lengths. least_spared: slots of one row that
    are not read for another piece to be worth it."""
    found: list[KVExtent] = []
    waiting = [(0, len(lengths))]
    while waiting:
        first, end = waiting.pop()
        cut = _best_split(lengths[first:end], min_saved_slots)
        if cut:
            waiting += [(first + cut, end), (first, first + cut)]
            continue
        longest = max(lengths[first:end])
        needs_mask = q > 1 or min(lengths[first:end]) != longest
        found.append(KVExtent(first, end - first, longest + q, needs_mask))
    return found


def _best_split(lengths: Sequence[int], min_saved_slots: int) -> int:
    """Before which row to cut so that most is spared; 0: nowhere."""
    most, cut = min_saved_slots, 0
    if len(lengths) < 2 or (max(lengths) - min(lengths)) * (len(lengths) - 1) <= min_saved_slots:
        return 0
    left, right = list(accumulate(lengths, max)), list(accumulate(reversed(lengths), max))[::-1]
    for i in range(1, len(lengths)):
        # What one piece would read, less what two read: rows before and after the cut.
        spared = len(lengths) * left[-1] - i * left[i - 1] - (len(lengths) - i) * right[i]
        if spared > most:
            most, cut = spared, i
    return cut
