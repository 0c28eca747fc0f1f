"""`EditCallback`: local SGD in a `transformers.Trainer`.

The Trainer fires its events in this order around a step: `on_step_begin`, backward passes, clipping,
`on_pre_optimizer_step`, the optimizer, `on_optimizer_step`, `on_step_end`, evaluation and saving. A step
counts after the optimizer, not after a micro-batch; everything under way lands before an evaluation or a
checkpoint.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_NAME, logging

from aedit.edit import snapshot
from aedit.edit.agreement import equalize
from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange
from aedit.edit.schedule import RoundSchedule
from aedit.edit.sync import LayerSync
from aedit.types import PositiveFloat, checked

_log = logging.get_logger(__name__)


@checked()
class EditCallback(TrainerCallback):
    """Make the model of a Trainer one node of a run.

        callback = EditCallback(exchange=MeanExchange(transport), schedule=EverySeconds(600))
        Trainer(model=model, args=args, train_dataset=mine, callbacks=[callback]).train()

    One callback serves one `train()` of one process, which is a node. Start it without torchrun, and the
    process group with `init_process_group("gloo", init_method="tcp://HOST:PORT", rank=NODE,
    world_size=NODES)`. Checkpoints also hold the anchors, so that `resume_from_checkpoint` gives the same
    bits if every node resumes from the same round; each node needs an `output_dir` of its own.

    Args:
        exchange: As for `LayerSync.of`.
        schedule: As for `LayerSync.of`.
        config: As for `LayerSync.of`.
        max_grad_norm: Clip gradients here instead of in the Trainer, whose own `max_grad_norm` must then be
            0. During a warm-up this clips the mean over nodes, as one large batch would be clipped; the
            Trainer clips each node's gradients before they can be averaged.
        weight_states: As for `LayerSync.of`.

    Raises:
        ValueError: The Trainer would join processes or GPUs by itself; raised when training begins.
    """

    def __init__(
        self,
        *,
        exchange: Exchange,
        schedule: RoundSchedule | None = None,
        config: EditConfig | None = None,
        max_grad_norm: PositiveFloat | None = None,
        weight_states: Sequence[str] | None = None,
    ) -> None:
        self.exchange, self.schedule, self.config = exchange, schedule, config
        self.max_grad_norm, self.weight_states = max_grad_norm, weight_states
        self.sync: LayerSync | None = None
        """The node, from the beginning of the training on."""
        self._attached = False

    def detach(self) -> None:
        """Remove the hooks without waiting for other nodes, after an exception has ended the training."""
        if self._attached:
            self._attached = False
            self._node.__exit__(RuntimeError, None, None)

    # -- events of the Trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach the node to the model and the optimizer, and resume if the Trainer does."""
        if self.sync is not None:
            raise ValueError(
                "this EditCallback has served another train(): make a new one, exchange and schedule"
            )
        self.sync = LayerSync.of(
            kwargs["model"],
            kwargs["optimizer"],
            exchange=self.exchange,
            schedule=self.schedule,
            config=self.config,
            weight_states=self.weight_states,
        )
        _check(args, self.sync, self.max_grad_norm)
        self.sync.compare()
        self._resume(args, state)
        self.sync.__enter__()
        self._attached = True

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Average the gradients during the warm-up and clip them, if `max_grad_norm` was given."""
        if self.max_grad_norm is not None:
            self._node.average_gradients()
            torch.nn.utils.clip_grad_norm_(self._node.model.parameters(), self.max_grad_norm)

    def on_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Count the inner step, unless the optimizer has skipped it."""
        if not getattr(kwargs["optimizer"], "step_was_skipped", False):  # fp16 overflow: no progress
            self._node.step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Land everything before an evaluation or a checkpoint; leave the run if training stops."""
        if control.should_training_stop:
            self._leave()
        elif control.should_evaluate or control.should_save:
            self._node.finish()

    on_epoch_end = on_step_end
    """Evaluations and checkpoints may also be due here, and an early stop comes to light here."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save anchors and outer state beside the Trainer's own files, and the weights if it wrote none."""
        directory = _directory(args, state)
        if args.should_save:
            _complete_weights(self._node.model, directory.parent)
        if args.save_only_model:
            return
        # A later callback may ask for a checkpoint after `on_step_end`.
        if self._node.in_flight and not self.exchange.asynchronous:
            _log.warning("a checkpoint in the middle of a round holds no anchors: list EditCallback last")
            return
        dcp.save(snapshot.tensors(self._node), checkpoint_id=directory, no_dist=True)
        # Written last: a snapshot without it is not complete.
        (directory / "numbers.json").write_text(json.dumps(snapshot.numbers(self._node, [])))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the run, and share the best model if the Trainer has loaded it."""
        self._leave()
        if args.load_best_model_at_end:
            _share_best(self._node.model, self.exchange, args, state)

    # -- the node

    @property
    def _node(self) -> LayerSync:
        assert self.sync is not None, "the Trainer fires on_train_begin first"
        return self.sync

    def _leave(self) -> None:
        if self._attached:
            self._attached = False
            self._node.__exit__(None, None, None)

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        """Restore the exchange from the Trainer's checkpoint, if all nodes resume from the same round."""
        sync, path = self._node, _directory(args, state) / "numbers.json"
        numbers: dict[str, Any] | None = json.loads(path.read_text()) if path.is_file() else None
        same_round, fewest_steps = _compare_checkpoints(self.exchange, numbers, state.global_step)
        if same_round:
            assert numbers is not None
            tensors = snapshot.blank(sync, numbers)
            dcp.load(tensors, checkpoint_id=path.parent, no_dist=True)
            snapshot.restore(sync, tensors, numbers)
        elif state.global_step:
            _log.warning("the nodes share no round to resume from: node 0's weights become new anchors")
            sync.steps = fewest_steps  # one number on all nodes: messages of a warm-up are named by it
            sync.schedule.last_step = sync.local_steps


