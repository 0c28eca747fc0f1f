"""Measure whether a drafter that trains in idle time keeps up with a moving policy.

A policy trained to write Python is moved by reinforcement learning, at a rate that follows a schedule of its
KL to its start. (The policy of scratchpad arithmetic is too certain to be moved by its own samples.) A step
is: rollouts by the speculating engine, whose features go into the ring; a wait; an update of the policy; a
wait. The waits together are a fifth of the step. The trainer's process runs in them only, and the engine
adopts what its gate publishes.

Waits are counted in processor seconds: the rest of the step took so many of one core, the trainer gets a
quarter of that, times 0.85, the share that `benchmarks.idle` requires of a wait. So a busy machine makes the
run longer and changes nothing else.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from aedit.launch.cli.train_drafter import collect_rollouts
from aedit.spec_rollout.choose import Fixed
from aedit.spec_rollout.drafters import DraftLayer, LayerDrafter, SuffixDrafter, layer_of
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout, Sampling
from aedit.spec_rollout.training import (
    JUDGED_EVERY,
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    FeatureSample,
    IdleConfig,
    LayerTraining,
    LearningConfig,
    LossConfig,
    Match,
    PolicyEmbeddings,
    RingShape,
    RowFeatures,
    held_out_match,
    pack_samples,
    policy_tensors,
    train_when_idle,
)
from benchmarks.kit.policy_drafter import Recipe, drafter_ready, prompts_of
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.trainer_waits import start, wait
from benchmarks.policies import PROMPT_BYTES, ROOT, Policy, load, prompts, ready

# -- move a policy by reinforcement learning on its own rollouts, and measure how far it has moved
#
# The reward is the share of one letter in the text. It has no use, but every rollout has some of it, so
# that a small policy learns from the first step on, and it can grow as far as the benchmark needs.


LETTER = ord("e")
ROWS_AT_ONCE = 16
"""Rows of a teacher-forced pass at most."""
TOKENS_AT_ONCE = 2048
"""Tokens of a teacher-forced pass, padding included, if it has more than one row."""
AHEAD = 3
"""Steps in which a policy that is behind or ahead of its schedule comes back to it."""
FASTER, SLOWER = 1.5, 0.7
"""Largest factors by which the rate changes from one step to the next."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Rollout with the weight of each of its tokens; below 0 its probability is lowered."""

    rollout: Rollout
    weight: float


def reward(rollout: Rollout) -> float:
    """Return the share of the letter in the rollout."""
    return rollout.tokens.count(LETTER) / len(rollout.tokens)


def policy_gradient(
    rollouts: Sequence[Rollout], rewarded: Callable[[Rollout], float] = reward
) -> list[Lesson]:
    """Return rollouts weighted by their advantage and normalized by the number of all tokens.

    The advantage is the reward minus the mean of its group, over the group's spread (GRPO, arXiv:2402.03300;
    one step per batch, so that there is no ratio to clip). Groups of equal rewards have weight 0.
    """
    num_tokens = sum(len(rollout.tokens) for rollout in rollouts)
    lessons = []
    for _, members in groupby(sorted(rollouts, key=_group), key=_group):
        group = list(members)
        rewards = torch.tensor([rewarded(rollout) for rollout in group])
        spread = float(rewards.std(correction=0))
        if spread > 0:
            weights = ((rewards - rewards.mean()) / spread / num_tokens).tolist()
            lessons += [Lesson(*each) for each in zip(group, weights, strict=True)]
    return lessons


def paced(lr: float, lr_sum: float, kl_nats: float, wanted_nats: float) -> float:
    """Return the rate that brings the policy to the wanted distance in `AHEAD` steps.

    It assumes that the root of KL grows like the sum of the rates. lr: of the last step. lr_sum: of all
    steps. wanted_nats: that many steps ahead.
    """
    gone = math.sqrt(max(kl_nats, 0.0))
    if not (gone and lr_sum):
        return lr
    needed = (math.sqrt(wanted_nats) - gone) * lr_sum / gone / AHEAD
    return min(max(needed, SLOWER * lr), FASTER * lr)


