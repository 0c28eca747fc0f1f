"""Measure the choice of the drafting arm: `auto` beside no drafts and beside each fixed arm.

    python -m benchmarks.choice [--quick] [--policies 0.3m,1m,10m,30m,124m] [--rows 1,2,4] [--json FILE]

Random policies generate two kinds of text. At temperature 1 no draft is ever accepted: nothing can be gained,
and `auto` must lose nothing. At temperature 0 the text soon repeats itself, and the suffix drafter finds what
follows. `auto` has what a server gives it: the suffix drafter, an untrained draft layer, and the collection
of features for its training. All make the same tokens, by short turns; only processor time counts.

Engines that do the same differ by 1 % on a core of their own (`taskset`), and by up to 12 % beside others. So
plain decoding has two of them: `off` is their mean, and their ratio shows what cannot be told apart.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from aedit.spec_rollout.choose import Fixed, Goodput
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine, EngineSource
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Sampling
from aedit.spec_rollout.training import OnlineConfig, OnlineDrafter
from benchmarks.kit import tables
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report

ABOUT = "The choice of the drafting arm: auto beside off and each fixed arm, processor time per token."
METHOD = (
    "Random policies, fp32, one thread; the same tokens by turns; processor time of steps and prompts.",
    "Text: random (T = 1, nothing is accepted) or repeating (T = 0). Ratios: median over turns [95 %].",
    "Off is the mean of two equal engines; off / off is one over the other.",
)
SHAPES = {
    "0.3m": (256, 96, 256, 3, 32),
    "1m": (256, 128, 384, 5, 32),
    "10m": (256, 320, 864, 8, 32),
    "30m": (256, 512, 1376, 9, 32),
    "124m": (50_304, 768, 2048, 12, 64),
}
"""By size: vocabulary, hidden size, intermediate size, layers, size of a head."""
OFF, AGAIN, AUTO = "off", "off again", "auto"
FIXED = ("suffix:2", "suffix:4", "suffix:8")
AUTO_ARMS = (*FIXED, "layer:1", "layer:2", "layer:4", "layer:8", "layer:4x2x8")
"""Candidates of a run."""
TEXTS = {"random": 1.0, "repeating": 0.0}
PROMPT, NEW = 16, (60, 420)
"""Tokens of a prompt, and least and most of an answer: rows of one length for all time would be a case that
plain decoding alone has."""
MAX_NODES = 8
OF_OFF, OF_BEST, CHOOSING = 0.98, 0.95, 0.02
LOGIT_DEVIATION = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    policies: tuple[str, ...] = ("0.3m", "1m", "10m", "30m")
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    repeats: int = 160
    turn_tokens: int = 12
    """Tokens of a row in a turn: short, as the speed of a shared machine changes within seconds."""
    warm_tokens: int = 512
    """The same before the turns that count: `auto` has then timed its arms."""
    least_tokens: int = 48
    """Tokens of all rows in a turn, at least, and a fortieth of those before."""


QUICK = Plan(
    policies=("0.3m", "1m"), rows=(1, 8), repeats=16, turn_tokens=12, warm_tokens=128, least_tokens=12
)


@dataclass(slots=True)
class Contestant:
    """Engine that works through an endless stream of samples, as a run does: by its `EngineSource`."""

    source: EngineSource
    stream: Iterator[Prompt]
    spent_s: list[float] = field(default_factory=list)
    """Processor seconds per token of each turn."""
    _owed: int = 0
    _queued: int = 0

    def turn(self, num_tokens: int) -> float:
        """Make `num_tokens` tokens, less the surplus of the last turn; return processor seconds per token."""
        self._owed += num_tokens
        engine, tokens, began_s = self.source.engine, 0, time.process_time()
        before = engine.meters.num_tokens
        while tokens < self._owed or not tokens:
            while self._queued < 2 * engine.target.rows:
                self.source.add([next(self.stream)])
                self._queued += 1
            self._queued -= len(self.source.step())
            tokens = engine.meters.num_tokens - before
        self._owed -= tokens
        return (time.process_time() - began_s) / tokens


@dataclass(frozen=True, slots=True)
class Cell:
    """Processor seconds per token, by contestant and turn."""

    policy: str
    rows: int
    text: str
    spent_s: dict[str, list[float]]
    choosing: float
    """Share of its steps' cost that `auto` spent on choosing."""
    arms: dict[str, int]
    """Steps of `auto` by arm."""

    def times(self, name: str) -> list[float]:
        """Return the processor seconds per token of each turn; of off the mean of both engines."""
        if name != OFF:
            return self.spent_s[name]
        return [(a + b) / 2 for a, b in zip(self.spent_s[OFF], self.spent_s[AGAIN], strict=True)]

    def speed(self, name: str, of: str) -> Interval:
        """Return the tokens per second of `name` over those of `of`."""
        return Interval.of([b / a for a, b in zip(self.times(name), self.times(of), strict=True)])

    @property
    def control(self) -> Interval:
        """Return the tokens per second of one engine without drafts over those of an equal one."""
        return Interval.of([b / a for a, b in zip(self.spent_s[AGAIN], self.spent_s[OFF], strict=True)])

    @property
    def best(self) -> str:
        """Return the fixed arm, off included, that was the cheapest in hindsight."""
        return min((OFF, *FIXED), key=lambda name: median(self.times(name)))

    @property
    def where(self) -> str:
        return f"{self.policy}, {self.rows} rows, {self.text}"


