"""Work of a drafter's trainer: train on features, evaluate, publish what is better.

All work is split into pieces of about 50 ms, as a trainer on a GPU can be paused only between two pieces.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import DraftLayer, DraftShape
from aedit.spec_rollout.training import gate
from aedit.spec_rollout.training.batches import newest_held_out, one_step_off
from aedit.spec_rollout.training.draft_training import DraftTrainer, DraftTrainingConfig, Metrics
from aedit.spec_rollout.training.feature_reader import Entry, FeatureReader, FeatureSample
from aedit.spec_rollout.training.feature_ring import Buffer, RingShape
from aedit.spec_rollout.training.gate import GateConfig, GateState, Match
from aedit.spec_rollout.training.idle import DrafterTraining
from aedit.spec_rollout.training.losses import PolicyEmbeddings
from aedit.spec_rollout.training.packing import pack_samples
from aedit.spec_rollout.training.trainer_memory import TrainerMemory
from aedit.spec_rollout.training.trainer_supervisor import IdleConfig
from aedit.types import check

MIN_EVALUATION_TOKENS = 256
"""Held-out tokens of a new policy that an early evaluation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """Settings of training and evaluation of a drafter."""

    training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    evaluate_every_steps: int = 32
    evaluate_moved_steps: int = 4
    """Steps before an evaluation if the policy has moved since the last one: idle time may end soon, and a
    trained drafter is of no use before its publication."""
    evaluation_depth: int = 4
    """Length of the chains that are compared on held-out samples."""
    held_out_tokens: int = 4096

    def __post_init__(self) -> None:
        for name in ("evaluate_every_steps", "evaluate_moved_steps", "evaluation_depth", "held_out_tokens"):
            check(getattr(self, name) > 0, name, "must be above 0", getattr(self, name))


