"""Plan of migrations from the busiest engine to the idlest one (after RLHFSpec, arXiv:2512.04752).

All samples of a batch are needed, so the finish of the last engine counts. It is predicted from the running
and waiting samples, their expected lengths, and the engine's speed at each number of running samples. A
sample moves if the later of the two engines then finishes sooner by more than the cost of the migration, and
by a margin for errors of prediction. Pure functions; `Reallocator` applies the plan.

`LengthDistribution` expects lengths from those of earlier samples (Kaplan and Meier 1958). Samples that are
still growing count as censored observations: longer than their current length. Without them the short
samples, which end first, would bias the estimate.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add, neg

from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.sampling import Rollout, SampleKey

PRIOR = 4.0
"""Weight, in samples, of the mean length of all samples in the mean length of a group."""


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Survival curve of lengths in tokens, constant between the lengths at which samples have ended."""

    at: tuple[int, ...] = (0,)
    """Ascending: 0, the lengths at which samples have ended, and the longest observed length."""
    longer: tuple[float, ...] = (1.0,)
    """Share of samples that are longer than `at`."""
    area: tuple[float, ...] = (0.0,)
    """Integral of the curve up to `at`, in tokens."""

    @classmethod
    def of(cls, completed: Iterable[int], censored: Iterable[int] = ()) -> "LengthDistribution":
        """Return the Kaplan-Meier estimate.

        Args:
            completed: Lengths of samples that have ended by themselves, 1 or more.
            censored: Lengths of samples that are growing or were cut at their limit.
        """
        ends, cut = Counter(completed), Counter(censored)
        if not ends:
            return cls()
        at_risk = ends.total() + cut.total()
        at, longer, area = [0], [1.0], [0.0]
        for length in sorted({*ends, *cut}):
            if ends[length] or length == max((*ends, *cut)):
                area.append(area[-1] + longer[-1] * (length - at[-1]))
                longer.append(longer[-1] * (1 - ends[length] / at_risk))
                at.append(length)
            at_risk -= ends[length] + cut[length]
        return cls(tuple(at), tuple(longer), tuple(area))

    def expected_remaining(
        self, emitted: int, max_length: int, scale: float = 1.0, part: tuple[float, float] = (0.0, 1.0)
    ) -> float:
        """Return the expected number of tokens after the first `emitted` of an unfinished sample.

        Beyond the longest observed length it is `emitted`; without completed samples all lengths that are
        allowed are equally likely.

        Args:
            emitted: Tokens so far.
            max_length: Upper limit of the sample's length.
            scale: Length of the sample's group relative to all samples (`group_scales`).
            part: Quantiles between which the sample's length is, such as (0.75, 1.0) for the longest quarter.
        """
        return scale * self._expected_remaining(emitted / scale, max_length / scale, *part)

    def _expected_remaining(self, emitted: float, max_length: float, low: float, high: float) -> float:
        room = max_length - emitted
        if len(self.at) == 1:
            return room * (low + high) / 2
        here = self._longer(emitted)
        if emitted >= self.at[-1] or not here:
            return min(emitted, room)
        # The mean of the quantiles is the integral of the curve, cut below at 1 - high and above at 1 - low.
        last = min(max_length, 2 * self.at[-1])
        end = min(self._falls_below(here * (1 - high)), last)
        begin = min(self._falls_below(here * (1 - low)), end)
        inside = (self._area(end) - self._area(begin)) / here - (1 - high) * (end - begin)
        return begin - emitted + inside / (high - low)

    def _falls_below(self, share: float) -> float:
        """Return the length from which the curve is below a share."""
        i = bisect_right(self.longer, -share, key=neg)
        return self.at[i] if i < len(self.at) else math.inf

    def _longer(self, length: float) -> float:
        return self.longer[bisect_right(self.at, length) - 1]

    def _area(self, length: float) -> float:
        i = bisect_right(self.at, length) - 1
        return self.area[i] + self.longer[i] * (length - self.at[i])


