"""Steps of reinforcement learning on two nodes, with the same samples once plainly and once speculating.

Both nodes compute in this process, one after the other, on one thread, and a step takes the processor time
that it used: other work on the machine makes a run longer and changes no figure but through shared caches.
The nodes average their gradients after each step, so that one waits for the other. The trainer of node 0's
drafter runs for the waits of node 0 alone; node 1 never trains one and uses what node 0 has published.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from torch import Tensor
from transformers import PreTrainedModel

from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine, EngineSource, Meters
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.spec_rollout.training import IdleConfig, OnlineConfig, OnlineDrafter
from benchmarks.drift_parts.policy import Lesson, Mover, policy_gradient
from benchmarks.drift_parts.run import HARVEST
from benchmarks.kit.trainer_waits import start, wait
from benchmarks.policies import load
from benchmarks.rl_speed_parts.dealing import NODES, Size, deal, node_of, rewarded
from benchmarks.rollout_parts.same import Same
from benchmarks.tail_parts.times import ARMS

Way = Literal["plain", "speculating"]
WAYS: tuple[Way, ...] = get_args(Way)
JUDGED_ARM, JUDGED_STEP = "layer:4", 1 << 20
"""Arm and step whose prompts compare the nodes' drafters."""

FEATURE_BYTES = 2**28
"""Memory for features, about 65,000 tokens of a policy of 10 M parameters."""

TAKES = OnlineConfig(train=False)
"""Drafter of a node that never trains one."""


@dataclass(slots=True)
class Spent:
    """Processor seconds of one node in one step."""

    rollouts_s: float = 0.0
    """The hand-over of the weights included."""
    rewards_s: float = 0.0
    training_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.rollouts_s + self.rewards_s + self.training_s