class LayerTraining:
    """A `Training` of a draft layer on the features in a ring."""

    def __init__(
        self,
        layer: DraftLayer,
        features: Buffer,
        config: LearningConfig,
        kl_nats: Callable[[], float] = lambda: math.nan,
    ) -> None:
        """Make the training.

        Args:
            layer: Layer to be trained, in place.
            features: Memory in which a `FeatureRing` is or will be.
            config: Settings.
            kl_nats: Returns the KL divergence per token between the policy and that of the last publication;
                NaN if unknown.
        """
        self._config, self._features, self._kl_nats = config, features, kl_nats
        self._trainer = DraftTrainer(layer, config.training)
        self._published = DraftLayer(layer.shape).to(layer.gain).requires_grad_(False)
        self._published.load_state_dict(layer.state_dict())
        self._reader: FeatureReader | None = None
        self._embeddings: PolicyEmbeddings | None = None
        self._uses: Counter[int] = Counter()
        self._gate_state = GateState()
        self._to_publish: dict[str, Tensor] | None = None
        self._last: Metrics | None = None
        self._rates = (math.nan, math.nan)
        self._num_evaluations, self._evaluated_version = 0, -1
        self._pieces = self._learn()

    def set_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Use this embedding and head of the policy from now on."""
        embedding = policy["embedding"].to(self._device)
        head = policy["head"].to(self._device) if "head" in policy else embedding
        self._embeddings = PolicyEmbeddings(embedding, head, version)

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        """Train these tensors from now on."""
        self._trainer.restart(drafter)
        self._published.load_state_dict(drafter)
        # A step or an evaluation under way is of the drafter before.
        self._pieces, self._to_publish, self._gate_state = self._learn(), None, GateState()
        self._trainer.lr_factor = self._gate_state.lr_factor

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of an earlier process."""
        self._trainer.resume(state)

    def state(self) -> Mapping[str, Tensor]:
        """Return the state of the training; see `DraftTrainer.state`."""
        return self._trainer.state()

    def microbatch(self) -> bool:
        """Run the next piece of work; return false if there was nothing to do."""
        return next(self._pieces)

    def to_publish(self) -> Mapping[str, Tensor] | None:
        """Return the trained tensors once after an evaluation found them better, else None."""
        better, self._to_publish = self._to_publish, None
        return better

    def metrics(self) -> Mapping[str, float]:
        """Return the figures that are finite, by name."""
        published, candidate = self._rates
        figures = {
            "steps": self._trainer.num_steps,
            "match_published": published,
            "match_candidate": candidate,
            "lr_factor": self._gate_state.lr_factor,
            "rejected": self._gate_state.num_rejected,
            "evaluations": self._num_evaluations,
        }
        if self._last is not None:
            figures |= {"loss": self._last.loss, "lr": self._last.lr, "overlap": self._last.overlap_S[0]}
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    # --- pieces of work

    def _learn(self) -> Iterator[bool]:
        """Train and evaluate forever; yield after each piece, False if there was nothing to do."""
        while True:
            version = self._embeddings.version if self._embeddings else None
            for number in range(self._config.evaluate_every_steps):
                if number >= self._config.evaluate_moved_steps and self._has_moved():
                    break
                yield from self._train_step()
            yield from self._evaluate()
            while gate.should_pause(self._gate_state, self._kl_nats(), self._config.gate):
                yield False
            if self._embeddings and self._embeddings.version != version:
                self._gate_state = gate.reset_after_move(self._gate_state)
                self._trainer.lr_factor = self._gate_state.lr_factor

    def _has_moved(self) -> bool:
        """Return true if the policy has moved since the last evaluation and an evaluation is possible."""
        is_new = self._embeddings is not None and self._embeddings.version != self._evaluated_version
        least = min(MIN_EVALUATION_TOKENS, self._config.held_out_tokens)
        return is_new and sum(entry.num_tokens for entry in self._held_out_entries()) >= least

    def _train_step(self) -> Iterator[bool]:
        """Run one training step, row by row."""
        embeddings, samples = self._embeddings, self._read(self._choose_entries())
        rows = 0
        if embeddings is not None:
            for metrics in self._trainer.rows(samples, embeddings):
                self._last, rows = metrics or self._last, rows + 1
                yield True
        if rows == 0:
            yield False

    def _evaluate(self) -> Iterator[bool]:
        """Compare the trained layer with the published one on held-out samples."""
        embeddings, samples = self._embeddings, self._read(self._held_out_entries())
        if embeddings is None or not samples:
            return
        published: list[Match] = []
        candidate: list[Match] = []
        yield from self._match(self._published, samples, embeddings, published)
        yield from self._match(self._trainer.layer, samples, embeddings, candidate)
        if published and candidate:
            self._rates = published[0].rate, candidate[0].rate
            self._evaluated_version = embeddings.version
            self._decide()

    def _match(
        self,
        layer: DraftLayer,
        samples: list[FeatureSample],
        embeddings: PolicyEmbeddings,
        found: list[Match],
    ) -> Iterator[bool]:
        """Append the match of a layer to `found`, unless no pair counts."""
        depth, config = self._config.evaluation_depth, self._config.training
        sums = torch.zeros(3, depth, dtype=torch.float64)
        packed = pack_samples(samples, config.row_pairs, response_only=config.response_only)
        for number, row in enumerate(packed):
            row = row.to(self._device)
            sums += gate.match_sums(layer, row, embeddings, gate.row_noise(number, row, embeddings), depth)
            yield True
        if sums[2, 0]:
            found.append(gate.match_from_sums(sums))

    def _decide(self) -> None:
        published, candidate = self._rates
        self._num_evaluations += 1
        state = gate.with_measurement(published, self._gate_state, self._config.gate)
        decision, self._gate_state = gate.decide(published, candidate, state, self._config.gate)
        self._trainer.lr_factor = self._gate_state.lr_factor
        if decision == "publish":
            self._to_publish = {n: t.detach().clone() for n, t in self._trainer.layer.state_dict().items()}
            self._published.load_state_dict(self._to_publish)
        elif decision == "revert":
            self._trainer.restart(self._published.state_dict())

    # --- samples

    def _entries(self) -> list[Entry]:
        if self._reader is None:
            try:
                self._reader = FeatureReader(self._features)
            except ValueError:
                return []  # the node has not created its ring yet
        return self._reader.entries()

    def _held_out_entries(self) -> list[Entry]:
        """Return the held-out samples of the current policy."""
        version = self._embeddings.version if self._embeddings else None
        exact = [entry for entry in self._entries() if entry.version == version]
        return newest_held_out(exact, self._config.held_out_tokens)

    def _choose_entries(self) -> list[Entry]:
        entries = self._entries()
        there = {entry.serial for entry in entries}
        self._uses = Counter({serial: n for serial, n in self._uses.items() if serial in there})
        chosen = one_step_off(entries, self._uses, self._config.training.batch_pairs)
        self._uses.update(entry.serial for entry in chosen)
        return chosen

    def _read(self, entries: list[Entry]) -> list[FeatureSample]:
        """Return the samples that were not evicted meanwhile."""
        found = [self._reader.read(entry) for entry in entries] if self._reader else []
        return [sample for sample in found if sample is not None]

    @property
    def _device(self) -> torch.device:
        return self._trainer.layer.gain.device


def train_when_idle(
    layer: DraftLayer,
    embeddings: PolicyEmbeddings,
    ring: RingShape,
    *,
    learning: LearningConfig | None = None,
    idle: IdleConfig | None = None,
) -> DrafterTraining:
    """Start a process that trains copies of `layer` while this node waits.

    Write features with `FeatureRing(training.features, ring)`, announce a new policy with
    `training.update_policy(policy_tensors(embeddings), version)`, and pass the tensors of `training.newest()`
    to `DraftLayer.load_state_dict`.

    Args:
        layer: Initial draft layer.
        embeddings: The policy's embedding and head.
        ring: Shape of the ring of features.
        learning: Settings of training and evaluation.
        idle: Settings of the process.
    """
    return DrafterTraining.of(
        partial(_make_training, shape=layer.shape, config=learning or LearningConfig()),
        drafter=layer.state_dict(),
        policy=policy_tensors(embeddings),
        version=embeddings.version,
        feature_bytes=ring.num_bytes,
        config=idle,
    )


def policy_tensors(embeddings: PolicyEmbeddings) -> dict[str, Tensor]:
    """Return the tensors of the policy that the trainer needs; the head only if it is not the embedding."""
    tensors = {"embedding": embeddings.embedding_Vd}
    if embeddings.head_Vd.data_ptr() != embeddings.embedding_Vd.data_ptr():
        tensors["head"] = embeddings.head_Vd
    return tensors


def _make_training(memory: TrainerMemory, shape: DraftShape, config: LearningConfig) -> LayerTraining:
    """Make the training in the trainer's process."""
    layer = DraftLayer(shape).to(memory.plan.drafter.specs[0].dtype)
    return LayerTraining(layer, memory.features, config, lambda: memory.kl_nats)