CANDIDATES = 8
"""Number of samples of the busiest engine that are evaluated."""
RETURN_FACTOR = 0.5
"""A sample returns to an engine that needs at most this share of its present one's time per token. For such
an engine a sample also leaves if the others of its present one finish no sooner."""


@dataclass(frozen=True, slots=True)
class UnfinishedSample:
    """An unfinished sample."""

    key: SampleKey
    context: int
    """Tokens of prompt and text, which the receiving engine computes again."""
    emitted: int
    max_new_tokens: int
    """Upper limit of `emitted`."""
    group: int = -1
    visited: tuple[int, ...] = ()
    """Indices of engines that it has left. It returns there only if they are much faster."""
    scale: float = 1.0
    """Length of its group relative to all samples."""

    @classmethod
    def of(cls, rollout: Rollout, unreported: int = 0) -> "UnfinishedSample":
        """Return a rollout that has drawn `unreported` tokens beside its own."""
        prompt, emitted = rollout.prompt, len(rollout.tokens) + unreported
        most = prompt.sampling.max_new_tokens
        return cls(prompt.key, len(prompt.tokens) + emitted, emitted, most, prompt.group)

    def expected_remaining(
        self, lengths: LengthDistribution, part: tuple[float, float] = (0.0, 1.0)
    ) -> float:
        """Return the expected number of further tokens; see `LengthDistribution.expected_remaining`."""
        return lengths.expected_remaining(self.emitted, self.max_new_tokens, self.scale, part)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work of an engine."""

    samples: tuple[UnfinishedSample, ...]
    """Running samples, then waiting ones in the order in which they will start."""
    rows: int
    """Upper limit of running samples."""
    speed: EngineSpeed
    since_move_s: float = math.inf
    """Seconds since its last migration."""


@dataclass(frozen=True, slots=True)
class Migration:
    """Migration of one sample between two engines, by their indices."""

    key: SampleKey
    source: int
    target: int
    gain_s: float
    """Seconds by which the later of the two finishes sooner, after the cost; those of the sample alone, if
    the other samples of a much slower engine finish no sooner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationRule:
    """Conditions of a migration."""

    cooldown_s: float = 0.1
    """Seconds after a migration before an engine takes part in the next."""
    overhead_s: float = 0.005
    """Cost for the receiver in seconds, besides computing the text again. After all costs the gain must
    exceed it once more."""
    margin: float = 0.05
    """Nothing moves between engines whose predicted finishes differ by less than this share."""
    max_moves: int = 16
    """Upper limit of migrations per plan."""
    max_moves_per_sample: int = 2
    """Upper limit of migrations of one sample."""


