"""Supervised warm-up: right answers are trained before the first rollout, for models trained from nothing.

It is a phase of the run, not of a node: the first `rl.supervised_steps` of the run's `train.steps`, counted
as the budget counts them. A node that joins later, or resumes, goes on where the run is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from aedit.launch.config.config import RunConfig
from aedit.launch.data.tokenizer import CorpusTokenizer
from aedit.launch.node.objective import AddLoss
from aedit.launch.node.world import World
from aedit.spec_rollout.rl.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Supervised steps on prompts and answers of `problems`."""

    config: RunConfig
    model: nn.Module
    problems: Sequence[Problem]
    tokenizer: CorpusTokenizer
    world: World

    def is_over(self, progress: float) -> bool:
        """Return whether the run, of which this share is done, has had its supervised steps."""
        return progress * self.config.train.steps >= self.config.rl.supervised_steps - 0.5

    def accumulate(self, step: int, add_loss: AddLoss) -> int:
        """Run the forward and backward passes of a supervised step; return its tokens.

        step: inner steps of this node so far. Its problems depend on it, the seed and the node alone.
        """
        tokens_BL, mask_BL = self._rows(self._problems(step))
        mine = slice(self.world.rank, None, self.world.ranks)
        num_trained = int(mask_BL.sum())
        tokens_BL = tokens_BL[mine].to(self.world.device)
        mask_BT = mask_BL[mine, 1:].to(self.world.device)
        bf16 = self.config.model.dtype == "bf16"
        with torch.autocast(tokens_BL.device.type, dtype=torch.bfloat16, enabled=bf16):
            logits = self.model(input_ids=tokens_BL).logits[:, :-1]
        total = cross_entropy(logits[mask_BT].float(), tokens_BL[:, 1:][mask_BT], reduction="sum")
        loss = total * self.world.ranks / max(1, num_trained)
        loss.backward()  # type: ignore[no-untyped-call]
        add_loss(loss.detach())
        return num_trained

    def _rows(self, problems: Sequence[Problem]) -> tuple[Tensor, Tensor]:
        """Return prompts with answers as padded token ids, and which of them are answers."""
        eos, key = self.tokenizer.eos_id, self.config.prompts.answer_key
        answers = [(*self.tokenizer.encode(str(each.columns[key])).tolist(), eos) for each in problems]
        texts = [(*each.tokens, *answer) for each, answer in zip(problems, answers, strict=True)]
        tokens_BL = torch.full((len(texts), max(map(len, texts))), eos, dtype=torch.int64)
        mask_BL = torch.zeros_like(tokens_BL, dtype=torch.bool)
        for row, (text, answer) in enumerate(zip(texts, answers, strict=True)):
            tokens_BL[row, : len(text)] = torch.tensor(text)
            mask_BL[row, len(text) - len(answer) : len(text)] = True
        return tokens_BL, mask_BL

    def _problems(self, step: int) -> Sequence[Problem]:
        key = np.random.SeedSequence((self.config.seed % 2**32, self.world.node, step, 0x5F7))
        size = self.config.rl.supervised_batch
        indices = np.random.default_rng(key).integers(0, len(self.problems), size)
        return [self.problems[int(index)] for index in indices]
