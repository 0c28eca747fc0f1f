"""Training step of a draft layer: forward and backward over packed rows, then AdamW."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from aedit.spec_rollout.drafters import DraftLayer
from aedit.spec_rollout.training.feature_reader import FeatureSample
from aedit.spec_rollout.training.losses import LossConfig, Losses, PolicyEmbeddings, draft_losses
from aedit.spec_rollout.training.packing import pack_samples
from aedit.types import check

MOMENTS = ("exp_avg", "exp_avg_sq")


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
        check(self.row_pairs >= 4, "row_pairs", "must be 4 or more", self.row_pairs)
        check(self.batch_pairs > 0, "batch_pairs", "must be above 0", self.batch_pairs)


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

    def __init__(self, layer: DraftLayer, config: DraftTrainingConfig) -> None:
        self.layer, self.config = layer, config
        self.lr_factor = 1.0
        """Factor of the learning rate, set by the gate."""
        self.num_steps = 0
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
        """Return the trained tensors, AdamW's moments and the counters.

        `resume` continues exactly from them.
        """
        state = {f"layer.{name}": value.detach().clone() for name, value in self.layer.state_dict().items()}
        for name, value in self.layer.named_parameters():
            moments = self._optimizer.state.get(value, {})
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = moments.get(moment, torch.zeros_like(value)).detach().clone()
        state["num_steps"] = torch.tensor(self.num_steps)
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
        self.num_steps, self.lr_factor = int(state["num_steps"]), float(state["lr_factor"])
        self._optimizer = self._fresh()
        for name, value in parameters.items():
            moments = {part: state[f"{part}.{name}"].to(value, copy=True) for part in MOMENTS}
            self._optimizer.state[value] = {"step": torch.tensor(float(self.num_steps)), **moments}

    def restart(self, tensors: Mapping[str, Tensor]) -> None:
        """Train these weights from now on, with new moments and a new warm-up."""
        self.layer.load_state_dict(tensors)
        self._optimizer, self.num_steps = self._fresh(), 0

    def _finish(self, sums: Sequence[Losses], num_pairs: int) -> Metrics:
        """Take AdamW's step on the gradients of all rows."""
        warm = min(1.0, (self.num_steps + 1) / (self.config.warmup_steps + 1))
        lr = self.config.lr * self.lr_factor * warm
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        norm = clip_grad_norm_(self.layer.parameters(), self.config.clip)
        self._optimizer.step()
        self.num_steps += 1
        overlap_S = torch.stack([losses.overlap_S for losses in sums]).sum(0)
        overlap_S = overlap_S / torch.stack([losses.num_overlap_S for losses in sums]).sum(0).clamp_min(1)
        loss = float(torch.stack([losses.total.detach() for losses in sums]).sum()) / num_pairs
        return Metrics(loss, tuple(overlap_S.tolist()), num_pairs, float(norm), lr)

    def _fresh(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            self.layer.parameters(),
            lr=self.config.lr,
            betas=self.config.betas,
            weight_decay=self.config.weight_decay,
        )


def _check(parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if moments or counters are missing or have other shapes than the parameters."""
    wanted = {f"{part}.{name}": value.shape for name, value in parameters.items() for part in MOMENTS}
    wanted |= {"num_steps": torch.Size(), "lr_factor": torch.Size()}
    for name, shape in wanted.items():
        saved = state.get(name)
        if saved is None or saved.shape != shape:
            found = "is missing" if saved is None else f"must be of shape {tuple(shape)}"
            raise ValueError(f"state of a drafter's training: {name} {found}")
