"""Run in which a policy moves and its drafter trains during the waits."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from transformers import PreTrainedModel

from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.training import LearningConfig
from benchmarks.drift_parts.drafters import Control, IdleTrained, copy_of
from benchmarks.drift_parts.judge import ARM, Checkpoint, Judge
from benchmarks.drift_parts.policy import AHEAD, Mover, moved, paced, policy_gradient
from benchmarks.kit.policy_drafter import Recipe, drafter_ready
from benchmarks.policies import PROMPT_BYTES, Policy, load, prompts

IDLE_SHARE, HARVEST = 0.2, 0.85
"""Idle share of a step, and the share of idle time that a trainer uses, by `benchmarks.idle`."""
MOST_LR = 20.0
"""Times what it was at first, and as much lower."""
PACED_BY = 8
"""Rollouts of a step, by which its policy is found to be too fast or too slow."""
RUN_SEED, EVAL_SEED, ORACLE_SEED = 1, 2, 3
"""Seeds of prompts; the names of their noise differ too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of work."""

    recipe: Recipe
    """Recipe of the first drafter and of its policy."""
    steps: int
    looks: int
    """Checkpoints after the first, which is before step 0."""
    groups: int
    """Prompts of a step."""
    samples: int
    """Samples of a prompt."""
    most_new: int
    """Tokens of a rollout."""
    lr: float
    """Learning rate of the first step."""
    kl_nats: float
    """Per token, where the policy is to be in the end."""
    judged_groups: int
    oracle_prompts: int
    oracle_rounds: int

    @property
    def checkpoint_steps(self) -> list[int]:
        return [round(self.steps * i / self.looks) for i in range(self.looks + 1)]

    def wanted_nats(self, step: int) -> float:
        """Return the KL that the policy should have after `step` steps.

        What it has learned grows with the steps, and KL with the square of that.
        """
        return self.kl_nats * (step / self.steps) ** 2


FULL = Size(
    recipe=Recipe(policy=Policy(task="python"), minutes=5.0),
    steps=72,
    looks=6,
    groups=4,
    samples=8,
    most_new=80,
    lr=3e-5,
    kl_nats=1.5,
    judged_groups=4,
    oracle_prompts=96,
    oracle_rounds=8,
)
QUICK = Size(
    recipe=Recipe(
        policy=Policy(task="python", size="quick", minutes=0.3), num_tokens=8192, minutes=0.1, lr=3e-3
    ),
    steps=6,
    looks=2,
    groups=2,
    samples=4,
    most_new=32,
    lr=2e-3,
    kl_nats=1.5,
    judged_groups=1,
    oracle_prompts=16,
    oracle_rounds=1,
)


class Drift:
    """Policy, drafters and their evaluation. A context manager: leaving it ends the trainer."""

    def __init__(
        self, size: Size, policies: tuple[PreTrainedModel, PreTrainedModel], layer: DraftLayer
    ) -> None:
        """Set up the run.

        policies: two copies of one, the first to be moved in place. layer: its drafter.
        """
        self._size, self._policies, self._step = size, policies, 0
        rows, max_tokens = size.groups * size.samples, PROMPT_BYTES + size.most_new
        self._target, start_target = (Target.of(m, rows=rows, max_tokens=max_tokens) for m in policies)
        learning = LearningConfig()
        self._idle = IdleTrained(layer, self._target, learning)
        self._control = Control(layer, start_target, learning)
        self._drafter = LayerDrafter.of(copy_of(layer), self._target)
        self._engine = Engine(self._target, drafters={"layer": self._drafter}, chooser=Fixed.of(ARM))
        self._engine.sink = self._idle.sink
        frozen = LayerDrafter.of(copy_of(layer), start_target)
        self._frozen = Engine(start_target, drafters={"layer": frozen}, chooser=Fixed.of(ARM))
        self._frozen.sink = self._control.sink
        self._mover = Mover(policies[0], size.lr)
        self._asked = _asked(size, RUN_SEED, size.steps * size.groups, size.samples)
        by = _asked(size, EVAL_SEED, size.judged_groups, size.samples)
        taught = _asked(size, ORACLE_SEED, size.oracle_prompts, 1)
        self._judge = Judge(policies, self._target, layer, (by, taught), size.oracle_rounds)

    @classmethod
    def of(cls, size: Size, root: Path) -> Self:
        """Return the run; train policy and drafter first if they do not exist."""
        path = drafter_ready(size.recipe, root)
        policies = load(size.recipe.policy, root), load(size.recipe.policy, root)
        made = cls(size, policies, DraftLayer.load(path, policies[0]))
        try:
            made._idle.start()
        except TimeoutError:
            made._idle.close()
            raise
        return made

    def step(self) -> None:
        """Take a step of the policy, and as many of the control as the trainer has taken in its waits."""
        rows = self._size.groups * self._size.samples
        asked = self._asked[rows * self._step : rows * (self._step + 1)]
        self._step += 1
        with foreground() as used:
            rollouts = list(self._engine.generate(asked))
        self._wait("tail", used)
        self._pace(rollouts)
        with foreground() as used:
            self._mover.learn(policy_gradient(rollouts))
            self._engine.update_weights(self._policies[0].state_dict(), self._step)
        self._idle.follow(self._target)
        self._wait("sync", used)
        self._control.sink.ring.begin_step(kl_nats=0.0)
        for _ in self._frozen.generate(asked):
            pass
        self._control.go_on(self._idle.microbatches)

    def look(self) -> Checkpoint:
        """Evaluate all drafters on the current policy."""
        drafters = {"idle-trained": self._idle.layer, "control": self._control.layer}
        return self._judge.look(self._step, drafters, self._idle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._idle.close()

    def _pace(self, rollouts: list[Rollout]) -> None:
        """Adjust the rate to the wanted distance of the policy."""
        kl_nats, _ = moved(*self._policies, rollouts[:: -(-len(rollouts) // PACED_BY)])
        wanted_nats = self._size.wanted_nats(self._step - 1 + AHEAD)
        lr = paced(self._mover.lr, self._mover.lr_sum, kl_nats, wanted_nats)
        self._mover.lr = min(max(lr, self._size.lr / MOST_LR), MOST_LR * self._size.lr)

    def _wait(self, cause: str, used: "Used") -> None:
        self._idle.wait(cause, used.seconds * HARVEST * IDLE_SHARE / (1 - IDLE_SHARE))
        if self._idle.adopt():
            self._drafter.replace(copy_of(self._idle.layer), self._step)


@dataclass(slots=True)
class Used:
    """Processor seconds of this process."""

    seconds: float = 0.0


@contextmanager
def foreground() -> Iterator[Used]:
    """Run the block on one thread and take its time.

    What is outside the block belongs to the measurement and uses as many threads as torch does.
    """
    used, began_s = Used(), time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield used
    finally:
        torch.set_num_threads(threads)
        used.seconds = time.process_time() - began_s


def _asked(size: Size, seed: int, groups: int, samples: int) -> list[Prompt]:
    """Return prompts at temperature 1, each `samples` times."""
    sampling = Sampling(max_new_tokens=size.most_new)
    return [
        Prompt(tokens=tokens, rollout=seed, sample=samples * group + i, group=group, sampling=sampling)
        for group, tokens in enumerate(prompts(size.recipe.policy, groups, seed))
        for i in range(samples)
    ]
