"""A-EDiT inside a Lightning `Trainer`, as a callback. Needs `pip install aedit[lightning]`.

Lightning fires around a step: backward passes, `on_before_optimizer_step`, clipping, the optimizer, and after
each micro-batch `on_train_batch_end`. A step counts when `trainer.global_step` has grown.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from aedit.edit.config import EditConfig
from aedit.edit.exchange import Exchange
from aedit.edit.schedule import RoundSchedule
from aedit.edit.sync import LayerSync
from aedit.types import checked


@checked()
class LightningCallback(Callback):
    """Make a Lightning Trainer's model one node of a run.

        callback = LightningCallback(exchange=MeanExchange(transport), schedule=EverySeconds(600))
        Trainer(callbacks=[callback], devices=1, ...).fit(model, loader)

    One callback serves one `fit` of one process, which is a node: start it with `devices=1`, and make the
    process group between nodes by hand. What is validated or saved has landed. Lightning's checkpoints also
    hold anchors and outer state, so that `fit(..., ckpt_path=...)` goes on with the same bits if all nodes
    resume from the same round.

    Args:
        exchange: Where new anchors come from.
        schedule: When; by default as `config` or a joined hub says.
        config: Everything else.
    """

    def __init__(
        self, *, exchange: Exchange, schedule: RoundSchedule | None = None, config: EditConfig | None = None
    ) -> None:
        self.exchange, self.schedule, self.config = exchange, schedule, config
        self.sync: LayerSync | None = None
        """The node, from the beginning of the training on."""
        self._loaded: dict[str, Any] | None = None
        self._steps = 0
        self._attached = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Become a node. Raises ValueError for settings that would train something else."""
        if self.sync is not None:
            raise ValueError(
                "a LightningCallback serves one fit: make a new one, with a new exchange and schedule"
            )
        if trainer.world_size > 1:
            raise ValueError(
                f"Lightning averages gradients over {trainer.world_size} processes by itself: start each node"
                " alone, with Trainer(devices=1, num_nodes=1)"
            )
        self.sync = LayerSync.of(
            pl_module,
            trainer.optimizers,
            exchange=self.exchange,
            schedule=self.schedule,
            config=self.config,
        )
        if self._loaded is not None:
            self.sync.load_state_dict(self._loaded)
        self._steps = trainer.global_step
        self.sync.__enter__()
        self._attached = True

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Average gradients during a warm-up before Lightning clips them."""
        self._node.average_gradients()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step, if the optimizer has made one."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self._node.step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Land what is under way, so that all nodes validate one state of the run."""
        if self._attached:
            self._node.finish()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Exchange the last, shorter interval and leave together with the other nodes."""
        if self._attached:
            self._attached = False
            self._node.__exit__(None, None, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off without waiting for anybody."""
        if self._attached:
            self._attached = False
            self._node.__exit__(type(exception), exception, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the node's state for Lightning's checkpoint."""
        if self.sync is None:
            return {}
        if self._attached:
            self.sync.finish()
        return dict(self.sync.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a Lightning checkpoint until training starts."""
        self._loaded = state_dict or None

    @property
    def _node(self) -> LayerSync:
        assert self.sync is not None, "Lightning fires on_train_start first"
        return self.sync
