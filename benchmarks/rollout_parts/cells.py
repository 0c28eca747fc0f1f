"""Measurements of one task, temperature and batch."""

import gc
import random
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.kit.statistics import Interval, median
from benchmarks.policies import Kind
from benchmarks.rollout_parts.same import Same
from benchmarks.rollout_parts.stream import (
    ADAPTIVE,
    AGAIN,
    FIXED,
    PLAIN,
    RANDOM,
    Cast,
    Contestant,
    contestants,
    race,
)
from benchmarks.rollout_parts.theirs import OURS, THEIRS, Theirs
from benchmarks.rollout_parts.watch import Foretold

OFF = "off"
FEW_ROWS = 4
"""Fewer rows have longer turns, so that all tell as much, and the choice has as many steps to learn from."""


@dataclass(frozen=True, slots=True)
class Size:
    """Amount of measurement."""

    repeats: int
    """Repeats of a stream, after the one in which the chooser learns."""
    turn_tokens: int
    """Tokens of a row in a repeat; with fewer than `FEW_ROWS` rows more, so that their sum is the same."""
    their_tokens: int
    their_repeats: int
    drains: int
    """After the one in which the choice learns."""
    drain_rows: int


@dataclass(frozen=True, slots=True)
class Spoken:
    """Work of one contestant's engine over all repeats."""

    accepted_length: float
    """Tokens per pass."""
    by_position: tuple[float, ...]
    arms: dict[str, int]
    """Steps by arm."""

    @classmethod
    def of(cls, one: Contestant) -> "Spoken":
        status: dict[str, Any] = one.engine.status()
        return cls(status["accepted_length"], tuple(status["accepted_by_position"]), status["arms"])


@dataclass(frozen=True, slots=True)
class Cell:
    """One task, temperature and batch."""

    task: Kind
    temperature: float
    rows: int
    rates: dict[str, tuple[float, ...]]
    """Tokens per second by contestant and repeat; in the first repeat the choice learns."""
    step_rates: dict[str, tuple[float, ...]]
    """The same of steps alone, for plain decoding and the choice: `Contestant.step_rates`."""
    theirs: dict[str, tuple[float, ...]]
    """The same of `Theirs.race`, in which "plain" is another workload."""
    spoken: dict[str, Spoken]
    foretold: Foretold
    """Predictions of the chooser, after the first repeat."""
    same: Same
    """Every contestant's tokens beside those of plain decoding."""
    their_same: Same

    def speedup(self, name: str, over: str = PLAIN) -> Interval:
        """Return the speed-up of a contestant over another, within each repeat but the first."""
        pairs = zip(self.rates[name][1:], self.rates[over][1:], strict=True)
        return Interval.of([one / other for one, other in pairs])

    def first(self, name: str) -> float:
        """Return the speed-up in the first repeat, in which the chooser learns."""
        return self.rates[name][0] / self.rates[PLAIN][0]

    def over_theirs(self, name: str = THEIRS) -> Interval:
        """Return the speed of plain decoding over one of transformers' ways."""
        pairs = zip(self.theirs[OURS], self.theirs[name], strict=True)
        return Interval.of([ours / their for ours, their in pairs])

    @property
    def best_fixed(self) -> str:
        """Return the best fixed arm in hindsight; plain decoding (`off`) is one too."""
        best = max(FIXED, key=lambda name: self.speedup(name).middle)
        return best if self.speedup(best).middle > 1 else OFF

    @property
    def over_best(self) -> Interval:
        """Return the speed of the chooser over the best fixed arm."""
        return self.speedup(ADAPTIVE, PLAIN if self.best_fixed == OFF else self.best_fixed)

    @property
    def kept(self) -> float:
        """Return the measured over the predicted speed-up, both of steps alone."""
        pairs = zip(self.step_rates[ADAPTIVE][1:], self.step_rates[PLAIN][1:], strict=True)
        return median([one / other for one, other in pairs]) / self.foretold.speedup

    @property
    def noise(self) -> float:
        """Return how far from 1 the interval of plain over plain reaches."""
        again = self.speedup(AGAIN)
        return max(abs(again.high - 1), abs(again.low - 1))

    @property
    def figures(self) -> dict[str, Any]:
        derived = {name: asdict(self.speedup(name)) for name in (AGAIN, *FIXED, ADAPTIVE, RANDOM)}
        return asdict(self) | {
            "speedups": derived,
            "over_theirs": {name: asdict(self.over_theirs(name)) for name in self.theirs if name != OURS},
            "best_fixed": self.best_fixed,
            "over_best": asdict(self.over_best),
            "measured_over_foretold": self.kept,
        }


def measure_cell(cast: Cast, theirs: Theirs, rows: int, size: Size) -> Cell:
    """Measure one batch, both races at the temperature of `theirs`."""
    temperature, rng = theirs.temperature, random.Random(rows)
    racers = contestants(cast, rows, temperature, seed=1)
    turn_tokens = size.turn_tokens * max(1, FEW_ROWS // rows)
    rates = race(racers, turn_tokens, 1 + size.repeats, rng)
    plain, adaptive = racers[0], next(one for one in racers if one.name == ADAPTIVE)
    assert adaptive.watch is not None
    same = sum((Same.of(cast.model, plain.rollouts, one.rollouts) for one in racers[1:]), Same())
    spoken = {one.name: Spoken.of(one) for one in racers}
    foretold = adaptive.watch.foretold
    step_rates = {one.name: tuple(one.step_rates) for one in (plain, adaptive)}
    del racers, plain, adaptive
    gc.collect()  # caches of a dozen engines
    their_rates, their_same = theirs.race(rows, size.their_repeats, rng)
    return Cell(
        task=cast.policy.task,
        temperature=temperature,
        rows=rows,
        rates={name: tuple(values) for name, values in rates.items()},
        step_rates=step_rates,
        theirs={name: tuple(values) for name, values in their_rates.items()},
        spoken=spoken,
        foretold=foretold,
        same=same,
        their_same=their_same,
    )