def _group(rollout: Rollout) -> int:
    return rollout.prompt.group


class Mover:
    """AdamW on a policy, in place."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._model, self.lr, self.lr_sum = model, lr, 0.0
        self._inner = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Take one step up the weighted log-probabilities of the answers."""
        self.backward(lessons)
        self.step()

    def backward(self, lessons: Sequence[Lesson]) -> None:
        """Add the gradient of the weighted log-probabilities of the answers."""
        for part in _parts([lesson.rollout for lesson in lessons]):
            weights = torch.tensor([lessons[i].weight for i in part.indices])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self._model(input_ids=part.ids_BT).logits
            nll_BT = F.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), part.ids_BT[:, 1:], reduction="none"
            )
            loss = (nll_BT * part.answers_BT[:, 1:] * weights[:, None]).sum()
            loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take one step along the gradients so far."""
        self.lr_sum += self.lr
        for group in self._inner.param_groups:
            group["lr"] = self.lr
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._inner.step()
        self._inner.zero_grad()


@torch.no_grad()
def moved(now: PreTrainedModel, start: PreTrainedModel, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return (KL(now || start), entropy of now) in nats per token of the rollouts of `now`.

    Each token's value is computed from the whole distributions.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in _parts(rollouts):
        said_BT = part.answers_BT[:, 1:]
        logp, logp_start = (F.log_softmax(m(input_ids=part.ids_BT).logits[:, :-1], -1) for m in (now, start))
        p = logp.exp()
        kl_BT, entropy_BT = (p * (logp - logp_start)).sum(-1), -(p * logp).sum(-1)
        sums += torch.stack([(x * said_BT).sum().double() for x in (kl_BT, entropy_BT, said_BT)])
    kl, entropy = (sums[:2] / sums[2]).tolist()
    return kl, entropy


@dataclass(frozen=True, slots=True)
class _Part:
    """Texts in one batch, padded after their ends, where no counted token attends."""

    indices: list[int]
    ids_BT: Tensor
    answers_BT: Tensor
    """1 at the tokens of answers, else 0."""


def _parts(rollouts: Sequence[Rollout]) -> Iterator[_Part]:
    """Group texts of similar length."""
    texts = [(*rollout.prompt.tokens, *rollout.tokens) for rollout in rollouts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    while order:
        num_rows = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // len(texts[order[0]])))
        indices, order = order[:num_rows], order[num_rows:]
        shape = len(indices), len(texts[indices[0]])
        ids_BT, answers_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, i in enumerate(indices):
            ids_BT[row, : len(texts[i])] = torch.tensor(texts[i])
            answers_BT[row, len(rollouts[i].prompt.tokens) : len(texts[i])] = 1
        yield _Part(indices, ids_BT, answers_BT)


# -- drafters of a moving policy: trained in idle time, on the unmoved policy, and to convergence
#
# The second one gets as much training as the first, the third learns from the moved policy.


RING_BYTES = 64 << 20
ROUND_STEPS = 16
"""Steps of an oracle between two evaluations."""
LEARNS_NO_MORE = 0.003
"""Increase of the match rate in a round, below which the rate is halved."""
HALVINGS = 3
ORACLE_ROW_PAIRS, ORACLE_LR = 512, 1e-3


@dataclass(frozen=True, slots=True)
class Gate:
    """Decisions of the gate so far."""

    published: int
    judged: int

    @property
    def refused(self) -> int:
        return self.judged - self.published


class IdleTrained:
    """Drafter trained in windows by a process of its own; `close` ends the process."""

    def __init__(self, layer: DraftLayer, target: Target, learning: LearningConfig) -> None:
        """Set up the process; layer: where training begins, copied."""
        self.layer = copy_of(layer)
        shape = RingShape.within(RING_BYTES, target.feature_size, torch.float32)
        # The run computes nothing in a window, so the trainer needs no lower priority, and other processes
        # should not change what it learns.
        idle = IdleConfig(niceness=0)
        self._work = train_when_idle(self.layer, ends_of(target), shape, learning=learning, idle=idle)
        self._number, self._begun_s = 1, 0.0
        self.sink = RowFeatures(FeatureRing(self._work.features, shape))
        self.idle_s = 0.0
        """Processor seconds that the windows were to give."""

    def start(self) -> None:
        """Wait until the process has loaded what it needs. Raises TimeoutError."""
        start(self._work)
        self._begun_s = self._work.used_s

    def wait(self, cause: str, idle_s: float) -> None:
        """Open a window until the trainer has used all idle time so far and `idle_s` more.

        A busy machine makes the window longer but gives the trainer no more time.
        """
        self.idle_s += idle_s
        wait(self._work, cause, lambda: self.used_s >= self.idle_s, idle_s)

    def follow(self, target: Target) -> None:
        """Send the weights of the moved policy to the trainer."""
        self._work.update_policy(policy_tensors(ends_of(target)), target.version)
        self.sink.ring.begin_step()

    def adopt(self) -> bool:
        """Take over what was published; return whether it is new."""
        found = self._work.newest(self._number)
        if found is None:
            return False
        self._number = found.number
        self.layer.load_state_dict(found.tensors)
        return True

    @property
    def used_s(self) -> float:
        """Return the processor seconds of the trainer since it started."""
        return self._work.used_s - self._begun_s

    @property
    def microbatches(self) -> int:
        return int(self._work.status()["steps"])

    @property
    def gate(self) -> Gate:
        status = self._work.status()
        return Gate(int(status["published"]), int(status["training"].get("evaluations", 0)))

    def close(self) -> None:
        self._work.close()


class Control:
    """The same training with equally many microbatches, on rollouts of the unmoved policy."""

    def __init__(self, layer: DraftLayer, target: Target, learning: LearningConfig) -> None:
        self.layer = copy_of(layer)
        shape = RingShape.within(RING_BYTES, target.feature_size, torch.float32)
        features = bytearray(shape.num_bytes)
        self.sink = RowFeatures(FeatureRing(features, shape))
        self._learning = LayerTraining(copy_of(layer), features, learning)
        self._learning.set_policy(policy_tensors(ends_of(target)), target.version)
        self._learning.begin(layer.state_dict())
        self.microbatches = 0

    def go_on(self, microbatches: int) -> None:
        """Train until `microbatches` are done."""
        while self.microbatches < microbatches and self._learning.microbatch():
            self.microbatches += 1
            better = self._learning.to_publish()
            if better is not None:
                self.layer.load_state_dict(better)


def collected(engine: Engine, prompts: Sequence[Prompt]) -> tuple[list[Rollout], list[FeatureSample]]:
    """Return the policy's rollouts of `prompts`, and the same with its features."""
    width = engine.target.feature_size
    num_tokens = sum(len(p.tokens) + p.sampling.max_new_tokens for p in prompts)
    row_bytes = RingShape(width, torch.float32, 1).row_bytes
    shape = RingShape.within(2 * num_tokens * row_bytes, width, torch.float32)
    features = bytearray(shape.num_bytes)
    engine.sink = RowFeatures(FeatureRing(features, shape))
    said = list(engine.generate(prompts))
    reader = FeatureReader(features)
    return said, [sample for entry in reader.entries() if (sample := reader.read(entry)) is not None]


