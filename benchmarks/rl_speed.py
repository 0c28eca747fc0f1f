"""Measure the time of a step of reinforcement learning, plain and with a drafter trained in waits.

    python -m benchmarks.rl_speed [--only steps|waits] [--seeds 0,1,2] [--size 10m] [--minutes M] [--quick]
        [--drafter FILE]

Two parts: steps (the same samples made plainly and speculating, on two nodes) and waits (a node of fixed
pace: use of its waits, and what the trainer costs its steps). The policy is trained first if there is none
(`benchmarks.policies`).
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from aedit.launch.data import ByteTokenizer
from aedit.spec_rollout.choose import ArmChooser, Fixed, Goodput
from aedit.spec_rollout.drafters import Drafter, DrafterKind, SuffixDrafter, parse_arm
from aedit.spec_rollout.engine import Engine, EngineSource, Meters
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.rl.tasks.scratchpad import reward
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.training import GateConfig, IdleConfig, LearningConfig, OnlineConfig, OnlineDrafter
from benchmarks.drift import HARVEST, Lesson, Mover, policy_gradient
from benchmarks.idle import Arm, Harvest, Pair, Race, Ratio, harvest, outside
from benchmarks.kit.statistics import Interval, median, percent, quantile
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.trainer_waits import start, wait
from benchmarks.policies import ROOT, Policy, load, tasks
from benchmarks.policies import Size as PolicySize
from benchmarks.rollout import Same
from benchmarks.tail import ARMS

# -- prompts and rewards of the steps: scratchpad arithmetic, whose answers are of very unequal length


NODES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of work."""

    policy: Policy
    groups: int = 4
    """Prompts of a node and step."""
    samples: int = 4
    """Samples of a prompt."""
    max_tokens: int = 1024
    """Prompt and answer."""
    lr: float = 1e-5
    practice: int = 80
    """Batches of rollouts, as those of a step, of the policy with which the steps begin."""
    learned_s: float = 900.0
    """Processor seconds of training that the drafter has had on these, before the steps."""
    warm: int = 1
    """First steps of a seed, which are not measured: the choice of the arms learns what passes take."""
    steps: int = 4
    """Steps that are measured."""


def deal(size: Size, seed: int, step: int, node: int) -> list[Prompt]:
    """Return a node's samples of a step, with a group for each prompt."""
    stop, dealt = (ByteTokenizer().eos_id,), []
    first = ((seed << 24) + step) * NODES + node
    for i, task in enumerate(tasks(size.groups, seed=first)):
        tokens = tuple(map(int, ByteTokenizer().encode(task.prompt)))
        sampling = Sampling(max_new_tokens=size.max_tokens - len(tokens), stop_tokens=stop)
        group = first * size.groups + i
        dealt += [
            Prompt(tokens=tokens, rollout=group, sample=sample, group=group, sampling=sampling)
            for sample in range(size.samples)
        ]
    return dealt


def node_of(size: Size, rollout: Rollout) -> int:
    """Return the node to which `deal` gave the sample."""
    return rollout.prompt.group // size.groups % NODES


def rewarded(rollout: Rollout) -> float:
    """Return 1 if the last line is the right result, else 0."""
    decode = ByteTokenizer().decode
    return reward(decode(rollout.prompt.tokens), decode(rollout.tokens))


# -- a node of fixed pace: how much of its waits the trainer uses, and what that costs the node's steps
#
# The waits have a given length whatever the node does, as those for a peer of fixed pace. The node's steps
# are those of reinforcement learning, decoded plainly and with a learning rate of 0: equal steps do equal
# work, and faster decoding cannot hide a delay.


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
            self.online.after_update()

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
        harvests = tuple(harvest(node.online, node.step, amount.windows, amount.windows_s))
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
    return Waited(harvests, ratios)


# -- steps of reinforcement learning on two nodes, with the same samples once plainly and once speculating
#
# Both nodes compute in this process, one after the other, on one thread, and a step takes the processor
# time that it used: other work on the machine makes a run longer and changes no figure but through shared
# caches. The nodes average their gradients after each step, so that one waits for the other. The trainer of
# node 0's drafter runs for the waits of node 0 alone; node 1 never trains one and uses what node 0 has
# published.


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


