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

from aedit.spec_rollout.drafters.drafts import Begun, Taken


@dataclass(slots=True, eq=False)
class Line:
    """One sample's pairs. Pair i is the feature of token i and token i + 1, and slot i of its row."""

    length: int
    """Pairs that are known."""
    first: int
    """The first pair that has not been forgotten."""
    done: int
    """Pairs from `first` to here are in the cache."""
    last: int
    """The last token."""
    tokens: Sequence[int] = ()
    """Of the pairs that the sample began with, as long as they are not in the cache."""
    features_Tw: Tensor | None = None

    @classmethod
    def of(cls, begun: Begun, window: int) -> "Line":
        length = len(begun.tokens) - 1
        features = begun.features_Td
        missing = length - len(features)
        first = max(missing, length - window)
        if first > missing:
            features = features[first - missing :].clone()
        return cls(length, first, first, begun.tokens[-1], begun.tokens[first + 1 :], features)

    def forget(self, count: int) -> None:
        """The next `count` pairs will not come: what is known begins after them."""
        begun = len(self.tokens)
        self.tokens, self.features_Tw = (), None
        self.first = self.done = self.done + begun + count


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine took, and whose it was."""

    taken: Taken
    lines: list[Line]

    @property
    def num_pairs(self) -> int:
        return self.taken.features.shape[0] * self.taken.features.shape[1]


@dataclass(frozen=True, slots=True)
class Owed:
    """Pairs of some rows that are to be computed, each row's in order and at least one."""

    tokens: list[int]
    features_Pw: Tensor
    rows: list[int]
    """Of each pair."""
    positions: list[int]
    """Of each pair's feature."""
    last: list[int]
    """Of each row, which of these pairs is its last."""


class Pending:
    """The samples by row, and the steps that no draft has needed yet."""

    def __init__(self, rows: int, window: int) -> None:
        self.window = window
        self.lines: list[Line | None] = [None] * rows
        self._steps: deque[Step] = deque()
        self._num_pairs = 0

    @property
    def num_pairs(self) -> int:
        """That wait, of steps."""
        return self._num_pairs

    def live(self, rows: int) -> list[Line]:
        """Of the rows 0..rows-1. ValueError if one of them has not begun."""
        lines = [line for line in self.lines[:rows] if line is not None]
        if len(lines) != rows:
            raise ValueError(f"{rows} rows are asked for, and only {len(lines)} of them have begun")
        return lines

    def begin(self, begun: Begun) -> None:
        self.lines[begun.row] = Line.of(begun, self.window)

    def take(self, taken: Taken) -> None:
        step = Step(taken, self.live(len(taken.tokens)))
        for line, tokens in zip(step.lines, taken.tokens, strict=True):
            line.length += len(tokens)
            line.last = tokens[-1]
        self._steps.append(step)
        self._num_pairs += step.num_pairs
        while self._num_pairs > len(self.lines) * self.window and len(self._steps) > 1:
            self._forget(self._steps.popleft())

    def steady(self, lines: list[Line]) -> Taken | None:
        """The one step that these rows have made since they were up to date; None if it is more than that.
        It counts as computed."""
        if len(self._steps) != 1 or self._steps[0].lines != lines:
            return None
        if any(line.features_Tw is not None for line in lines):
            return None
        taken = self._steps[0].taken
        self._clear(lines)
        return taken

    def owed(self, lines: list[Line]) -> Owed:
        """Everything that these rows are behind. It counts as computed. ValueError if nothing has come since
        the last time."""
        pieces: dict[Line, list[tuple[Sequence[int], Tensor]]] = {line: [] for line in lines}
        for line, mine in pieces.items():
            if line.features_Tw is not None:
                mine.append((line.tokens, line.features_Tw))
        for step in self._steps:
            for b, line in enumerate(step.lines):
                if line in pieces:
                    tokens = step.taken.tokens[b]
                    pieces[line].append((tokens, step.taken.features[b, : len(tokens)]))
        owed = _join(lines, pieces)
        self._clear(lines)
        return owed

    def _forget(self, step: Step) -> None:
        self._num_pairs -= step.num_pairs
        for line, tokens in zip(step.lines, step.taken.tokens, strict=True):
            line.forget(len(tokens))

    def _clear(self, lines: list[Line]) -> None:
        self._steps.clear()
        self._num_pairs = 0
        for line in lines:
            line.tokens, line.features_Tw, line.done = (), None, line.length


def _join(lines: list[Line], pieces: dict[Line, list[tuple[Sequence[int], Tensor]]]) -> Owed:
    tokens: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    features: list[Tensor] = []
    for row, line in enumerate(lines):
        mine = [piece for piece in pieces[line] if piece[0]]
        if line.length == 0:
            # A prompt of one token has no pair yet: this one stands in for it, until the first real one.
            width = pieces[line][0][1] if pieces[line] else None
            if width is None:
                raise ValueError(f"row {row} has made no step since its last draft")
            mine = [((line.last,), width.new_zeros(1, width.shape[-1]))]
        if not mine:
            raise ValueError(f"row {row} has made no step since its last draft")
        for some, theirs in mine:
            tokens += some
            features.append(theirs)
        count = len(tokens) - len(rows)
        rows += [row] * count
        positions += range(line.done, line.done + count)
        last.append(len(tokens) - 1)
    return Owed(tokens, torch.cat(features), rows, positions, last)