def oracle(
    layer: DraftLayer, samples: Sequence[FeatureSample], ends: PolicyEmbeddings, most_rounds: int
) -> tuple[DraftLayer, int]:
    """Train a layer on a policy's samples until the held-out part shows no progress.

    The rate is halved whenever progress stops. Returns the layer and the number of steps.
    """
    config = DraftTrainingConfig(lr=ORACLE_LR, batch_pairs=2 * ORACLE_ROW_PAIRS, row_pairs=ORACLE_ROW_PAIRS)
    taught = [sample for sample in samples if sample.serial % JUDGED_EVERY]
    apart = pack_samples([s for s in samples if s.serial % JUDGED_EVERY == 0], ORACLE_ROW_PAIRS)
    best, trainer = copy_of(layer), DraftTrainer(copy_of(layer), config)
    best_rate, halvings, steps = held_out_match(best, apart, ends, 4).rate, 0, 0
    rng = torch.Generator().manual_seed(0)
    for _ in range(most_rounds):
        for _ in range(ROUND_STEPS):
            trainer.step(_batch(taught, config.batch_pairs, rng), ends)
        steps += ROUND_STEPS
        rate = held_out_match(trainer.layer, apart, ends, 4).rate
        if rate < best_rate + LEARNS_NO_MORE:
            halvings, trainer.lr_factor = halvings + 1, trainer.lr_factor / 2
        if rate > best_rate:
            best_rate = rate
            best.load_state_dict(trainer.layer.state_dict())
        if halvings > HALVINGS:
            break
    return best, steps


