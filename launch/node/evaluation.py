"""Held-out evaluation in the waits of a node, on a copy of its weights."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from aedit.edit import Shards
from aedit.launch.config import RunConfig
from aedit.launch.data import Corpus
from aedit.launch.node.model import held_out_sums, make_model, mean_loss
from aedit.launch.node.objective import NodeParts

PAUSE_S = 0.0005
"""Pause between two looks at a wait that is too short for a batch so far."""


@dataclass(slots=True, kw_only=True)
class EvaluationInWaits:
    """Evaluates a copy of the weights batch by batch, each batch a piece of work of a waiting node.

    A batch begins when the wait has lasted as long as a batch takes, so short waits are not prolonged and
    long ones by one batch at most.
    """

    copy: nn.Module
    """Model of its own, into which weights are copied."""
    corpus: Corpus
    config: RunConfig
    shards: Shards
    record: Callable[[float, int, int, bool], None]
    """Takes the loss, step and round of the weights, and whether the node waits."""
    used_s: float = 0.0
    """Time of batches in waits."""
    _batch_s: float = 0.0
    """Longest time of a batch."""
    _batches: Iterator[Tensor] | None = None
    _sums: list[Tensor] = field(default_factory=list)
    _step: int = 0
    _round: int = 0

    def begin(self, model: nn.Module, step: int, round: int) -> None:
        """Copy the weights of `model` for an evaluation; an earlier one is finished first."""
        self.finish()
        self.copy.load_state_dict(model.state_dict())
        self._batches = held_out_sums(self.copy, self.corpus, self.config, self.shards)
        self._step, self._round = step, round

    def piece(self, waited_s: float) -> bool:
        """Evaluate a batch, or pause in a wait that is too short for one so far; return false without any."""
        if self._batches is None:
            return False
        if waited_s < self._batch_s:
            time.sleep(PAUSE_S)
            return True
        began_s = time.monotonic()
        self._next_batch(self._batches, in_wait=True)
        took_s = time.monotonic() - began_s
        self._batch_s = max(self._batch_s, took_s)
        self.used_s += took_s
        return True

    def finish(self) -> None:
        """Evaluate all batches that are left, and record the result."""
        while self._batches is not None:
            self._next_batch(self._batches)

    def _next_batch(self, batches: Iterator[Tensor], *, in_wait: bool = False) -> None:
        found = next(batches, None)
        if found is not None:
            self._sums.append(found)
            return
        loss, self._batches, self._sums = mean_loss(self._sums, self.shards), None, []
        self.record(loss, self._step, self._round, in_wait)


def make_evaluation(parts: NodeParts, corpus: Corpus) -> EvaluationInWaits | None:
    """Return the evaluation of a node in its waits; None if it evaluates at once.

    Ranks of one node wait at different times, so there it evaluates at once.
    """
    config, recorder = parts.config, parts.recorder
    if not config.train.eval_in_waits or parts.world.ranks > 1:
        return None
    copy = make_model(config, parts.tokenizer, parts.world).requires_grad_(False)
    copy.eval()

    def record(loss: float, step: int, round: int, in_wait: bool) -> None:
        recorder.event("eval", step=step, round=round, loss=loss, **({"in_wait": True} if in_wait else {}))

    found = EvaluationInWaits(
        copy=copy, corpus=corpus, config=config, shards=parts.sync.shards, record=record
    )
    parts.sync.pieces = found
    return found
