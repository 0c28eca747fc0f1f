"""Measure the speed of rollouts, and whether speculation ever slows them.

    python -m benchmarks.rollout [--task scratchpad|python] [--size 10m] [--batches 1,2,4] [--quick]

Policies and drafters are trained first if they do not exist (`benchmarks.policies`). Four parts: our
arms on a stream of samples, plain decoding beside `transformers`, a batch to its end, and what is wanted of
all that.
"""

import argparse
import gc
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import transformers
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import (
    ArmChooser,
    EngineView,
    Fixed,
    Floats,
    Goodput,
    StepObservation,
    accepted_nodes,
    score_bins,
)
from aedit.spec_rollout.drafters import (
    OFF,
    Arm,
    Draft,
    Drafter,
    DrafterKind,
    DraftLayer,
    LayerDrafter,
    SuffixDrafter,
    parse_arm,
)
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, gumbel
from benchmarks.kit import tables
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report
from benchmarks.policies import ROOT, Kind, Policy, load, prompts, ready, tasks
from benchmarks.policies import Size as PolicySize

# -- compare the tokens of two engines; a difference at a tie is arithmetic


TIE = 1e-4
"""Two tokens whose scores are nearer than this may change places by fp32 rounding."""


@dataclass(frozen=True, slots=True)
class Same:
    """Number of tokens compared, and of the first differences of samples.

    After its first difference a sample is another text, and is not compared further.
    """

    tokens: int = 0
    ties: int = 0
    """First differences of two tokens that float64 finds nearly equal."""
    differences: int = 0
    """The others: there must be none."""

    def __add__(self, other: "Same") -> "Same":
        return Same(self.tokens + other.tokens, self.ties + other.ties, self.differences + other.differences)

    @classmethod
    def of(cls, model: PreTrainedModel, ours: Iterable[Rollout], theirs: Iterable[Rollout]) -> "Same":
        """Compare samples in the same order, also unfinished ones."""
        made = (
            cls.of_tokens(model, a.prompt, a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=False)
        )
        return sum(made, cls())

    @classmethod
    def of_tokens(cls, model: PreTrainedModel, prompt: Prompt, a: list[int], b: list[int]) -> "Same":
        """Compare the tokens of one sample. model: the policy."""
        shared = min(len(a), len(b))
        at = next((i for i in range(shared) if a[i] != b[i]), None)
        if at is None:
            return cls(shared)
        is_tie = abs(gap(model, prompt, a[:at], (a[at], b[at]))) < TIE
        return cls(at, int(is_tie), int(not is_tie))


@torch.inference_mode()
def gap(model: PreTrainedModel, prompt: Prompt, before: list[int], pair: tuple[int, int]) -> float:
    """Return by how much the first of two tokens is ahead, by transformers' own forward pass in float64."""
    exact: Any = deepcopy(model)  # the engines compute with the model's own parameters
    ids = torch.tensor([[*prompt.tokens, *before]], device=exact.device)
    scores_V = exact.double()(input_ids=ids).logits[0, -1].log_softmax(-1)
    temperature = prompt.sampling.temperature
    if temperature > 0:
        position = torch.tensor([[len(prompt.tokens) + len(before)]])
        noise = gumbel(prompt.rollout, prompt.sample, position, len(scores_V), torch.float64)[0, 0]
        scores_V = scores_V / temperature + noise.to(scores_V.device)
    return float(scores_V[pair[0]] - scores_V[pair[1]])


# -- compare the predictions of `Goodput` with the outcome: step times, chances, speed-up


NUM_BINS = 20
"""Bins of a predicted chance; the chooser uses others."""