def matched(layer: DraftLayer, samples: Sequence[FeatureSample], ends: PolicyEmbeddings, depth: int) -> Match:
    """Return how a drafter matches the policy on samples, from probabilities instead of draws."""
    return held_out_match(layer, pack_samples(samples, ORACLE_ROW_PAIRS), ends, depth)


def ends_of(target: Target) -> PolicyEmbeddings:
    return PolicyEmbeddings(target.embedding.detach(), target.head.detach(), target.version)


def copy_of(layer: DraftLayer) -> DraftLayer:
    made = layer_of(layer.shape)
    made.load_state_dict(layer.state_dict())
    return made


def _batch(samples: Sequence[FeatureSample], num_pairs: int, rng: torch.Generator) -> list[FeatureSample]:
    """Return random samples with `num_pairs` pairs in total, or slightly more."""
    chosen: list[FeatureSample] = []
    while sum(len(sample.features_MF) for sample in chosen) < num_pairs:
        chosen.append(samples[int(torch.randint(len(samples), (), generator=rng))])
    return chosen


# -- evaluate drafters on the current policy: tokens per step, with equal prompts and noise for all


DEPTH = 4
ARM, SUFFIX_ARM = f"layer:{DEPTH}", f"suffix:{DEPTH}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Result of one drafter on one policy."""

    tokens_per_step: float
    """Tokens per step of a sample."""
    accepted_D: tuple[float, ...]
    """Share of the drafts that were right before this depth that are right here too. Empty: its drafts are of
    unequal depths."""
    overlap_D: tuple[float, ...]
    """The same without the chance of drawing: sum over tokens of min(p, q). Empty: it has no q."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Results of all drafters on one policy."""

    step: int
    kl_nats: float
    """Per token, from the policy at first."""
    entropy_nats: float
    drafters: Mapping[str, Standing]
    gate: Gate
    trainer_s: float
    """Processor seconds that it has learned for, in waits."""
    idle_s: float
    """That it was to have."""
    oracle_steps: int
    unlike: int
    """Rollouts that were not the same with every drafter: ties in fp32."""


