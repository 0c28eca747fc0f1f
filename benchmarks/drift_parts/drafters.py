"""Drafters of a moving policy: trained in idle time, on the unmoved policy, and to convergence.

The second one gets as much training as the first, the third learns from the moved policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.model import Target
from aedit.spec_rollout.sampling import Prompt, Rollout
from aedit.spec_rollout.training import (
    HELD_OUT_EVERY,
    DraftTrainer,
    DraftTrainingConfig,
    FeatureReader,
    FeatureRing,
    FeatureSample,
    IdleConfig,
    LayerTraining,
    LearningConfig,
    Match,
    PolicyEmbeddings,
    RingShape,
    RowFeatures,
    held_out_match,
    pack_samples,
    policy_tensors,
    train_when_idle,
)
from benchmarks.kit.trainer_waits import start, wait

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
    taught = [sample for sample in samples if sample.serial % HELD_OUT_EVERY]
    apart = pack_samples([s for s in samples if s.serial % HELD_OUT_EVERY == 0], ORACLE_ROW_PAIRS)
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
    made = DraftLayer(layer.shape)
    made.load_state_dict(layer.state_dict())
    return made


def _batch(samples: Sequence[FeatureSample], num_pairs: int, rng: torch.Generator) -> list[FeatureSample]:
    """Return random samples with `num_pairs` pairs in total, or slightly more."""
    chosen: list[FeatureSample] = []
    while sum(len(sample.features_MF) for sample in chosen) < num_pairs:
        chosen.append(samples[int(torch.randint(len(samples), (), generator=rng))])
    return chosen
