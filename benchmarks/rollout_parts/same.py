"""Compare the tokens of two engines; a difference at a tie is arithmetic."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from aedit.spec_rollout.sampling import Prompt, Rollout, gumbel

TIE = 1e-4
"""Two tokens whose scores are nearer than this may change places by fp32 rounding."""


@dataclass(frozen=True, slots=True)
class Same:
    """Number of tokens compared, and of the first differences of samples.

    After its first difference a sample is another text, and is not compared further.
    """

    tokens: int = 0
    ties: int = 0
    """First differences of two tokens that float64 finds nearly equal."""
    differences: int = 0
    """The others: there must be none."""

    def __add__(self, other: "Same") -> "Same":
        return Same(self.tokens + other.tokens, self.ties + other.ties, self.differences + other.differences)

    @classmethod
    def of(cls, model: PreTrainedModel, ours: Iterable[Rollout], theirs: Iterable[Rollout]) -> "Same":
        """Compare samples in the same order, also unfinished ones."""
        made = (
            cls.of_tokens(model, a.prompt, a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=False)
        )
        return sum(made, cls())

    @classmethod
    def of_tokens(cls, model: PreTrainedModel, prompt: Prompt, a: list[int], b: list[int]) -> "Same":
        """Compare the tokens of one sample. model: the policy."""
        shared = min(len(a), len(b))
        at = next((i for i in range(shared) if a[i] != b[i]), None)
        if at is None:
            return cls(shared)
        is_tie = abs(gap(model, prompt, a[:at], (a[at], b[at]))) < TIE
        return cls(at, int(is_tie), int(not is_tie))


@torch.inference_mode()
def gap(model: PreTrainedModel, prompt: Prompt, before: list[int], pair: tuple[int, int]) -> float:
    """Return by how much the first of two tokens is ahead, by transformers' own forward pass in float64."""
    exact: Any = deepcopy(model)  # the engines compute with the model's own parameters
    ids = torch.tensor([[*prompt.tokens, *before]], device=exact.device)
    scores_V = exact.double()(input_ids=ids).logits[0, -1].log_softmax(-1)
    temperature = prompt.sampling.temperature
    if temperature > 0:
        position = torch.tensor([[len(prompt.tokens) + len(before)]])
        noise = gumbel(prompt.rollout, prompt.sample, position, len(scores_V), torch.float64)[0, 0]
        scores_V = scores_V / temperature + noise.to(scores_V.device)
    return float(scores_V[pair[0]] - scores_V[pair[1]])
