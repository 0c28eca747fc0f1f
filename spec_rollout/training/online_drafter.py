"""`OnlineDrafter`: a learned drafter that trains in the waits of its node while the node's engine uses it.

    online = OnlineDrafter.of(target)
    engine = Engine(target, drafters={"layer": online.drafter}, chooser=Goodput.of("layer:4"))
    engine.sink = online.sink
    sync.idle = online

It joins the ring of features, the trainer process (on CUDA: a low-priority stream), the gate, publication and
adoption. Nothing here changes a token: an engine verifies each drafted token.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol, Self, TypeGuard

import torch
from torch import Tensor, nn

from aedit.spec_rollout.drafters import DraftForm, DraftLayer, LayerDrafter, layer_of
from aedit.spec_rollout.model import TargetModel, whole
from aedit.spec_rollout.training.feature_ring import Buffer, FeatureRing, RingShape
from aedit.spec_rollout.training.features import RowFeatures
from aedit.spec_rollout.training.gate import LocalGate
from aedit.spec_rollout.training.idle_stream import StreamTraining
from aedit.spec_rollout.training.learning import (
    LayerTraining,
    LearningConfig,
    policy_tensors,
    train_when_idle,
)
from aedit.spec_rollout.training.losses import PolicyEmbeddings
from aedit.spec_rollout.training.publishing import Publication, all_finite
from aedit.spec_rollout.training.trainer_supervisor import IdleConfig
from aedit.spec_rollout.training.windows import NoTraining, UseOfFeatures
from aedit.types import NonNegativeInt, PositiveInt, Range, check, checked

CAUSES = ("round", "hub", "rollouts", "longest sample", "rank", "rewards")
"""Why a node waits: for other nodes of a round, for a hub, for rollouts of other processes, for the last of
these, for other ranks of the node, for rewards of the last rollouts."""
COMPARE_EVERY = 16
"""Calls of `adopt` between two looks for samples on which a shared drafter is compared."""
_LAYER, _COUNTS = "layer.", "counts"


class Trainer(Protocol):
    """Training of the drafter in windows: `DrafterTraining`, `StreamTraining` or `NoTraining`."""

    @property
    def used_s(self) -> float:
        """Return the processor time of the training in seconds."""

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Let the training run inside the context."""

    def newest(self, after: int = 1) -> Publication | None:
        """Return the newest published drafter if its number is above `after`."""

    def pause(self) -> None:
        """Let no window start the training until `unpause`."""

    def unpause(self) -> None:
        """End `pause`."""

    def update_policy(self, policy: Mapping[str, Tensor], version: int) -> None:
        """Train for this embedding and head from now on."""

    def offer(self, drafter: Mapping[str, Tensor]) -> int:
        """Continue from these tensors; return the number of the newest publication so far."""

    def status(self) -> dict[str, Any]:
        """Return the state by name."""

    def close(self) -> None:
        """End the training."""


@checked()
@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineConfig:
    """Settings of an `OnlineDrafter`."""

    learning: LearningConfig = field(default_factory=LearningConfig)
    idle: IdleConfig = field(default_factory=IdleConfig)
    memory_bytes: PositiveInt = 2**26
    """Memory for the newest features."""
    max_share: Annotated[float, Range(above=0, most=1)] = 0.01
    """Largest share of the cost of an engine's steps on a CPU that the collection of features within steps
    may take. Where steps are short, fewer samples are collected. Begin and end of a sample do not count."""
    form: DraftForm = field(default_factory=DraftForm)
    """Of a new layer. The policy's features must have its taps."""
    train: bool = True
    """False: windows are measured and not used; the drafter changes only by `take_shared`."""


@dataclass(slots=True)
class _Counts:
    """Counts over the whole run, including what was loaded."""

    steps: int = 0
    published: int = 0
    adopted: int = 0
    refused: int = 0


class PolicySource(Protocol):
    """The parts of a policy that its drafter needs, such as those of an engine's `TargetModel`."""

    @property
    def model(self) -> Any:
        """Return the `transformers` model."""

    @property
    def version(self) -> int:
        """Return the version of the weights."""

    @property
    def embedding(self) -> Tensor:
        """Return the embedding, (V, d)."""

    @property
    def head(self) -> Tensor:
        """Return the output head, (V, d)."""

    @property
    def feature_size(self) -> int:
        """Return the size of the feature of one token."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the features."""

    @property
    def device(self) -> torch.device:
        """Return the device of the features."""


