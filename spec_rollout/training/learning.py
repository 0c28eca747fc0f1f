"""Work of a drafter's trainer: train on features, evaluate, publish what is better.

All work is split into pieces of about 50 ms, as a trainer on a GPU can be paused only between two pieces.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import get_ema_multi_avg_fn

from aedit.spec_rollout.drafters import DraftLayer, DraftShape, layer_of
from aedit.spec_rollout.training import gate
from aedit.spec_rollout.training.batches import newest_held_out, one_step_off, pack_samples
from aedit.spec_rollout.training.feature_ring import (
    Buffer,
    FeatureReader,
    FeatureSample,
    RingEntry,
    RingShape,
)
from aedit.spec_rollout.training.gate import GateConfig, GateState, Match
from aedit.spec_rollout.training.losses import LossConfig, Losses, PolicyEmbeddings, draft_losses
from aedit.spec_rollout.training.trainer_memory import TrainerMemory
from aedit.spec_rollout.training.trainer_supervisor import DrafterTraining, IdleConfig
from aedit.types import check

MIN_EVALUATION_TOKENS = 256
"""Held-out tokens that an early evaluation needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrainingConfig:
    """Settings of the training.

    A new AdamW takes steps of the full learning rate whatever the gradient is. This harms a drafter that is
    good already, hence the warm-up. Measured on a drafter with 0.412 of its chains of 4 accepted, after 1, 3
    and 24 more steps on the same policy: lr 3e-3 without warm-up -0.172, -0.051, +0.005; 1e-3 without -0.028,
    +0.001, +0.016, with warm-up 0.000, +0.002, +0.009; 3e-4 with warm-up 0.000, +0.001, +0.014. From a new
    layer 3e-3 learns faster than 1e-3 (0.471 against 0.408 after 150 steps of cross entropy with three
    passes). On a policy that moves, in idle time, 2e-3 recovered 0.52, 0.72 and 0.83 of the loss at KL 0.18,
    0.44 and 1.05, and 1e-3 0.21, 0.68 and 0.82 at 0.18, 0.45 and 0.80 (one run each).
    """

    loss: LossConfig = field(default_factory=LossConfig)
    lr: float = 2e-3
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.01
    clip: float = 1.0
    """Limit of the gradient norm."""
    decay: float = 0.98
    """Share of the moving average of the weights that a step keeps; less in the first steps. The average is
    what is evaluated and published: steps of a constant rate on a few samples scatter around it. Measured on
    a drafter that 10 minutes with a falling rate had trained, 3.48 expected tokens of a chain of 4, after 48,
    96 and 144 steps on the newest three of twelve small batches: lr 5e-4 3.41, 3.40, 3.41 without an average
    and 3.49, 3.47, 3.46 with it; 1.5e-4 3.48, 3.49, 3.49 and 3.50, 3.50, 3.49."""
    batch_pairs: int = 512
    """Approximate number of pairs per step: samples are taken whole."""
    row_pairs: int = 256
    """Pairs per packed row. Training can be interrupted between two rows."""
    response_only: bool = True
    """Train on the answers only; prompts are context."""

    def __post_init__(self) -> None:
        check(self.lr > 0, "lr", "must be above 0", self.lr)
        check(self.warmup_steps >= 0, "warmup_steps", "must be 0 or more", self.warmup_steps)
        check(self.clip > 0, "clip", "must be above 0", self.clip)
        check(0 <= self.decay < 1, "decay", "must be at least 0 and below 1", self.decay)
        check(self.row_pairs >= 4, "row_pairs", "must be 4 or more", self.row_pairs)
        check(self.batch_pairs > 0, "batch_pairs", "must be above 0", self.batch_pairs)


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


Measured = tuple[Match, Tensor]
"""Match of a drafter, and the share of accepted tokens of each chain."""


