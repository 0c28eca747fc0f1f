"""Our steps alone: noise, new weights under live samples, and a choice that has nothing to gain."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from transformers import PreTrainedModel

from aedit.spec_rollout.choose import ArmChooser, Goodput
from aedit.spec_rollout.drafters import SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.decode_parts.policy import vocabulary
from benchmarks.decode_parts.systems import random_texts
from benchmarks.kit.statistics import Interval, median
from benchmarks.rollout_parts.stream import Contestant, race

PLAIN, AGAIN, AUTO = "plain", "plain again", "auto, suffix"
SUFFIX_ARMS = ("suffix:2", "suffix:4", "suffix:8")
"""Candidates of `aedit generate --arm auto` without a draft layer."""
PROMPT, NEW = 16, 240
"""Tokens of a sample of the stream, on which `auto` is compared with plain decoding."""
STEPS_PER_REPEAT = 4
"""Plain steps before and after new weights are handed over."""
SPARE = 64
"""Tokens that the first rows may have made when the last one has begun."""


@dataclass(frozen=True, slots=True)
class Update:
    """Hand-over of new weights under live samples."""

    dtype: str
    rows: int
    tokens: int
    """Tokens of each live sample before the first hand-over."""
    update_s: list[float]
    step_s: list[float]
    """A plain step before and after each, median."""

    @property
    def in_steps(self) -> Interval:
        """Return the plain steps that take as long."""
        return Interval.of([a / b for a, b in zip(self.update_s, self.step_s, strict=True)])


@dataclass(frozen=True, slots=True)
class Noise:
    """Steps at T = 1 beside greedy ones."""

    dtype: str
    rows: int
    greedy_s: list[float]
    """Seconds of a step, by turn."""
    sampled_s: list[float]

    @property
    def extra(self) -> Interval:
        """Return the share of a greedy step that coupled sampling adds."""
        return Interval.of([a / b - 1 for a, b in zip(self.sampled_s, self.greedy_s, strict=True)])


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens per second, by turn, where drafts are never accepted: a random policy at T = 1."""

    dtype: str
    rows: int
    rates: dict[str, list[float]]

    def over_plain(self, name: str) -> Interval:
        return Interval.of([a / b for a, b in zip(self.rates[name], self.rates[PLAIN], strict=True)])


def update(model: PreTrainedModel, dtype: str, rows: int, tokens: int, repeats: int) -> Update:
    """Measure `update_weights` with `rows` live samples, between plain steps."""
    live = tokens - STEPS_PER_REPEAT
    num_new = STEPS_PER_REPEAT * (2 * repeats + 4) + SPARE
    engine = Engine.of(model, rows=rows, max_tokens=tokens + num_new)
    _fill(engine, live, num_new, temperature=1.0)
    # Other memory than the model's, so that it is copied as from a trainer.
    weights = {name: value.clone() for name, value in model.named_parameters()}
    found = Update(dtype, rows, tokens, [], [])
    for version in range(1, repeats + 2):
        before_s = _steps(engine, STEPS_PER_REPEAT)
        began_s = time.perf_counter()
        engine.update_weights(weights, version)
        took_s = time.perf_counter() - began_s
        if version > 1:  # the first does one-time work
            found.update_s.append(took_s)
            found.step_s.append(median(before_s + _steps(engine, STEPS_PER_REPEAT)))
    return found


def noise(model: PreTrainedModel, dtype: str, rows: int, turn_steps: int, repeats: int) -> Noise:
    """Measure steps of two engines by turns: greedy, and at T = 1."""
    num_new = turn_steps * (repeats + 1) + SPARE
    engines = [Engine.of(model, rows=rows, max_tokens=PROMPT + num_new) for _ in range(2)]
    for engine, temperature in zip(engines, (0.0, 1.0), strict=True):
        _fill(engine, PROMPT, num_new, temperature)
    rng, found = random.Random(0), Noise(dtype, rows, [], [])
    for repeat in range(repeats + 1):
        for i in rng.sample(range(2), 2):
            # The mean: noise that is computed ahead comes with some of the steps.
            seconds = sum(_steps(engines[i], turn_steps)) / turn_steps
            if repeat:
                (found.greedy_s, found.sampled_s)[i].append(seconds)
    return found


def choice(model: PreTrainedModel, dtype: str, rows: int, turn_tokens: int, repeats: int) -> Choice:
    """Measure plain decoding twice and `auto` with the suffix drafter, by turns, on a stream of samples."""
    racers = [
        _contestant(model, rows, PLAIN, None),
        _contestant(model, rows, AGAIN, None),
        _contestant(model, rows, AUTO, Goodput([parse_arm(arm) for arm in SUFFIX_ARMS])),
    ]
    rates = race(racers, turn_tokens, 1 + repeats, random.Random(rows))
    return Choice(dtype, rows, {name: values[1:] for name, values in rates.items()})


def _contestant(model: PreTrainedModel, rows: int, name: str, chooser: ArmChooser | None) -> Contestant:
    target = Target.of(model, rows=rows, max_tokens=PROMPT + NEW)
    if chooser is None:
        return Contestant(name, Engine(target), _stream(model))
    return Contestant(
        name, Engine(target, drafters={"suffix": SuffixDrafter()}, chooser=chooser), _stream(model)
    )


def _stream(model: PreTrainedModel) -> Iterator[Prompt]:
    """Yield samples without end, the same for all."""
    rng, num_ids = random.Random(0), vocabulary(model)
    for number in count():
        (tokens,) = random_texts(num_ids, 1, PROMPT, rng)
        how = Sampling(temperature=1.0, max_new_tokens=NEW)
        yield Prompt(tokens=tuple(tokens), rollout=number, sampling=how)


def _fill(engine: Engine, length: int, new: int, temperature: float) -> None:
    """Start a sample in every row and make its first token."""
    how = Sampling(temperature=temperature, max_new_tokens=new)
    rows = engine.target.rows
    for i, tokens in enumerate(random_texts(engine.target.vocabulary, rows, length, random.Random(1))):
        engine.add(Prompt(tokens=tuple(tokens), rollout=i, sampling=how))
    # Prompts may be computed in parts, over several steps.
    while len(engine.running) < rows or not all(rollout.tokens for rollout in engine.running):
        engine.step()


def _steps(engine: Engine, num_steps: int) -> list[float]:
    """Return the seconds of each step."""
    found = []
    for _ in range(num_steps):
        began_s = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - began_s)
    return found
