"""Supervised warm-up: right answers are trained before the first rollout, for models trained from nothing.

It is a phase of the run, not of a node: the first `rl.supervised_steps` of the run's `train.steps`, counted as
the budget counts them. A node that joins later, or resumes, goes on where the run is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from aedit.edit.shards import Shards
from aedit.launch.config.config import RunConfig
from aedit.launch.data.supervised import SupervisedRows
from aedit.launch.node.objective import AddLoss
from aedit.launch.node.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised steps on `rows`."""

    config: RunConfig
    model: nn.Module
    rows: SupervisedRows
    world: World
    shards: Shards

    def is_over(self, progress: float) -> bool:
        """Return whether the run, of which this share is done, has had its supervised steps."""
        return progress * self.config.train.steps >= self.config.rl.supervised_steps - 0.5

    def accumulate(self, step: int, add_loss: AddLoss) -> int:
        """Run the forward and backward passes of a supervised step; return its tokens.

        step: inner steps of this node so far. Its problems depend on it, the seed and the node alone.
        """
        chosen = self._problems(step)
        tokens_BL, mask_BL = self.rows.batch(chosen)
        mine = slice(self.world.rank, None, self.world.ranks)
        mask_BT = mask_BL[:, 1:]
        num_trained = int(mask_BT.sum())
        mask_BT = mask_BT[mine].to(self.world.device)
        tokens_BL = tokens_BL[mine].to(self.world.device)
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self.model(input_ids=tokens_BL).logits[:, :-1]
        total = cross_entropy(logits[mask_BT].float(), tokens_BL[:, 1:][mask_BT], reduction="sum")
        loss = total * self.world.ranks / max(1, num_trained)
        loss.backward()  # type: ignore[no-untyped-call]
        add_loss(loss.detach())
        return int(mask_BL.sum())

    def _problems(self, step: int) -> Sequence[int]:
        key = np.random.SeedSequence((self.config.seed % 2**32, self.world.node, step, 0x5F7))
        size = self.config.rl.supervised_batch
        found: Sequence[int] = np.random.default_rng(key).integers(0, self.rows.num_rows, size).tolist()
        return found