def stream(vocabulary: int, temperature: float) -> Iterator[Prompt]:
    """Yield samples without end, the same for all."""
    draw = random.Random(0)
    for number in count():
        tokens = tuple(draw.randrange(vocabulary) for _ in range(PROMPT))
        how = Sampling(temperature=temperature, max_new_tokens=draw.randint(*NEW))
        yield Prompt(tokens=tokens, rollout=number, sampling=how)


def contestant(model: PreTrainedModel, rows: int, name: str, temperature: float) -> Contestant:
    """Return the engine of one contestant."""
    target = Target.of(model, rows=rows, max_tokens=PROMPT + NEW[1], nodes=MAX_NODES)
    samples = stream(target.vocabulary, temperature)
    if name in (OFF, AGAIN):
        return Contestant(EngineSource(Engine(target)), samples)
    drafters: dict[DrafterKind, Drafter] = {"suffix": SuffixDrafter()}
    if name != AUTO:
        engine = Engine(target, drafters=drafters, chooser=Fixed.of(name))
        return Contestant(EngineSource(engine), samples)
    online = OnlineDrafter.of(target, config=OnlineConfig(train=False))
    assert online.drafter is not None
    drafters["layer"] = online.drafter
    engine = Engine(target, drafters=drafters, chooser=Goodput([parse_arm(arm) for arm in AUTO_ARMS]))
    engine.sink = online.sink
    return Contestant(EngineSource(engine, online), samples)


def cell(model: PreTrainedModel, policy: str, rows: int, text: str, plan: Plan) -> Cell:
    """Measure all contestants by turns, in random order."""
    names = (OFF, AGAIN, AUTO, *FIXED)
    racers = {name: contestant(model, rows, name, TEXTS[text]) for name in names}
    for racer in racers.values():
        racer.turn(max(plan.warm_tokens * rows, 40 * plan.least_tokens))
    draw, spent_s = random.Random(rows), {name: list[float]() for name in names}
    meters = racers[AUTO].source.engine.meters
    before = meters.choosing_s, meters.cost_s
    for _ in range(plan.repeats):
        for name in draw.sample(names, len(names)):
            spent_s[name].append(racers[name].turn(max(plan.turn_tokens * rows, plan.least_tokens)))
    choosing = (meters.choosing_s - before[0]) / (meters.cost_s - before[1])
    return Cell(policy, rows, text, spent_s, choosing, dict(meters.arms.most_common(3)))