class Judge:
    """Evaluates with the same prompts and the same noise every time."""

    def __init__(
        self,
        policies: tuple[PreTrainedModel, PreTrainedModel],
        target: Target,
        layer: DraftLayer,
        asked: tuple[Sequence[Prompt], Sequence[Prompt]],
        oracle_rounds: int,
    ) -> None:
        """Set up the evaluation.

        policies: the moving one, which `target` is of, and the one at the start. layer: the static drafter,
        where oracles begin too. asked: the prompts to evaluate on, and those that oracles learn from.
        """
        self._policies, self._target, self._static = policies, target, layer
        self._oracle_rounds, (self._asked, self._oracle_asked) = oracle_rounds, asked

    def look(self, step: int, drafters: Mapping[str, DraftLayer], idle: IdleTrained) -> Checkpoint:
        """Evaluate all drafters; the target must have no live rows."""
        best, oracle_steps = self._oracle(drafters["idle-trained"])
        first = self._engine(self._static)
        said, samples = collected(first, self._asked)
        kl_nats, entropy_nats = moved(*self._policies, said)
        standings = {"static": _standing(first, self._overlap(self._static, samples))}
        unlike: set[int] = set()
        for name, layer in {**drafters, "oracle": best}.items():
            engine = self._engine(layer)
            unlike |= _distinct_candidates(said, list(engine.generate(self._asked)))
            standings[name] = _standing(engine, self._overlap(layer, samples))
        engine = Engine(self._target, drafters={"suffix": SuffixDrafter()}, chooser=Fixed.of(SUFFIX_ARM))
        unlike |= _distinct_candidates(said, list(engine.generate(self._asked)))
        standings["suffix"] = Standing(_standing(engine, ()).tokens_per_step, (), ())
        return Checkpoint(
            step=step,
            kl_nats=kl_nats,
            entropy_nats=entropy_nats,
            drafters=standings,
            gate=idle.gate,
            trainer_s=idle.used_s,
            idle_s=idle.idle_s,
            oracle_steps=oracle_steps,
            unlike=len(unlike),
        )

    def _oracle(self, quick: DraftLayer) -> tuple[DraftLayer, int]:
        """Return a trained oracle; quick: drafts during the collection, which changes no token."""
        _, samples = collected(self._engine(quick), self._oracle_asked)
        return oracle(self._static, samples, ends_of(self._target), self._oracle_rounds)

    def _overlap(self, layer: DraftLayer, samples: Sequence[FeatureSample]) -> tuple[float, ...]:
        return matched(layer, samples, ends_of(self._target), DEPTH).overlap_D

    def _engine(self, layer: DraftLayer) -> Engine:
        drafter = LayerDrafter.of(copy_of(layer), self._target)
        return Engine(self._target, drafters={"layer": drafter}, chooser=Fixed.of(ARM))


def _standing(engine: Engine, overlap_D: tuple[float, ...]) -> Standing:
    status: dict[str, Any] = engine.meters.status()
    reached = [1.0, *status["accepted_by_position"]]
    accepted = tuple(b / a if a else 0.0 for a, b in itertools.pairwise(reached))
    return Standing(status["accepted_length"], accepted, overlap_D)


def _distinct_candidates(said: Sequence[Rollout], other: Sequence[Rollout]) -> set[int]:
    """Return the samples in which the two differ."""
    tokens = {rollout.prompt.sample: rollout.tokens for rollout in other}
    return {one.prompt.sample for one in said if one.tokens != tokens[one.prompt.sample]}


# -- run in which a policy moves and its drafter trains during the waits


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
        self._control.sink.ring.begin_step()
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


# -- report what a policy's drift cost each drafter, as tables and bars


SMALL_KL, LARGE_KL, FAR_KL = 0.1, 0.3, 1.0
NO_HARM, OVER_STATIC, OVER_CONTROL, RECOVERY = 0.98, 1.2, 1.1, 0.75
NAMES = ("static", "idle-trained", "control", "oracle", "suffix")


def report(seen: Sequence[Checkpoint], size: Size) -> Report:
    """Return a row for each checkpoint, and the bars over all of them."""
    shown = f"{size.groups} x {size.samples} rollouts of {size.most_new} tokens"
    return Report(
        name=f"Tokens per step at {ARM}, T = 1, as the policy moves",
        method=(
            f"Steps of {shown}; idle {percent(IDLE_SHARE, 0)} of a step, {HARVEST} of it used.",
            "Same prompts and noise for all. Recovery: (idle-trained - static) / (oracle - static).",
        ),
        columns=(
            "step",
            "KL",
            "entropy",
            *NAMES,
            "/ static",
            "/ control",
            "recovery",
            "published",
            "refused",
            "trainer s",
        ),
        rows=tuple(_row(one) for one in seen),
        bars=tuple(_bars(seen)),
        figures={"checkpoints": [asdict(one) for one in seen]},
    )


def depths(seen: Sequence[Checkpoint]) -> Report:
    """Return the acceptance by depth, for the drafters with drafts of one depth."""
    rows = [
        (f"{one.step} {name}", *_by_depth(standing.accepted_D, standing.overlap_D))
        for one in seen
        for name, standing in one.drafters.items()
        if standing.accepted_D
    ]
    numbers = range(1, DEPTH + 1)
    return Report(
        name="By depth, of the drafts that were right up to there",
        method=(
            "accepted: as the engine saw it. overlap: mean sum over tokens of min(p, q), without chance.",
            f"{sum(one.unlike for one in seen)} rollouts were not the same with every drafter.",
        ),
        columns=(
            "step",
            *(f"accepted {d}" for d in numbers),
            f"{DEPTH} / 1",
            *(f"overlap {d}" for d in numbers),
        ),
        rows=tuple(rows),
        bars=(),
        figures={},
    )