@checked()
class OnlineDrafter:
    """A learned drafter with its training in idle time. Make one with `OnlineDrafter.of`.

    It is an `IdleWork`: `sync.idle = online` trains it while the node waits for others. The methods are for
    one thread, except `window`. Also a context manager: leaving it ends the trainer.
    """

    def __init__(
        self,
        policy: PolicySource,
        layer: DraftLayer,
        trainer: Trainer,
        sink: RowFeatures,
        gate: LocalGate,
        *,
        is_trained: bool = True,
    ) -> None:
        self.layer = layer
        """The drafter in use. Its tensors change with `adopt`."""
        self.drafter = LayerDrafter.of(layer, policy) if _is_target(policy) else None
        """Drafter for the engine of this target; None for a policy without an engine. Its version is negative
        until a drafter has passed the gate: the engine does not try an untrained one."""
        self.is_trained = is_trained
        """The drafter in use has passed the gate of a node, or was given."""
        if self.drafter is not None and not is_trained:
            self.drafter.version = -1
        self.sink = sink
        """Receiver of the policy's features, for `engine.sink`."""
        self._policy, self._trainer, self._gate = policy, trainer, gate
        self._number = 1
        """Number of the publication in use; 1 is the initial drafter."""
        self._shared: DraftLayer | None = None
        self._num_looks = 0
        """Calls of `adopt` with a shared drafter, since it came or the policy changed."""
        self._before = _Counts()
        self._adopted = self._refused = 0
        self._shared_steps = 0
        self._use_of_features = UseOfFeatures()
        self._can_gain = True

    @classmethod
    def of(
        cls,
        policy: PolicySource,
        *,
        layer: DraftLayer | None = None,
        config: OnlineConfig | None = None,
        checkpoint: Path | None = None,
        seed: int = 0,
    ) -> Self:
        """Return a drafter for this policy and start its trainer, suspended.

        Args:
            policy: The target of an engine (`make_target`), or a `TrainedPolicy` where there is no engine.
            layer: Initial draft layer; None: a new one. It belongs to the result.
            config: Settings.
            checkpoint: File of the training's own checkpoint: optimizer state and step count. A restarted
                trainer process continues from it.
            seed: Seed of a new layer. Nodes that share a drafter need the same one.

        Raises:
            ValueError: There is no draft layer for this type of model, or `layer` expects other features.
        """
        config = config or OnlineConfig()
        generator = torch.Generator(policy.device).manual_seed(seed)
        taps = policy.feature_size // policy.embedding.shape[1] - 1
        new = config.form.new(policy.model, taps=taps, generator=generator)
        layer = layer or new
        is_trained = not _are_equal(layer.state_dict(), new.state_dict())
        layer.requires_grad_(False)
        sizes = layer.shape.feature_size, policy.feature_size
        check(sizes[0] == sizes[1], "features of this draft layer", f"must be {sizes[1]} wide", sizes[0])
        ring = RingShape.within(config.memory_bytes, policy.feature_size, policy.dtype)
        idle = config.idle if checkpoint is None else replace(config.idle, checkpoint=checkpoint)
        trainer, memory = _start(policy, layer, ring, replace(config, idle=idle), is_trained)
        sink = RowFeatures(FeatureRing(memory, ring), max_share=config.max_share)
        gate = LocalGate(memory, config.learning.evaluation_depth)
        return cls(policy, layer, trainer, sink, gate, is_trained=is_trained)

    # -- idle work

    def window(self, cause: str) -> AbstractContextManager[None]:
        """Return a context in which the drafter trains; leaving it does not wait.

        Args:
            cause: Why the node waits: one of `CAUSES`, or a text of your own.
        """
        return self._trainer.window(cause)

    @property
    def used_s(self) -> float:
        """Return the processor time of the trainer so far, in seconds. It never decreases."""
        return self._trainer.used_s

    @property
    def can_gain(self) -> bool:
        """Return true if drafts could make the engine faster, were all of them accepted.

        Setting it to false ends training and the collection of features; true begins them again with the
        next samples and windows.
        """
        return self._can_gain

    @can_gain.setter
    def can_gain(self, can_gain: bool) -> None:
        if can_gain == self._can_gain:
            return
        self._can_gain = self.sink.collects = can_gain
        if can_gain:
            self._trainer.unpause()
        else:
            self._trainer.pause()

    # -- what the rollout loop calls

    def after_update(self) -> None:
        """Tell the trainer of a new policy, of which features follow: from the engine or a forward pass.

        Embedding and head are copied into the memory of the trainer, and the features of this version are
        collected: neither where the trainer has not used a wait for long (`UseOfFeatures`), unless a drafter
        of other nodes is to be compared.
        """
        self._num_looks = 0
        status = self._trainer.status()
        idle_s = 0.0 if status["state"] == "off" else status["idle_s"]
        rests = bool(status["training"].get("rests"))
        is_used = self._use_of_features.next_version(idle_s, self.used_s, time.monotonic(), rests=rests)
        self.sink.collects = self._can_gain and (is_used or self._shared is not None)
        if not self.sink.collects:
            return
        embeddings = embeddings_of(self._policy)
        self._trainer.update_policy(policy_tensors(embeddings), embeddings.version)
        self.sink.ring.begin_step()

    def adopt(self) -> bool:
        """Draft with the newest drafter that has passed the gate; return whether it is another one.

        Call it between two steps of the engine. Without a new drafter it takes microseconds. A drafter of
        other nodes is compared with the present one here, on held-out samples of the present policy, once
        there are some; on any samples if the present one was never trained.
        """
        found = self._trainer.newest(self._number)
        changed = found is not None
        if found is not None:
            self._number = found.number
            self._use(found.tensors)
            self._shared_steps = int(self._trainer.status()["steps"])
        return self._adopt_shared() or changed

    # -- sharing and checkpoints

    @property
    def shared_steps(self) -> int:
        """Return the microbatches of this node's trainer that are in the drafter in use: a running total."""
        return self._shared_steps

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the drafter in use, by name; not copies."""
        return dict(self.layer.state_dict())

    def take_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Let the next `adopt` compare this drafter of other nodes, and use it unless it is worse.

        Values that are not finite, other names and other shapes are refused at once.
        """
        candidate = deepcopy(self.layer)
        try:
            candidate.load_state_dict(tensors)
        except ValueError:
            self._refused += 1
            return
        if all_finite(candidate.state_dict()):
            self._shared, self._num_looks = candidate, 0
            self.sink.collects = self._can_gain
        else:
            self._refused += 1

    def state(self) -> dict[str, Tensor]:
        """Return copies of the drafter in use and its counts, for a checkpoint of the node."""
        counts = self._counts()
        numbers = [counts.steps, counts.published, counts.adopted, counts.refused]
        layer = {f"{_LAYER}{name}": value.detach().clone() for name, value in self.tensors().items()}
        return layer | {_COUNTS: torch.tensor(numbers)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned.

        Raises:
            ValueError: It belongs to a drafter of other sizes, or is incomplete. Nothing has changed.
        """
        counts = state.get(_COUNTS)
        if counts is None or counts.shape != (4,):
            raise ValueError("state of a drafter: counts must be 4 numbers")
        own = {name.removeprefix(_LAYER): t for name, t in state.items() if name.startswith(_LAYER)}
        if not all_finite(own):
            raise ValueError("state of a drafter: its values must be finite")
        if self.is_trained or not _are_equal(own, self.tensors()):
            self._use(own)
        self._number = self._trainer.offer(self.tensors())
        self._shared, self._before = None, _Counts(*counts.tolist())
        self._adopted = self._refused = 0

    def status(self) -> dict[str, Any]:
        """Return the state by name, for logs and metrics.

        `steps` are microbatches of the trainer; `refused` counts trained drafters that were not better and
        shared ones that were worse or not usable; `version` changes with the drafter in use. See
        `DrafterTraining.status` for the others.
        """
        counts = self._counts()
        return {
            **self._trainer.status(),
            "used_s": self.used_s,
            "steps": counts.steps,
            "published": counts.published,
            "adopted": counts.adopted,
            "refused": counts.refused,
            "version": counts.adopted,
            "features": self.sink.status(),
        }

    def close(self) -> None:
        """End the trainer.

        Raises:
            TimeoutError: It could not be ended.
        """
        self._trainer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _counts(self) -> _Counts:
        status, before = self._trainer.status(), self._before
        published = int(status["published"])
        rejected = max(0, int(status["training"].get("evaluations", 0)) - published)
        return _Counts(
            steps=before.steps + int(status["steps"]),
            published=before.published + published,
            adopted=before.adopted + self._adopted,
            refused=before.refused + self._refused + int(status["refused"]) + rejected,
        )

    def _use(self, tensors: Mapping[str, Tensor]) -> None:
        self.layer.load_state_dict(tensors)
        self._adopted += 1
        self.is_trained = True
        if self.drafter is not None:
            self.drafter.replace(self.layer, max(self.drafter.version, 0) + 1)

    def _adopt_shared(self) -> bool:
        if self._shared is None:
            return False
        self._num_looks += 1
        if self._num_looks % COMPARE_EVERY != 1:
            return False
        self.sink.flush()
        embeddings = embeddings_of(self._policy)
        # A layer that was never trained has not seen the other samples either.
        accepted = self._gate.is_not_worse(
            self._shared, self.layer, embeddings, held_out_only=self.is_trained
        )
        if accepted is None:
            return False
        candidate, self._shared = self._shared, None
        if not accepted:
            self._refused += 1
            return False
        self._use(candidate.state_dict())
        self._number = self._trainer.offer(self.tensors())
        return True


def _are_equal(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    """Return true if both have the same names and values."""
    return a.keys() == b.keys() and all(
        a[name].shape == value.shape and torch.equal(a[name].to(value), value) for name, value in b.items()
    )


def _is_target(policy: PolicySource) -> TypeGuard[TargetModel]:
    return hasattr(policy, "rows")


def _start(
    policy: PolicySource, layer: DraftLayer, ring: RingShape, config: OnlineConfig, is_trained: bool
) -> tuple[Trainer, Buffer]:
    """Return the trainer and the memory of the ring."""
    embeddings = embeddings_of(policy)
    if not config.train:
        return NoTraining(), bytearray(ring.num_bytes)
    if policy.device.type != "cuda":
        work = train_when_idle(
            layer, embeddings, ring, learning=config.learning, idle=config.idle, is_trained=is_trained
        )
        return work, work.features
    memory = bytearray(ring.num_bytes)
    trained = layer_of(layer.shape).to(layer.gain)
    stream = StreamTraining(
        LayerTraining(trained, memory, config.learning, is_trained=is_trained),
        policy.device,
        drafter=layer.state_dict(),
        policy=policy_tensors(embeddings),
        version=embeddings.version,
    )
    return stream, memory


@checked()
class TrainedPolicy:
    """`PolicySource` of a rank that trains a `transformers` model whose rollouts are generated elsewhere.

    Of sharded parameters (DTensor) it keeps the whole embedding and head, on each rank: all ranks of the node
    make it together, and update it together.
    """

    def __init__(self, model: nn.Module, version: NonNegativeInt = 0, taps: Sequence[int] = ()) -> None:
        self.model: Any = model
        self.taps = tuple(taps)
        """Layers whose outputs are part of a feature."""
        self.update(version)

    def update(self, version: int) -> None:
        """Read embedding and head of this version of the weights. Call it after each hand-over."""
        self.version = version
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        self._embedding = whole(embedding)
        self._head = self._embedding if head is embedding else whole(head)

    @property
    def embedding(self) -> Tensor:
        """Return the embedding, (V, d)."""
        return self._embedding

    @property
    def head(self) -> Tensor:
        """Return the output head, (V, d); the embedding itself where they are tied."""
        return self._head

    @property
    def feature_size(self) -> int:
        """Return the size of the feature of one token."""
        return int(self.model.config.hidden_size) * (1 + len(self.taps))

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        device: torch.device = next(self.model.parameters()).device
        return device


def embeddings_of(policy: PolicySource) -> PolicyEmbeddings:
    """Return the policy's embedding and head as they are now, without a copy."""
    return PolicyEmbeddings(policy.embedding.detach(), policy.head.detach(), policy.version)
