"""Objective of a node's inner steps, and the inner optimizers with their learning rate."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.edit import LayerSync, SharedModule
from aedit.launch.config import RunConfig, TrainConfig
from aedit.launch.data import Corpus, CorpusTokenizer, Order, batch
from aedit.launch.node.budget import NodeBudget
from aedit.launch.node.checkpoint import NodeCheckpoints, Resumed
from aedit.launch.node.model import blocks, held_out_loss, loss
from aedit.launch.node.stop import Stop
from aedit.launch.node.world import World
from aedit.launch.records import PositionLog, Recorder
from aedit.types import UserError

if TYPE_CHECKING:
    from aedit.launch.node.build_hub import HubMembership
    from aedit.launch.node.evaluation import EvaluationInWaits
    from aedit.launch.node.text_learner import TextLearner

AddLoss = Callable[[Tensor], None]


@dataclass(slots=True)
class Slowdown:
    """Simulated slower machine: each step of the node takes `factor` times as long."""

    factor: float = 1.0
    stretched_s: float = 0.0
    """Seconds of work that `stretch` has slowed down, slowing included; the rest is at a step's end."""
    waited_s: float = 0.0
    """Seconds of steps in which the node waited for the work of others, apart from rounds."""

    def stretch(self, seconds: float) -> float:
        """Slow down a piece of work of so many seconds now; return the seconds that it took then."""
        if self.factor == 1:
            return seconds
        time.sleep(seconds * (self.factor - 1))
        self.stretched_s += seconds * self.factor
        return seconds * self.factor

    def note_wait(self, seconds: float) -> None:
        """Count so many seconds as waited."""
        self.waited_s += seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeParts:
    """Components of a node that takes part in its run, of which an objective and `TrainingNode` are made."""

    config: RunConfig
    world: World
    """With the index of the node in its run."""
    tokenizer: CorpusTokenizer
    sync: LayerSync
    order: Order
    budget: NodeBudget
    stop: Stop
    checkpoints: NodeCheckpoints
    recorder: Recorder
    positions: PositionLog = field(default_factory=PositionLog)
    """Records of the stream's positions."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Properties that must be equal for all nodes and checkpoints of the run."""
    resumed: Resumed | None = None
    shared: SharedModule | None = None
    """The drafter as the nodes share it."""
    hub: "HubMembership | None" = None
    """Membership of the node in a run with a hub."""
    slowdown: Slowdown = field(default_factory=Slowdown)


class Objective(Protocol):
    """Loss of a node's inner steps, and the data for it.

    All ranks of the node call its methods together.
    """

    def accumulate_gradients(self, add_loss: AddLoss) -> None:
        """Run the forward and backward passes of one inner step, and report the loss of each."""

    def lr(self, progress: float, nodes: int) -> float:
        """Return the learning rate after this share of the run's budget, with this number of live nodes."""

    def positions(self) -> Sequence[int] | NDArray[np.int64]:
        """Return the positions of the stream that this rank trains first in the step with the gradients."""

    def end_step(self) -> int:
        """Return the tokens of the inner step that was taken with the gradients."""

    def undo_step(self) -> None:
        """Put back the data of a step that was begun and not taken; they are drawn again later."""

    def drawn(self) -> int:
        """Return the positions of the run's stream that were drawn in this attempt."""

    def used(self, steps: int) -> int:
        """Return how many of these the first `steps` inner steps of this attempt have used up."""

    def evaluation_is_due(self, milestone: int, evaluated: int) -> bool:
        """Return whether to evaluate after this step. Arguments: rounds now, and at the last evaluation."""

    def evaluate(self) -> tuple[str, dict[str, Any]]:
        """Evaluate on held-out data; return the name of an event and its values."""

    def evaluate_later(self, step: int, round: int) -> bool:
        """Begin an evaluation that goes on in waits and is recorded at its end; return false without one.

        step, round: of the weights.
        """

    def finish_evaluation(self) -> None:
        """Finish and record the evaluation of `evaluate_later`, if it goes on."""

    def metrics(self) -> dict[str, Any]:
        """Return the objective's own part of a line of metrics."""

    def order_state(self) -> dict[str, int]:
        """Return the state of the sample order from which the next step would draw after a resume."""

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""

    def close(self) -> None:
        """End the processes that the objective has started."""


