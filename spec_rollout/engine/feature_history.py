"""Features of one running sample, for other samples that begin with the same tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor

JOINED_STEPS = 64
"""Number of steps after which features of a sample are copied out of the tensors that all rows share."""


class FeatureHistory:
    """Features of the tokens of one sample from token `start` on.

    Those of a step are a view of a tensor of all rows, until `JOINED_STEPS` steps are joined.
    """

    def __init__(self, features_Tf: Tensor, start: int) -> None:
        """Make a history of T tokens.

        Args:
            features_Tf: Their features.
            start: Index of the first of them in the text.
        """
        self.start = start
        self._joined = [features_Tf]
        self._steps: list[tuple[Tensor, int, int]] = []

    def append(self, features_Bmf: Tensor, row: int, count: int) -> None:
        """Append the features of the first `count` tokens of a row."""
        self._steps.append((features_Bmf, row, count))
        if len(self._steps) == JOINED_STEPS:
            self._join()

    def first(self, count: int) -> Tensor:
        """Return a view of the features of the first `count` tokens, which the sample started with."""
        return self._joined[0][:count]

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of the features of the tokens from index `start` up to `end` of the text."""
        self._join()
        if len(self._joined) > 1:
            self._joined = [torch.cat(self._joined)]
        return self._joined[0][start - self.start : end - self.start].clone()

    def tensors(self) -> Iterator[Tensor]:
        """Return the tensors that hold the features."""
        yield from self._joined
        yield from (features_Bmf for features_Bmf, _, _ in self._steps)

    def _join(self) -> None:
        if self._steps:
            self._joined.append(torch.cat([x[row, :count] for x, row, count in self._steps]))
            self._steps = []