@dataclass(frozen=True, slots=True)
class Done:
    """One step in one way."""

    nodes: tuple[Spent, ...]
    tokens_per_pass: float
    arms: Mapping[str, int]
    """Engine steps by arm."""

    @property
    def seconds(self) -> float:
        """Return when the slowest node is done."""
        return max(node.busy_s for node in self.nodes)

    @property
    def waits_s(self) -> tuple[float, ...]:
        return tuple(self.seconds - node.busy_s for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Step:
    """One step in both ways."""

    seed: int
    number: int
    ways: Mapping[Way, Done]
    same: Same
    """Tokens of the speculating engines beside those of the plain ones."""
    lengths: tuple[int, ...]
    solved: float
    trained: float
    """Share of the tokens in groups with unequal rewards: the others have no gradient."""

    @property
    def speedup(self) -> float:
        return self.ways["plain"].seconds / self.ways["speculating"].seconds

    @property
    def rollout_speedup(self) -> float:
        plain, speculating = (sum(node.rollouts_s for node in self.ways[way].nodes) for way in WAYS)
        return plain / speculating


@contextmanager
def timed() -> Iterator[list[float]]:
    """Run the block; the list that is yielded then holds its processor seconds."""
    seconds: list[float] = []
    began_s = time.process_time()
    yield seconds
    seconds.append(time.process_time() - began_s)


class Node:
    """Engine of one node in one way."""

    def __init__(self, model: PreTrainedModel, size: Size, config: OnlineConfig | None) -> None:
        """Set up the node; config: of its drafter. None: it does not speculate."""
        rows = size.groups * size.samples
        self.target = Target.of(model, rows=rows, max_tokens=size.max_tokens)
        self.online = OnlineDrafter.of(self.target, config=config) if config else None
        self.engine = self._engine(Goodput([parse_arm(arm) for arm in ARMS]) if config else None)
        if self.online is not None:
            self.engine.sink = self.online.sink
        self._source = EngineSource(self.engine, self.online)

    @property
    def drafting(self) -> OnlineDrafter:
        """Return the drafter of a node that speculates."""
        if self.online is None:
            raise ValueError("this node does not speculate")
        return self.online

    def generate(self, prompts: Sequence[Prompt], spent: Spent) -> list[Rollout]:
        """Return a rollout of each prompt, with the newest drafter."""
        self.engine.meters = Meters()
        rollouts: list[Rollout] = []
        with timed() as seconds:
            self._source.add(prompts)
            while self._source.running:
                rollouts += self._source.step()
        spent.rollouts_s += seconds[0]
        return sorted(rollouts, key=lambda one: (one.prompt.group, one.prompt.sample))

    def follow(self, version: int, spent: Spent) -> None:
        """Take over the weights, which have changed in place."""
        with timed() as seconds:
            self._source.update_weights(None, version)
        spent.rollouts_s += seconds[0]

    def accepted_length(self, prompts: Sequence[Prompt]) -> float:
        """Return the tokens per pass with one fixed arm of the drafter."""
        engine = self._engine(Fixed.of(JUDGED_ARM))
        for _ in engine.generate(prompts):
            pass
        meters = engine.meters
        return meters.num_tokens / meters.num_passes

    def _engine(self, chooser: ArmChooser | None) -> Engine:
        drafters: dict[DrafterKind, Drafter] = {}
        if self.online is not None and self.online.drafter is not None:
            drafters = {"layer": self.online.drafter, "suffix": SuffixDrafter()}
        engine = Engine(self.target, drafters=drafters, chooser=chooser)
        # Other work must not change the choice of the arm either.
        engine.clock = engine.cost_clock = time.process_time
        return engine


class World:
    """Two nodes with one policy. A context manager: leaving it ends the trainer."""

    def __init__(
        self, size: Size, seed: int, root: Path, drafter: Mapping[str, Tensor] | None = None
    ) -> None:
        """Set up the nodes; drafter: where both nodes begin, as `learn` returns it. None: random weights."""
        self.size, self.seed, self.number = size, seed, 0
        self.model = load(size.policy, root)
        self.model.set_attn_implementation("eager")  # in training the fused one's way back is slow in bf16
        self.mover = Mover(self.model, size.lr)
        # Nothing is computed in a window, so the trainer needs no lower priority; with one, other work on the
        # machine would decide how much is learned.
        learns = OnlineConfig(idle=IdleConfig(niceness=0), memory_bytes=FEATURE_BYTES)
        self.nodes: dict[Way, list[Node]] = {
            "plain": [Node(self.model, size, None) for _ in range(NODES)],
            "speculating": [Node(self.model, size, learns), Node(self.model, size, TAKES)],
        }
        self.learner, self.other = (node.drafting for node in self.nodes["speculating"])
        if drafter is not None:
            self.learner.load_state(drafter)
            self.other.load_state(drafter)
        self.owed_s = 0.0
        """Processor seconds that the waits of node 0 have been worth. May be raised, as by a longer wait."""
        self._begun_s, self._sent = 0.0, self.learner.status()["adopted"]
        self._chance = random.Random(seed)

    def __enter__(self) -> "World":
        try:
            start(self.learner)
        except TimeoutError:
            self.learner.close()
            raise
        self._begun_s = self.learner.used_s
        return self

    def __exit__(self, *error: object) -> None:
        self.learner.close()

    @property
    def used_s(self) -> float:
        """Return the processor seconds of the trainer since it started."""
        return self.learner.used_s - self._begun_s

    def practise(self, number: int, until_s: float) -> None:
        """Generate samples at node 0 without a step of the policy, and wait until its trainer had `until_s`.

        The trainer also runs while samples are generated.
        """
        with self.learner.window("start"):
            self.nodes["speculating"][0].generate(deal(self.size, self.seed, number, 0), Spent())
        wait(self.learner, "start", lambda: self.used_s >= until_s, max(0.0, until_s - self.used_s))

    def step(self, ways: Sequence[Way] = WAYS) -> Step:
        """Take one step: generate in each of the ways, in random order, and train once.

        Rewards and training are the same work in all ways, and count in each.
        """
        spent: dict[Way, list[Spent]] = {way: [Spent() for _ in range(NODES)] for way in ways}
        said = self._generate(spent)
        first = [one for rollouts in said[ways[0]] for one in rollouts]
        same = sum((Same.of(self.model, *pair) for pair in self._pairs(said)), Same())
        lessons = self._reward(said[ways[0]], spent)
        self._train(lessons, spent)
        # A round is waited for before its weights are handed over: the gate judges on this step's samples.
        learner, other = (node.busy_s for node in spent["speculating"])
        self._share(max(0.0, other - learner))
        self._hand_over(spent)
        done = {way: self._done(way, nodes) for way, nodes in spent.items()}
        return Step(
            seed=self.seed,
            number=self.number,
            ways=done,
            same=same,
            lengths=tuple(len(one.tokens) for one in first),
            solved=sum(map(rewarded, first)) / len(first),
            trained=sum(len(one.rollout.tokens) for one in lessons) / sum(len(one.tokens) for one in first),
        )

    def shared(self) -> float:
        """Return the acceptance on the node that never trained its drafter over that on the one that did."""
        trained, other = (
            node.accepted_length(deal(self.size, self.seed, JUDGED_STEP, i))
            for i, node in enumerate(self.nodes["speculating"])
        )
        return other / trained

    def _generate(self, spent: Mapping[Way, Sequence[Spent]]) -> dict[Way, list[list[Rollout]]]:
        said: dict[Way, list[list[Rollout]]] = {way: [] for way in spent}
        for i in range(NODES):
            prompts = deal(self.size, self.seed, self.number, i)
            for way in self._chance.sample(list(spent), len(spent)):
                said[way].append(self.nodes[way][i].generate(prompts, spent[way][i]))
        return said

    @staticmethod
    def _pairs(said: Mapping[Way, list[list[Rollout]]]) -> Iterator[tuple[list[Rollout], list[Rollout]]]:
        if len(said) > 1:
            yield from zip(said["plain"], said["speculating"], strict=True)

    def _reward(
        self, said: Sequence[Sequence[Rollout]], spent: Mapping[Way, Sequence[Spent]]
    ) -> list[Lesson]:
        """Return the lessons of all nodes: one batch, in which each node has its part."""
        rewards: dict[int, float] = {}
        for i, rollouts in enumerate(said):
            with timed() as seconds:
                rewards |= {id(one): rewarded(one) for one in rollouts}
            for nodes in spent.values():
                nodes[i].rewards_s = seconds[0]
        return policy_gradient([one for rollouts in said for one in rollouts], lambda one: rewards[id(one)])

    def _train(self, lessons: Sequence[Lesson], spent: Mapping[Way, Sequence[Spent]]) -> None:
        """Add up the gradients of all nodes and step; each node steps for itself."""
        trained_s = []
        for i in range(NODES):
            with timed() as seconds:
                self.mover.backward([one for one in lessons if node_of(self.size, one.rollout) == i])
            trained_s.append(seconds[0])
        with timed() as seconds:
            self.mover.step()
        self.number += 1
        for nodes in spent.values():
            for node, backward_s in zip(nodes, trained_s, strict=True):
                node.training_s = backward_s + seconds[0]

    def _hand_over(self, spent: Mapping[Way, Sequence[Spent]]) -> None:
        for way, nodes in self.nodes.items():
            for node, to in zip(nodes, spent.get(way, [Spent() for _ in nodes]), strict=True):
                node.follow(self.number, to)

    def _done(self, way: Way, spent: Sequence[Spent]) -> Done:
        meters = [node.engine.meters for node in self.nodes[way]]
        passes = sum(one.num_passes for one in meters)
        arms = sum((one.arms for one in meters[1:]), meters[0].arms)
        return Done(tuple(spent), sum(one.num_tokens for one in meters) / passes, dict(arms))

    def _share(self, waited_s: float) -> None:
        """Let the trainer use node 0's wait, and send what node 0 has adopted since to node 1."""
        self.owed_s += HARVEST * waited_s
        wait(self.learner, "round", lambda: self.used_s >= self.owed_s, self.owed_s - self.used_s)
        adopted = self.learner.status()["adopted"]
        if adopted > self._sent:
            self._sent = adopted
            self.other.take_shared({name: value.clone() for name, value in self.learner.tensors().items()})
