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

from aedit.spec_rollout.migration.lengths import LengthDistribution

SampleKey = tuple[int, int]
"""Rollout and sample of a prompt."""
CANDIDATES = 8
"""Samples of the busiest engine for which a move is worked out."""


@dataclass(frozen=True, slots=True)
class UnfinishedSample:
    """A sample that is not finished, as its engine tells it."""

    key: SampleKey
    context: int
    """Tokens of prompt and text: what an engine that takes it over computes again."""
    emitted: int
    max_new_tokens: int
    """Its `max_new_tokens`."""
    group: int = -1
    visited: tuple[int, ...] = ()
    """Engines it has left, by number: it does not go back there."""
    scale: float = 1.0
    """How long those of its group become, as a multiple of what all do."""

    def expected(self, lengths: LengthDistribution) -> float:
        """Tokens that are expected to come."""
        return lengths.expected_remaining(self.emitted, self.max_new_tokens, self.scale)


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast an engine is: with B live samples each gets a token every fixed_s + B x row_s seconds."""

    fixed_s: float
    row_s: float
    prefill_s: float
    """For each token that is computed again."""

    def token_s(self, live: int) -> float:
        return self.fixed_s + live * self.row_s


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine has to do."""

    samples: tuple[UnfinishedSample, ...]
    """Live ones, then waiting ones in the order in which they will begin."""
    rows: int
    """Most live ones."""
    speed: EngineSpeed
    since_move_s: float = math.inf
    """Since samples last moved to it or from it."""


@dataclass(frozen=True, slots=True)
class Migration:
    """A sample that should go from one engine to another, by their numbers."""

    key: SampleKey
    source: int
    target: int
    gain_s: float
    """By how much sooner the later of the two then finishes, the cost subtracted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRule:
    """When moving is worth it."""

    cooldown_s: float = 0.1
    """An engine takes part in moves only so long after the last ones."""
    overhead_s: float = 0.005
    """What a move costs the receiver beside computing the text again. With all that subtracted it must still
    gain more than this once more."""
    margin: float = 0.05
    """Nothing moves between engines that will finish within this share of each other."""
    max_moves: int = 16
    """At one time."""
    max_moves_per_sample: int = 2
    """Moves of one sample in its life."""


def plan(
    loads: Mapping[int, EngineLoad], lengths: LengthDistribution, rule: MigrationRule = MigrationRule()
) -> list[Migration]:
    """The moves that are worth it now, in order; often none. loads: by the engines' numbers.

    Each is from the engine that will finish last to the one that will finish first, given the moves before,
    of those that have a row free: as long as samples wait everywhere, moving them is guesswork. Never makes
    an engine idle that is not, nor one finish later than the busiest would have; engines that have not
    rested, and samples that have moved enough, stay out of it. Of equal gains the shortest context.
    """
    now = {i: load for i, load in loads.items() if load.since_move_s >= rule.cooldown_s}
    moves: list[Migration] = []
    while len(moves) < rule.max_moves:
        finish_s = {i: drain_s(load, lengths) for i, load in now.items()}
        free = [i for i, load in now.items() if len(load.samples) < load.rows]
        if not free:
            break
        busiest, idlest = max(now, key=finish_s.__getitem__), min(free, key=finish_s.__getitem__)
        if finish_s[idlest] >= (1 - rule.margin) * finish_s[busiest]:
            break
        move = _best_migration(now, (busiest, idlest), lengths, rule)
        if move is None or move.gain_s <= rule.overhead_s:
            break
        moves.append(move)
        now[busiest], now[idlest] = _after_migration(now, move)
    return moves


def drain_s(load: EngineLoad, lengths: LengthDistribution) -> float:
    """Seconds until an engine has finished all it has, if nothing comes and nothing goes.

    Live samples advance together, a token each in `EngineSpeed.token_s`. Those that wait begin in their
    order, each
    at the tokens per row that all before it make on average: like water that is poured over the rows, as
    nobody knows exactly which row will be free first.
    """
    expected = [sample.expected(lengths) for sample in load.samples]
    live, waiting = sorted(expected[: load.rows]), expected[load.rows :]
    begin = list(_fill_levels(live, waiting))
    full = begin.pop() if waiting else 0.0
    ends = sorted([*live, *map(add, begin, waiting)])
    passed_s, seen = full * load.speed.token_s(load.rows), full
    for i in range(bisect_right(ends, full), len(ends)):
        passed_s += (ends[i] - seen) * load.speed.token_s(min(len(ends) - i, load.rows))
        seen = ends[i]
    return passed_s


def _fill_levels(floor: Sequence[float], poured: Sequence[float]) -> Iterator[float]:
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


def _best_migration(
    now: dict[int, EngineLoad], pair: tuple[int, int], lengths: LengthDistribution, rule: MigrationRule
) -> Migration | None:
    """Of what may move between the two, what is best."""
    source, target = (now[i] for i in pair)
    candidates = [
        sample
        for sample in source.samples
        if len(sample.visited) < rule.max_moves_per_sample and pair[1] not in sample.visited
    ]
    if not candidates or len(source.samples) < 2:
        return None
    before_s = drain_s(source, lengths)
    options: list[Migration] = []
    for sample in _distinct_candidates(candidates, lengths):
        expected, joined = _after_migration(now, Migration(sample.key, *pair, gain_s=0.0))
        cost_s = rule.overhead_s + sample.context * target.speed.prefill_s
        after_s = max(drain_s(expected, lengths), drain_s(joined, lengths) + cost_s)
        options.append(Migration(sample.key, *pair, gain_s=before_s - after_s))
    return max(options, key=lambda move: move.gain_s)


def _distinct_candidates(
    samples: Sequence[UnfinishedSample], lengths: LengthDistribution
) -> list[UnfinishedSample]:
    """A few from the one with least to come to the one with most, shortest contexts first. Of equal ones the
    last, which would have begun last."""
    unlike = {
        (sample.context, sample.emitted, sample.max_new_tokens, sample.scale): sample for sample in samples
    }
    options = sorted(unlike.values(), key=lambda sample: sample.expected(lengths))
    step = max(1, (len(options) - 1) / (CANDIDATES - 1))
    chosen = (options[round(i * step)] for i in range(min(CANDIDATES, len(options))))
    return sorted(chosen, key=lambda sample: sample.context)


def _after_migration(now: dict[int, EngineLoad], move: Migration) -> tuple[EngineLoad, EngineLoad]:
    """Source and target after the move."""
    source, target = now[move.source], now[move.target]
    (sample,) = (sample for sample in source.samples if sample.key == move.key)
    sample = replace(sample, visited=(*sample.visited, move.source))
    rest = tuple(sample for sample in source.samples if sample.key != move.key)
    return replace(source, samples=rest), replace(target, samples=(*target.samples, sample))