def _check(args: TrainingArguments, sync: LayerSync, max_grad_norm: float | None) -> None:
    """Raise ValueError for training arguments that would change the training without notice."""
    if args.n_gpu > 1:
        raise ValueError(
            f"this process sees {args.n_gpu} GPUs, and the Trainer would copy the model to each: "
            "show it one (CUDA_VISIBLE_DEVICES)"
        )
    if args.world_size > 1:
        raise ValueError(
            f"the Trainer averages gradients over {args.world_size} processes by itself: "
            "start each node alone, without torchrun"
        )
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size = True would restart one node without the others: set it to False, "
            "and give per_device_train_batch_size"
        )
    if args.load_best_model_at_end and sync.free:
        raise ValueError(
            "load_best_model_at_end would end every node of a hub with other weights: set it to False, and "
            "load the best checkpoint where you need it"
        )
    wants = torch.tensor([float(args.load_best_model_at_end)], dtype=torch.float64)
    if not (sync.exchange.rows("trainer/wants", wants).result().rows == wants).all():
        raise ValueError("load_best_model_at_end differs between the nodes: give it to all or to none")
    if max_grad_norm is not None and args.fp16:
        raise ValueError(
            "max_grad_norm would clip gradients that fp16 has scaled: use bf16, or clip in the Trainer"
        )
    if max_grad_norm is not None and args.max_grad_norm:
        raise ValueError(
            "max_grad_norm is given twice, here and to the Trainer: set TrainingArguments(max_grad_norm=0)"
        )
    if sync.warming_up and args.max_grad_norm:
        _log.warning(
            "the Trainer clips each node's gradient before the warm-up averages it; to clip the average, use "
            "TrainingArguments(max_grad_norm=0) and EditCallback(max_grad_norm=...)"
        )


def _share_best(model: nn.Module, exchange: Exchange, args: TrainingArguments, state: TrainerState) -> None:
    """Give all nodes the best of the models that their Trainers have just loaded."""
    score = -torch.inf if state.best_metric is None else float(state.best_metric)
    if not args.greater_is_better and state.best_metric is not None:
        score = -score
    scores = exchange.rows("trainer/best", torch.tensor([score], dtype=torch.float64)).result().rows[:, 0]
    if scores.max() > -torch.inf:
        equalize(model, exchange, source=int(scores.argmax()), key="trainer/best")


def _directory(args: TrainingArguments, state: TrainerState) -> Path:
    assert args.output_dir is not None
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}" / "edit"


def _complete_weights(model: nn.Module, checkpoint: Path) -> None:
    """Write the weights into `checkpoint` if the Trainer has not.

    transformers writes weights in the first process of a process group only, but every node resumes from its
    own.
    """
    if any(checkpoint.glob("*.safetensors")) or not isinstance(model, PreTrainedModel):
        return
    names: dict[int, str] = {}
    for name, tensor in model.state_dict().items():
        names.setdefault(tensor.data_ptr(), name)  # tied weights once
    weights = {name: model.state_dict()[name].contiguous() for name in names.values()}
    save_file(weights, checkpoint / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    model.config.save_pretrained(checkpoint)


def _compare_checkpoints(
    exchange: Exchange, numbers: dict[str, Any] | None, global_step: int
) -> tuple[bool, int]:
    """Return whether every node resumes from the same round or step, and the fewest steps of any Trainer."""
    last_id, warm_up_steps = -1, -1
    if numbers is not None:
        last_id, warm_up_steps = numbers["last_id"], 0 if numbers["anchored"] else numbers["steps"]
    row = torch.tensor([last_id, warm_up_steps, global_step], dtype=torch.float64)
    rows = exchange.rows("trainer/resume", row).result().rows
    same = bool((rows[:, :2] == row[:2]).all()) and numbers is not None
    return same, int(rows[:, 2].min())