def plan(
    loads: Mapping[int, EngineLoad], lengths: LengthDistribution, rule: MigrationRule = MigrationRule()
) -> list[Migration]:
    """Return the migrations that pay now, in order; often none.

    Each goes from the engine that will finish last to the one that will finish first, given the migrations
    before, among those with a free row: while samples wait everywhere, a migration is a guess. It never makes
    an engine finish later than the busiest would have, and takes the only sample of an engine for a faster
    one only. Engines in their cooldown, and samples at their limit, are excluded. Of equal gains the shortest
    context wins.

    Args:
        loads: Work by engine index.
        lengths: Distribution of lengths.
        rule: Conditions of a migration.
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
    """Return the seconds until an engine has finished all its samples, if none is added or removed.

    Running samples advance together, one token each per `EngineSpeed.token_s`. Waiting samples start in
    order, each at the average number of tokens per row of all before it (water filling over the rows), as it
    is not known which row will be free first.
    """
    return _drain_s(load, [sample.expected_remaining(lengths) for sample in load.samples])


def batch_drain_s(load: EngineLoad, lengths: LengthDistribution) -> float:
    """Return the same as `drain_s`, for samples whose lengths will be unequal, as those before were.

    Of n samples the shortest is expected among the shortest 1/n of all, and so on. The longest ones decide
    when an engine has finished, so that half of the samples take more than half of the time.
    """
    num = max(len(load.samples), 1)
    parts = [(i / num, (i + 1) / num) for i in _spread_order(len(load.samples))]
    pairs = zip(load.samples, parts, strict=True)
    return _drain_s(load, [sample.expected_remaining(lengths, part) for sample, part in pairs])


def _spread_order(num: int) -> list[int]:
    """Return 0 .. num - 1 with small and large numbers everywhere: waiting samples are not the longest."""
    step = next(k for k in range(max(1, round(num * 0.618)), num + 2) if math.gcd(k, max(num, 1)) == 1)
    return [i * step % num for i in range(num)]


def _drain_s(load: EngineLoad, expected: Sequence[float]) -> float:
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
    """Yield the water level over an ascending floor before each pouring, and after the last."""
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
    """Return the best migration between the pair of engines, or None."""
    source, target = (now[i] for i in pair)
    may_return = target.speed.token_s(1) <= RETURN_FACTOR * source.speed.token_s(1)
    candidates = [
        sample
        for sample in source.samples
        if len(sample.visited) < rule.max_moves_per_sample and (may_return or pair[1] not in sample.visited)
    ]
    if not candidates:
        return None
    before_s = drain_s(source, lengths)
    options: list[Migration] = []
    alone: list[Migration] = []
    for sample in _distinct_candidates(candidates, lengths):
        expected, joined = _after_migration(now, Migration(sample.key, *pair, gain_s=0.0))
        cost_s = rule.overhead_s + sample.context * target.speed.prefill_s
        after_s = max(drain_s(expected, lengths), drain_s(joined, lengths) + cost_s)
        options.append(Migration(sample.key, *pair, gain_s=before_s - after_s))
        there_s = drain_s(joined, lengths) + cost_s
        if may_return and there_s < before_s:
            here_s = sample.expected_remaining(lengths) * source.speed.token_s(1)
            alone.append(Migration(sample.key, *pair, gain_s=here_s - there_s))
    best = max(options, key=lambda move: move.gain_s)
    return best if best.gain_s > rule.overhead_s or not alone else max(alone, key=lambda move: move.gain_s)


def _distinct_candidates(
    samples: Sequence[UnfinishedSample], lengths: LengthDistribution
) -> list[UnfinishedSample]:
    """Return a few samples from least to most expected tokens, shortest contexts first.

    Of equal samples the last is taken, which would have started last.
    """
    unlike = {
        (sample.context, sample.emitted, sample.max_new_tokens, sample.scale): sample for sample in samples
    }
    options = sorted(unlike.values(), key=lambda sample: sample.expected_remaining(lengths))
    step = max(1, (len(options) - 1) / (CANDIDATES - 1))
    chosen = (options[round(i * step)] for i in range(min(CANDIDATES, len(options))))
    return sorted(chosen, key=lambda sample: sample.context)


def _after_migration(now: dict[int, EngineLoad], move: Migration) -> tuple[EngineLoad, EngineLoad]:
    """Return the loads of source and target after the migration."""
    source, target = now[move.source], now[move.target]
    (sample,) = (sample for sample in source.samples if sample.key == move.key)
    sample = replace(sample, visited=(*sample.visited, move.source))
    rest = tuple(sample for sample in source.samples if sample.key != move.key)
    return replace(source, samples=rest), replace(target, samples=(*target.samples, sample))


def group_scales(
    completed: Iterable[tuple[int, int]], growing: Iterable[tuple[int, int]]
) -> dict[int, float]:
    """Return for each group the length of its samples relative to all samples.

    The length of a group is its number of tokens over its number of completed samples, the estimate under a
    constant rate of ending.

    Args:
        completed: Pairs of group and length.
        growing: Pairs of group and current length.
    """
    ends: Counter[int] = Counter()
    tokens: Counter[int] = Counter()
    for group, length in completed:
        ends[group] += 1
        tokens[group] += length
    if not ends:
        return {}
    for group, length in growing:
        tokens[group] += length
    mean = tokens.total() / ends.total()
    return {group: (count / mean + PRIOR) / (ends[group] + PRIOR) for group, count in tokens.items()}
