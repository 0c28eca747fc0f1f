"""Which samples should move from the busiest engine to the idlest one (after RLHFSpec, arXiv:2512.04752).

All samples of a batch are wanted, so that what counts is when the last engine has finished. When each will
is predicted from its live and waiting samples, how long they will become, and how fast it is with so many
live ones. A sample moves if the later of the two engines then finishes sooner by more than the move costs,
and by a margin, as predictions are no more than that. Pure functions; `Reallocator` does what they say.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from aedit.spec_rollout.migration.lengths import Lengths

Key = tuple[int, int]
"""Rollout and sample of a prompt."""
CANDIDATES = 8
"""Samples of the busiest engine for which a move is worked out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample that is not finished, as its engine tells it."""

    key: Key
    context: int
    """Tokens of prompt and text: what an engine that takes it over computes again."""
    emitted: int
    most: int
    """Its `max_new_tokens`."""
    group: int = -1
    been: tuple[int, ...] = ()
    """Engines it has left, by number: it does not go back there."""
    scale: float = 1.0
    """How long those of its group become, as a multiple of what all do."""

    def left(self, lengths: Lengths) -> float:
        """Tokens that are expected to come."""
        return lengths.remainder(self.emitted, self.most, self.scale)


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast an engine is: with B live samples each gets a token every fixed_s + B x row_s seconds."""

    fixed_s: float
    row_s: float
    prefill_s: float
    """For each token that is computed again."""

    def token_s(self, live: int) -> float:
        return self.fixed_s + live * self.row_s


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do."""

    samples: tuple[Sample, ...]
    """Live ones, then waiting ones in the order in which they will begin."""
    rows: int
    """Most live ones."""
    pace: Pace
    rested_s: float = math.inf
    """Since samples last moved to it or from it."""


@dataclass(frozen=True, slots=True)
class Move:
    """A sample that should go from one engine to another, by their numbers."""

    key: Key
    source: int
    target: int
    gain_s: float
    """By how much sooner the later of the two then finishes, the cost subtracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """When moving is worth it."""

    rest_s: float = 0.1
    """An engine takes part in moves only so long after the last ones."""
    pause_s: float = 0.005
    """What a move costs the receiver beside computing the text again. With all that subtracted it must still
    gain more than this once more."""
    margin: float = 0.05
    """Nothing moves between engines that will finish within this share of each other."""
    most_moves: int = 16
    """At one time."""
    most_of_sample: int = 2
    """Moves of one sample in its life."""


def plan(loads: Mapping[int, Load], lengths: Lengths, rule: Rule = Rule()) -> list[Move]:
    """The moves that are worth it now, in order; often none. loads: by the engines' numbers.

    Each is from the engine that will finish last to the one that will finish first, given the moves before,
    of those that have a row free: as long as samples wait everywhere, moving them is guesswork. Never makes
    an engine idle that is not, nor one finish later than the busiest would have; engines that have not
    rested, and samples that have moved enough, stay out of it. Of equal gains the shortest context.
    """
    now = {i: load for i, load in loads.items() if load.rested_s >= rule.rest_s}
    moves: list[Move] = []
    while len(moves) < rule.most_moves:
        finish_s = {i: drain_s(load, lengths) for i, load in now.items()}
        free = [i for i, load in now.items() if len(load.samples) < load.rows]
        if not free:
            break
        busiest, idlest = max(now, key=finish_s.__getitem__), min(free, key=finish_s.__getitem__)
        if finish_s[idlest] >= (1 - rule.margin) * finish_s[busiest]:
            break
        move = _best(now, (busiest, idlest), lengths, rule)
        if move is None or move.gain_s <= rule.pause_s:
            break
        moves.append(move)
        now[busiest], now[idlest] = _moved(now, move)
    return moves


def drain_s(load: Load, lengths: Lengths) -> float:
    """Seconds until an engine has finished all it has, if nothing comes and nothing goes.

    Live samples advance together, a token each in `Pace.token_s`. Those that wait begin in their order, each
    at the tokens per row that all before it make on average: like water that is poured over the rows, as
    nobody knows exactly which row will be free first.
    """
    left = [sample.left(lengths) for sample in load.samples]
    live, waiting = sorted(left[: load.rows]), left[load.rows :]
    begin = list(_levels(live, waiting))
    full = begin.pop() if waiting else 0.0
    ends = sorted([*live, *map(add, begin, waiting)])
    passed_s, seen = full * load.pace.token_s(load.rows), full
    for i in range(bisect_right(ends, full), len(ends)):
        passed_s += (ends[i] - seen) * load.pace.token_s(min(len(ends) - i, load.rows))
        seen = ends[i]
    return passed_s


def _levels(floor: Sequence[float], poured: Sequence[float]) -> Iterator[float]:
    """Where water stands over an ascending floor: before each of the pourings, and after the last."""
    level, wide = floor[0] if floor else 0.0, 0
    for more in (*poured, None):
        while wide < len(floor) and floor[wide] <= level:
            wide += 1
        yield level
        if more is None:
            return
        while wide < len(floor) and (room := (floor[wide] - level) * wide) <= more:
            more, level = more - room, floor[wide]
            wide += 1
        level += more / wide


def _best(now: dict[int, Load], pair: tuple[int, int], lengths: Lengths, rule: Rule) -> Move | None:
    """Of what may move between the two, what is best."""
    source, target = (now[i] for i in pair)
    may = [
        sample
        for sample in source.samples
        if len(sample.been) < rule.most_of_sample and pair[1] not in sample.been
    ]
    if not may or len(source.samples) < 2:
        return None
    before_s = drain_s(source, lengths)
    found: list[Move] = []
    for sample in _unlike(may, lengths):
        left, joined = _moved(now, Move(sample.key, *pair, gain_s=0.0))
        cost_s = rule.pause_s + sample.context * target.pace.prefill_s
        after_s = max(drain_s(left, lengths), drain_s(joined, lengths) + cost_s)
        found.append(Move(sample.key, *pair, gain_s=before_s - after_s))
    return max(found, key=lambda move: move.gain_s)


def _unlike(samples: Sequence[Sample], lengths: Lengths) -> list[Sample]:
    """A few from the one with least to come to the one with most, shortest contexts first. Of equal ones the
    last, which would have begun last."""
    unlike = {(one.context, one.emitted, one.most, one.scale): one for one in samples}
    found = sorted(unlike.values(), key=lambda one: one.left(lengths))
    step = max(1, (len(found) - 1) / (CANDIDATES - 1))
    chosen = (found[round(i * step)] for i in range(min(CANDIDATES, len(found))))
    return sorted(chosen, key=lambda one: one.context)


def _moved(now: dict[int, Load], move: Move) -> tuple[Load, Load]:
    """Source and target after the move."""
    source, target = now[move.source], now[move.target]
    (sample,) = (one for one in source.samples if one.key == move.key)
    sample = replace(sample, been=(*sample.been, move.source))
    rest = tuple(one for one in source.samples if one.key != move.key)
    return replace(source, samples=rest), replace(target, samples=(*target.samples, sample))