@dataclass(slots=True)
class Scores:
    """Predicted chances of nodes and their outcomes, by bins of the chance."""

    promised: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    accepted: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))
    nodes: Floats = field(default_factory=lambda: np.zeros(NUM_BINS))

    @property
    def error(self) -> float:
        """Return the expected calibration error; 0 without nodes."""
        total = float(self.nodes.sum())
        return float(np.abs(self.promised - self.accepted).sum()) / total if total else 0.0

    def add(self, chance: Floats, accepted: Floats) -> None:
        bins = np.minimum((chance * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self.promised += np.bincount(bins, chance, NUM_BINS)
        self.accepted += np.bincount(bins, accepted, NUM_BINS)
        self.nodes += np.bincount(bins, minlength=NUM_BINS)


@dataclass(frozen=True, slots=True)
class Foretold:
    """Errors of the predictions."""

    step_error: float
    """Mean of |foretold - measured| / measured of step times."""
    middle_step_error: float
    """Their median: what single long steps do not move."""
    chance_errors: dict[str, float]
    """Calibration error by drafter."""
    chance_nodes: dict[str, int]
    """Drafted nodes that the policy has judged, by drafter."""
    speedup: float
    """Over plain decoding: what the choice expected of the arms that it played."""
    steps: int


@dataclass(slots=True)
class Watched:
    """Chooser that chooses as `inner` does."""

    inner: Goodput
    clock: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0
    _errors: list[float] = field(default_factory=list)
    _scores: defaultdict[str, Scores] = field(default_factory=lambda: defaultdict(Scores))
    _seconds: float = 0.0
    _plain_s: float = 0.0
    """Plain decoding's for what the arms were expected to make in `_seconds`."""

    def choose(self, view: EngineView) -> Arm:
        return self.inner.choose(view)

    def trim(self, view: EngineView, arm: Arm, draft: Draft) -> int | Sequence[int]:
        return self.inner.trim(view, arm, draft)

    def learn(self, observed: StepObservation) -> None:
        began_s = self.clock()
        self._note_time(observed)
        self._note_chances(observed)
        self.spent_s += self.clock() - began_s
        self.inner.learn(observed)

    def forget(self) -> None:
        """Discard the records so far."""
        self._errors, self._scores = [], defaultdict(Scores)
        self._seconds = self._plain_s = 0.0

    @property
    def foretold(self) -> Foretold:
        return Foretold(
            step_error=float(np.mean(self._errors)) if self._errors else 0.0,
            middle_step_error=float(np.median(self._errors)) if self._errors else 0.0,
            chance_errors={by: scores.error for by, scores in self._scores.items()},
            chance_nodes={by: int(scores.nodes.sum()) for by, scores in self._scores.items()},
            speedup=self._plain_s / self._seconds if self._seconds else 1.0,
            steps=len(self._errors),
        )

    def _note_time(self, observed: StepObservation) -> None:
        view, arm, cost = observed.view, observed.arm, self.inner.cost
        behind = self.inner.missing_tokens(view, arm) if arm.drafter in self.inner.drafters else 0
        foretold_s = cost.verify_s(view.rows, observed.nodes, view.context)
        foretold_s += cost.draft_s(arm, view.rows, behind)
        self._errors.append(abs(foretold_s * cost.slowdown / observed.total_s - 1))
        self._seconds += observed.total_s
        gain = self.inner.value(view, arm) / self.inner.value(view, OFF)
        self._plain_s += observed.total_s * gain

    def _note_chances(self, observed: StepObservation) -> None:
        draft, known = observed.draft, self.inner.drafters.get(observed.arm.drafter)
        if draft is None or known is None or draft.tokens_BN.shape[1] == 0:
            return
        bins = score_bins(draft)[:, : observed.nodes]
        accepted_BN = accepted_nodes(bins.shape, observed.accepted_B, observed.path_Bm)
        is_node_BN = known.chances(observed.arm, bins) > 0  # others are padding
        chances = known.chances(observed.arm, bins)[is_node_BN]
        self._scores[observed.arm.drafter].add(chances, accepted_BN[is_node_BN].astype(np.float64))


# -- measure one batch size: engines with different drafters take turns at the same stream of samples


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
    allowed = _submitted(chooser)
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


def _submitted(chooser: ArmChooser | None) -> set[DrafterKind]:
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


# -- compare plain decoding with `transformers.generate` on the same policy


OURS, THEIRS, LOOKUP, ASSISTED = "plain", "generate", "prompt lookup", "assisted"
LOOKUP_TOKENS = 10
_config: Any = GenerationConfig  # it carries no types


@dataclass(frozen=True, slots=True, eq=False)
class Theirs:
    """Inputs of `generate`."""

    policy: Policy
    model: PreTrainedModel
    assistant: PreTrainedModel | None
    """None: no assisted generation."""
    num_new: int
    """Tokens of each answer."""
    temperature: float

    def race(self, rows: int, repeats: int, rng: random.Random) -> tuple[dict[str, list[float]], Same]:
        """Return the tokens per second of each way, by repeat, and at T = 0 the comparison of tokens."""
        engine = Engine(Target.of(self.model, rows=rows, max_tokens=MAX_PROMPT + self.num_new))
        asked = self._prompts(rows * (repeats + 1))
        ways = self._ways(engine, rows)
        for way in ways.values():
            way(asked[:rows])
        found: dict[str, list[float]] = {name: [] for name in ways}
        same = Same()
        for repeat in range(1, repeats + 1):
            batch, said = asked[rows * repeat : rows * (repeat + 1)], {}
            for name in rng.sample(list(ways), len(ways)):
                began_s = time.perf_counter()
                said[name] = ways[name](batch)
                found[name].append(rows * self.num_new / (time.perf_counter() - began_s))
            if self.temperature == 0:
                pairs = zip(batch, said[OURS], said[THEIRS], strict=True)
                same += sum((Same.of_tokens(self.model, *pair) for pair in pairs), Same())
        return found, same

    def _ways(self, engine: Engine, rows: int) -> dict[str, Callable[[Sequence[Prompt]], list[list[int]]]]:
        ways: dict[str, Callable[[Sequence[Prompt]], list[list[int]]]] = {
            OURS: partial(_ours, engine),
            THEIRS: self._generate,
        }
        if rows == 1:
            ways[LOOKUP] = partial(self._generate, lookup=LOOKUP_TOKENS)
            if self.assistant is not None:
                ways[ASSISTED] = partial(self._generate, by=self.assistant)
        return ways

    def _generate(
        self, batch: Sequence[Prompt], by: PreTrainedModel | None = None, lookup: int | None = None
    ) -> list[list[int]]:
        longest, pad = max(len(prompt.tokens) for prompt in batch), ByteTokenizer().eos_id
        padded = [[pad] * (longest - len(p.tokens)) + [*p.tokens] for p in batch]
        real = [[0] * (longest - len(p.tokens)) + [1] * len(p.tokens) for p in batch]
        ids, mask = (torch.tensor(numbers, device=self.model.device) for numbers in (padded, real))
        config = _config(
            max_new_tokens=self.num_new,
            pad_token_id=pad,
            use_cache=True,
            prompt_lookup_num_tokens=lookup,
            do_sample=self.temperature > 0,
            temperature=self.temperature or None,
            top_k=0 if self.temperature > 0 else None,
        )
        untyped: Any = self.model  # its methods carry no types
        with torch.inference_mode():
            made = untyped.generate(ids, attention_mask=mask, generation_config=config, assistant_model=by)
        answers: list[list[int]] = made[:, longest:].tolist()
        if any(len(answer) != self.num_new for answer in answers):
            raise RuntimeError(f"generate has ended early: {len(answers[0])} tokens, not {self.num_new}")
        return answers

    def _prompts(self, num: int) -> list[Prompt]:
        """Return questions whose right answers are long enough."""
        sampling = Sampling(temperature=self.temperature, max_new_tokens=self.num_new)
        if self.policy.task == "python":
            texts = prompts(self.policy, num, seed=1)
        else:
            drawn = (task for chunk in count(1 << 20) for task in tasks(64, chunk))
            long = (t for t in drawn if len(t.answer) >= self.num_new and len(t.prompt) <= MAX_PROMPT)
            texts = [tuple(t.prompt.encode()) for t in islice(long, num)]
        return [Prompt(tokens=text, sample=i, sampling=sampling) for i, text in enumerate(texts)]


def without_stop(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, with no token at which `generate` would stop."""
    config: Any = model.generation_config
    config.eos_token_id = None
    return model


def _ours(engine: Engine, batch: Sequence[Prompt]) -> list[list[int]]:
    rollouts = [engine.add(prompt) for prompt in batch]
    while engine.running or engine.waiting:
        engine.step()
    return [rollout.tokens for rollout in rollouts]


# -- measurements of one task, temperature and batch


NO_DRAFT = "off"
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
        return best if self.speedup(best).middle > 1 else NO_DRAFT

    @property
    def over_best(self) -> Interval:
        """Return the speed of the chooser over the best fixed arm."""
        return self.speedup(ADAPTIVE, PLAIN if self.best_fixed == NO_DRAFT else self.best_fixed)

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


# -- end of a batch of rollouts: all begin together, none follows, and the last ones are long


TURN_S = 0.25
DRAIN_TOKENS = 1024


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
    plain = engine_of(cast, rows, None, None, max_tokens=DRAIN_TOKENS)
    adaptive = engine_of(cast, rows, cast.layer, chooser, max_tokens=DRAIN_TOKENS)
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
    most = DRAIN_TOKENS - len(prompt.tokens)
    stop_tokens = (ByteTokenizer().eos_id,)
    return replace(prompt, sampling=replace(prompt.sampling, max_new_tokens=most, stop_tokens=stop_tokens))


# -- bars of the rollout benchmarks, and the values that were measured


OVER_GENERATE, NOT_SLOWER, OVER_BEST, KEPT = 1.2, 0.98, 0.95, 0.85
STRUCTURED_1, STRUCTURED_4, HARD = 2.0, 1.5, 1.15
STEP_ERROR, CHANCE_ERROR, NOISE = 0.15, 0.05, 0.03
DRAINED, TAIL = 1.4, 6.0
ENOUGH_NODES = 1000
"""Judged nodes of one drafter: of fewer, a calibration error says more of chance than of calibration."""


@dataclass(frozen=True, slots=True)
class Least:
    """Lowest value among some cells."""

    cell: Cell
    value: float
    interval: Interval | None = None

    @property
    def where(self) -> str:
        return f"T {self.cell.temperature:g}, batch {self.cell.rows}"


def bars(cells: Sequence[Cell]) -> list[Bar]:
    """Return the bars for the cells of one task."""
    task = cells[0].task
    wanted = [
        _at_least("plain over generate", cells, Cell.over_theirs, OVER_GENERATE),
        *_speedups(cells),
        _not_slower("adaptive over plain", cells, lambda cell: cell.speedup(ADAPTIVE), NOT_SLOWER),
        _not_slower("with a random drafter", cells, lambda cell: cell.speedup(RANDOM), NOT_SLOWER),
        _not_slower("over the best fixed arm", cells, lambda cell: cell.over_best, OVER_BEST),
        _kept(cells),
        _step_errors(cells),
        _chance_errors(cells),
        _same(same for cell in cells for same in (cell.same, cell.their_same)),
        _noise(cells),
    ]
    return [Bar(f"{task}, {bar.text}", bar.passed) for bar in wanted]


def drain_bars(found: Sequence[Drain]) -> list[Bar]:
    """Return the bars for drains; in the first drain the chooser learns."""
    speedup, long = median([drain.speedup for drain in found[1:]]), tail(list(found))
    return [
        Bar(
            f"drain: {speedup:.2f} x sooner than plain (learning: {found[0].speedup:.2f}), bar {DRAINED}",
            speedup >= DRAINED,
        ),
        Bar(f"drain: lengths p99 / p50 {long:.1f}, bar {TAIL:g}", long >= TAIL),
        _same(drain.same for drain in found),
    ]


def chance_error(cell: Cell) -> float | None:
    """Return the calibration error of the worst drafter with enough samples."""
    foretold = cell.foretold
    enough = [by for by, nodes in foretold.chance_nodes.items() if nodes >= ENOUGH_NODES]
    return max((foretold.chance_errors[by] for by in enough), default=None)


def _speedups(cells: Sequence[Cell]) -> list[Bar]:
    def adaptive(cell: Cell) -> Interval:
        return cell.speedup(ADAPTIVE)

    if cells[0].task == "python":
        hard = [cell for cell in cells if cell.temperature == 1 and cell.rows <= 4]
        return [_at_least("adaptive, T 1, batch 1 to 4", hard, adaptive, HARD)] if hard else []
    found = []
    for name, most, bar in (("batch 1", (1, 1), STRUCTURED_1), ("batch 2 to 4", (2, 4), STRUCTURED_4)):
        some = [cell for cell in cells if most[0] <= cell.rows <= most[1]]
        found += [_at_least(f"adaptive, {name}", some, adaptive, bar)] if some else []
    return found


def _least(cells: Iterable[Cell], of: Callable[[Cell], Interval]) -> Least:
    found = [Least(cell, of(cell).middle, of(cell)) for cell in cells]
    return min(found, key=lambda least: least.value)


def _at_least(name: str, cells: Iterable[Cell], of: Callable[[Cell], Interval], bar: float) -> Bar:
    least = _least(cells, of)
    return Bar(f"{name}: {least.interval} at the least ({least.where}), bar {bar}", least.value >= bar)


def _not_slower(name: str, cells: Iterable[Cell], of: Callable[[Cell], Interval], bar: float) -> Bar:
    """Return a bar that is undecided where the machine's noise is as large as the difference."""
    least = _least(cells, of)
    noise = least.cell.noise
    text = f"{name}: {least.interval} at the least ({least.where}), bar {bar}"
    if noise > NOISE and abs(least.value - bar) < noise:
        return Bar(f"{text}; plain against itself is off by {percent(noise)}: too noisy to tell", None)
    return Bar(text, least.value >= bar)


def _kept(cells: Iterable[Cell]) -> Bar:
    worst = min((Least(cell, cell.kept) for cell in cells), key=lambda least: least.value)
    text = f"measured / foretold speed-up of steps {worst.value:.2f} at the least ({worst.where}), bar {KEPT}"
    return Bar(text, worst.value >= KEPT)


def _step_errors(cells: Iterable[Cell]) -> Bar:
    worst = max((Least(cell, cell.foretold.step_error) for cell in cells), key=lambda most: most.value)
    text = f"step times are foretold within {percent(worst.value)} at the most ({worst.where})"
    return Bar(f"{text}, bar {percent(STEP_ERROR, 0)}", worst.value <= STEP_ERROR)


def _chance_errors(cells: Iterable[Cell]) -> Bar:
    errors = [(cell, chance_error(cell)) for cell in cells]
    found = [Least(cell, error) for cell, error in errors if error is not None]
    if not found:
        return Bar(f"calibration error: no drafter was seen with {ENOUGH_NODES} nodes", None)
    worst = max(found, key=lambda most: most.value)
    text = f"calibration error {worst.value:.3f} at the most ({worst.where}), bar {CHANCE_ERROR}"
    return Bar(text, worst.value <= CHANCE_ERROR)


def _same(found: Iterable[Same]) -> Bar:
    total = sum(found, Same())
    text = f"{total.tokens} tokens compared: {total.differences} differ, and {total.ties} ties of fp32"
    return Bar(text, total.differences == 0)


def _noise(cells: Sequence[Cell]) -> Bar:
    worst = max((Least(cell, cell.noise) for cell in cells), key=lambda most: most.value)
    wide = sum(cell.noise > NOISE for cell in cells)
    text = (
        f"plain against itself: off by {percent(worst.value)} at the most ({worst.where}), bar"
        f" {percent(NOISE, 0)}; {wide} of {len(cells)} cells are too noisy"
    )
    return Bar(text, worst.value <= NOISE)


# -- tables of cells and drains


SHOWN_ARMS = 3


def speeds(cells: Sequence[Cell]) -> Report:
    """Return plain decoding, its rivals and the chooser, one row for each cell."""
    columns = (
        "task, T, batch",
        "plain, tokens/s",
        "plain / plain",
        "plain / generate",
        "/ lookup",
        "/ assisted",
        "adaptive / plain",
        "learning",
        "random drafter",
        "best fixed",
        "adaptive / best",
    )
    return _table("tokens per second", columns, [_speed_row(cell) for cell in cells])


def forecasts(cells: Sequence[Cell]) -> Report:
    """Return what the chooser did, and the errors of its predictions."""
    columns = (
        "task, T, batch",
        "tokens per pass",
        "step error, mean and median",
        "calibration error",
        "foretold",
        "measured / foretold, steps alone",
        "arms, % of steps",
    )
    return _table("the choice of the arm", columns, [_forecast_row(cell) for cell in cells])


def arms(cells: Sequence[Cell]) -> Report:
    """Return every fixed arm over plain decoding."""
    rows = [(_name(cell), *(str(cell.speedup(name)) for name in FIXED)) for cell in cells]
    return _table("fixed arms over plain decoding", ("task, T, batch", *FIXED), rows)


def acceptance(cells: Sequence[Cell]) -> Report:
    """Return acceptance by place in the draft, of each task and temperature at its largest batch.

    The largest batch has the most drafts.
    """
    largest: dict[tuple[str, float], Cell] = {}
    for cell in cells:
        largest[cell.task, cell.temperature] = cell
    rows = [_acceptance_row(cell, name) for cell in largest.values() for name in (*FIXED, ADAPTIVE)]
    columns = ("task, T, batch", "arm", "tokens per pass", "accepted up to position 1, 2, ...")
    return _table("acceptance", columns, rows)


def drained(found: Sequence[Drain]) -> Report:
    """Return one row for each drain."""
    rows = [
        (
            "learning" if i == 0 else str(i),
            f"{len(drain.lengths)}",
            f"{sum(drain.lengths)}",
            f"{max(drain.lengths)}",
            f"{drain.plain_s:.2f}",
            f"{drain.adaptive_s:.2f}",
            f"{drain.speedup:.2f}",
            _shares(drain.arms),
        )
        for i, drain in enumerate(found)
    ]
    columns = ("drain", "rollouts", "tokens", "longest", "plain, s", "adaptive, s", "speed-up", "arms, %")
    return _table("from a full batch to the last rollout", columns, rows)


def line(cell: Cell) -> str:
    """Return a cell in one line, for progress output."""
    plain = f"plain {_rate(cell):.0f} tokens/s, {cell.over_theirs().middle:.2f} x generate"
    choice = f"adaptive {cell.speedup(ADAPTIVE)}, random drafter {cell.speedup(RANDOM)}"
    return f"{_name(cell)}: {plain}; {choice}, best fixed {_best(cell)}"


def _speed_row(cell: Cell) -> tuple[str, ...]:
    theirs = [str(cell.over_theirs(name)) if name in cell.theirs else "" for name in (LOOKUP, ASSISTED)]
    return (
        _name(cell),
        f"{_rate(cell):.0f}",
        str(cell.speedup(AGAIN)),
        str(cell.over_theirs(THEIRS)),
        *theirs,
        str(cell.speedup(ADAPTIVE)),
        f"{cell.first(ADAPTIVE):.2f}",
        str(cell.speedup(RANDOM)),
        _best(cell),
        str(cell.over_best),
    )


def _forecast_row(cell: Cell) -> tuple[str, ...]:
    spoken, foretold, error = cell.spoken[ADAPTIVE], cell.foretold, chance_error(cell)
    return (
        _name(cell),
        f"{spoken.accepted_length:.2f}",
        f"{percent(foretold.step_error)}, {percent(foretold.middle_step_error)}",
        "" if error is None else f"{error:.3f}",
        f"{foretold.speedup:.2f}",
        f"{cell.kept:.2f}",
        _shares(spoken.arms),
    )


def _acceptance_row(cell: Cell, name: str) -> tuple[str, ...]:
    spoken = cell.spoken[name]
    positions = " ".join(f"{share:.2f}" for share in spoken.by_position)
    return _name(cell), name, f"{spoken.accepted_length:.2f}", positions


def _best(cell: Cell) -> str:
    name = cell.best_fixed
    return name if name == NO_DRAFT else f"{name} {cell.speedup(name).middle:.2f}"


def _rate(cell: Cell) -> float:
    rates = sorted(cell.rates[PLAIN][1:])
    return rates[len(rates) // 2]


def _shares(steps: dict[str, int]) -> str:
    most = sorted(steps, key=steps.__getitem__, reverse=True)[:SHOWN_ARMS]
    return ", ".join(f"{arm} {100 * steps[arm] / sum(steps.values()):.0f}" for arm in most)


def _name(cell: Cell) -> str:
    return f"{cell.task}, {cell.temperature:g}, {cell.rows}"


def _table(name: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Report:
    return Report(name, (), columns, tuple(rows), (), {})


# -- the benchmark


ABOUT = "Tokens per second of rollouts: plain, each arm, the choice among them, and transformers."
METHOD = (
    "All engines take turns at the same samples, in an order drawn for each repeat; ratios are taken within a"
    " repeat: median [95 % by bootstrap].",
    "A policy trained here; free rows take the next sample at once. The first repeat, in which the choice"
    " learns, counts for itself only.",
)
FULL = Size(repeats=9, turn_tokens=64, their_tokens=96, their_repeats=3, drains=3, drain_rows=64)
QUICK = Size(repeats=2, turn_tokens=16, their_tokens=16, their_repeats=1, drains=1, drain_rows=8)
BATCHES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    tasks: tuple[Kind, ...] = get_args(Kind)
    policy_size: PolicySize = "10m"
    batches: tuple[int, ...] = BATCHES
    temperatures: tuple[float, ...] = (0.0, 1.0)
    root: Path = ROOT
    size: Size = FULL
    only: str | None = None
    """`batches` or `drain`; None is both."""
    quick: bool = False

    def policy(self, task: Kind) -> Policy:
        return (
            Policy(task=task, size="quick", minutes=0.3)
            if self.quick
            else Policy(task=task, size=self.policy_size)
        )

    def recipe(self, task: Kind) -> Recipe:
        policy = self.policy(task)
        return Recipe(policy=policy, num_tokens=40_000, minutes=0.1) if self.quick else Recipe(policy=policy)

    def assistant(self, task: Kind) -> Policy:
        """Return a smaller policy of the task, for assisted generation."""
        return Policy(task=task, size="quick", minutes=0.1 if self.quick else 2.0)


@dataclass(slots=True)
class Found:
    """Measurements so far."""

    cells: list[Cell] = field(default_factory=list)
    drains: list[Drain] = field(default_factory=list)
    """Of scratchpad arithmetic: only its answers have ends."""

    @property
    def bars(self) -> list[Bar]:
        of_cells = [
            bar for task in dict.fromkeys(cell.task for cell in self.cells) for bar in bars(self.of(task))
        ]
        return of_cells + (drain_bars(self.drains) if self.drains else [])

    @property
    def figures(self) -> dict[str, Any]:
        return {
            "cells": [cell.figures for cell in self.cells],
            "drains": [asdict(one) for one in self.drains],
        }

    def of(self, task: Kind) -> list[Cell]:
        return [cell for cell in self.cells if cell.task == task]

    def tables(self) -> Iterator[Report]:
        if self.cells:
            for make in (
                speeds,
                arms,
                forecasts,
                acceptance,
            ):
                yield make(self.cells)
        if self.drains:
            yield drained(self.drains)

    def reports(self, quick: bool) -> list[Report]:
        """Return all tables, with the method before the first and the bars after the last."""
        bars = tuple(replace(bar, passed=None) if quick else bar for bar in self.bars)
        first, *rest = self.tables()
        end = Report("bars", (), (), (), bars, self.figures)
        return [replace(first, method=METHOD), *rest, end]


def measure(plan: Plan, say: Callable[[str], None]) -> Found:
    """Measure all cells and drains of a plan, one after the other. say: gets the progress messages."""
    found = Found()
    for task in plan.tasks:
        cast, assistant = _cast(plan, task, say)
        if plan.only != "drain":
            found.cells += _measured(plan, cast, assistant, say)
        if plan.only != "batches" and task == "scratchpad":
            found.drains = drains(cast, plan.size.drain_rows, 1 + plan.size.drains, max(plan.temperatures))
    return found


def _measured(
    plan: Plan, cast: Cast, assistant: PreTrainedModel, say: Callable[[str], None]
) -> Iterator[Cell]:
    """Yield all cells of one task."""
    num_tokens = plan.size.their_tokens
    for temperature in plan.temperatures:
        theirs = Theirs(cast.policy, without_stop(cast.model), assistant, num_tokens, temperature)
        for rows in plan.batches:
            cell = measure_cell(cast, theirs, rows, plan.size)
            say(line(cell))
            yield cell


def _cast(plan: Plan, task: Kind, say: Callable[[str], None]) -> tuple[Cast, PreTrainedModel]:
    policy, recipe, smaller = plan.policy(task), plan.recipe(task), plan.assistant(task)
    for wanted in (policy, smaller):
        if not (plan.root / wanted.name).exists():
            say(f"training the policy {wanted.name}: {wanted.minutes:g} minutes")
        ready(wanted, plan.root)
    if not (plan.root / policy.name / recipe.name).exists():
        say(f"training a drafter of {policy.name}: {recipe.minutes:g} minutes and its rollouts")
    path, model = drafter_ready(recipe, plan.root), load(policy, plan.root)
    cast = Cast(policy, model, DraftLayer.load(path, model), random_layer(model))
    return cast, without_stop(load(smaller, plan.root))


def _plan(args: argparse.Namespace) -> Plan:
    usual = Plan(quick=args.quick, root=args.root)
    if args.quick:
        usual = replace(usual, size=QUICK, batches=(1, 4), temperatures=(1.0,), tasks=("scratchpad",))
    size = usual.size if args.seeds is None else replace(usual.size, repeats=args.seeds)
    return replace(
        usual,
        size=size,
        only=args.only,
        policy_size=args.size,
        tasks=usual.tasks if args.task is None else (args.task,),
        batches=args.batches or usual.batches,
        temperatures=args.temperatures or usual.temperatures,
    )


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse an option like 1,2,4. Raises ValueError if a number is below 1."""
    values = tuple(map(int, text.split(",")))
    if min(values) < 1:
        raise ValueError(text)
    return values


def _numbers(text: str) -> tuple[float, ...]:
    values = tuple(map(float, text.split(",")))
    if min(values) < 0:
        raise ValueError(text)
    return values


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--task", choices=get_args(Kind), help="one of them instead of both")
    add("--size", choices=get_args(PolicySize), default="10m", help="of the policy")
    add("--only", choices=("batches", "drain"), help="one part of the measurement")
    add("--batches", type=whole_numbers, metavar="B,B,...", help=f"usually {','.join(map(str, BATCHES))}")
    add("--temperatures", type=_numbers, metavar="T,T,...", help="usually 0,1")
    add("--threads", type=int, default=1)
    add("--seeds", type=int, metavar="N", help="repeats of each cell, after the learning one")
    add("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report]:
    torch.set_num_threads(args.threads)
    logging: Any = transformers.logging  # it carries no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return measure(_plan(args), Console(stderr=True).print).reports(args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("rollout", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
