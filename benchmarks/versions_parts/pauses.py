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

from aedit.spec_rollout.engine.engine import Engine
from aedit.spec_rollout.engine.limits import EngineLimits
from aedit.spec_rollout.sampling.samples import Prompt, Rollout, Sampling
from aedit.spec_rollout.service.host import EngineHost

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
    steps: int = 40
    versions: int = 4
    prefill_tokens: int = 64


@dataclass(frozen=True, slots=True)
class Pauses:
    """Seconds between the ends of two steps, while versions change in one way."""

    way: Way
    gaps_s: tuple[float, ...]
    """All of them, those of the first step of a sample left out."""

    def of(self, quantile: float) -> float:
        """Return a quantile."""
        return float(np.quantile(self.gaps_s, quantile))


class Counter:
    """Receiver that starts its sample again when it ends, so that all rows stay busy."""

    def __init__(self, again: Callable[["Counter"], object]) -> None:
        self._again = again

    def tokens(self, rollout: Rollout, start: int) -> None:
        """Ignore tokens: steps are counted elsewhere."""

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
        _submit_all(host, amount, model.config.vocab_size)
        steps.wait(amount.prompt * amount.rows // amount.prefill_tokens + 20)
        first = len(steps.times_s)
        own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for version in range(1, amount.versions + 1):
            if way != "no new weights":
                _change(host, steps, way, own, version)
            steps.wait(amount.steps)
        return Pauses(way, tuple(np.diff(steps.times_s[first:]).tolist()))
    finally:
        host.close(LIMIT_S)


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


def _submit_all(host: EngineHost, amount: Amount, vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def submit(counter: Counter) -> None:
        tokens = torch.randint(vocabulary, (amount.prompt,), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=amount.answer)
        host.submit(LINE, Prompt(tokens=tuple(tokens), sampling=sampling), counter)

    for _ in range(amount.rows):
        submit(Counter(submit))