def over_static(seen: Checkpoint) -> float:
    return _tokens(seen, "idle-trained") / _tokens(seen, "static")


def over_control(seen: Checkpoint) -> float:
    return _tokens(seen, "idle-trained") / _tokens(seen, "control")


def recovery(seen: Checkpoint) -> float:
    """Return the recovered share of the loss; NaN where the oracle is no better than the static drafter."""
    lost = _tokens(seen, "oracle") - _tokens(seen, "static")
    return (_tokens(seen, "idle-trained") - _tokens(seen, "static")) / lost if lost > 0 else math.nan


def _tokens(seen: Checkpoint, name: str) -> float:
    return seen.drafters[name].tokens_per_step


def _row(one: Checkpoint) -> tuple[str, ...]:
    return (
        str(one.step),
        f"{one.kl_nats:.3f}",
        f"{one.entropy_nats:.3f}",
        *(f"{_tokens(one, name):.2f}" for name in NAMES),
        f"{over_static(one):.2f}",
        f"{over_control(one):.2f}",
        f"{recovery(one):.2f}",
        str(one.gate.published),
        str(one.gate.refused),
        f"{one.trainer_s:.1f}",
    )


def _by_depth(accepted_D: Sequence[float], overlap_D: Sequence[float]) -> list[str]:
    ratio = accepted_D[-1] / accepted_D[0] if accepted_D[0] else math.nan
    return [f"{x:.2f}" for x in (*accepted_D, ratio, *overlap_D)]


def _bars(seen: Sequence[Checkpoint]) -> list[Bar]:
    near = [one for one in seen if one.kl_nats <= SMALL_KL and one.step]
    far = [one for one in seen if one.kl_nats >= LARGE_KL]
    reach = max(one.kl_nats for one in seen)
    return [
        Bar(f"the policy moved {reach:.2f} nats per token, wanted {FAR_KL}", reach >= FAR_KL),
        _bar(near, over_static, NO_HARM, f"KL <= {SMALL_KL}: idle-trained / static"),
        _bar(far, over_static, OVER_STATIC, f"KL >= {LARGE_KL}: idle-trained / static"),
        _bar(far, over_control, OVER_CONTROL, f"KL >= {LARGE_KL}: idle-trained / control"),
        _bar(far, recovery, RECOVERY, f"KL >= {LARGE_KL}: recovery"),
    ]


def _bar(seen: Sequence[Checkpoint], of: Callable[[Checkpoint], float], least: float, text: str) -> Bar:
    """Return a bar that all checkpoints must reach; its text has the lowest value."""
    if not seen:
        return Bar(f"{text}: no checkpoint there, wanted {least}", None)
    worst = min(seen, key=of)
    value = of(worst)
    where = f"at KL {worst.kl_nats:.2f}, the least of {len(seen)}"
    return Bar(f"{text} {value:.2f}, wanted {least} ({where})", value >= least)


# -- losses of the drafter's training, side by side


LOSSES = ("ce", "lk", "tv", "coupled")
LOSS_STEPS = 300


