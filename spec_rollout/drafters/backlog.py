"""What a learned drafter has been told and has not computed yet.

An arm without the drafter costs it nothing but a place in a list: pairs wait here as the engine has handed
them over, and are put into the cache when a draft is asked for. What waits is bounded: a row that nobody has
drafted for in a long time begins its drafting anew with its last pairs.

Shapes: B rows, m tokens of the longest row of a step, P pairs, w feature size.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.drafts import RowStart, StepUpdate


@dataclass(slots=True, eq=False)
class RowBacklog:
    """One sample's pairs. Pair i is the feature of token i and token i + 1, and slot i of its row."""

    length: int
    """Pairs that are known."""
    first: int
    """The first pair that has not been forgotten."""
    num_computed: int
    """Pairs from `first` to here are in the cache."""
    last: int
    """The last token."""
    tokens: Sequence[int] = ()
    """Of the pairs that the sample began with, as long as they are not in the cache."""
    features_Tw: Tensor | None = None

    @classmethod
    def of(cls, start: RowStart, window: int) -> "RowBacklog":
        length = len(start.tokens) - 1
        features = start.features_Td
        missing = length - len(features)
        first = max(missing, length - window)
        if first > missing:
            features = features[first - missing :].clone()
        return cls(length, first, first, start.tokens[-1], start.tokens[first + 1 :], features)

    def skip(self, count: int) -> None:
        """The next `count` pairs will not come: what is known begins after them."""
        start = len(self.tokens)
        self.tokens, self.features_Tw = (), None
        self.first = self.num_computed = self.num_computed + start + count


@dataclass(frozen=True, slots=True)
class PendingStep:
    """What the engine took, and whose it was."""

    update: StepUpdate
    rows: list[RowBacklog]

    @property
    def num_pairs(self) -> int:
        return self.update.features.shape[0] * self.update.features.shape[1]


@dataclass(frozen=True, slots=True)
class MissingPairs:
    """Pairs of some rows that are to be computed, each row's in order and at least one."""

    tokens: list[int]
    features_Pw: Tensor
    rows: list[int]
    """Of each pair."""
    positions: list[int]
    """Of each pair's feature."""
    last: list[int]
    """Of each row, which of these pairs is its last."""


class Backlog:
    """The samples by row, and the steps that no draft has needed yet."""

    def __init__(self, rows: int, window: int) -> None:
        self.window = window
        self.rows: list[RowBacklog | None] = [None] * rows
        self._steps: deque[PendingStep] = deque()
        self._num_pairs = 0

    @property
    def num_pairs(self) -> int:
        """That wait, of steps."""
        return self._num_pairs

    def running_rows(self, rows: int) -> list[RowBacklog]:
        """Of the rows 0..rows-1. ValueError if one of them has not begun."""
        backlogs = [backlog for backlog in self.rows[:rows] if backlog is not None]
        if len(backlogs) != rows:
            raise ValueError(f"{rows} rows are asked for, and only {len(backlogs)} of them have begun")
        return backlogs

    def begin(self, start: RowStart) -> None:
        self.rows[start.row] = RowBacklog.of(start, self.window)

    def update(self, update: StepUpdate) -> None:
        step = PendingStep(update, self.running_rows(len(update.tokens)))
        for backlog, tokens in zip(step.rows, update.tokens, strict=True):
            backlog.length += len(tokens)
            backlog.last = tokens[-1]
        self._steps.append(step)
        self._num_pairs += step.num_pairs
        while self._num_pairs > len(self.rows) * self.window and len(self._steps) > 1:
            self._drop_step(self._steps.popleft())

    def take_single_step(self, backlogs: list[RowBacklog]) -> StepUpdate | None:
        """The one step that these rows have made since they were up to date; None if it is more than that.
        It counts as computed."""
        if len(self._steps) != 1 or self._steps[0].rows != backlogs:
            return None
        if any(backlog.features_Tw is not None for backlog in backlogs):
            return None
        update = self._steps[0].update
        self._clear(backlogs)
        return update

    def take_missing(self, backlogs: list[RowBacklog]) -> MissingPairs:
        """Everything that these rows are behind. It counts as computed. ValueError if nothing has come since
        the last time."""
        pairs_of_row: dict[RowBacklog, list[tuple[Sequence[int], Tensor]]] = {
            backlog: [] for backlog in backlogs
        }
        for backlog, row_pairs in pairs_of_row.items():
            if backlog.features_Tw is not None:
                row_pairs.append((backlog.tokens, backlog.features_Tw))
        for step in self._steps:
            for b, backlog in enumerate(step.rows):
                if backlog in pairs_of_row:
                    tokens = step.update.tokens[b]
                    pairs_of_row[backlog].append((tokens, step.update.features[b, : len(tokens)]))
        missing = _join_pairs(backlogs, pairs_of_row)
        self._clear(backlogs)
        return missing

    def _drop_step(self, step: PendingStep) -> None:
        self._num_pairs -= step.num_pairs
        for backlog, tokens in zip(step.rows, step.update.tokens, strict=True):
            backlog.skip(len(tokens))

    def _clear(self, backlogs: list[RowBacklog]) -> None:
        self._steps.clear()
        self._num_pairs = 0
        for backlog in backlogs:
            backlog.tokens, backlog.features_Tw, backlog.num_computed = (), None, backlog.length


def _join_pairs(
    backlogs: list[RowBacklog], pairs_of_row: dict[RowBacklog, list[tuple[Sequence[int], Tensor]]]
) -> MissingPairs:
    tokens: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    features: list[Tensor] = []
    for row, backlog in enumerate(backlogs):
        row_pairs = [piece for piece in pairs_of_row[backlog] if piece[0]]
        if backlog.length == 0:
            # A prompt of one token has no pair yet: this one stands in for it, until the first real one.
            width = pairs_of_row[backlog][0][1] if pairs_of_row[backlog] else None
            if width is None:
                raise ValueError(f"row {row} has made no step since its last draft")
            row_pairs = [((backlog.last,), width.new_zeros(1, width.shape[-1]))]
        if not row_pairs:
            raise ValueError(f"row {row} has made no step since its last draft")
        for row_tokens, row_features in row_pairs:
            tokens += row_tokens
            features.append(row_features)
        count = len(tokens) - len(rows)
        rows += [row] * count
        positions += range(backlog.num_computed, backlog.num_computed + count)
        last.append(len(tokens) - 1)
    return MissingPairs(tokens, torch.cat(features), rows, positions, last)
