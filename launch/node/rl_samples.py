"""Trained samples: rewards and rollouts of a batch of groups as padded tensors."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.launch.config import RLConfig
from aedit.spec_rollout.rl import Group, advantages, overlong_penalty
from aedit.spec_rollout.sampling import Rollout

Key = tuple[int, int]
"""Position of the group in the run's stream, and number of the sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout with its advantage."""

    rollout: Rollout
    advantage: float
    is_trained: bool
    """False for a rollout without a reward."""
    proximal: Tensor | None = None
    """Log-probabilities of its tokens before the first inner step on the batch, where the loss needs them."""

    @property
    def num_trained(self) -> int:
        """Return the number of trained tokens."""
        return len(self.rollout.tokens) if self.is_trained else 0


@dataclass(frozen=True, slots=True, eq=False)
class SampleTensors:
    """Samples of a micro-batch, padded on the right. L is the length of the longest one, T = L - 1.

    Place t of T is the prediction of token t + 1.
    """

    tokens_BL: Tensor
    behaviour_BT: Tensor
    """fp32: in float64 only rounding of the engine would be added."""
    mask_BT: Tensor
    advantages_B: Tensor
    proximal_BT: Tensor | None
    """Like `behaviour_BT`; None: the loss takes those of the present weights."""


def shaped_rewards(group: Group, config: RLConfig) -> list[float | None]:
    """Return the rewards of a group with the penalty of answers that are almost too long."""
    most, window = config.sampling.max_new_tokens, config.overlong
    return [
        None if reward is None else reward + overlong_penalty(len(rollout.tokens), most, window)
        for reward, rollout in zip(group.rewards, group.rollouts, strict=True)
    ]


def samples_of(
    groups: Sequence[Group], config: RLConfig, proximal: Mapping[Key, Tensor] | None = None
) -> list[Sample]:
    """Return the rollouts of `groups` with their advantages, and `proximal` by key of the rollout."""
    known = proximal or {}
    rewards = [shaped_rewards(group, config) for group in groups]
    return [
        Sample(rollout, advantage, reward is not None, known.get(rollout.prompt.key))
        for group, row, found in zip(groups, rewards, advantages(rewards, config.advantage), strict=True)
        for rollout, advantage, reward in zip(group.rollouts, found, row, strict=True)
    ]


def parts_of(groups: Sequence[Group], num_parts: int) -> list[Sequence[Group]]:
    """Return `groups` in `num_parts` parts of equal size or one apart; the first ones are the larger ones."""
    size, more = divmod(len(groups), num_parts)
    ends = [(i + 1) * size + min(i + 1, more) for i in range(num_parts)]
    return [groups[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def micro_batches(samples: Sequence[Sample], size: int) -> Iterator[list[Sample]]:
    """Yield the samples `size` at a time, those of similar length together."""
    ordered = sorted(samples, key=_length)
    for start in range(0, len(ordered), size):
        yield ordered[start : start + size]


def to_tensors(samples: Sequence[Sample], device: torch.device, *, whole: bool = False) -> SampleTensors:
    """Return samples as tensors. whole: the mask has also the tokens of samples that are not trained."""
    rows, longest = len(samples), max(map(_length, samples))
    tokens_BL = torch.zeros(rows, longest, dtype=torch.int64)
    behaviour_BT = torch.zeros(rows, longest - 1, dtype=torch.float32)
    mask_BT = torch.zeros(rows, longest - 1, dtype=torch.bool)
    proximal_BT = torch.zeros_like(behaviour_BT)
    for row, sample in enumerate(samples):
        prompt, rollout = sample.rollout.prompt.tokens, sample.rollout
        text = (*prompt, *rollout.tokens)
        answer = slice(len(prompt) - 1, len(text) - 1)
        tokens_BL[row, : len(text)] = torch.tensor(text)
        behaviour_BT[row, answer] = torch.tensor(rollout.logprobs, dtype=torch.float64).float()
        mask_BT[row, answer] = sample.is_trained or whole
        if sample.proximal is not None:
            proximal_BT[row, answer] = sample.proximal
    has_proximal = any(sample.proximal is not None for sample in samples)
    advantages_B = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    return SampleTensors(
        tokens_BL.to(device),
        behaviour_BT.to(device),
        mask_BT.to(device),
        advantages_B.to(device),
        proximal_BT.to(device) if has_proximal else None,
    )


def _length(sample: Sample) -> int:
    return len(sample.rollout.prompt.tokens) + len(sample.rollout.tokens)
