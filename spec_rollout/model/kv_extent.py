"""Extents of the KV cache that new tokens read, for rows of unequal length.

One product reads as many slots of each row as the longest row has. In a batch with a long tail this is
several times the number of cached tokens. So the rows are split, in order, into groups that are read
separately wherever this saves more than the additional calls cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class KVExtent:
    """Cache slots that the new tokens of some consecutive rows read."""

    first_row: int
    num_rows: int
    context: int
    """Number of slots C of a row that are read: at least the longest length plus the new tokens."""
    needs_mask: bool = True
    """False only if every new token attends to all C slots."""


def kv_extents(lengths: Sequence[int], q: int, min_saved_slots: int) -> list[KVExtent]:
    """Return extents that cover the rows 0, 1, ... with q new tokens each.

    Args:
        lengths: Number of cached tokens of each row.
        q: Number of new tokens per row.
        min_saved_slots: Slots of one row that a split must save.
    """
    found: list[KVExtent] = []
    pending = [(0, len(lengths))]
    while pending:
        first, end = pending.pop()
        split = _best_split(lengths[first:end], min_saved_slots)
        if split:
            pending += [(first + split, end), (first, first + split)]
            continue
        longest = max(lengths[first:end])
        needs_mask = q > 1 or min(lengths[first:end]) != longest
        found.append(KVExtent(first, end - first, longest + q, needs_mask))
    return found


def _best_split(lengths: Sequence[int], min_saved_slots: int) -> int:
    """Return the row before which a split saves the most slots, or 0 if no split saves enough."""
    most, split = min_saved_slots, 0
    if len(lengths) < 2 or (max(lengths) - min(lengths)) * (len(lengths) - 1) <= min_saved_slots:
        return 0
    left, right = list(accumulate(lengths, max)), list(accumulate(reversed(lengths), max))[::-1]
    for i in range(1, len(lengths)):
        # Slots that one extent would read, minus those that two extents read.
        saved = len(lengths) * left[-1] - i * left[i - 1] - (len(lengths) - i) * right[i]
        if saved > most:
            most, split = saved, i
    return split


Span = tuple[int, int, int]
"""Row, first slot, end of the slots."""


@dataclass(frozen=True, slots=True)
class KVSizes:
    """Sizes of the keys and values of all rows."""

    layers: int
    rows: int
    heads: int
    """Key/value heads K."""
    slots: int
    """Slots of one row: the greatest number of tokens, with a draft."""
    head_dim: int


class KVMemoryError(ValueError):
    """There is not enough memory for keys and values. The message says what to lower."""