class LayerTraining:
    """A `Training` of a draft layer on the features in a ring."""

    def __init__(
        self,
        layer: DraftLayer,
        features: Buffer,
        config: LearningConfig,
        *,
        is_trained: bool = False,
    ) -> None:
        """Make the training.

        Args:
            layer: Layer to be trained, in place.
            features: Memory in which a `FeatureRing` is or will be.
            config: Settings.
            is_trained: The layer is not a new one.
        """
        self._config, self._features = config, features
        self._is_trained = is_trained
        self._trainer = DraftTrainer(layer, config.training, is_trained=is_trained)
        self._published = layer_of(layer.shape).to(layer.gain).requires_grad_(False)
        self._published.load_state_dict(layer.state_dict())
        self._reader: FeatureReader | None = None
        self._embeddings: PolicyEmbeddings | None = None
        self._uses: Counter[int] = Counter()
        self._gate_state = GateState()
        self._to_publish: dict[str, Tensor] | None = None
        self._last: Metrics | None = None
        self._rates = (math.nan, math.nan)
        self._num_evaluations, self._evaluated_version = 0, -1
        self._judged_steps = 0
        """Training steps before the last evaluation that was not early."""
        self._rests = False
        self._pieces = self._learn()

    def set_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Use this embedding and head of the policy from now on."""
        embedding = policy["embedding"].to(self._device)
        head = policy["head"].to(self._device) if "head" in policy else embedding
        self._embeddings = PolicyEmbeddings(embedding, head, version)

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        """Train these tensors from now on: those of the first layer, then trained ones."""
        self._trainer.restart(drafter, is_trained=self._is_trained)
        self._is_trained = True
        self._published.load_state_dict(drafter)
        # A step or an evaluation under way is of the drafter before.
        self._pieces, self._to_publish, self._gate_state = self._learn(), None, GateState()
        self._trainer.lr_factor = self._gate_state.lr_factor
        self._judged_steps = self._trainer.num_steps

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Continue from the state of an earlier process."""
        self._trainer.resume(state)
        self._judged_steps = self._trainer.num_steps

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
            "rests": float(self._rests),
            "evaluations": self._num_evaluations,
        }
        if self._last is not None:
            figures |= {"loss": self._last.loss, "lr": self._last.lr, "overlap": self._last.overlap_S[0]}
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    # --- pieces of work

    def _learn(self) -> Iterator[bool]:
        """Train and evaluate forever; yield after each piece, False if there was nothing to do."""
        while True:
            version = self._version
            for number in range(self._config.evaluate_every_steps):
                if number >= self._config.evaluate_moved_steps and self._has_moved():
                    break
                yield from self._train_step()
            yield from self._evaluate()
            if gate.should_rest(self._gate_state, self._config.gate):
                yield from self._rest()
            if self._version != version:
                self._gate_state = gate.after_move(self._gate_state)
                self._trainer.lr_factor = self._gate_state.lr_factor

    def _rest(self) -> Iterator[bool]:
        """Only measure the published drafter, once a version, until it is worse or a trial is due."""
        self._rests = True
        ends = self._version + gate.rest_versions(self._gate_state, self._config.gate)
        while self._version < ends and gate.is_near_peak(self._gate_state, self._config.gate):
            if self._version != self._evaluated_version:
                yield from self._evaluate(published_only=True)
            yield False
        self._gate_state, self._rests = gate.after_rest(self._gate_state, self._config.gate), False

    @property
    def _version(self) -> int:
        """Return the version of the policy; -1 before there is one."""
        return self._embeddings.version if self._embeddings else -1

    def _has_moved(self) -> bool:
        """Return true if the policy has moved since the last evaluation and an evaluation is possible."""
        is_new = self._version != self._evaluated_version
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

    def _evaluate(self, *, published_only: bool = False) -> Iterator[bool]:
        """Measure the published drafter on held-out samples, and decide on the trained one beside it."""
        embeddings, samples = self._embeddings, self._read(self._held_out_entries())
        if embeddings is None or not samples:
            return
        layers = [self._published] if published_only else [self._published, self._trainer.averaged]
        found: list[Measured] = []
        for layer in layers:
            yield from self._match(layer, samples, embeddings, found)
        if len(found) < len(layers):
            return
        published = found[0][0].rate
        self._rates = published, self._rates[1] if published_only else found[1][0].rate
        self._evaluated_version = embeddings.version
        self._gate_state = gate.with_measurement(published, self._gate_state, self._config.gate)
        if not published_only:
            self._decide(gate.difference_error(found[0][1], found[1][1]))

    def _match(
        self,
        layer: DraftLayer,
        samples: list[FeatureSample],
        embeddings: PolicyEmbeddings,
        found: list[Measured],
    ) -> Iterator[bool]:
        """Append the match of a layer to `found`, with that of each chain, unless no pair counts."""
        depth, config = self._config.evaluation_depth, self._config.training
        sums, chains = torch.zeros(3, depth, dtype=torch.float64), []
        packed = pack_samples(samples, config.row_pairs, response_only=config.response_only)
        for number, row in enumerate(packed):
            row = row.to(self._device)
            noise_PV = gate.row_noise(number, row, embeddings)
            of_row, accepted_C = gate.match_sums(layer, row, embeddings, noise_PV, depth)
            sums += of_row
            chains.append(accepted_C)
            yield True
        if sums[2, 0]:
            found.append((gate.match_from_sums(sums), torch.cat(chains)))

    def _decide(self, error: float) -> None:
        published, candidate = self._rates
        self._num_evaluations += 1
        is_early = self._trainer.num_steps - self._judged_steps < self._config.evaluate_every_steps
        decision, self._gate_state = gate.decide(
            published, candidate, error, self._gate_state, self._config.gate, is_early=is_early
        )
        self._trainer.lr_factor = self._gate_state.lr_factor
        if decision == "publish":
            self._to_publish = {n: t.clone() for n, t in self._trainer.averaged.state_dict().items()}
            self._published.load_state_dict(self._to_publish)
        elif decision == "revert":
            self._trainer.restart(self._published.state_dict())
        if not is_early or decision != "keep":
            self._judged_steps = self._trainer.num_steps

    # --- samples

    def _entries(self) -> list[RingEntry]:
        if self._reader is None:
            try:
                self._reader = FeatureReader(self._features)
            except ValueError:
                return []  # the node has not created its ring yet
        return self._reader.entries()

    def _held_out_entries(self) -> list[RingEntry]:
        """Return the newest held-out samples."""
        return newest_held_out(self._entries(), self._config.held_out_tokens)

    def _choose_entries(self) -> list[RingEntry]:
        entries = self._entries()
        there = {entry.serial for entry in entries}
        self._uses = Counter({serial: n for serial, n in self._uses.items() if serial in there})
        chosen = one_step_off(entries, self._uses, self._config.training.batch_pairs)
        self._uses.update(entry.serial for entry in chosen)
        return chosen

    def _read(self, entries: list[RingEntry]) -> list[FeatureSample]:
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
    is_trained: bool = False,
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
        is_trained: The layer is not a new one.
    """
    config = learning or LearningConfig()
    return DrafterTraining.of(
        partial(_make_training, shape=layer.shape, config=config, is_trained=is_trained),
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


def _make_training(
    memory: TrainerMemory, shape: DraftShape, config: LearningConfig, is_trained: bool
) -> LayerTraining:
    """Make the training in the trainer's process."""
    layer = layer_of(shape).to(memory.plan.drafter.specs[0].dtype)
    return LayerTraining(layer, memory.features, config, is_trained=is_trained)


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Metrics:
    """Figures of one step."""

    loss: float
    """Per counted pair."""
    overlap_S: tuple[float, ...]
    """Mean over pairs of the sum over tokens of min(p, q) in each feedback pass, before the step; 0 where p
    was unknown."""
    num_pairs: int
    gradient_norm: float
    lr: float


