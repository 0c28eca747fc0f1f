"""An engine in a process of its own, with the methods of `Engine` that an `EngineHost` calls.

A server runs vLLM so: its process has an interpreter of its own, and gets the weights of each version through
shared memory. A process that has died is replaced, and its samples go on with the same tokens.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from aedit.spec_rollout.drafters import OFF, Arm
from aedit.spec_rollout.engine import Meters, NoNextTokenError, SampleKeys, Step, check_prompt
from aedit.spec_rollout.model import SpareWeights, unwrapped
from aedit.spec_rollout.remote.dispatcher import SampleFailedError
from aedit.spec_rollout.remote.source import WorkerSource
from aedit.spec_rollout.remote.workers import WorkerConfig
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey, Sampling, TokenDecoder
from aedit.types import check


@dataclass(slots=True, kw_only=True)
class ServedModel:
    """The policy of an engine in another process, in place of its `TargetModel`.

    Its weights are those of the newest version: they are sent from here, and score given texts.
    """

    model: nn.Module
    rows: int
    max_tokens: int
    vocabulary: int
    dtype: torch.dtype
    device: torch.device
    version: int = 0


class EngineProcess:
    """An engine in a worker process, which starts with the first version. Used by one thread at a time.

    The thread must last: the kernel ends the process together with the thread that has started it.
    """

    keeps_old_versions = False

    def __init__(
        self,
        policy: Any,
        config: WorkerConfig,
        *,
        tokenizer: TokenDecoder | None = None,
        arm: Arm = OFF,
        check_sample: Callable[[Prompt], None] = lambda prompt: None,
    ) -> None:
        """Make it; no process starts.

        Args:
            policy: `transformers` model on a CPU, whose weights this engine replaces with each version.
            config: Of the process; `processes` must be 1.
            tokenizer: Needed for stop strings; so is `config.tokenizer`, which the process reads.
            arm: What the process drafts.
            check_sample: Raises ValueError for a sample that the process does not serve.
        """
        check(config.processes == 1, "EngineProcess: config.processes", "must be 1", config.processes)
        policy.requires_grad_(False).eval()
        text: Any = unwrapped(policy).config
        text = text.get_text_config()
        self.target = ServedModel(
            model=policy,
            rows=config.rows,
            max_tokens=config.max_tokens,
            vocabulary=int(text.vocab_size),
            dtype=config.dtype,
            device=torch.device("cpu"),
        )
        self.tokenizer, self.meters = tokenizer, Meters()
        self._arm, self._check_sample = arm, check_sample
        self._keys = SampleKeys()
        self._start = partial(WorkerSource, policy, config)
        self._source: WorkerSource | None = None
        self._samples: dict[SampleKey, _Reported] = {}

    @property
    def version(self) -> int:
        """Return the policy version that new samples have."""
        return self.target.version

    @property
    def running(self) -> list[Rollout]:
        """Return the rollouts of the process, oldest first."""
        return [each.rollout for each in self._samples.values()]

    @property
    def waiting(self) -> list[Rollout]:
        """Return no rollout: the process has all."""
        return []

    def check(self, prompt: Prompt) -> None:
        """Check that a sample can be served.

        Raises:
            ValueError: It cannot.
        """
        target = self.target
        check_prompt(prompt, target.vocabulary, target.max_tokens, self.tokenizer is not None)
        self._check_sample(prompt)

    def add(self, prompt: Prompt) -> Rollout:
        """Send a sample to the process and return its rollout, which grows with the steps.

        Raises:
            ValueError: It cannot be served, or another sample here has its ids. Nothing has changed.
        """
        self.check(prompt)
        if self._source is None:
            raise ValueError("the engine has no weights yet: call update_weights first")
        (prompt,) = self._keys.assign([prompt])
        try:
            self._source.add([prompt])
        except ValueError:
            self._keys.release([prompt])
            raise
        rollout = self._source.rollout(prompt.key)
        self._samples[prompt.key] = _Reported(rollout, len(rollout.tokens), rollout.passes)
        return rollout

    def remove(self, rollout: Rollout, *, kv: bool = False) -> Prompt:
        """Remove a sample and return a prompt with which another engine continues it.

        Raises:
            ValueError: The rollout is not in this engine.
        """
        key = rollout.prompt.key
        if key not in self._samples or self._samples[key].rollout is not rollout:
            raise ValueError(f"rollout {rollout.prompt.name} is not in this engine")
        assert self._source is not None
        self._source.cancel([key])
        self._forget(key)
        return rollout.to_prompt()

    def abort(self, rollout: Rollout) -> None:
        """End a sample now, with the tokens that have arrived and finish_reason "abort".

        Raises:
            ValueError: The rollout is not in this engine.
        """
        self.remove(rollout)
        rollout.finish_reason = "abort"

    def update_weights(
        self, weights: Mapping[str, Tensor] | None, version: int, *, in_steps: bool = False
    ) -> None:
        """Send new weights, which the process takes over between two steps; start it if it does not run.

        Args:
            weights: Tensors by the names of `model.state_dict()`. None: `target.model` has them.
            version: Their version, above `version`.
            in_steps: Has no effect.

        Raises:
            ValueError: A tensor does not fit or is not finite, or the version is not above this one. Nothing
                has changed.
        """
        if version <= self.version:
            raise ValueError(f"version {version} is not above version {self.version}, which the engine has")
        if weights is not None:
            swap = self.weight_swap()
            swap.fill(weights)
            swap.recompute(version)
            return
        own = self.target.model.state_dict(keep_vars=True)
        check_finite(own)
        if self._source is None:
            self._source = self._start()
        self._source.update_weights(own, version)
        self.target.version = version

    def weight_swap(self) -> "ProcessSwap":
        """Return a second set of weights, which `LineWeights` fills."""
        return ProcessSwap(self)

    def clear_prefix_cache(self) -> None:
        """Raise ValueError: the process does that with each version."""
        raise ValueError("an engine in a process of its own drops its prefixes with each new version only")

    def wait_ready(self) -> None:
        """Wait until the process has generated one token with the newest version, which it checks before.

        Raises:
            RuntimeError: The process ends again and again; the text says why.
        """
        rollout = self.add(Prompt(tokens=(0,), sampling=Sampling(temperature=0.0, max_new_tokens=1)))
        while not rollout.finish_reason:
            self.step()
            assert self._source is not None
            if error := self._source.status()["worker_error"]:
                raise RuntimeError(error)
        self.meters = Meters()

    def step(self) -> Step:
        """Wait for news of the process, for a part of a second, and report the tokens that have come.

        Raises:
            NoNextTokenError: The process has failed with one sample again and again.
            RuntimeError: It ends again and again.
        """
        if not self._samples or self._source is None:
            return Step()
        began_s = time.perf_counter()
        try:
            finished = self._source.step(for_tokens=True)
        except SampleFailedError as error:
            rollout = self._samples[error.rollout.prompt.key].rollout
            raise NoNextTokenError(str(error), [rollout]) from error
        news = [each for each in self._samples.values() if each.has_news]
        rollouts = tuple(each.rollout for each in news)
        counts, passes = zip(*(each.report() for each in news), strict=True) if news else ((), ())
        for rollout in finished:
            self._forget(rollout.prompt.key)
        step = Step(
            rollouts=rollouts,
            counts=counts,
            passes=passes,
            finished=tuple(finished),
            arm=self._arm,
            total_s=time.perf_counter() - began_s,
        )
        if rollouts:
            self.meters.add(step)
            self.meters.arms = Counter(self._source.status()["arms"])
        return step

    def status(self) -> dict[str, object]:
        """Return counts and the figures of `Meters.status`, and those of the process."""
        source = self._source.status() if self._source is not None else {}
        names = ("pids", "worker_deaths", "worker_error")
        return {
            "running": len(self._samples),
            "waiting": 0,
            "version": self.version,
            "kv_bytes": 0,
            **self.meters.status(),
            **{name: source[name] for name in names if name in source},
        }

    def close(self) -> None:
        """Remove all samples and end the process."""
        for key in list(self._samples):
            self._forget(key)
        if self._source is not None:
            self._source.close()
            self._source = None

    def _forget(self, key: SampleKey) -> None:
        self._keys.release([self._samples.pop(key).rollout.prompt])


@dataclass(slots=True)
class _Reported:
    """A sample of the process, and what `step` has reported of it."""

    rollout: Rollout
    num_tokens: int
    num_passes: int

    @property
    def has_news(self) -> bool:
        """Return whether there are tokens, or its end, that were not reported."""
        return len(self.rollout.tokens) > self.num_tokens or bool(self.rollout.finish_reason)

    def report(self) -> tuple[int, int]:
        """Return the new tokens and passes."""
        found = len(self.rollout.tokens) - self.num_tokens, self.rollout.passes - self.num_passes
        self.num_tokens, self.num_passes = len(self.rollout.tokens), self.rollout.passes
        return found


class ProcessSwap:
    """New weights of an `EngineProcess`: checked and filled by any thread, sent between two steps."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._spare = SpareWeights(engine.target.model)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the second set."""
        return self._spare.num_bytes

    def fill(self, weights: Mapping[str, Tensor]) -> None:
        """Copy new weights into the second set. Raises ValueError if they do not fit or are not finite."""
        check_finite(weights)
        self._spare.fill(weights)

    def recompute(self, version: int) -> None:
        """Send the filled weights. Raises ValueError if the version is not above the engine's."""
        if version <= self._engine.version:
            before = self._engine.version
            raise ValueError(f"version {version} is not above version {before}, which the engine has")
        self._spare.exchange()
        self._engine.update_weights(None, version)

    def finish(self, version: int) -> None:
        """Raise ValueError: the process has one set of weights."""
        raise ValueError(
            'an engine in a process of its own has one version at a time: use on_new_version "recompute"'
        )


def check_finite(weights: Mapping[str, Tensor]) -> None:
    """Check that all values are finite.

    Raises:
        ValueError: Some are not; the text names a tensor.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"weights: {name} has values that are not finite")
