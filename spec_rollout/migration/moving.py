"""Samples on their way between engines: the tokens move, and inside one process keys and values too.

Tokens are a few kilobytes, keys and values megabytes: to compute a text again is faster than to send them
over most networks, and slower than to copy them. With coupled sampling a sample that moves gets the same
tokens as one that stays. Between ranks of a process group samples move by `handing`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.engine.meters import Step
from aedit.spec_rollout.migration.lengths import LengthDistribution, group_scales
from aedit.spec_rollout.migration.reallocate import (
    EngineLoad,
    EngineSpeed,
    Migration,
    MigrationRule,
    SampleKey,
    UnfinishedSample,
    plan,
)
from aedit.spec_rollout.sampling.samples import Prompt, Rollout

DECAY = 0.99
"""What a step counts after each further one, when an engine's pace is measured."""
HISTORY_ROLLOUTS = 4096
"""Rollouts whose lengths say how long others will be: the last ones, as the policy changes."""
OUTLIER_FACTOR = 4.0
"""A step that took so many times what was expected counts as so many times."""


class MigratableEngine(Protocol):
    """An engine whose samples can move, here or elsewhere. A call that raises OSError has done nothing."""

    def load(self) -> EngineLoad | None:
        """None as long as its pace is not known. `EngineLoad.since_move_s`, `UnfinishedSample.visited` and
        `UnfinishedSample.scale` are filled
        in by who asks."""

    def remove(self, key: SampleKey) -> Prompt | None:
        """The sample leaves, between two steps; None if it has finished meanwhile."""

    def add(self, prompt: Prompt) -> None:
        """ValueError if it cannot be served here; nothing has changed then."""


