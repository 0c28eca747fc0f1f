"""Race of the systems: the same prompts, by turns in random order, one batch shape after the other.

A turn decodes a batch of fresh prompts to its first token, which is the time of the prompts, and another one
to 1 + n tokens; less the median time of the prompts, that is the time of n plain steps.
"""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.decode_parts.systems import System, random_texts
from benchmarks.kit.statistics import Interval, median

RESOLUTION_S = 1e-6
"""Shortest time of plain steps, for models so small that noise could make it negative."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch of prompts."""

    rows: int
    prompt: int
    """Tokens of each prompt."""
    new: int = 0
    """Plain steps to measure; 0 measures the prompts only."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.prompt}"


@dataclass(frozen=True, slots=True)
class Race:
    """Times of one shape and dtype, by system; a turn of each in every repeat."""

    dtype: str
    shape: Shape
    first_s: dict[str, list[float]]
    """Seconds to the first tokens of all prompts."""
    rates: dict[str, list[float]]
    """Tokens per second of the plain steps, all rows together; empty without plain steps."""
    equal: dict[str, float]
    """Share of the tokens that are those of the first system, each text up to its first difference."""

    def speedup(self, name: str, other: str, *, prompts: bool = False) -> Interval:
        """Return how many times as fast `name` is as `other`, by ratios within a repeat."""
        if prompts:
            pairs = zip(self.first_s[other], self.first_s[name], strict=True)
        else:
            pairs = zip(self.rates[name], self.rates[other], strict=True)
        return Interval.of([a / b for a, b in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Number of turns, and what begins them."""

    repeats: int
    vocabulary: int
    limit_s: float = 90.0
    """No further repeat begins after these seconds, as soon as there are two."""
    begin: Callable[[], object] = lambda: None
    """Called after the first turn, which does one-time work and is left out."""


def race(systems: Mapping[str, System], dtype: str, shape: Shape, turns: Turns) -> Race:
    """Measure all systems on one batch shape."""
    rng = random.Random(f"{shape}")
    first_s: dict[str, list[float]] = {name: [] for name in systems}
    whole_s: dict[str, list[float]] = {name: [] for name in systems}
    equal, compared = Counter[str](), Counter[str]()
    until_s = math.inf
    for repeat in range(1 + turns.repeats):
        if repeat == 1:
            turns.begin()
            until_s = time.monotonic() + turns.limit_s
        if repeat > 2 and time.monotonic() > until_s:
            break
        texts = [random_texts(turns.vocabulary, shape.rows, shape.prompt, rng) for _ in range(2)]
        said: dict[str, list[list[int]]] = {}
        for name in rng.sample(list(systems), len(systems)):
            turn = [systems[name].decode(texts[0], 1)]
            turn += [systems[name].decode(texts[1], 1 + shape.new)] if shape.new else []
            said[name] = [text for decoded in turn for text in decoded.tokens]
            if repeat:
                first_s[name].append(turn[0].seconds)
                whole_s[name] += [decoded.seconds for decoded in turn[1:]]
        ours = said[next(iter(systems))]
        for name, theirs in said.items():
            for same, either in _same_tokens(ours, theirs):
                equal[name] += same
                compared[name] += either
    rates = {name: _rates(shape, first_s[name], whole_s[name]) for name in systems}
    return Race(dtype, shape, first_s, rates, {name: equal[name] / compared[name] for name in systems})


def _rates(shape: Shape, first_s: Sequence[float], whole_s: Sequence[float]) -> list[float]:
    """Return the tokens per second of the plain steps of each turn."""
    prompts_s = median(first_s) if first_s else 0.0
    return [shape.rows * shape.new / max(seconds - prompts_s, RESOLUTION_S) for seconds in whole_s]


def _same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield, for each text, how many tokens are equal up to its first difference, and how many were compared.

    Raises:
        RuntimeError: A system has made fewer or more tokens.
    """
    if [len(text) for text in ours] != [len(text) for text in theirs]:
        raise RuntimeError("a system has made another number of tokens than asked for")
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        yield same, min(same + 1, len(a))
