"""Supervised warm-up: right answers are trained before the first rollout, for models trained from nothing.

It is a phase of the run, not of a node: the first `rl.supervised_steps` of the run's `train.steps`, counted
as the budget counts them. A node that joins later, or resumes, goes on where the run is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from aedit.launch.config import RunConfig
from aedit.launch.data import AnswerTokens
from aedit.launch.node.objective import AddLoss
from aedit.launch.node.world import World
from aedit.spec_rollout.rl import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised steps on prompts and answers of `problems`."""

    config: RunConfig
    model: nn.Module
    problems: Sequence[Problem]
    answers: AnswerTokens
    world: World

    def is_over(self, progress: float) -> bool:
        """Return whether the run, of which this share is done, has had its supervised steps."""
        return progress * self.config.train.steps >= self.config.rl.supervised_steps - 0.5

    def accumulate(self, step: int, add_loss: AddLoss) -> int:
        """Run the forward and backward passes of a supervised step; return its tokens.

        step: inner steps of this node so far. Its problems depend on it, the seed and the node alone.
        """
        rows = self.answers.batch(self._problems(step))
        mine = slice(self.world.rank, None, self.world.ranks)
        tokens_BL = rows.tokens_BT[mine].to(self.world.device)
        mask_BT = rows.mask_BT[mine, 1:].to(self.world.device)
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self.model(input_ids=tokens_BL).logits[:, :-1]
        total = cross_entropy(logits[mask_BT].float(), tokens_BL[:, 1:][mask_BT], reduction="sum")
        loss = total * self.world.ranks / rows.num_tokens
        loss.backward()  # type: ignore[no-untyped-call]
        add_loss(loss.detach())
        return rows.num_tokens

    def _problems(self, step: int) -> Sequence[Problem]:
        key = np.random.SeedSequence((self.config.seed % 2**32, self.world.node, step, 0x5F7))
        size = self.config.rl.supervised_batch
        indices = np.random.default_rng(key).integers(0, len(self.problems), size)
        return [self.problems[int(index)] for index in indices]
