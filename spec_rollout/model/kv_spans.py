"""Sizes of a KV storage, and the slots that a pass writes."""

from dataclasses import dataclass

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
