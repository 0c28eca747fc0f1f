"""Migration of samples between engines: tokens, and inside one process keys and values too.

Tokens are a few kilobytes, keys and values megabytes: computing a text again is faster than sending them over
most networks, and slower than copying them. With coupled sampling a sample that moves gets the same tokens as
one that stays. For ranks of a process group see `rank_transfer`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

from aedit.spec_rollout.engine import Engine, SpeedMeter, Step
from aedit.spec_rollout.remote.reallocate import (
    EngineLoad,
    LengthDistribution,
    Migration,
    MigrationRule,
    UnfinishedSample,
    group_scales,
    plan,
)
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey

HISTORY_ROLLOUTS = 4096
"""Number of newest rollouts whose lengths are used, as the policy changes."""


class MigratableEngine(Protocol):
    """An engine whose samples can move, local or remote. A call that raises OSError has had no effect."""

    def load(self) -> EngineLoad | None:
        """Return the work of the engine; None while its speed is unknown.

        The caller fills in `EngineLoad.since_move_s`, `UnfinishedSample.visited` and
        `UnfinishedSample.scale`.
        """

    def remove(self, key: SampleKey) -> Prompt | None:
        """Remove a sample between two steps; return None if it has finished meanwhile."""

    def add(self, prompt: Prompt) -> None:
        """Add a sample.

        Raises:
            ValueError: It cannot be served here. Nothing has changed.
        """


class LocalEngine:
    """An `Engine` of this process as a `MigratableEngine`. Call its `step` instead of the engine's."""

    def __init__(self, engine: Engine, *, kv: bool = True) -> None:
        """Wrap `engine`.

        Args:
            engine: The engine.
            kv: Samples leave with keys and values and arrive without prefill if the other engine does the
                same.
        """
        self.engine, self._kv = engine, kv
        self._meter = SpeedMeter()

    def step(self) -> Step:
        """Run one step of the engine and measure its speed."""
        step = self.engine.step()
        if step.counts:
            num_live = len(step.counts)
            self._meter.add(num_live, step.total_s * num_live / sum(step.counts))
        return step

    def load(self) -> EngineLoad | None:
        """Return the work of the engine; None before its first step."""
        speed = self._meter.speed()
        if speed is None:
            return None
        if self._kv:
            speed = replace(speed, prefill_s=0.0)  # a copy is part of `MigrationRule.overhead_s`
        samples = tuple(map(UnfinishedSample.of, [*self.engine.running, *self.engine.waiting]))
        return EngineLoad(samples, self.engine.target.rows, speed)

    def remove(self, key: SampleKey) -> Prompt | None:
        """Remove a sample; return None if it is not here."""
        for rollout in [*self.engine.running, *self.engine.waiting]:
            if rollout.prompt.key == key:
                return self.engine.remove(rollout, kv=self._kv)
        return None

    def add(self, prompt: Prompt) -> None:
        """Add a sample."""
        self.engine.add(prompt)


class Reallocator:
    """Moves samples between engines according to `plan`.

    No sample is lost: one that its target refuses returns to its source, and one that the source refuses as
    well is kept until an engine accepts it.
    """

    def __init__(
        self,
        engines: Mapping[int, MigratableEngine],
        rule: MigrationRule | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make a reallocator.

        Args:
            engines: Engines by index; more may be added.
            rule: When a migration pays.
            clock: Monotonic seconds.
        """
        self._engines, self._rule, self._clock = engines, rule or MigrationRule(), clock
        self._completed: deque[tuple[int, int]] = deque(maxlen=HISTORY_ROLLOUTS)
        self._cut: deque[tuple[int, int]] = deque(maxlen=HISTORY_ROLLOUTS)
        self._visited: dict[SampleKey, tuple[int, ...]] = {}
        self._moved_at: dict[int, float] = {}
        self._unplaced: list[Prompt] = []
        self.num_moves = 0
        self.num_refused = 0
        self.overhead_s = 0.0
        """Seconds of all `rebalance` calls, during which local engines do not step."""

    def record_finished(self, rollout: Rollout) -> None:
        """Record the length of a finished rollout.

        Call it for each one: predictions are based on these lengths.
        """
        lengths = self._completed if rollout.finish_reason == "stop" else self._cut
        lengths.append((rollout.prompt.group, len(rollout.tokens)))
        self._visited.pop(rollout.prompt.key, None)

    def lengths(self, growing: Iterable[int]) -> LengthDistribution:
        """Return the distribution of lengths, of finished rollouts and of unfinished ones, so far."""
        cut = (length for _, length in self._cut)
        return LengthDistribution.of((length for _, length in self._completed), [*growing, *cut])

    def rebalance(self) -> list[Migration]:
        """Move the samples whose migration pays now and return the migrations.

        Call it a few times per second, or more often where steps take milliseconds. It is cheap when nothing
        moves.
        """
        began = self._clock()
        self._place_unplaced()
        loads = {i: load for i, engine in self._engines.items() if (load := self._load(i, engine))}
        growing = [(sample.group, sample.emitted) for load in loads.values() for sample in load.samples]
        lengths = self.lengths(emitted for _, emitted in growing)
        relative = group_scales(self._completed, [*growing, *self._cut])
        scales = {group: scale for group, scale in relative.items() if group >= 0}
        scaled: dict[int, EngineLoad] = {}
        for i, load in loads.items():
            samples = (replace(each, scale=scales.get(each.group, 1.0)) for each in load.samples)
            scaled[i] = replace(load, samples=tuple(samples))
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
        """Add samples that no engine has accepted so far to an engine that accepts them."""
        unplaced, self._unplaced = self._unplaced, []
        for prompt in unplaced:
            if not any(self._add(i, prompt) for i in self._engines):
                self._unplaced.append(prompt)

    def _add(self, i: int, prompt: Prompt) -> bool:
        try:
            self._engines[i].add(prompt)
        except (OSError, ValueError):
            return False
        return True