class SpeedMeter:
    """An engine's `EngineSpeed` by what its steps took: least squares with forgetting, over the live
    samples."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5  # of 1, B, B^2, y, B y

    def add(self, live: int, token_s: float) -> None:
        """A step with `live` samples took `token_s` for each token that a sample got."""
        current = self.speed()
        if current is not None:
            token_s = min(token_s, OUTLIER_FACTOR * current.token_s(live))
        terms = (1.0, live, live * live, token_s, live * token_s)
        self._sums = [DECAY * old + more for old, more in zip(self._sums, terms, strict=True)]

    def speed(self) -> EngineSpeed | None:
        """None before the first step. To compute a token again costs at most what one more sample costs."""
        count, b, bb, y, by = self._sums
        if not count:
            return None
        spread = bb * count - b * b
        slope = max(0.0, (by * count - b * y) / spread) if spread > 1e-6 * bb * count else 0.0
        slope = min(slope, y / b)
        return EngineSpeed((y - slope * b) / count, slope, slope)


class LocalEngine:
    """An `Engine` of this process as a `MigratableEngine`. Whoever drives the engine calls `step` here."""

    def __init__(self, engine: Engine, *, kv: bool = True) -> None:
        """kv: its samples leave with their keys and values, and come without prefill if the others' do too;
        False where only tokens should move."""
        self.engine, self._kv = engine, kv
        self._meter = SpeedMeter()

    def step(self) -> Step:
        """One step of the engine, whose time tells its pace."""
        step = self.engine.step()
        if step.counts:
            num_live = len(step.counts)
            self._meter.add(num_live, step.total_s * num_live / sum(step.counts))
        return step

    def load(self) -> EngineLoad | None:
        speed = self._meter.speed()
        if speed is None:
            return None
        if self._kv:
            speed = replace(speed, prefill_s=0.0)  # a copy is part of `MigrationRule.overhead_s`
        samples = tuple(map(_sample, [*self.engine.running, *self.engine.waiting]))
        return EngineLoad(samples, self.engine.target.rows, speed)

    def remove(self, key: SampleKey) -> Prompt | None:
        for rollout in [*self.engine.running, *self.engine.waiting]:
            if _key(rollout.prompt) == key:
                return self.engine.remove(rollout, kv=self._kv)
        return None

    def add(self, prompt: Prompt) -> None:
        self.engine.add(prompt)


class Reallocator:
    """Moves samples between engines, by `plan`. None is lost: one that cannot go where it should goes back,
    and one that cannot go back is kept until some engine has it."""

    def __init__(
        self,
        engines: Sequence[MigratableEngine],
        rule: MigrationRule | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """engines: by their numbers, which must not change."""
        self._engines, self._rule, self._clock = engines, rule or MigrationRule(), clock
        self._ended: deque[tuple[int, int]] = deque(maxlen=HISTORY_ROLLOUTS)
        self._cut: deque[tuple[int, int]] = deque(maxlen=HISTORY_ROLLOUTS)
        self._visited: dict[SampleKey, tuple[int, ...]] = {}
        self._moved_at: dict[int, float] = {}
        self._unplaced: list[Prompt] = []
        self.num_moves = 0
        self.num_refused = 0
        self.overhead_s = 0.0
        """Of all `look`s together: engines of this process stand still meanwhile."""

    def record_finished(self, rollout: Rollout) -> None:
        """Tell of every rollout that has ended: the lengths that come are predicted from those there were."""
        lengths = self._ended if rollout.finish_reason == "stop" else self._cut
        lengths.append((rollout.prompt.group, len(rollout.tokens)))
        self._visited.pop(_key(rollout.prompt), None)

    def rebalance(self) -> list[Migration]:
        """Move what should move now; what has been moved. Costs nothing that matters when nothing should:
        call it a few times per second, or more often where steps take milliseconds."""
        began = self._clock()
        self._place_unplaced()
        loads = {i: load for i, engine in enumerate(self._engines) if (load := self._load(i, engine))}
        growing = [(sample.group, sample.emitted) for load in loads.values() for sample in load.samples]
        growing += self._cut
        lengths = LengthDistribution.of((n for _, n in self._ended), (n for _, n in growing))
        scales = {group: x for group, x in group_scales(self._ended, growing).items() if group >= 0}
        scaled = {i: _scaled(load, scales) for i, load in loads.items()}
        done = [move for move in plan(scaled, lengths, self._rule) if self._move(move)]
        self.overhead_s += self._clock() - began
        return done

    def _load(self, i: int, engine: MigratableEngine) -> EngineLoad | None:
        try:
            load = engine.load()
        except OSError:
            return None
        if load is None:
            return None
        samples = (replace(sample, visited=self._visited.get(sample.key, ())) for sample in load.samples)
        since_move_s = self._clock() - self._moved_at[i] if i in self._moved_at else math.inf
        return replace(load, samples=tuple(samples), since_move_s=since_move_s)

    def _move(self, move: Migration) -> bool:
        try:
            prompt = self._engines[move.source].remove(move.key)
        except OSError:
            return False
        if prompt is None:
            return False
        self._visited[move.key] = (*self._visited.get(move.key, ()), move.source)
        self._moved_at[move.source] = self._moved_at[move.target] = self._clock()
        if self._add(move.target, prompt):
            self.num_moves += 1
            return True
        self.num_refused += 1
        if not self._add(move.source, prompt):
            self._unplaced.append(prompt)
        return False

    def _place_unplaced(self) -> None:
        """Samples that no engine would have get a row where one has them now."""
        unplaced, self._unplaced = self._unplaced, []
        for prompt in unplaced:
            if not any(self._add(i, prompt) for i in range(len(self._engines))):
                self._unplaced.append(prompt)

    def _add(self, i: int, prompt: Prompt) -> bool:
        try:
            self._engines[i].add(prompt)
        except (OSError, ValueError):
            return False
        return True


def _sample(rollout: Rollout) -> UnfinishedSample:
    prompt, emitted = rollout.prompt, len(rollout.tokens)
    most = prompt.sampling.max_new_tokens
    return UnfinishedSample(_key(prompt), len(prompt.tokens) + emitted, emitted, most, prompt.group)


def _scaled(load: EngineLoad, scales: Mapping[int, float]) -> EngineLoad:
    samples = (replace(sample, scale=scales.get(sample.group, 1.0)) for sample in load.samples)
    return replace(load, samples=tuple(samples))


def _key(prompt: Prompt) -> SampleKey:
    return prompt.rollout, prompt.sample
