"""End of a batch of rollouts: all begin together, none follows, and the last ones are long.

A plain engine and one that chooses its arm take turns of a quarter of a second until both have finished, so
that both run under the same load. The chooser keeps what it has learned from one drain to the next.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import Goodput
from aedit.spec_rollout.drafters import parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.sampling import Prompt, Rollout
from benchmarks.rollout_parts.same import Same
from benchmarks.rollout_parts.stream import FIXED, Cast, engine_of, stream
from benchmarks.rollout_parts.watch import Watched

TURN_S = 0.25
MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Drain:
    """One batch until its end."""

    plain_s: float
    adaptive_s: float
    lengths: tuple[int, ...]
    """New tokens of each rollout."""
    same: Same
    arms: dict[str, int]
    """Steps of the choice by arm."""

    @property
    def speedup(self) -> float:
        return self.plain_s / self.adaptive_s


@dataclass(slots=True, eq=False)
class Draining:
    """One engine that finishes its batch."""

    engine: Engine
    rollouts: list[Rollout]
    seconds: float = 0.0
    arms: dict[str, int] = field(default_factory=dict)
    clock: Callable[[], float] = time.perf_counter

    @property
    def is_done(self) -> bool:
        return not (self.engine.running or self.engine.waiting)

    def turn(self) -> None:
        chooser = self.engine.chooser
        until_s = self.seconds + TURN_S
        while not self.is_done and self.seconds < until_s:
            spent_s = chooser.spent_s if isinstance(chooser, Watched) else 0.0
            began_s = self.clock()
            step = self.engine.step()
            self.seconds += self.clock() - began_s
            self.seconds -= chooser.spent_s - spent_s if isinstance(chooser, Watched) else 0.0
            self.arms[str(step.arm)] = self.arms.get(str(step.arm), 0) + 1


def drains(cast: Cast, rows: int, repeats: int, temperature: float) -> list[Drain]:
    """Run `repeats` batches, one after the other; in the first one the chooser has no data yet."""
    chooser = Watched(Goodput([parse_arm(arm) for arm in FIXED]))
    plain = engine_of(cast, rows, None, None, max_tokens=MAX_TOKENS)
    adaptive = engine_of(cast, rows, cast.layer, chooser, max_tokens=MAX_TOKENS)
    samples, rng = stream(cast.policy, temperature, seed=2), random.Random(0)
    found = []
    for _ in range(repeats):
        batch = [_unlimited(next(samples)) for _ in range(rows)]
        both = [Draining(engine, [engine.add(one) for one in batch]) for engine in (plain, adaptive)]
        while not all(one.is_done for one in both):
            for one in rng.sample(both, 2):
                one.turn()
        found.append(_found(cast, *both))
    return found


def tail(found: list[Drain]) -> float:
    """Return p99 over p50 of the lengths of all drains."""
    lengths = [length for drain in found for length in drain.lengths]
    middle, long = np.percentile(lengths, [50, 99])
    return float(long / middle)


def _found(cast: Cast, plain: Draining, adaptive: Draining) -> Drain:
    lengths = tuple(len(rollout.tokens) for rollout in plain.rollouts)
    same = Same.of(cast.model, plain.rollouts, adaptive.rollouts)
    return Drain(plain.seconds, adaptive.seconds, lengths, same, adaptive.arms)


def _unlimited(prompt: Prompt) -> Prompt:
    most = MAX_TOKENS - len(prompt.tokens)
    stop_tokens = (ByteTokenizer().eos_id,)
    return replace(prompt, sampling=replace(prompt.sampling, max_new_tokens=most, stop_tokens=stop_tokens))
