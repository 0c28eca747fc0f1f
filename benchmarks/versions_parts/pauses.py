"""Pauses of an engine whose weights change while it generates, beside its usual steps."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from aedit.spec_rollout.engine import Engine, EngineLimits
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.server import EngineHost

Way = Literal["no new weights", "at once", "recompute", "finish"]
WAYS: tuple[Way, ...] = get_args(Way)
LINE = "policy"
LIMIT_S = 600.0
Weights = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Settings: samples at a time, tokens of prompt and answer, steps between versions, versions."""

    rows: int = 4
    prompt: int = 64
    answer: int = 400
    steps: int = 110
    versions: int = 4
    prefill_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between the beginnings of two steps, while versions change in one way."""

    way: Way
    gaps_s: tuple[float, ...]
    starts_s: tuple[float, ...]
    """Those of the steps in which a new sample started: a step and the computation of a prompt."""
    silent_s: float
    """Longest time without a token of any sample."""

    @property
    def start_s(self) -> float:
        """Return the median of the steps that start a sample."""
        return float(np.median(self.starts_s))

    def of(self, quantile: float) -> float:
        """Return a quantile."""
        return float(np.quantile(self.gaps_s, quantile))


class Counter:
    """Receiver that notes when tokens come, and starts a new sample after the end so that rows stay busy."""

    def __init__(self, steps: "Steps", again: Callable[["Counter"], object]) -> None:
        self._steps, self._again = steps, again

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Note the time, and the step if these are the first tokens of the sample."""
        self._steps.tokens_s.append(time.monotonic())
        if start == 0:
            self._steps.starts.append(len(self._steps.times_s) - 1)

    def ended(self, rollout: Rollout) -> None:
        """Start again."""
        if rollout.finish_reason != "abort":
            self._again(self)

    def failed(self, error: Exception) -> None:
        """Ignore the end of the host."""


class Steps:
    """Times of the steps of a line; lets the benchmark wait for a number of them."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.tokens_s: list[float] = []
        """Times at which tokens of a sample came."""
        self.starts: list[int] = []
        """Number of the step in which each sample got its first token."""
        self._todo: list[Callable[[], object]] = []
        self._changed = threading.Condition()

    def __call__(self) -> None:
        """Note that a step begins."""
        with self._changed:
            todo, self._todo = self._todo, []
            self.times_s.append(time.monotonic())
            self._changed.notify_all()
        for call in todo:
            call()

    def then(self, call: Callable[[], object]) -> None:
        """Let the engine's thread call this before the next step."""
        with self._changed:
            self._todo.append(call)

    def wait(self, more: int) -> None:
        """Wait until so many further steps have begun."""
        with self._changed:
            wanted = len(self.times_s) + more
            if not self._changed.wait_for(lambda: len(self.times_s) >= wanted, LIMIT_S):
                raise TimeoutError(f"{more} steps took more than {LIMIT_S:g} s")


def measure(model: PreTrainedModel, way: Way, amount: Amount) -> Pauses:
    """Generate all the time while the weights change every so many steps."""
    model.train(False)
    steps, host = Steps(), EngineHost()
    limits = EngineLimits(prefill_tokens=amount.prefill_tokens, prefix_cache_bytes=0)
    engine = Engine.of(model, rows=amount.rows, max_tokens=amount.prompt + amount.answer, limits=limits)
    try:
        host.open(LINE, lambda: engine, between_steps=steps)
        _submit_all(host, steps, amount, model.config.vocab_size)
        steps.wait(amount.prompt * amount.rows // amount.prefill_tokens + 20)
        first = len(steps.times_s)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for version in range(1, amount.versions + 1):
            if way != "no new weights":
                _change(host, steps, way, own, version)
            steps.wait(amount.steps)
        return _pauses(way, steps, first)
    finally:
        host.close(LIMIT_S)


def _pauses(way: Way, steps: Steps, first: int) -> Pauses:
    """Return the pauses from a step on."""
    last = len(steps.times_s) - 1
    gaps_s = np.diff(steps.times_s[first : last + 1]).tolist()
    began_s, ended_s = steps.times_s[first], steps.times_s[last]
    tokens_s = [time_s for time_s in list(steps.tokens_s) if began_s <= time_s <= ended_s]
    return Pauses(
        way,
        tuple(gaps_s),
        tuple(gaps_s[i - first] for i in list(steps.starts) if first <= i < last),
        float(np.max(np.diff([began_s, *tokens_s, ended_s]))),
    )


def _change(host: EngineHost, steps: Steps, way: Way, own: Weights, version: int) -> None:
    def prepare() -> Weights:
        return {name: _moved(tensor, version) for name, tensor in own.items()}

    if way == "recompute" or way == "finish":
        host.swap(LINE, prepare, version, way).result(LIMIT_S)
        return
    new = prepare()
    steps.then(lambda: host.engine(LINE).update_weights(new, version))
    steps.wait(2)


def _moved(tensor: Tensor, version: int) -> Tensor:
    return tensor * (1 + 1e-4 * version) if tensor.is_floating_point() else tensor


def _submit_all(host: EngineHost, steps: Steps, amount: Amount, vocabulary: int) -> None:
    """Submit a sample for each row. The first ones are of unequal length, so that they end one by one."""
    generator = torch.Generator().manual_seed(0)

    def submit(counter: Counter, answer: int = amount.answer) -> None:
        tokens = torch.randint(vocabulary, (amount.prompt,), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=answer)
        host.submit(LINE, Prompt(tokens=tuple(tokens), sampling=sampling), counter)

    for row in range(amount.rows):
        submit(Counter(steps, submit), amount.answer * (row + 1) // amount.rows)
