"""Pairs that a learned drafter has received but not computed yet.

While another arm is in use, a step costs the drafter one list entry: pairs are queued as the engine passed
them, and are written to the cache when a draft is requested. The queue is bounded: for a row without drafts
for a long time, only the last pairs remain.

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
    """Pairs of one sample.

    Pair i consists of the feature of token i and of token i + 1, and has slot i of its row.
    """

    length: int
    """Number of pairs so far."""
    first: int
    """Index of the first pair that has not been dropped."""
    num_computed: int
    """Pairs from `first` to this index are in the cache."""
    last: int
    """Last token."""
    tokens: Sequence[int] = ()
    """Tokens of the initial pairs, as long as these are not in the cache."""
    features_Tw: Tensor | None = None

    @classmethod
    def of(cls, start: RowStart, window: int) -> "RowBacklog":
        """Return the backlog of a sample that starts, limited to its last `window` pairs."""
        length = len(start.tokens) - 1
        features = start.features_Td
        missing = length - len(features)
        first = max(missing, length - window)
        if first > missing:
            features = features[first - missing :].clone()
        return cls(length, first, first, start.tokens[-1], start.tokens[first + 1 :], features)

    def skip(self, count: int) -> None:
        """Drop the next `count` pairs: the row's pairs begin after them."""
        start = len(self.tokens)
        self.tokens, self.features_Tw = (), None
        self.first = self.num_computed = self.num_computed + start + count


@dataclass(frozen=True, slots=True)
class PendingStep:
    """Update of one step of the engine, with the samples of its rows."""

    update: StepUpdate
    rows: list[RowBacklog]

    @property
    def num_pairs(self) -> int:
        """Return the number of pairs, with padding."""
        return self.update.features.shape[0] * self.update.features.shape[1]


@dataclass(frozen=True, slots=True)
class MissingPairs:
    """Pairs of some rows that must be computed: at least one per row, in order."""

    tokens: list[int]
    features_Pw: Tensor
    rows: list[int]
    """Row of each pair."""
    positions: list[int]
    """Position of each pair's feature."""
    last: list[int]
    """Index of each row's last pair."""


class Backlog:
    """Samples by row, and the steps that no draft has needed yet."""

    def __init__(self, rows: int, window: int) -> None:
        self.window = window
        self.rows: list[RowBacklog | None] = [None] * rows
        self._steps: deque[PendingStep] = deque()
        self._num_pairs = 0

    @property
    def num_pairs(self) -> int:
        """Return the number of queued pairs."""
        return self._num_pairs

    def running_rows(self, rows: int) -> list[RowBacklog]:
        """Return the backlogs of the rows 0 .. rows - 1.

        Raises:
            ValueError: One of the rows has no sample.
        """
        backlogs = [backlog for backlog in self.rows[:rows] if backlog is not None]
        if len(backlogs) != rows:
            raise ValueError(
                f"a draft of {rows} rows is requested, but only {len(backlogs)} of them have a sample"
            )
        return backlogs

    def begin(self, start: RowStart) -> None:
        """Add a sample."""
        self.rows[start.row] = RowBacklog.of(start, self.window)

    def update(self, update: StepUpdate) -> None:
        """Queue the tokens and features of one step."""
        step = PendingStep(update, self.running_rows(len(update.tokens)))
        for backlog, tokens in zip(step.rows, update.tokens, strict=True):
            backlog.length += len(tokens)
            backlog.last = tokens[-1]
        self._steps.append(step)
        self._num_pairs += step.num_pairs
        while self._num_pairs > len(self.rows) * self.window and len(self._steps) > 1:
            dropped = self._steps.popleft()
            self._num_pairs -= dropped.num_pairs
            for backlog, tokens in zip(dropped.rows, dropped.update.tokens, strict=True):
                backlog.skip(len(tokens))

    def take_single_step(self, backlogs: list[RowBacklog]) -> StepUpdate | None:
        """Return the only queued step of these rows and mark it as computed.

        Returns None if more than one step is queued.
        """
        if len(self._steps) != 1 or self._steps[0].rows != backlogs:
            return None
        if any(backlog.features_Tw is not None for backlog in backlogs):
            return None
        update = self._steps[0].update
        self._clear(backlogs)
        return update

    def take_missing(self, backlogs: list[RowBacklog]) -> MissingPairs:
        """Return all queued pairs of these rows and mark them as computed.

        Raises:
            ValueError: A row has no new pair since the last call.
        """
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
            # A prompt of one token has no pair yet: use a placeholder until the first real pair.
            width = pairs_of_row[backlog][0][1] if pairs_of_row[backlog] else None
            if width is None:
                raise ValueError(f"row {row} has no step since its last draft: call update first")
            row_pairs = [((backlog.last,), width.new_zeros(1, width.shape[-1]))]
        if not row_pairs:
            raise ValueError(f"row {row} has no step since its last draft: call update first")
        for row_tokens, row_features in row_pairs:
            tokens += row_tokens
            features.append(row_features)
        count = len(tokens) - len(rows)
        rows += [row] * count
        positions += range(backlog.num_computed, backlog.num_computed + count)
        last.append(len(tokens) - 1)
    return MissingPairs(tokens, torch.cat(features), rows, positions, last)
