"""Measure one batch size: engines with different drafters take turns at the same stream of samples.

Samples have their natural ends (a stop token; Python text, which has none, ends after a length that is drawn
once for all), and a free row takes the next sample at once. So the batch is constant without forcing any
sample beyond the end of its answer, which would be an unrepresentative text. Prompts are computed in the
measured time, one per sample, in all engines alike.

A turn is a number of tokens per row. All engines take it in each repeat, in a random order; what an engine
makes beyond its turn counts for its next one, so that all stay at the same place of the stream.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from transformers import PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import (
    Arm,
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    parse_arm,
)
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from benchmarks.policies import Policy, prompts
from benchmarks.rollout_parts.watch import Watched

PLAIN, AGAIN, ADAPTIVE, RANDOM = "plain", "plain again", "adaptive", "random drafter"
FIXED = ("suffix:4", "suffix:8", "layer:1", "layer:2", "layer:4", "layer:8", "layer:4x2x8")
MAX_TOKENS, MAX_PROMPT = 640, 128
PYTHON_TOKENS = (64, 320)
"""New tokens of a sample that has no natural end, drawn evenly."""


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Policy and its drafters."""

    policy: Policy
    model: PreTrainedModel
    layer: DraftLayer
    untrained: DraftLayer


@dataclass(slots=True, eq=False)
class Contestant:
    """Engine that works through the stream."""

    name: str
    engine: Engine
    stream: Iterator[Prompt]
    rollouts: list[Rollout] = field(default_factory=list)
    """Rollouts that it has begun or will begin next, in the order of the stream."""
    step_rates: list[float] = field(default_factory=list)
    """Tokens per second of each turn's steps alone: without the computation of prompts, which takes as long
    whatever is drafted, and which no forecast of a step speaks of."""
    clock: Callable[[], float] = time.perf_counter
    _owed: int = 0
    _queued: int = 0

    @property
    def watch(self) -> Watched | None:
        return self.engine.chooser if isinstance(self.engine.chooser, Watched) else None

    def turn(self, num_tokens: int) -> float:
        """Make `num_tokens` tokens, all rows together, less the surplus of the last turn.

        Return tokens per second.
        """
        self._owed += num_tokens
        tokens, seconds, of_steps_s = 0, 0.0, 0.0
        while tokens < self._owed:
            self._queue()
            spent_s = self.watch.spent_s if self.watch else 0.0
            began_s = self.clock()
            step = self.engine.step()
            seconds += self.clock() - began_s
            seconds -= self.watch.spent_s - spent_s if self.watch else 0.0
            of_steps_s += step.total_s
            tokens += sum(step.counts)
            self._queued -= len(step.finished)
        self._owed -= tokens
        self.step_rates.append(tokens / of_steps_s)
        return tokens / seconds

    def _queue(self) -> None:
        """Keep as many samples queued as could end in one step."""
        while self._queued < 2 * self.engine.target.rows:
            self.rollouts.append(self.engine.add(next(self.stream)))
            self._queued += 1


def stream(policy: Policy, temperature: float, seed: int) -> Iterator[Prompt]:
    """Yield samples without end, the same for the same arguments.

    Each has a prompt of its own and belongs to no group, so that no drafter gains from other samples.
    """
    rng, samples = random.Random(seed), count()
    for chunk in count():
        for tokens in prompts(policy, 64, seed * 4096 + chunk):
            if len(tokens) <= MAX_PROMPT:
                how = _sampling(policy, temperature, rng)
                yield Prompt(tokens=tokens, rollout=seed, sample=next(samples), sampling=how)


def contestants(cast: Cast, rows: int, temperature: float, seed: int) -> list[Contestant]:
    """Return plain decoding twice, each fixed arm, the chooser, and the chooser with a random layer.

    One-time work of the target has been done.
    """

    def one(name: str, layer: DraftLayer | None, chooser: ArmChooser | None) -> Contestant:
        engine = engine_of(cast, rows, layer, chooser)
        return Contestant(name, engine, stream(cast.policy, temperature, seed))

    arms = [parse_arm(name) for name in FIXED]
    of_layer = [arm for arm in arms if arm.drafter == "layer"]
    return [
        one(PLAIN, None, None),
        one(AGAIN, None, None),
        *(one(str(arm), cast.layer, Fixed(arm)) for arm in arms),
        one(ADAPTIVE, cast.layer, Watched(Goodput(arms))),
        one(RANDOM, cast.untrained, Goodput(of_layer)),
    ]


def engine_of(
    cast: Cast,
    rows: int,
    layer: DraftLayer | None,
    chooser: ArmChooser | None,
    *,
    max_tokens: int = MAX_TOKENS,
) -> Engine:
    """Return an engine with the drafters that its chooser may use; their memory has been touched."""
    target = Target.of(cast.model, rows=rows, max_tokens=max_tokens)
    plain = Engine(target)
    sampling = Sampling(temperature=0.0, max_new_tokens=2)
    asked = [Prompt(tokens=(10,) * MAX_PROMPT, sample=i, sampling=sampling) for i in range(rows)]
    for _ in plain.generate(asked):
        pass
    drafters: dict[DrafterKind, Drafter] = {}
    allowed = _asked(chooser)
    if "suffix" in allowed:
        drafters["suffix"] = SuffixDrafter(device=str(target.device))
    if "layer" in allowed and layer is not None:
        drafters["layer"] = LayerDrafter.of(layer, target)
    return Engine(target, drafters=drafters, chooser=chooser)


def race(
    racers: Sequence[Contestant], turn_tokens: int, repeats: int, rng: random.Random
) -> dict[str, list[float]]:
    """Return the tokens per second of each engine, by repeat.

    In the first repeat the chooser learns, and what its watch records in it is discarded.
    """
    found: dict[str, list[float]] = {one.name: [] for one in racers}
    for repeat in range(repeats):
        for one in rng.sample(racers, len(racers)):
            found[one.name].append(one.turn(turn_tokens * one.engine.target.rows))
        for one in racers:
            if one.watch is not None and repeat == 0:
                one.watch.forget()
    return found


def random_layer(model: PreTrainedModel, seed: int = 0) -> DraftLayer:
    """Return an untrained layer with confident predictions."""
    generator = torch.Generator().manual_seed(seed)
    layer = DraftLayer.of(model, generator=generator)
    with torch.no_grad():
        for value in layer.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=generator).to(value))
    return layer


def _asked(chooser: ArmChooser | None) -> set[DrafterKind]:
    match chooser:
        case Watched(inner=Goodput(arms=arms)) | Goodput(arms=arms):
            return {arm.drafter for arm in arms}
        case Fixed(arm=Arm(drafter=by)):
            return {by}
    return set()


def _sampling(policy: Policy, temperature: float, rng: random.Random) -> Sampling:
    if policy.task == "python":
        return Sampling(temperature=temperature, max_new_tokens=rng.randint(*PYTHON_TOKENS))
    most, stop_tokens = MAX_TOKENS - MAX_PROMPT, (ByteTokenizer().eos_id,)
    return Sampling(temperature=temperature, max_new_tokens=most, stop_tokens=stop_tokens)