# -- measurements, tables and bars


ABOUT = "Time of a step of reinforcement learning: plain, and speculating with a drafter trained in waits."
STEPS_METHOD = (
    "GRPO steps of two nodes that average after each step; each makes the same samples in both ways, in"
    " random order, on one thread, and trains once; times are processor time.",
    "Medians over the measured steps [95 % by bootstrap]. Before them node 0's drafter trains from random"
    " weights on rollouts of the first policy; in them it trains in node 0's waits alone, 85 % of which are"
    " used. Node 1 trains none. The first step of a seed is not measured: the choice learns in it.",
)
WAITS_METHOD = (
    "A node whose waits have a given length, on two threads, with the drafter's trainer in its waits; steps"
    " are decoded plainly with a learning rate of 0.",
    "Ratios are of steps on the same samples after waits of one length, in random order; 95 % by bootstrap.",
)
FASTER, TAIL, USED, SHARED = 1.5, 6.0, 0.85, 0.95
COST, HARM, AA_WIDTH, PAIRS = 1.01, 1.02, 0.06, 40
RUN_IN_SEED = 1000
Part = Literal["steps", "waits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of the measurement."""

    size: Size
    amount: Amount
    seeds: tuple[int, ...] = (0, 1, 2)
    root: Path = ROOT
    only: Part | None = None
    quick: bool = False
    drafter: Path | None = None
    """File of the drafter with which the steps begin. Where there is none yet, it is written."""


FULL = Plan(
    size=Size(policy=Policy(minutes=26.0)),
    amount=Amount(windows=8, windows_s=(1.0, 2.0), turns=60, waits_s=(0.02, 0.1)),
)
QUICK = Plan(
    size=Size(
        policy=Policy(size="quick", minutes=0.2),
        groups=2,
        samples=3,
        max_tokens=256,
        practice=2,
        learned_s=0.1,
        steps=2,
    ),
    amount=Amount(windows=1, windows_s=(1.0, 1.1), turns=3, waits_s=(0.01, 0.02), new_tokens=8, niceness=0),
    seeds=(0,),
    quick=True,
)


@dataclass(frozen=True, slots=True)
class Seed:
    """One run."""

    steps: tuple[Step, ...]
    """Those that are measured."""
    used_s: float
    """Processor seconds of the trainer in the waits of these steps."""
    shared: float
    """Acceptance on the node that never trained a drafter over that on the other."""


def drafter_of(plan: Plan, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return the drafter of the plan's file, or one that is trained now."""
    if plan.drafter is None:
        return learned(plan, say)
    if not plan.drafter.exists():
        save_file(learned(plan, say), plan.drafter)
    return load_file(plan.drafter)


def learned(plan: Plan, say: Callable[[str], None]) -> dict[str, Tensor]:
    """Return a drafter that has been trained from random weights on, in windows alone."""
    with World(plan.size, RUN_IN_SEED, plan.root) as world:
        for number in range(plan.size.practice):
            world.practise(number, plan.size.learned_s * (number + 1) / plan.size.practice)
            say(f"before the steps: batch {number} of rollouts, trainer {world.used_s:.1f} s")
        if world.used_s < plan.size.learned_s:
            raise TimeoutError(f"the trainer had {world.used_s:.1f} s only: the machine is too busy")
        world.learner.adopt()
        status = world.learner.status()
        say(f"drafter: {status['steps']} microbatches, {status['published']} published; {status['training']}")
        return world.learner.state()


def run(plan: Plan, seed: int, drafter: Mapping[str, Tensor], say: Callable[[str], None]) -> Seed:
    """Take the steps of one seed; drafter: where it begins."""
    steps = []
    with World(plan.size, seed, plan.root, drafter) as world:
        for _ in range(plan.size.warm):
            world.step(("speculating",))
        for number in range(plan.size.steps):
            steps.append(world.step())
            say(f"seed {seed}, step {number}: {steps[-1].speedup:.2f} x; {_speculating(steps[-1])}")
        return Seed(tuple(steps), world.used_s, world.shared())


def _speculating(step: Step) -> str:
    done = step.ways["speculating"]
    solved = f"{percent(step.solved, 0)} solved, longest {max(step.lengths)}"
    return f"{done.seconds:.2f} s, {done.tokens_per_pass:.2f} tokens per pass, {solved}"


def measure(plan: Plan, say: Callable[[str], None]) -> list[Report]:
    reports = []
    if plan.only != "waits":
        torch.set_num_threads(1)
        drafter = drafter_of(plan, say)
        reports.append(steps_report([run(plan, seed, drafter, say) for seed in plan.seeds], plan))
    if plan.only != "steps":
        reports.append(waits_report(measure_waits(plan.size, plan.amount, plan.root), plan))
    return reports


# --- steps


def steps_report(seeds: Sequence[Seed], plan: Plan) -> Report:
    steps = [step for seed in seeds for step in seed.steps]
    lengths = [length for step in steps for length in step.lengths]
    p50, p99 = quantile(lengths, 0.5), quantile(lengths, 0.99)
    name = f"{len(seeds)} seeds x {plan.size.steps} steps of 2 nodes x {plan.size.groups} prompts x"
    name += f" {plan.size.samples} samples; lengths p50 {p50:.0f}, p99 {p99:.0f}"
    return Report(
        name=name,
        method=STEPS_METHOD,
        columns=(
            "way",
            "step s",
            "of plain",
            "rollouts",
            "rewards",
            "training",
            "waiting",
            "per pass",
            "arms",
        ),
        rows=tuple(_row(way, steps) for way in WAYS),
        bars=tuple(_judged(list(_steps_bars(seeds, plan, p99 / p50)), plan.quick)),
        figures={"seeds": [asdict(seed) for seed in seeds]},
    )


def _row(way: Way, steps: Sequence[Step]) -> tuple[str, ...]:
    done = [step.ways[way] for step in steps]
    nodes = [node for one in done for node in one.nodes]
    parts = ("rollouts_s", "rewards_s", "training_s")
    whole_s = sum(len(one.nodes) * one.seconds for one in done)
    shares = [sum(getattr(node, part) for node in nodes) / whole_s for part in parts]
    shares.append(sum(sum(one.waits_s) for one in done) / whole_s)
    arms: dict[str, int] = {}
    for one in done:
        for arm, count in one.arms.items():
            arms[arm] = arms.get(arm, 0) + count
    often = sorted(arms.items(), key=lambda pair: -pair[1])[:3]
    ratio = Interval.of(
        [one.seconds / step.ways["plain"].seconds for one, step in zip(done, steps, strict=True)]
    )
    return (
        way,
        f"{median([one.seconds for one in done]):.2f}",
        str(ratio),
        *(percent(share) for share in shares),
        f"{median([one.tokens_per_pass for one in done]):.2f}",
        ", ".join(f"{arm} {percent(count / sum(arms.values()), 0)}" for arm, count in often),
    )


def _steps_bars(seeds: Sequence[Seed], plan: Plan, tail: float) -> Iterator[Bar]:
    steps = [step for seed in seeds for step in seed.steps]
    faster, rollouts = (
        Interval.of([getattr(step, name) for step in steps]) for name in ("speedup", "rollout_speedup")
    )
    each = ", ".join(f"{median([step.speedup for step in seed.steps]):.2f}" for seed in seeds)
    text = f"step: {faster} x faster (seeds {each}; rollouts alone {rollouts}), bar {FASTER}"
    yield Bar(text, faster.middle >= FASTER)
    yield Bar(f"lengths: p99 / p50 is {tail:.1f}, bar {TAIL:g}", tail >= TAIL)
    same = [step.same for step in steps]
    tokens, ties, other = (sum(getattr(one, n) for one in same) for n in ("tokens", "ties", "differences"))
    yield Bar(
        f"{tokens} tokens equal, {ties} near ties of fp32 apart; other differences: {other}, bar 0", not other
    )
    shared = median([seed.shared for seed in seeds])
    lowest = min(seed.shared for seed in seeds)
    text = f"acceptance without own training / with: {shared:.3f}, lowest {lowest:.3f}, bar {SHARED}"
    yield Bar(text, shared >= SHARED)
    used = [seed.used_s for seed in seeds]
    text = f"trainer: {plan.size.learned_s:g} s before and {median(used):.0f} s in the steps, all in waits"
    yield Bar(
        f"{text}; steps with a gradient in {percent(median([s.trained for s in steps]), 0)} of tokens", None
    )


# --- waits


def waits_report(seen: Waited, plan: Plan) -> Report:
    shares = [one.cpu_s / one.idle_s for one in seen.harvests]
    rows: list[tuple[str, ...]] = [
        (
            "trainer busy / waits of 1 s and more",
            str(len(shares)),
            percent(seen.used),
            "",
            percent(min(shares)),
        ),
        ("trainer's time outside of waits", "", percent(outside(seen.harvests), 2), "", ""),
    ]
    names = {
        "same": "step: no drafter beside no drafter (A/A)",
        "drafter": "step: drafter that trains in waits",
        "control": "step: control, trainer goes on during the step",
    }
    rows += [_ratio_row(names[name], ratio) for name, ratio in seen.ratios.items()]
    return Report(
        name="A drafter's training in the waits of a node of fixed pace",
        method=WAITS_METHOD,
        columns=("what", "n", "middle", "95 %", "worst"),
        rows=tuple(rows),
        bars=tuple(_judged(list(_waits_bars(seen)), plan.quick)),
        figures=asdict(seen),
    )


def _ratio_row(name: str, ratio: Ratio) -> tuple[str, ...]:
    spread = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return name, str(ratio.num_pairs), f"{ratio.middle:.3f}", spread, f"{ratio.worst:.2f}"


def _waits_bars(seen: Waited) -> Iterator[Bar]:
    yield Bar(f"waits of 1 s and more used: {percent(seen.used)}, bar {percent(USED, 0)}", seen.used >= USED)
    same, cost, harm = (seen.ratios[name] for name in ("same", "drafter", "control"))
    yield Bar(
        f"the control shows the harm: {harm.middle:.2f}, at least {harm.low:.2f}, bar {HARM}", harm.low > HARM
    )
    # Without harm in the control, or with two like series that differ, nothing could be seen here.
    can_tell = harm.low > HARM and same.high - same.low <= AA_WIDTH and cost.num_pairs >= PAIRS
    text = f"step with a drafter: {cost.middle:.3f}, {cost.low:.3f} to {cost.high:.3f}, bar {COST}"
    text += f" (A/A {same.middle:.3f}, {same.low:.3f} to {same.high:.3f})"
    yield Bar(text, cost.middle <= COST if can_tell else None)


def _judged(bars: Sequence[Bar], quick: bool) -> list[Bar]:
    """Return the bars; a quick run decides nothing but that the tokens are equal."""
    return [replace(bar, passed=None) if quick and "tokens equal" not in bar.text else bar for bar in bars]


# --- command line


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=get_args(Part))
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--size", choices=get_args(PolicySize), default=FULL.size.policy.size)
    parser.add_argument(
        "--minutes", type=float, default=FULL.size.policy.minutes, help="of the policy's training"
    )
    parser.add_argument(
        "--learned", type=float, default=FULL.size.learned_s, help="seconds of training before the steps"
    )
    parser.add_argument("--steps", type=int, default=FULL.size.steps, help="steps that are")
    parser.add_argument("--drafter", type=Path, help="file to begin with; without one it is written")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def _asked(args: argparse.Namespace) -> list[Report]:
    say: Callable[[str], Any] = Console(stderr=True).print
    if args.quick:
        return measure(replace(QUICK, only=args.only, root=args.root, drafter=args.drafter), say)
    policy = Policy(size=args.size, minutes=args.minutes)
    size = replace(FULL.size, policy=policy, learned_s=args.learned, steps=args.steps)
    seeds = tuple(int(seed) for seed in args.seeds.split(","))
    plan = replace(FULL, size=size, seeds=seeds, only=args.only, root=args.root, drafter=args.drafter)
    return measure(plan, say)


if __name__ == "__main__":
    main("rl_speed", ABOUT, _asked, options=_options)
