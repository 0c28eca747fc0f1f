"""Move a policy by reinforcement learning on its own rollouts, and measure how far it has moved.

The reward is the share of one letter in the text. It has no use, but every rollout has some of it, so that a
small policy learns from the first step on, and it can grow as far as the benchmark needs.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from aedit.spec_rollout.sampling import Rollout

LETTER = ord("e")
ROWS_AT_ONCE = 16
"""Rows of a teacher-forced pass at most."""
TOKENS_AT_ONCE = 2048
"""Tokens of a teacher-forced pass, padding included, if it has more than one row."""
AHEAD = 3
"""Steps in which a policy that is behind or ahead of its schedule comes back to it."""
FASTER, SLOWER = 1.5, 0.7
"""Largest factors by which the rate changes from one step to the next."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Rollout with the weight of each of its tokens; below 0 its probability is lowered."""

    rollout: Rollout
    weight: float


def reward(rollout: Rollout) -> float:
    """Return the share of the letter in the rollout."""
    return rollout.tokens.count(LETTER) / len(rollout.tokens)


def policy_gradient(
    rollouts: Sequence[Rollout], rewarded: Callable[[Rollout], float] = reward
) -> list[Lesson]:
    """Return rollouts weighted by their advantage and normalized by the number of all tokens.

    The advantage is the reward minus the mean of its group, over the group's spread (GRPO, arXiv:2402.03300;
    one step per batch, so that there is no ratio to clip). Groups of equal rewards have weight 0.
    """
    num_tokens = sum(len(rollout.tokens) for rollout in rollouts)
    lessons = []
    for _, members in groupby(sorted(rollouts, key=_group), key=_group):
        group = list(members)
        rewards = torch.tensor([rewarded(rollout) for rollout in group])
        spread = float(rewards.std(correction=0))
        if spread > 0:
            weights = ((rewards - rewards.mean()) / spread / num_tokens).tolist()
            lessons += [Lesson(*each) for each in zip(group, weights, strict=True)]
    return lessons


def paced(lr: float, lr_sum: float, kl_nats: float, wanted_nats: float) -> float:
    """Return the rate that brings the policy to the wanted distance in `AHEAD` steps.

    It assumes that the root of KL grows like the sum of the rates. lr: of the last step. lr_sum: of all
    steps. wanted_nats: that many steps ahead.
    """
    gone = math.sqrt(max(kl_nats, 0.0))
    if not (gone and lr_sum):
        return lr
    needed = (math.sqrt(wanted_nats) - gone) * lr_sum / gone / AHEAD
    return min(max(needed, SLOWER * lr), FASTER * lr)


def _group(rollout: Rollout) -> int:
    return rollout.prompt.group


class Mover:
    """AdamW on a policy, in place."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self._model, self.lr, self.lr_sum = model, lr, 0.0
        self._inner = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Take one step up the weighted log-probabilities of the answers."""
        self.backward(lessons)
        self.step()

    def backward(self, lessons: Sequence[Lesson]) -> None:
        """Add the gradient of the weighted log-probabilities of the answers."""
        for part in _parts([lesson.rollout for lesson in lessons]):
            weights = torch.tensor([lessons[i].weight for i in part.indices])
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = self._model(input_ids=part.ids_BT).logits
            nll_BT = F.cross_entropy(
                logits[:, :-1].float().transpose(1, 2), part.ids_BT[:, 1:], reduction="none"
            )
            loss = (nll_BT * part.answers_BT[:, 1:] * weights[:, None]).sum()
            loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Take one step along the gradients so far."""
        self.lr_sum += self.lr
        for group in self._inner.param_groups:
            group["lr"] = self.lr
        nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._inner.step()
        self._inner.zero_grad()


@torch.no_grad()
def moved(now: PreTrainedModel, start: PreTrainedModel, rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Return (KL(now || start), entropy of now) in nats per token of the rollouts of `now`.

    Each token's value is computed from the whole distributions.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    for part in _parts(rollouts):
        said_BT = part.answers_BT[:, 1:]
        logp, logp_start = (F.log_softmax(m(input_ids=part.ids_BT).logits[:, :-1], -1) for m in (now, start))
        p = logp.exp()
        kl_BT, entropy_BT = (p * (logp - logp_start)).sum(-1), -(p * logp).sum(-1)
        sums += torch.stack([(x * said_BT).sum().double() for x in (kl_BT, entropy_BT, said_BT)])
    kl, entropy = (sums[:2] / sums[2]).tolist()
    return kl, entropy


@dataclass(frozen=True, slots=True)
class _Part:
    """Texts in one batch, padded after their ends, where no counted token attends."""

    indices: list[int]
    ids_BT: Tensor
    answers_BT: Tensor
    """1 at the tokens of answers, else 0."""


def _parts(rollouts: Sequence[Rollout]) -> Iterator[_Part]:
    """Group texts of similar length."""
    texts = [(*rollout.prompt.tokens, *rollout.tokens) for rollout in rollouts]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
    while order:
        num_rows = max(1, min(ROWS_AT_ONCE, TOKENS_AT_ONCE // len(texts[order[0]])))
        indices, order = order[:num_rows], order[num_rows:]
        shape = len(indices), len(texts[indices[0]])
        ids_BT, answers_BT = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        for row, i in enumerate(indices):
            ids_BT[row, : len(texts[i])] = torch.tensor(texts[i])
            answers_BT[row, len(rollouts[i].prompt.tokens) : len(texts[i])] = 1
        yield _Part(indices, ids_BT, answers_BT)
