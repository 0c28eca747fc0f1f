"""Training of the rollout benchmarks' policies: packed rows, cosine over a time budget, resumable."""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aedit.launch.config import TrainConfig
from aedit.launch.data import ByteTokenizer, batch
from aedit.launch.node import lr_at, make_inner, set_lr
from aedit.spec_rollout.rl.tasks.scratchpad import MAX_CHARS, draw_task

IGNORED = -100
SAVE_EVERY_S = 60.0
MISSES = 16
"""So many tasks in a row that fit nowhere end a batch."""

Rows = tuple[Tensor, Tensor]
"""Token ids and labels, both (k, seq_len); the label of a token is the token after it, or IGNORED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Duration and rate of a training."""

    seconds: float
    """Duration of the steps, without saving; the learning rate follows the share of it that is used."""
    lr: float = 1e-3
    device: str = "cpu"

    @property
    def train(self) -> TrainConfig:
        return TrainConfig(lr=self.lr, betas=(0.9, 0.98), weight_decay=0.1, lr_warmup=0.03, lr_final=0.05)


@dataclass(slots=True)
class Progressed:
    """Progress of a training."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    loss: float = float("nan")
    """Nats per token of the last step, answers only."""


def task_rows(num_rows: int, seq_len: int, seed: str, longest: int = MAX_CHARS) -> Rows:
    """Return rows of whole tasks, each ended by the end token; only answers have labels.

    A row begins with a task. What is left of a row when nothing more fits is padding without labels. A row is
    longer than seq_len if its first task is, because otherwise the longest tasks would never be trained on.
    longest: characters of a task.
    """
    rng, tokenizer = random.Random(seed), ByteTokenizer()
    first = [draw_task(rng, longest) for _ in range(num_rows)]
    seq_len = max(seq_len, *(len(task.prompt) + len(task.answer) for task in first))
    ids_KT = np.full((num_rows, seq_len + 1), tokenizer.eos_id)
    labels_KT = np.full((num_rows, seq_len + 1), IGNORED)
    filled, missed = [0] * num_rows, 0
    while missed < MISSES:
        task = first.pop() if first else draw_task(rng, longest)
        prompt, answer = tokenizer.encode(task.prompt), tokenizer.encode(task.answer)
        length = len(prompt) + len(answer) + 1
        open_rows = (k for k in range(num_rows) if filled[k] + length <= seq_len + 1)
        row = min(open_rows, key=filled.__getitem__, default=None)
        if row is None:
            missed += 1
            continue
        start, middle, filled[row] = filled[row], filled[row] + len(prompt), filled[row] + length
        ids_KT[row, start : filled[row] - 1] = np.concatenate([prompt, answer])
        labels_KT[row, middle : filled[row]] = ids_KT[row, middle : filled[row]]
        missed = 0
    return torch.from_numpy(ids_KT[:, :-1].copy()), torch.from_numpy(labels_KT[:, 1:].copy())


def text_rows(samples: NDArray[np.unsignedinteger], num_rows: int, seed: str) -> Rows:
    """Return random samples of a corpus; every token has a label."""
    chosen = random.Random(seed).choices(range(len(samples)), k=num_rows)
    ids = batch(samples, np.array(chosen))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def mean_loss(model: nn.Module, rows: Rows, device: str) -> Tensor:
    """Return the nats per labelled token; the model computes in bf16, the loss is fp32."""
    ids, labels = (part.to(device) for part in rows)
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(input_ids=ids).logits
    return cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


class Training:
    """Training of a policy.

    The same rows, budget and clock give the same bits, also after stops and resumes.
    """

    def __init__(
        self, model: nn.Module, rows_of: Callable[[int, float], Rows], budget: Budget, place: Path
    ) -> None:
        """Set up the training.

        rows_of(step, done): the rows of that step, when that share of the budget is used. place: the file
        from which a later call resumes.
        """
        self.model, self._rows_of, self._budget, self._place = model.to(budget.device), rows_of, budget, place
        self._inner = make_inner(model, budget.train)
        self.progress = Progressed()
        if place.exists():
            self._resume()

    def run(self, clock: Callable[[], float] = time.monotonic) -> Iterator[Progressed]:
        """Train until the budget is used; yield the progress after each step.

        Saves every minute, and when it is left early.
        """
        saved = self.progress.seconds
        self.model.train()
        try:
            while self.progress.seconds < self._budget.seconds:
                began = clock()
                self._step()
                self.progress.seconds += clock() - began
                if self.progress.seconds - saved >= SAVE_EVERY_S:
                    self._save()
                    saved = self.progress.seconds
                yield self.progress
        finally:
            if self.progress.seconds < self._budget.seconds:
                self._save()

    def _step(self) -> None:
        done = self.progress.seconds / self._budget.seconds
        set_lr(self._inner, lr_at(done, self._budget.train))
        rows = self._rows_of(self.progress.step, done)
        loss = mean_loss(self.model, rows, self._budget.device)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._inner.step()
        self._inner.zero_grad()
        self.progress.step += 1
        self.progress.tokens += rows[0].numel()
        self.progress.loss = float(loss.detach())

    def _save(self) -> None:
        done = self.progress
        state: dict[str, Any] = {
            "model": self.model.state_dict(),
            "inner": self._inner.state_dict(),
            "progress": json.dumps([done.step, done.seconds, done.tokens, done.loss]),
        }
        self._place.parent.mkdir(parents=True, exist_ok=True)
        writing = self._place.with_suffix(".writing")
        torch.save(state, writing)
        writing.rename(self._place)

    def _resume(self) -> None:
        state = torch.load(self._place, map_location=self._budget.device, weights_only=True)
        self.model.load_state_dict(state["model"])
        self._inner.load_state_dict(state["inner"])
        self.progress = Progressed(*json.loads(state["progress"]))


def watched(name: str, steps: Iterator[Progressed], seconds: float) -> None:
    """Iterate over `steps` with a line on stderr that shows loss, speed and remaining time."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as shown:
        bar = shown.add_task(name, total=seconds)
        for done in steps:
            speed = done.tokens / max(done.seconds, 1e-9)
            what = f"{name}: step {done.step}, loss {done.loss:.3f}, {speed:,.0f} tokens/s"
            shown.update(bar, completed=done.seconds, description=what)