def measure(plan: Plan, say: Callable[[str], None], *, quick: bool = False) -> Report:
    """Measure every cell."""
    torch.set_num_threads(1)
    cells = []
    for policy in plan.policies:
        model = sharp_policy(policy)
        for rows in plan.rows:
            for text in TEXTS:
                cells.append(cell(model, policy, rows, text, plan))
                say(f"{cells[-1].where}: auto {cells[-1].speed(AUTO, OFF)} of off")
    return report(cells, quick=quick)


def sharp_policy(policy: str) -> PreTrainedModel:
    """Return a random policy with a head of its own and logits of `LOGIT_DEVIATION`.

    With equal logits the noise that drafts share would decide every token, and with tied embeddings a policy
    of sharp logits repeats its last token.
    """
    vocabulary, size, inner, layers, head_size = SHAPES[policy]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=size,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=size // head_size,
        num_key_value_heads=size // head_size,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM  # its methods carry no types
    model: PreTrainedModel = automatic.from_config(config, dtype=torch.float32)
    model.train(False)
    model.requires_grad_(False)
    model.state_dict()["lm_head.weight"].normal_(std=LOGIT_DEVIATION / size**0.5)
    return model


def report(cells: Sequence[Cell], *, quick: bool) -> Report:
    """Return the table and its bars."""
    rows = [
        (
            each.policy,
            str(each.rows),
            each.text,
            *(f"{1e6 * median(each.times(name)):.0f}" for name in (OFF, *FIXED, AUTO)),
            str(each.control),
            str(each.speed(AUTO, OFF)),
            f"{each.speed(AUTO, each.best)} {each.best}",
            percent(each.choosing),
            " ".join(f"{arm} {steps}" for arm, steps in each.arms.items()),
        )
        for each in cells
    ]
    ratios = ("off / off", "auto / off", "auto / best")
    columns = ("policy", "rows", "text", OFF, *FIXED, AUTO, *ratios, "choosing", "steps")
    of_off = min(cells, key=lambda each: each.speed(AUTO, OFF).middle)
    of_best = min(cells, key=lambda each: each.speed(AUTO, each.best).middle)
    choosing = max(cells, key=lambda each: each.choosing)
    worst = of_off.speed(AUTO, OFF).middle, of_best.speed(AUTO, of_best.best).middle, choosing.choosing
    bars: tuple[Bar, ...] = (
        Bar(f"auto at least {worst[0]:.3f} of off ({of_off.where}), bar {OF_OFF}", worst[0] >= OF_OFF),
        Bar(
            f"auto at least {worst[1]:.3f} of the best ({of_best.where}), bar {OF_BEST}", worst[1] >= OF_BEST
        ),
        Bar(
            f"choosing at most {percent(worst[2])} of a step ({choosing.where}), bar {percent(CHOOSING)}",
            worst[2] <= CHOOSING,
        ),
    )
    if quick:
        bars = tuple(Bar(bar.text, bar.passed or None) for bar in bars)
    figures = {
        "cells": [
            {"policy": each.policy, "rows": each.rows, "text": each.text, "spent_s": each.spent_s}
            | {"choosing": each.choosing, "arms": each.arms}
            for each in cells
        ]
    }
    return Report(
        "choice of the arm (microseconds of processor time per token)",
        METHOD,
        columns,
        tuple(rows),
        bars,
        figures,
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policies", metavar="LIST", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--rows", metavar="LIST", help="numbers of running samples, separated by commas")
    parser.add_argument("--repeats", type=int, help="turns of each contestant")


def _measure(args: Any) -> Report | str:
    plan = QUICK if args.quick else Plan()
    policies = tuple(args.policies.split(",")) if args.policies else plan.policies
    if unknown := set(policies) - set(SHAPES):
        return f"--policies {', '.join(sorted(unknown))}: expected some of {', '.join(SHAPES)}"
    rows = tuple(map(int, args.rows.split(","))) if args.rows else plan.rows
    repeats = args.repeats or plan.repeats
    plan = replace(plan, policies=policies, rows=rows, repeats=repeats)
    return measure(plan, Console(stderr=True).print, quick=args.quick)


if __name__ == "__main__":
    tables.main("choice", ABOUT, _measure, options=_options)