def losses(policy: Policy, root: Path, steps: int) -> Report:
    """Return what drafters accept that differ in the loss of their training only."""
    recipe = Recipe(policy=policy, num_tokens=65_536)
    ready(policy, root)
    model = load(policy, root)
    target = Target.of(model, rows=16, max_tokens=PROMPT_BYTES + FULL.most_new)
    ends, samples = ends_of(target), collect_rollouts(model, prompts_of(recipe), recipe.num_tokens)
    taught = [sample for sample in samples if sample.serial % JUDGED_EVERY]
    apart = [sample for sample in samples if sample.serial % JUDGED_EVERY == 0]
    asked = _asked(replace(FULL, recipe=recipe), EVAL_SEED, 16, 4)
    rows, said = [], None
    for kind in (*LOSSES, *(f"ce, {kind}" for kind in LOSSES[1:])):
        layer = DraftLayer.of(model, generator=torch.Generator().manual_seed(0))
        parts = kind.split(", ")
        for part in parts:
            loss = LossConfig(tokens=part, num_passes=DEPTH)  # type: ignore[arg-type]
            trainer = DraftTrainer(layer, DraftTrainingConfig(batch_pairs=1024, row_pairs=512, loss=loss))
            rng = torch.Generator().manual_seed(len(parts) if part == parts[-1] else 1)
            for step in range(steps // len(parts)):
                trainer.lr_factor = math.cos(math.pi / 2 * step * len(parts) / steps)
                trainer.step(_batch(taught, 1024, rng), ends)
        match = matched(layer, apart, ends, DEPTH)
        drafter = LayerDrafter.of(layer, target)
        engine = Engine(target, drafters={"layer": drafter}, chooser=Fixed.of(ARM))
        texts = [rollout.tokens for rollout in sorted(engine.generate(asked), key=lambda r: r.prompt.sample)]
        said = said or texts
        same = sum(a == b for a, b in zip(said, texts, strict=True))
        standing = _standing(engine, match.overlap_D)
        rows.append(
            (
                kind,
                f"{standing.tokens_per_step:.3f}",
                *(f"{x:.3f}" for x in match.overlap_D),
                *(f"{x:.3f}" for x in match.coupled_D),
                f"{same}/{len(texts)}",
            )
        )
    numbers = range(1, DEPTH + 1)
    return Report(
        name=f"Losses of the drafter's training: {steps} steps each, {ARM}, T = 1",
        method=(
            f"{policy.name}: {len(taught)} rollouts, steps of 1,024 pairs, {DEPTH} passes, equal batches.",
            "overlap, coupled: held-out acceptance by depth, of drawn drafts and with shared noise.",
            "A pair of losses: half of the steps each.",
        ),
        columns=(
            "loss",
            "tokens per step",
            *(f"overlap {d}" for d in numbers),
            *(f"coupled {d}" for d in numbers),
            "same texts",
        ),
        rows=tuple(rows),
        bars=(),
        figures={},
    )


# -- measurements, tables and bars


def checkpoints(size: Size, root: Path, minutes: float) -> list[Checkpoint]:
    """Return the results at each checkpoint, in order; no further step begins after `minutes`."""
    began_s = time.monotonic()
    seen: list[Checkpoint] = []
    with Drift.of(size, root) as drift:
        for step in range(size.steps + 1):
            if step in size.checkpoint_steps:
                seen.append(drift.look())
                print(_line(seen[-1], time.monotonic() - began_s), file=sys.stderr)
            if step == size.steps or time.monotonic() - began_s > 60 * minutes:
                break
            drift.step()
    return seen


def measure(args: argparse.Namespace) -> list[Report]:
    """Return the tables: of the losses, or of a moving policy and by depth."""
    size = QUICK if args.quick else FULL
    if args.only == "losses":
        policy = replace(size.recipe.policy, size="quick", minutes=0.3 if args.quick else 4.0)
        return [losses(policy, args.root, args.steps or (6 if args.quick else LOSS_STEPS))]
    size = replace(size, steps=args.steps or size.steps)
    seen = checkpoints(size, args.root, args.minutes)
    return [report(seen, size), depths(seen)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("drift", "losses"), default="drift", help="the tables")
    parser.add_argument("--steps", type=int, help=f"of the policy, {FULL.steps} unless told; of a drafter")
    parser.add_argument("--minutes", type=float, default=60.0, help="no step begins after so many")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def _line(seen: Checkpoint, seconds: float) -> str:
    values = ", ".join(f"{name} {one.tokens_per_step:.2f}" for name, one in seen.drafters.items())
    return f"{seconds:5.0f} s: step {seen.step}, KL {seen.kl_nats:.3f}, {values}"


if __name__ == "__main__":
    main("drift", "A drafter that learns in idle time while its policy moves.", measure, options=_options)