@dataclass(slots=True, kw_only=True)
class TextObjective:
    """Next-token prediction on the samples of a corpus."""

    config: RunConfig
    world: World
    corpus: Corpus
    order: Order
    sync: LayerSync
    learner: "TextLearner | None" = None
    """Drafter that learns from these forward passes in the node's waits."""
    in_waits: "EvaluationInWaits | None" = None
    """Evaluates in the node's waits; None: all at once."""
    _drawn: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Positions of the current step."""
    _before: tuple[dict[str, int], Tensor] | None = None
    """Sample order and random state before the current step."""

    def accumulate_gradients(self, add_loss: AddLoss) -> None:
        """Run forward and backward passes on the next samples, `train.accumulate` micro-batches."""
        self._before = (self.order.state(), torch.get_rng_state())
        train, world = self.config.train, self.world
        self._drawn = self.order.draw(train.batch_size * train.accumulate)
        drawn, learner = self.order.samples(self._drawn), self.learner
        if learner is not None:
            learner.begin_step()
        for part in drawn.reshape(train.accumulate, -1):
            mine = part[world.rank :: world.ranks]
            samples = batch(self.corpus.train, mine).to(world.device, non_blocking=True)
            model = self.sync.model
            with learner.collecting(model, samples[:, :-1]) if learner is not None else nullcontext():
                mean = loss(model, samples, self.config.model.dtype) / train.accumulate
            mean.backward()  # type: ignore[no-untyped-call]
            if learner is not None:
                learner.write()
            add_loss(mean.detach())

    def lr(self, progress: float, nodes: int) -> float:
        """Return the learning rate of the schedule."""
        return lr_at(progress, self.config.train, nodes)

    def positions(self) -> NDArray[np.int64]:
        """Return the positions of a step on the first rank: the ranks share them."""
        return self._drawn if self.world.leads else self._drawn[:0]

    def end_step(self) -> int:
        """Return the tokens of a step."""
        self._before = None
        return self._per_step * self.config.data.seq_len

    def undo_step(self) -> None:
        """Go back to the order and the random state before an unfinished step."""
        if self._before is not None:
            state, rng = self._before
            torch.set_rng_state(rng)
            self.order = self.order.resume(state)
            self._before = None

    def drawn(self) -> int:
        """Return the samples that were drawn."""
        return self.order.state()["drawn"]

    def used(self, steps: int) -> int:
        """Return the samples of the first `steps` steps."""
        return steps * self._per_step

    def evaluation_is_due(self, milestone: int, evaluated: int) -> bool:
        """Return whether `train.eval_every` rounds have passed and nothing is in flight."""
        every = self.config.train.eval_every
        return bool(every) and not self.sync.in_flight and milestone >= evaluated + every

    def evaluate(self) -> tuple[str, dict[str, Any]]:
        """Return the held-out loss."""
        found = held_out_loss(self.sync.model, self.corpus, self.config, self.sync.shards)
        return "eval", {"loss": found}

    def evaluate_later(self, step: int, round: int) -> bool:
        """Copy the weights, whose held-out loss is computed in waits; return false if all is at once."""
        if self.in_waits is not None:
            self.in_waits.begin(self.sync.model, step, round)
        return self.in_waits is not None

    def finish_evaluation(self) -> None:
        """Compute what no wait has computed."""
        if self.in_waits is not None:
            self.in_waits.finish()

    def metrics(self) -> dict[str, Any]:
        """Return the state of the drafter, if there is one: loss and tokens are in each line."""
        return {} if self.learner is None else {"drafter": self.learner.metrics()}

    def order_state(self) -> dict[str, int]:
        """Return the state of the sample order."""
        return self.order.state()

    def state(self) -> dict[str, Any]:
        """Return the training steps of the drafter, and write it beside the checkpoint."""
        return {} if self.learner is None else {"drafter_steps": self.learner.save()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned."""
        if self.learner is not None:
            self.learner.steps_before = state.get("drafter_steps", 0)

    def close(self) -> None:
        """End the drafter's trainer."""
        if self.learner is not None:
            self.sync.idle = None
            self.learner.online.close()

    @property
    def _per_step(self) -> int:
        return self.config.train.batch_size * self.config.train.accumulate


def make_inners(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `train.optimizer` names; each parameter is in one of them.

    Raises UserError if Muon cannot step the model: it has no blocks with matrices, or one of them has fewer
    rows than the node has ranks, which torch's DTensor cannot do.
    """
    if config.optimizer == "adamw":
        return [make_inner(model, config)]
    hidden = _hidden_matrices(model)
    muon = torch.optim.Muon(
        hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [muon, _adamw(rest, config)] if rest else [muon]


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of the transformer blocks."""
    named = [
        (f"{outer}.{name}", p)
        for outer, block in blocks(model)
        for name, p in block.named_parameters()
        if p.ndim == 2 and p.requires_grad
    ]
    if not named:
        raise UserError('train.optimizer = "muon": the model has no blocks with matrices; use "adamw"')
    for name, p in named:
        ranks = p.device_mesh.size() if isinstance(p, DTensor) else 1
        if len(p) < ranks:
            raise UserError(
                f'train.optimizer = "muon": {name} has {len(p)} rows, fewer than the node has ranks '
                f'({ranks}); use fewer ranks or "adamw"'
            )
    return [p for _, p in named]


def make_inner(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and none on vectors (norms, biases)."""
    return _adamw([p for p in model.parameters() if p.requires_grad], config)


def _adamw(params: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def lr_at(progress: float, config: TrainConfig, nodes: int = 1) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to `lr_final`.

    progress: share of the run, 0 to 1. nodes: live nodes, by whose number the rate grows as `lr_by_nodes`
    says.
    """
    peak = config.lr * math.pow(nodes, config.lr_by_nodes)
    if progress < config.lr_warmup:
        return peak * (progress + 1e-3) / (config.lr_warmup + 1e-3)
    done = min(1.0, (progress - config.lr_warmup) / (1 - config.lr_warmup))
    share = config.lr_final + (1 - config.lr_final) * 0.5 * (1 + math.cos(math.pi * done))
    return peak * share


def set_lr(inner: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in inner.param_groups:
        group["lr"] = lr
