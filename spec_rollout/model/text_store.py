"""Texts of the rows of a model without a usable cache, with the interface of `SlotStore`."""

from collections.abc import Sequence

import torch
from torch import Tensor


class TextStore:
    """Token ids of each row. Its keys and values are the ids: (1, 1, 1, tokens, 1), int64."""

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.texts: list[list[int]] = [[] for _ in range(rows)]

    @property
    def kv_bytes(self) -> int:
        """Return 0: a text needs no keys and values."""
        return 0

    kv_bytes_reserved = kv_bytes

    def extend(self, row: int, start: int, tokens: Sequence[int]) -> list[int]:
        """Replace the row's tokens from `start` on and return its text."""
        self.texts[row][start:] = tokens
        return self.texts[row]

    def keep_path(self, lengths_B: Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Refuse trees.

        Raises:
            ValueError: Always.
        """
        raise ValueError("trees need keys and values in a cache")

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self.texts[target] = self.texts[source][:length]

    def release_row(self, row: int) -> None:
        """Forget the row's text."""
        self.texts[row] = []

    def clear(self) -> None:
        """Do nothing: texts do not depend on weights."""

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return the token ids of slots start .. length - 1, (1, 1, 1, length - start, 1)."""
        return torch.tensor(self.texts[row][start:length], dtype=torch.int64).view(1, 1, 1, -1, 1)

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write the result of `read_kv` to a row, from slot `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """
        if kv.dtype != torch.int64 or kv.dim() != 5 or (*kv.shape[:3], kv.shape[4]) != (1, 1, 1, 1):
            raise ValueError(
                f"the text of a row must be int64, (1, 1, 1, tokens, 1), got {kv.dtype}, {tuple(kv.shape)}"
            )
        if start + kv.shape[3] > self.slots:
            raise ValueError(f"{start + kv.shape[3]} tokens exceed the {self.slots} slots of a row")
        self.extend(row, start, kv.flatten().tolist())
