"""Rollouts for `trl`'s asynchronous GRPO trainer from an engine in the trainer's process.

    worker = TrlWorker(engine, rows, [reward], tokenizer, TrlWorkerConfig(group_size=8, max_ahead=64))
    AsyncGRPOTrainer(..., rollout_worker=worker, weight_transfer=worker)

The worker has the methods of both protocols of `trl.experimental.async_grpo` (1.16). It generates in a
thread, and takes the trainer's weights between two steps of the engine. `trl` itself is not imported.
"""

import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from torch import Tensor

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.rl import Advantage, BadReturn, EventLoop, advantages, values_of
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling, TextTokens
from aedit.types import PositiveInt, check, checked

Reward = Callable[..., Sequence[float | None] | Awaitable[Sequence[float | None]]]
"""trl's signature: `reward(prompts, completions, completion_ids, **columns)`, sync or async."""

POLL_S = 0.02
STOP_S = 60.0
"""Deadline of the step in progress when the worker is stopped."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class TrlWorkerConfig:
    """Settings of a `TrlWorker`."""

    group_size: PositiveInt = 8
    """Rollouts per prompt."""
    max_ahead: int = 64
    """Rollouts that are running or wait for the trainer. The trainer drops what is older than its
    `max_staleness` versions: `max_staleness` times its samples per step is a good value."""
    sampling: Sampling = field(default_factory=Sampling)
    """The temperature must be that of the trainer's configuration."""
    advantage: Advantage = "std"

    def __post_init__(self) -> None:
        check(
            self.max_ahead >= self.group_size,
            "TrlWorkerConfig: max_ahead",
            "must be at least a group",
            self.max_ahead,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class TrlSample:
    """One rollout as the trainer reads it: the fields of trl's `RolloutSample`."""

    prompt: Any
    completion: Any
    input_ids: Any
    """Prompt and answer (T,)."""
    completion_mask: Any
    """1 for the answer, 0 for the prompt (T,)."""
    old_log_probs: Any
    """Behaviour log-probabilities; 0 for the prompt (T,)."""
    advantage: float
    model_version: int
    """Oldest policy version that drew one of its tokens."""
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@checked()
class TrlWorker:
    """Rollout worker and weight transfer of an `AsyncGRPOTrainer`.

    The engine must have a model of its own: parameters that the trainer changes while the engine generates
    would be neither version. Groups reach the trainer in the order in which they were started.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Mapping[str, Any]],
        rewards: Sequence[Reward],
        tokenizer: Any,
        config: TrlWorkerConfig,
    ) -> None:
        """Make a worker.

        Args:
            engine: Used by this worker alone.
            rows: The data set, with `prompt` (text or messages) and columns for the rewards; drawn in order,
                again from the start at its end.
            rewards: Functions whose rewards are added; a rollout whose rewards are all None is left out.
            tokenizer: The trainer's, of `transformers`.
            config: Settings.
        """
        check(bool(rows), "rows", "must not be empty", len(rows))
        check(bool(rewards), "rewards", "must name at least one function", len(rewards))
        self.rollout_buffer: queue.Queue[TrlSample] = queue.Queue()
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._engine, self._rows, self._rewards = engine, rows, list(rewards)
        self._texts, self._config = TextTokens(tokenizer), config
        self._lock = threading.Lock()
        self._sent: dict[str, Tensor] | None = None
        self._next: tuple[dict[str, Tensor], int] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._alive_at = time.monotonic()
        self._groups: dict[int, tuple[Mapping[str, Any], list[Rollout]]] = {}
        """Row and rollouts of each group that was started and has not reached the trainer, by position."""
        self._positions = count()
        self._loop = EventLoop()

    # --- trl's RolloutWorkerProtocol

    def start(self) -> None:
        """Begin to generate."""
        if self._thread is None:
            self._alive_at = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="aedit-trl-rollouts", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread; raise TimeoutError if its step does not end within a minute."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                raise TimeoutError(f"the rollout worker did not end within {STOP_S:g} s")

    def update_model_version(self, model_version: int) -> None:
        """Generate with the weights that were sent last, as this version, from the engine's next step on."""
        with self._lock:
            if self._sent is not None:
                self._next, self._sent = (self._sent, model_version), None

    def check_health(self, stale_after_s: float) -> None:
        """Raise RuntimeError if the worker has failed, or has made no step for `stale_after_s`."""
        if self._error is not None:
            raise RuntimeError("the rollout worker has failed") from self._error
        silent_s = time.monotonic() - self._alive_at
        if self._thread is not None and silent_s > stale_after_s:
            raise RuntimeError(
                f"the rollout worker has been in one step or reward for {silent_s:.0f} s; the limit is "
                f"{stale_after_s:g} s"
            )

    # --- trl's WeightTransferProtocol

    def init_weight_transfer(self) -> None:
        """Do nothing: trainer and engine share a process."""

    def pause(self) -> None:
        """Do nothing: the engine goes on with the old weights until it has all new ones."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Copy the trainer's weights."""
        sent = {name: tensor.detach().clone() for name, tensor in iterator}
        with self._lock:
            self._sent = sent

    def resume(self) -> None:
        """Do nothing; see `pause`."""

    def destroy(self) -> None:
        """Free the weights that were sent and not used."""
        with self._lock:
            self._sent = self._next = None

    # --- the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._alive_at = time.monotonic()
                self._take_weights()
                self._admit()
                if self._groups:
                    self._engine.step()
                    self._queue_finished()
                else:
                    self._stopping.wait(POLL_S)
        except BaseException as error:  # reported by check_health, in the trainer's thread
            self._error = error
        finally:
            self._engine.close()

    def _take_weights(self) -> None:
        with self._lock:
            taken, self._next = self._next, None
        if taken is not None:
            self._engine.update_weights(*taken)

    def _admit(self) -> None:
        size = self._config.group_size
        while self.rollout_buffer.qsize() + size * (len(self._groups) + 1) <= self._config.max_ahead:
            position = next(self._positions)
            row = self._rows[position % len(self._rows)]
            prompt, sampling = row["prompt"], self._config.sampling
            is_text = isinstance(prompt, str)
            tokens = tuple(
                self._texts.prompt(prompt)
                if is_text
                else self._texts.chat(prompt, add_generation_prompt=True)
            )
            rollouts = [
                self._engine.add(
                    Prompt(tokens=tokens, rollout=position, sample=i, group=position, sampling=sampling)
                )
                for i in range(size)
            ]
            self._groups[position] = row, rollouts

    def _queue_finished(self) -> None:
        """Reward finished groups and queue their samples, the oldest group first."""
        for position, (row, rollouts) in list(self._groups.items()):
            if not all(rollout.finish_reason for rollout in rollouts):
                break
            del self._groups[position]
            for sample in self._samples(position, row, rollouts):
                self.rollout_buffer.put(sample)

    def _samples(
        self, position: int, row: Mapping[str, Any], rollouts: Sequence[Rollout]
    ) -> Iterator[TrlSample]:
        prompt = row["prompt"]
        texts = [self._texts.decode(rollout.tokens) for rollout in rollouts]
        is_chat = not isinstance(prompt, str)
        completions = [[{"role": "assistant", "content": text}] if is_chat else text for text in texts]
        totals = self._rewarded(row, rollouts, completions)
        known = np.array([total for total in totals if total is not None])
        (A,) = advantages([totals], self._config.advantage)
        for i, total in enumerate(totals):
            if total is None:
                continue
            rollout = rollouts[i]
            asked, answered = len(rollout.prompt.tokens), len(rollout.tokens)
            yield TrlSample(
                prompt=prompt,
                completion=completions[i],
                input_ids=np.array((*rollout.prompt.tokens, *rollout.tokens), np.int64),
                completion_mask=np.array([0] * asked + [1] * answered, np.int64),
                old_log_probs=np.array([0.0] * asked + rollout.logprobs, np.float32),
                advantage=A[i],
                model_version=min(rollout.versions),
                group_id=position,
                metrics={"reward": total, "reward_std": float(known.std())},
                enqueued_at=time.time(),
            )

    def _rewarded(
        self, row: Mapping[str, Any], rollouts: Sequence[Rollout], completions: list[Any]
    ) -> list[float | None]:
        """Return the sum of the rewards of each rollout, None where all are None."""
        columns = {name: [value] * len(completions) for name, value in row.items() if name != "prompt"}
        prompts = [row["prompt"]] * len(completions)
        ids = [rollout.tokens for rollout in rollouts]
        found = []
        for reward in self._rewards:
            values = reward(prompts=prompts, completions=completions, completion_ids=ids, **columns)
            if inspect.isawaitable(values):
                values = self._loop.result(values)
            try:
                found.append(values_of(values, len(completions)))
            except BadReturn as error:
                raise ValueError(f"reward {getattr(reward, '__name__', repr(reward))} {error}") from None
        known = [[value for value in values if value is not None] for values in zip(*found, strict=True)]
        return [float(sum(values)) if values else None for values in known]
