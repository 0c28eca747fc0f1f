"""What a drafter's trainer does with features: learn, judge what was learned, and publish what is better.

Everything is cut into pieces of some 50 ms, as a trainer on a GPU must be able to stop between two.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.draft_layer import DraftLayer
from aedit.spec_rollout.drafters.draft_shape import DraftShape
from aedit.spec_rollout.idle.idle import DrafterTraining
from aedit.spec_rollout.idle.trainer_memory import Desk
from aedit.spec_rollout.idle.trainer_supervisor import IdleConfig
from aedit.spec_rollout.learning import gate
from aedit.spec_rollout.learning.batches import held_out, one_step_off
from aedit.spec_rollout.learning.draft_training import DraftTrainer, DraftTrainingConfig, Metrics
from aedit.spec_rollout.learning.feature_reader import Entry, FeatureReader, Sample
from aedit.spec_rollout.learning.feature_ring import Buffer, RingShape
from aedit.spec_rollout.learning.gate import GateConfig, Match, Standing
from aedit.spec_rollout.learning.losses import PolicyEnds
from aedit.spec_rollout.learning.packing import pack
from aedit.types import check

LEAST_JUDGED_TOKENS = 256
"""Of a new policy, kept apart, before anybody is judged by it early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningConfig:
    """How a drafter learns and is judged."""

    training: DraftTrainingConfig = field(default_factory=DraftTrainingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    judge_every_steps: int = 32
    judge_moved_steps: int = 4
    """After so many already where the policy has moved since the last judgement: a wait may be no longer, and
    what was learned is of no use to anybody before it is published."""
    judged_depth: int = 4
    """Length of the chains that are compared on held-out samples."""
    held_out_tokens: int = 4096

    def __post_init__(self) -> None:
        check(self.judge_every_steps > 0, "judge_every_steps", "must be above 0", self.judge_every_steps)
        check(self.judge_moved_steps > 0, "judge_moved_steps", "must be above 0", self.judge_moved_steps)
        check(self.judged_depth > 0, "judged_depth", "must be above 0", self.judged_depth)
        check(self.held_out_tokens > 0, "held_out_tokens", "must be above 0", self.held_out_tokens)


class Learning:
    """A `Training` of a draft layer on the features in a ring."""

    def __init__(
        self,
        layer: DraftLayer,
        features: Buffer,
        config: LearningConfig,
        kl_nats: Callable[[], float] = lambda: math.nan,
    ) -> None:
        """layer: to be trained, in place. features: where a `FeatureRing` writes, or will. kl_nats: of the
        policy from the one that the last publication was for; not a number: unknown."""
        self._config, self._features, self._kl_nats = config, features, kl_nats
        self._trainer = DraftTrainer(layer, config.training)
        self._published = _copy(layer)
        self._reader: FeatureReader | None = None
        self._ends: PolicyEnds | None = None
        self._uses: Counter[int] = Counter()
        self._standing = Standing()
        self._better: dict[str, Tensor] | None = None
        self._last: Metrics | None = None
        self._rates = (math.nan, math.nan)
        self._num_judged, self._judged_version = 0, -1
        self._pieces = self._learn()

    def follow(self, policy: Mapping[str, Tensor], version: int) -> None:
        embedding = policy["embedding"].to(self._device)
        head = policy["head"].to(self._device) if "head" in policy else embedding
        self._ends = PolicyEnds(embedding, head, version)

    def begin(self, drafter: Mapping[str, Tensor]) -> None:
        self._trainer.restart(drafter)
        self._published.load_state_dict(drafter)

    def resume(self, state: Mapping[str, Tensor]) -> None:
        self._trainer.resume(state)

    def state(self) -> Mapping[str, Tensor]:
        return self._trainer.state()

    def microbatch(self) -> bool:
        return next(self._pieces)

    def to_publish(self) -> Mapping[str, Tensor] | None:
        better, self._better = self._better, None
        return better

    def figures(self) -> Mapping[str, float]:
        published, candidate = self._rates
        figures = {
            "steps": self._trainer.num_steps,
            "match_published": published,
            "match_candidate": candidate,
            "lr_factor": self._standing.lr_factor,
            "refusals": self._standing.refusals,
            "judged": self._num_judged,
        }
        if self._last is not None:
            figures |= {"loss": self._last.loss, "lr": self._last.lr, "overlap": self._last.overlap_S[0]}
        return {name: value for name, value in figures.items() if math.isfinite(value)}

    # --- pieces

    def _learn(self) -> Iterator[bool]:
        """Without end: lessons, and a judgement after every few. False where there is nothing to do."""
        while True:
            version = self._ends.version if self._ends else None
            for number in range(self._config.judge_every_steps):
                if number >= self._config.judge_moved_steps and self._has_moved():
                    break
                yield from self._lesson()
            yield from self._judge()
            while gate.rests(self._standing, self._kl_nats(), self._config.gate):
                yield False
            if self._ends and self._ends.version != version:
                self._standing = gate.awake(self._standing)
                self._trainer.lr_factor = self._standing.lr_factor

    def _has_moved(self) -> bool:
        """Whether nobody has been judged yet by the policy as it is now, and somebody could be."""
        is_new = self._ends is not None and self._ends.version != self._judged_version
        least = min(LEAST_JUDGED_TOKENS, self._config.held_out_tokens)
        return is_new and sum(entry.num_tokens for entry in self._apart()) >= least

    def _lesson(self) -> Iterator[bool]:
        """One step, row by row."""
        ends, samples = self._ends, self._read(self._chosen())
        rows = 0
        if ends is not None:
            for metrics in self._trainer.rows(samples, ends):
                self._last, rows = metrics or self._last, rows + 1
                yield True
        if rows == 0:
            yield False

    def _judge(self) -> Iterator[bool]:
        """Compare with what was published last, on samples that neither has learned from."""
        ends, samples = self._ends, self._read(self._apart())
        if ends is None or not samples:
            return
        published: list[Match] = []
        candidate: list[Match] = []
        yield from self._match(self._published, samples, ends, published)
        yield from self._match(self._trainer.layer, samples, ends, candidate)
        if published and candidate:
            self._rates = published[0].rate, candidate[0].rate
            self._judged_version = ends.version
            self._decide()

    def _match(
        self, layer: DraftLayer, samples: list[Sample], ends: PolicyEnds, found: list[Match]
    ) -> Iterator[bool]:
        """Appends to `found`, unless there is nothing to match."""
        depth, config = self._config.judged_depth, self._config.training
        sums = torch.zeros(3, depth, dtype=torch.float64)
        packed = pack(samples, config.row_pairs, response_only=config.response_only)
        for number, row in enumerate(packed):
            row = row.to(self._device)
            sums += gate.match_sums(layer, row, ends, gate.row_noise(number, row, ends), depth)
            yield True
        if sums[2, 0]:
            found.append(gate.match_of(sums))

    def _decide(self) -> None:
        published, candidate = self._rates
        self._num_judged += 1
        standing = gate.watched(published, self._standing, self._config.gate)
        verdict, self._standing = gate.decide(published, candidate, standing, self._config.gate)
        self._trainer.lr_factor = self._standing.lr_factor
        if verdict == "publish":
            self._better = {n: t.detach().clone() for n, t in self._trainer.layer.state_dict().items()}
            self._published.load_state_dict(self._better)
        elif verdict == "go back":
            self._trainer.restart(self._published.state_dict())

    # --- samples

    def _entries(self) -> list[Entry]:
        if self._reader is None:
            try:
                self._reader = FeatureReader(self._features)
            except ValueError:
                return []  # the node has not made its ring yet
        return self._reader.entries()

    def _apart(self) -> list[Entry]:
        """Those that judge: kept apart, and of the policy as it is now."""
        version = self._ends.version if self._ends else None
        exact = [entry for entry in self._entries() if entry.version == version]
        return held_out(exact, self._config.held_out_tokens)

    def _chosen(self) -> list[Entry]:
        entries = self._entries()
        there = {entry.serial for entry in entries}
        self._uses = Counter({serial: n for serial, n in self._uses.items() if serial in there})
        chosen = one_step_off(entries, self._uses, self._config.training.batch_pairs)
        self._uses.update(entry.serial for entry in chosen)
        return chosen

    def _read(self, entries: list[Entry]) -> list[Sample]:
        """Those that are still there."""
        found = [self._reader.read(entry) for entry in entries] if self._reader else []
        return [sample for sample in found if sample is not None]

    @property
    def _device(self) -> torch.device:
        return self._trainer.layer.gain.device


def train_when_idle(
    layer: DraftLayer,
    ends: PolicyEnds,
    ring: RingShape,
    *,
    learning: LearningConfig | None = None,
    idle: IdleConfig | None = None,
) -> DrafterTraining:
    """A process that trains copies of `layer` while this node waits. What it learns from is what a
    `FeatureRing(training.features, ring)` is given; `training.refresh(shared(ends), version)` tells it of a
    new policy; `training.newest()` has what it has published, for `DraftLayer.load_state_dict`."""
    return DrafterTraining.of(
        partial(_learning, shape=layer.shape, config=learning or LearningConfig()),
        drafter=layer.state_dict(),
        policy=shared(ends),
        version=ends.version,
        feature_bytes=ring.num_bytes,
        config=idle,
    )


def shared(ends: PolicyEnds) -> dict[str, Tensor]:
    """What the trainer must have of the policy; the head only where it is not the embedding."""
    tensors = {"embedding": ends.embedding_Vd}
    if ends.head_Vd.data_ptr() != ends.embedding_Vd.data_ptr():
        tensors["head"] = ends.head_Vd
    return tensors


def _learning(desk: Desk, shape: DraftShape, config: LearningConfig) -> Learning:
    """In the trainer's process."""
    layer = DraftLayer(shape).to(desk.plan.drafter.forms[0].dtype)
    return Learning(layer, desk.features, config, lambda: desk.kl_nats)


def _copy(layer: DraftLayer) -> DraftLayer:
    made = DraftLayer(layer.shape).to(layer.gain)
    made.load_state_dict(layer.state_dict())
    return made.requires_grad_(False)
