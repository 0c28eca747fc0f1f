"""The drafter of a node that trains on text: it learns in the node's waits from its forward passes."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aedit.edit import Shards
from aedit.launch.config import DrafterConfig
from aedit.launch.node.objective import NodeParts
from aedit.launch.node.rl_engine import TrainerWatch, draft_form, save_drafter, start_online, taps_of
from aedit.spec_rollout.model import unwrapped
from aedit.spec_rollout.training import (
    ForwardFeatures,
    LearningConfig,
    OnlineDrafter,
    TrainedPolicy,
    TrainedText,
)
from aedit.types import UserError

MAX_SHARE = 0.01
"""Largest share of the time of training passes that collecting features may take."""
SAMPLES = 128
"""Collected samples that count as one policy version, so that enough of them are held out."""


@dataclass(slots=True, kw_only=True)
class TextLearner:
    """Collects features of the training forward for the drafter of a rank.

    All ranks of the node call `begin_step` together; the drafter of the first one is saved. Nothing here
    changes the model or draws random numbers: the weights of the run are those of a run without a drafter.
    """

    policy: TrainedPolicy
    online: OnlineDrafter
    features: ForwardFeatures
    watch: TrainerWatch
    shards: Shards
    clock: Callable[[], float]
    """Seconds without the node's waits."""
    directory: Path
    """Directory of the node."""
    steps_before: int = 0
    """Steps of the drafter's training in the attempts before this one."""
    _collects: bool = False
    _num_collected: int = 0
    _version: int = 0
    _began_s: float = 0.0
    _passes_s: float = 0.0
    _cost_s: float = 0.0
    """Part of `_passes_s` that went into collecting."""

    def begin_step(self) -> None:
        """Decide whether features of this step are collected: yes while that has taken at most `MAX_SHARE`.

        After each `SAMPLES` of them the trainer gets embedding and head anew, as a policy version.
        """
        collects = self._cost_s <= MAX_SHARE * self._passes_s
        begins = collects and self._num_collected >= SAMPLES * self._version
        self._collects, begins = map(bool, self.shards.decide([collects, begins]))
        if begins:
            began_s = self.clock()
            self._version += 1
            self.policy.update(self._version)
            self.online.after_update()
            self._cost_s += self.clock() - began_s

    @contextmanager
    def collecting(self, model: nn.Module, tokens_BL: Tensor) -> Iterator[None]:
        """Collect the features of the call of `model` on these texts in the context; `write` follows."""
        self._began_s = now_s = self.clock()
        if not self._collects:
            yield
            return
        self._num_collected += len(tokens_BL)
        texts = [TrainedText(row, 1) for row in tokens_BL.tolist()]
        self._cost_s += self.clock() - now_s
        with self.features.collecting(model, texts, self._version):
            yield
            now_s = self.clock()
        self._cost_s += self.clock() - now_s

    def write(self) -> None:
        """Give the collected features to the trainer. Call it after the backward pass."""
        now_s = self.clock()
        self.features.write()
        ended_s = self.clock()
        self._cost_s += ended_s - now_s
        self._passes_s += ended_s - self._began_s

    def metrics(self) -> dict[str, float]:
        """Return the state of the drafter for a line of metrics, and record deaths of its trainer."""
        self.watch.report()
        status = self.online.status()
        found: dict[str, float] = {name: status[name] for name in ("steps", "published", "refused")}
        found["steps"] += self.steps_before
        match = max(status["training"].get(f"match_{which}", 0.0) for which in ("published", "candidate"))
        # On held-out samples of the training text, in chains as long as in the trainer's evaluation.
        found["accepted_length"] = round(1 + LearningConfig().evaluation_depth * match, 3)
        return found

    def save(self) -> int:
        """Write the newest drafter that has passed the gate, if there is one; return its training steps."""
        self.online.adopt()
        steps = self.steps_before + self.online.shared_steps
        if self.online.is_trained and self.shards.leads:
            save_drafter(self.online, self.directory, steps=steps)
        return steps


def check_text_drafter(config: DrafterConfig, model: Any) -> None:
    """Raise UserError if a run on text shall train a drafter and there is none for this model.

    model: Only its configuration is read.
    """
    if not config.trains_on_text:
        return
    try:
        draft_form(config).shape(model.config)
    except ValueError as error:
        raise UserError(f"drafter.train = true: {error}; leave drafter.train out") from None
    taps_of(config, model)


def make_text_learner(parts: NodeParts) -> TextLearner | None:
    """Return the drafter of a node that trains on text; None if the configuration wants none.

    All ranks of the node together. Raises UserError if there is no draft layer for the model.
    """
    config, sync = parts.config.drafter, parts.sync
    if not config.trains_on_text:
        return None
    model = unwrapped(sync.model)
    check_text_drafter(config, model)
    taps = taps_of(config, model)
    policy = TrainedPolicy(model, taps=taps)
    try:
        with torch.random.fork_rng(devices=[]):
            online = start_online(parts, policy)
    except ValueError as error:
        raise UserError(f"drafter.train = true: {error}") from None
    sync.idle = online
    return TextLearner(
        policy=policy,
        online=online,
        features=ForwardFeatures(online.sink, taps),
        watch=TrainerWatch.of(online, parts.recorder.event, config),
        shards=sync.shards,
        clock=lambda: time.monotonic() - sync.waited_s,
        directory=parts.recorder.directory,
    )
