"""Engines in virtual time: each computes for real and takes the time that `Times` declares.

One engine computes at a time, the one whose clock is furthest behind. So four of them fit on one core, and
the same samples give the same figures whatever the load of the machine.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedModel

from aedit.spec_rollout.choose import ArmChooser
from aedit.spec_rollout.drafters import Arm, Draft, Drafter, DrafterKind, Noise, RowStart, StepUpdate
from aedit.spec_rollout.engine import Engine, Step
from aedit.spec_rollout.model import Segment, Target
from aedit.spec_rollout.remote import LocalEngine, Reallocator
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey
from benchmarks.tail_parts.times import Times

LOOK_S = 0.05
"""Virtual time between looks for what should move. One takes 0.3 ms, 4 ms if much moves (measured, for 128
samples), on one core for all engines: it is not counted.
"""
NODES = 8
"""Most that are drafted."""


@dataclass(slots=True)
class Clock:
    """Clock of one node."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


class PacedTarget(Target):
    """Target whose computations take declared times on a clock."""

    def __init__(self, model: PreTrainedModel, *, rows: int, max_tokens: int, times: Times) -> None:
        super().__init__(model, rows, max_tokens, NODES, ())
        self.times, self.clock = times, Clock()
        self.copies_s: list[float] = []
        """Copy times of samples that came with their keys and values."""

    def step(
        self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        num_rows, q = tokens_Bq.shape
        self.clock.now_s += self.times.step(num_rows, q - 1)
        return super().step(tokens_Bq, lengths_B, parents_BN)

    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        self.clock.now_s += sum(self.times.prefill(len(segment.tokens)) for segment in segments)
        return super().prefill(segments)

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        super().write_kv(row, kv, start)
        self.copies_s.append(kv.shape[3] * self.times.copy_s)
        self.clock.now_s += self.copies_s[-1]


@dataclass(frozen=True, slots=True)
class PacedDrafter:
    """Drafter whose guesses take declared times on its engine's clock."""

    inner: Drafter
    times: Times
    clock: Clock

    @property
    def version(self) -> int:
        return int(getattr(self.inner, "version", 0))

    def begin(self, rows: Sequence[RowStart]) -> None:
        self.inner.begin(rows)

    def update(self, taken: StepUpdate) -> None:
        self.inner.update(taken)

    def move(self, source: int, target: int) -> None:
        self.inner.move(source, target)

    def end(self, row: int) -> None:
        self.inner.end(row)

    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        self.clock.now_s += self.times.draft(arm, rows)
        return self.inner.propose(arm, rows, noise, temperature_B)


class Node(LocalEngine):
    """One engine of the four."""

    def __init__(
        self, target: PacedTarget, drafters: Mapping[DrafterKind, Drafter], chooser: ArmChooser | None
    ):
        self.clock, self.target = target.clock, target
        self.clock.now_s, self.busy_s, self.num_emptied = 0.0, 0.0, 0
        self.target.copies_s.clear()
        paced: dict[DrafterKind, Drafter] = {
            by: PacedDrafter(drafter, target.times, self.clock) for by, drafter in drafters.items()
        }
        super().__init__(Engine(target, drafters=paced, chooser=chooser))
        self.engine.clock = self.engine.cost_clock = self.clock

    @property
    def has_work(self) -> bool:
        return bool(self.engine.running or self.engine.waiting)

    def step(self) -> Step:
        began_s = self.clock.now_s
        step = super().step()
        self.busy_s += self.clock.now_s - began_s
        return step

    def remove(self, key: SampleKey) -> Prompt | None:
        prompt = super().remove(key)
        self.num_emptied += prompt is not None and not self.has_work
        return prompt


@dataclass(slots=True)
class Way:
    """Method and result of one batch."""

    seconds: float = 0.0
    """Seconds until the last engine had finished."""
    rollouts: dict[SampleKey, Rollout] = field(default_factory=dict)
    moves: Counter[SampleKey] = field(default_factory=Counter)
    num_emptied: int = 0
    """Engines that were idle after they had given a sample away."""
    busy_share: float = 0.0
    copies_s: list[float] = field(default_factory=list)
    arms: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class World:
    """Nodes, and the time of the one that is furthest behind."""

    nodes: Sequence[Node]
    now_s: float = 0.0
    way: Way = field(default_factory=Way)

    def run(self, reallocator: Reallocator | None) -> Way:
        """Run until all have finished their samples. reallocator: over these nodes, on this world's time."""
        look_s = LOOK_S
        while busy := [node for node in self.nodes if node.has_work]:
            node = min(busy, key=lambda node: node.clock.now_s)
            self.now_s = max(self.now_s, node.clock.now_s)
            if reallocator is not None and self.now_s >= look_s:
                self._look(reallocator)
                look_s = self.now_s + LOOK_S
                continue
            for rollout in node.step().finished:
                self._ended(rollout, reallocator)
        return self._told()

    def _look(self, reallocator: Reallocator) -> None:
        for move in reallocator.rebalance():
            self.way.moves[move.key] += 1
            # A sample that left in the middle of a step arrives when the step has ended.
            source, target = self.nodes[move.source].clock, self.nodes[move.target].clock
            target.now_s = max(target.now_s, source.now_s, self.now_s)

    def _ended(self, rollout: Rollout, reallocator: Reallocator | None) -> None:
        key = rollout.prompt.rollout, rollout.prompt.sample
        if key in self.way.rollouts:
            raise RuntimeError(f"sample {key} was made twice")
        self.way.rollouts[key] = rollout
        if reallocator is not None:
            reallocator.record_finished(rollout)

    def _told(self) -> Way:
        way, nodes = self.way, self.nodes
        way.seconds = max(node.clock.now_s for node in nodes)
        way.num_emptied = sum(node.num_emptied for node in nodes)
        way.busy_share = sum(node.busy_s for node in nodes) / (len(nodes) * way.seconds)
        way.copies_s = [copy_s for node in nodes for copy_s in node.target.copies_s]
        for node in nodes:
            way.arms += node.engine.meters.arms
        return way