class DraftTrainer:
    """Trains a draft layer. It neither changes nor keeps the policy's tensors."""

    def __init__(self, layer: DraftLayer, config: DraftTrainingConfig, *, is_trained: bool = False) -> None:
        """Make the trainer.

        Args:
            layer: Layer to be trained, in place.
            config: Settings.
            is_trained: The layer is not a new one: the average of its weights begins with it.
        """
        self.layer, self.config = layer, config
        self.averaged = layer_of(layer.shape).to(layer.gain).requires_grad_(False)
        """Moving average of the layer, which is what the training gives."""
        self.averaged.load_state_dict(layer.state_dict())
        self.lr_factor = 1.0
        """Factor of the learning rate, set by the gate."""
        self.num_steps = 0
        self._is_trained = is_trained
        self._optimizer = self._fresh()

    def step(self, samples: Sequence[FeatureSample], embeddings: PolicyEmbeddings) -> Metrics | None:
        """Run one step on these samples; return None if they contain nothing to learn."""
        pieces = list(self.rows(samples, embeddings))
        return pieces[-1] if pieces else None

    def rows(
        self, samples: Sequence[FeatureSample], embeddings: PolicyEmbeddings
    ) -> Iterator[Metrics | None]:
        """Run one step in pieces: yield None after each row, and the metrics after the optimizer step.

        A step that is not iterated to its end has changed nothing.
        """
        packed = pack_samples(samples, self.config.row_pairs, response_only=self.config.response_only)
        num_pairs = sum(row.num_counted for row in packed)
        self._optimizer.zero_grad(set_to_none=True)
        sums: list[Losses] = []
        for row in packed:
            losses = draft_losses(self.layer, row.to(self.layer.gain.device), embeddings, self.config.loss)
            (losses.total / num_pairs).backward()  # type: ignore[no-untyped-call]
            sums.append(losses)
            yield None
        if num_pairs:
            yield self._finish(sums, num_pairs)

    def state(self) -> dict[str, Tensor]:
        """Return the trained tensors, their average, AdamW's moments and the counters.

        `resume` continues exactly from them.
        """
        state = {f"layer.{name}": value.detach().clone() for name, value in self.layer.state_dict().items()}
        state |= {f"average.{name}": value.clone() for name, value in self.averaged.named_parameters()}
        for name, value in self.layer.named_parameters():
            moments = self._optimizer.state.get(value, {})
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(value)).detach().clone()
        state["num_steps"] = torch.tensor(self.num_steps)
        state["is_trained"] = torch.tensor(self._is_trained)
        state["lr_factor"] = torch.tensor(self.lr_factor, dtype=torch.float64)
        return state

    def resume(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: It belongs to another drafter. Nothing has changed.
        """
        parameters = dict(self.layer.named_parameters())
        _check(parameters, state)
        prefix = "layer."
        own = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
        self.layer.load_state_dict(own)
        self.averaged.load_state_dict(own | {name: state[f"average.{name}"] for name in parameters})
        self.num_steps, self.lr_factor = int(state["num_steps"]), float(state["lr_factor"])
        self._is_trained = bool(state["is_trained"])
        self._optimizer = self._fresh()
        for name, value in parameters.items():
            moments = {part: state[f"{part}.{name}"].to(value, copy=True) for part in MOMENTS}
            steps = torch.tensor(self.num_steps, dtype=torch.float32)
            self._optimizer.state[value] = {"step": steps, **moments}

    def restart(self, tensors: Mapping[str, Tensor], *, is_trained: bool = True) -> None:
        """Train these weights from now on, with new moments, a new average and a new warm-up."""
        self.layer.load_state_dict(tensors)
        self.averaged.load_state_dict(tensors)
        self._optimizer, self.num_steps, self._is_trained = self._fresh(), 0, is_trained

    def _finish(self, sums: Sequence[Losses], num_pairs: int) -> Metrics:
        """Take AdamW's step on the gradients of all rows."""
        warm = min(1.0, (self.num_steps + 1) / (self.config.warmup_steps + 1))
        lr = self.config.lr * self.lr_factor * warm
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = clip_grad_norm_(self.layer.parameters(), self.config.clip)
        self._optimizer.step()
        self.num_steps += 1
        self._average()
        overlap_S = torch.stack([losses.overlap_S for losses in sums]).sum(0)
        overlap_S = overlap_S / torch.stack([losses.num_overlap_S for losses in sums]).sum(0).clamp_min(1)
        loss = float(torch.stack([losses.total.detach() for losses in sums]).sum()) / num_pairs
        return Metrics(loss, tuple(overlap_S.tolist()), num_pairs, float(norm), lr)

    @torch.no_grad()
    def _average(self) -> None:
        """Add the layer to the average; a new one's covers about the last tenth of its steps at first."""
        steps = self.num_steps
        decay = self.config.decay if self._is_trained else min(self.config.decay, steps / (steps + 10))
        average = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
        average(list(self.averaged.parameters()), list(self.layer.parameters()), steps)

    def _fresh(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self.layer.parameters(),
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
        )


def _check(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if moments or counters are missing or have other shapes than the parameters."""
    parts = ("average", *MOMENTS)
    wanted = {f"{part}.{name}": value.shape for name, value in parameters.items() for part in parts}
    wanted |= dict.fromkeys(("num_steps", "lr_factor", "is_trained"), torch.Size())
    for name, shape in wanted.items():
        saved = state.get(name)
        if saved is None or saved.shape != shape:
            found = "is missing" if saved is None else f"must be of shape {tuple(shape)}"
            raise ValueError(f"state of a drafter's training: {name} {found}")
