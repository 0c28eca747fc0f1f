"""A node of fixed pace: how much of its waits the trainer uses, and what that costs the node's steps.

The waits have a given length whatever the node does, as those for a peer of fixed pace. The node's steps are
those of reinforcement learning, decoded plainly and with a learning rate of 0: equal steps do equal work, and
faster decoding cannot hide a delay.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.training import GateConfig, IdleConfig, LearningConfig, OnlineConfig, OnlineDrafter
from benchmarks.drift_parts.policy import Mover, policy_gradient
from benchmarks.idle_parts.foreground import Arm, Pair, Race, Ratio
from benchmarks.idle_parts.windows import Harvest, harvest
from benchmarks.kit.trainer_waits import start, wait
from benchmarks.policies import load
from benchmarks.rl_speed_parts.dealing import Size, deal

NEVER = LearningConfig(gate=GateConfig(gain=2.0, harm=2.0, patience=10**9))
"""Nothing is published."""
KEPT_STEPS = 4
"""Different steps. Each is taken many times."""
FIRST_PROMPTS = 8
"""Steps whose rollouts the trainer has before the first wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Amount of measurement."""

    windows: int
    """Waits of 1 s and more."""
    windows_s: tuple[float, float]
    turns: int
    waits_s: tuple[float, float]
    """Before the steps that are timed."""
    samples: int = 4
    """Samples of a step's one prompt."""
    new_tokens: int = 24
    """Most tokens of each sample."""
    threads: int = 2
    """Threads of the node."""
    niceness: int = 19
    """Niceness of the trainer; 19 is what a run has."""


@dataclass(frozen=True, slots=True)
class Waited:
    """Results."""

    harvests: tuple[Harvest, ...]
    outside: float
    """Share of the trainer's processor time that it used outside of waits."""
    ratios: dict[str, Ratio]

    @property
    def used(self) -> float:
        """Return the trainer's processor time over the time waited."""
        return sum(one.cpu_s for one in self.harvests) / sum(one.idle_s for one in self.harvests)


class Stepper:
    """Node that generates and trains. A context manager: leaving it ends the trainer."""

    def __init__(self, size: Size, amount: Amount, root: Path, idle: IdleConfig) -> None:
        self._model = load(size.policy, root)
        self._target = Target.of(self._model, rows=amount.samples, max_tokens=size.max_tokens)
        self._engine, self._mover, self._version = Engine(self._target), Mover(self._model, 0.0), 0
        self.online = OnlineDrafter.of(self._target, config=OnlineConfig(learning=NEVER, idle=idle))
        self._size = replace(size, groups=1, samples=amount.samples)
        self._new_tokens = amount.new_tokens

    def __enter__(self) -> "Stepper":
        try:
            start(self.online)
            with self.attached():
                for number in range(FIRST_PROMPTS):
                    self.step(number)
                wait(self.online, "start", lambda: self.online.status()["steps"] > 0, 1.0)
        except BaseException:
            self.online.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.online.close()

    def step(self, number: int) -> None:
        """Generate, train without an effect, and hand the weights over."""
        prompts = deal(self._size, 0, number % KEPT_STEPS, 0)
        short = [replace(p.sampling, max_new_tokens=self._new_tokens) for p in prompts]
        asked = [replace(p, sampling=how) for p, how in zip(prompts, short, strict=True)]
        rollouts = list(self._engine.generate(asked))
        self._mover.learn(policy_gradient(rollouts))  # for a letter: texts so short have no results yet
        self._version += 1
        self._engine.update_weights(None, self._version)
        if self._engine.sink is not None:
            self.online.after_update(kl_nats=0.0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Pass the features of the steps to the trainer, from here until `detached`."""
        self._engine.sink = self.online.sink
        yield

    @contextmanager
    def detached(self) -> Iterator[None]:
        """Take the steps from here on without a drafter."""
        self._engine.sink = None
        yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait with a trainer, and go on with its features."""
        with self.attached(), self.online.window("round"):
            yield


def measure_waits(size: Size, amount: Amount, root: Path) -> Waited:
    """Return the use of waits, and the steps after them beside those of a node without a drafter."""
    torch.set_num_threads(amount.threads)
    with Stepper(size, amount, root, IdleConfig(niceness=amount.niceness)) as node:
        harvests, outside = harvest(node.online, node.step, amount.windows, amount.windows_s)
        off = Arm(node.detached)
        arms = {"off": off, "same": off, "drafter": Arm(node.waiting)}
        race = Race(node, amount.waits_s)
        turns = [race.turn(arms) for _ in range(amount.turns)]
    ratios = {name: Ratio.of([Pair(s[name], s["off"]) for s in turns]) for name in ("same", "drafter")}
    with Stepper(size, amount, root, IdleConfig(niceness=0, threads=amount.threads)) as node:
        race = Race(node, amount.waits_s)
        arms = {"on": Arm(node.waiting, goes_on=True), "off": Arm(node.detached)}
        turns = [race.turn(arms) for _ in range(max(amount.turns // 3, 3))]
    ratios["control"] = Ratio.of([Pair(s["on"], s["off"]) for s in turns])
    return Waited(tuple(harvests), outside, ratios)
