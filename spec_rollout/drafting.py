"""Chains and trees from the draft layer, one token of each row at a time.

In coupled mode the drafter draws as the policy will, `argmax(log q / T + G)` with the noise G of the place,
and is wrong only where its distribution is (Daliri, Musco and Suresh, arXiv:2408.07978). T = 0 is the
most likely token.

Shapes: B rows, F nodes looked at together, k depth, N nodes, C slots, V vocabulary, d hidden size.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from aedit.spec_rollout import tree
from aedit.spec_rollout.draft_pass import DraftPass, Pairs
from aedit.spec_rollout.drafts import Arm, Draft

Mode = Literal["coupled", "rejection"]


@dataclass(frozen=True, slots=True)
class Heat:
    """How the tokens are drawn."""

    inverse_B1: Tensor
    """1 / T; 1 where T is 0."""
    is_warm_B1: Tensor
    """Bool: T is above 0."""
    noise_BkV: Tensor
    """Gumbel noise of the positions drafted; 0 where T is 0."""

    @classmethod
    def of(cls, temperature_B: Tensor, noise_BkV: Tensor) -> "Heat":
        temperature_B1 = temperature_B[:, None]
        is_warm_B1 = temperature_B1 > 0
        inverse_B1 = torch.where(is_warm_B1, temperature_B1, 1.0).reciprocal_()
        return cls(inverse_B1, is_warm_B1, noise_BkV * is_warm_B1[:, :, None])


@dataclass(frozen=True, slots=True)
class Start:
    """Where drafts begin: the last pairs of the rows 0..B-1, which are in the cache."""

    pairs: Pairs
    lengths: list[int]
    """Pairs of each row, at least 1."""
    first: int
    """The first slot that any row sees."""
    firsts_B: Tensor | None
    """The first slot that each row sees; None if that is `first` for all of them."""
    lengths_B: Tensor
    """`lengths`, on the device."""
    places_B: Tensor
    """Where each row's slots begin in the cache."""

    @property
    def context(self) -> int:
        return max(self.lengths)

    def unseen(self, ends_B: Tensor, context: int) -> Tensor:
        """(B, context - first), 0 for the slots below `ends_B`, -inf for the rest and what is forgotten."""
        slots = torch.arange(self.first, context, device=ends_B.device)
        seen = slots < ends_B[..., None]
        if self.firsts_B is not None:
            seen &= slots >= self.firsts_B[:, None]
        return torch.where(seen, 0.0, -torch.inf)


def draft_chain(run: DraftPass, start: Start, depth: int, heat: Heat, mode: Mode) -> Draft:
    """`depth` tokens in a line for every row."""
    steps_k1 = torch.arange(depth, device=start.lengths_B.device)[:, None]
    ends_kB = start.lengths_B + steps_k1
    slots_k = (ends_kB + (start.places_B - 1)).unbind(0)
    positions_k = (ends_kB - 1).unbind(0)
    context = start.context + depth - 1
    keys, values = (x[:, :, start.first :] for x in run.seen(len(start.lengths), context))
    is_alone = len(start.lengths) == 1
    masks = None if is_alone else start.unseen(ends_kB, context).to(keys.dtype).unsqueeze(2).unbind(0)
    pairs, drawn, logits_k = start.pairs, [], []
    for j in range(depth):
        if masks is None:
            count = start.context + j - start.first
            guessed = run.guess(pairs, keys.narrow(2, 0, count), values.narrow(2, 0, count), None)
        else:
            guessed = run.guess(pairs, keys, values, masks[j])
        logits_k.append(run.logits(guessed))
        ranking_BV = torch.addcmul(heat.noise_BkV[:, j], logits_k[j], heat.inverse_B1)
        drawn.append(ranking_BV.max(-1).indices)
        if j + 1 < depth:
            pairs = run.enter(drawn[j], guessed, slots_k[j + 1], positions_k[j + 1])
    return _chain(torch.stack(drawn, 1), torch.stack(logits_k, 1), heat, mode)


def _chain(tokens_Bk: Tensor, logits_BkV: Tensor, heat: Heat, mode: Mode) -> Draft:
    logq_BkV = torch.log_softmax(logits_BkV * heat.inverse_B1[:, :, None], -1)
    scores_Bk = logq_BkV.gather(-1, tokens_Bk[:, :, None]).squeeze(-1).clamp_(max=0).cumsum(-1)
    if mode == "coupled":
        return Draft(tokens_Bk, None, None, scores_Bk.float())
    # Without heat nothing is drawn: all of q is on the one token.
    certain_BkV = torch.full_like(logq_BkV, -torch.inf).scatter_(-1, tokens_Bk[:, :, None], 0.0)
    drawn_from_BkV = torch.where(heat.is_warm_B1[:, :, None], logq_BkV, certain_BkV)
    return Draft(tokens_Bk, None, None, scores_Bk.float(), drawn_from_BkV.float())


def draft_tree(run: DraftPass, start: Start, arm: Arm, heat: Heat) -> Draft:
    """The best nodes of a tree whose levels grow from their best `arm.width` nodes."""
    growth = _Growth.of(start, arm)
    keys, values = (x[:, :, start.first :] for x in run.seen(len(start.lengths), growth.context))
    pairs, inverse_B11 = start.pairs, heat.inverse_B1[:, :, None]
    for level in range(arm.depth):
        guessed = run.guess(pairs, keys, values, growth.mask().to(keys.dtype))
        logits_BFV = run.logits(guessed).view(len(start.lengths), -1, run.head.shape[0]) * inverse_B11
        ranking_BFV = logits_BFV + heat.noise_BkV[:, level, None]
        growth.grow(ranking_BFV, torch.log_softmax(logits_BFV, -1))
        if level + 1 < arm.depth:
            tokens_BF, origins_BF = growth.advance()
            fed_back = guessed[origins_BF.flatten()]
            slots_BF = growth.slots() + start.places_B[:, None]
            positions_B = start.lengths_B + level
            positions_BF = positions_B[:, None].expand_as(tokens_BF)
            pairs = run.enter(tokens_BF.flatten(), fed_back, slots_BF.flatten(), positions_BF.flatten())
    return growth.draft(arm.nodes)


class _Growth:
    """A tree as it grows: all its nodes, and the frontier of nodes that are looked at."""

    def __init__(self, start: Start, width: int, num_looked_at: int) -> None:
        """num_looked_at: nodes that get a slot, in all."""
        B, device = len(start.lengths), start.lengths_B.device
        self.start, self.width = start, width
        self.context = start.context + num_looked_at
        self._past_B1C = start.unseen(start.lengths_B, self.context).unsqueeze(1)
        self._sees_BFn = torch.full((B, 1, num_looked_at), -torch.inf, device=device)
        self._own_B1n = (start.lengths_B[:, None] - start.first) + torch.arange(num_looked_at, device=device)
        self._scores_BF = torch.zeros(B, 1, device=device)
        self._frontier_BF = torch.full((B, 1), -1, device=device)
        self._num_looked_at, self._num_grown = 0, 0
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []

    @classmethod
    def of(cls, start: Start, arm: Arm) -> "_Growth":
        return cls(start, arm.width, (arm.depth - 1) * arm.width)

    def mask(self) -> Tensor:
        """(B, F, C): what the frontier sees: the row's past, and of the tree its ancestors and itself."""
        num_nodes = self._sees_BFn.shape[1]
        mask = self._past_B1C.repeat(1, num_nodes, 1)
        return mask.scatter_(2, self._own_B1n.unsqueeze(1).expand_as(self._sees_BFn), self._sees_BFn)

    def grow(self, ranking_BFV: Tensor, logq_BFV: Tensor) -> None:
        """The frontier's children."""
        tokens, scores = tree.children(ranking_BFV, logq_BFV, self._scores_BF, self.width)
        width = tokens.shape[1] // self._frontier_BF.shape[1]
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(self._frontier_BF.repeat_interleave(width, 1))

    def advance(self) -> tuple[Tensor, Tensor]:
        """(tokens, origins), each (B, F): the best of the children become the frontier; of each, which of the
        nodes that were looked at, of all rows, is its parent."""
        tokens, scores = self._tokens[-1], self._scores[-1]
        num_rows, num_before = self._frontier_BF.shape
        chosen_BF = tree.frontier(scores, self.width)
        parents_BF = chosen_BF // (tokens.shape[1] // num_before)
        wide = parents_BF.unsqueeze(-1).expand(-1, -1, self._sees_BFn.shape[2])
        self._sees_BFn = self._sees_BFn.gather(1, wide)
        num_nodes = chosen_BF.shape[1]
        self._sees_BFn.diagonal(self._num_looked_at, 1, 2)[:, :num_nodes] = 0
        self._scores_BF = scores.gather(1, chosen_BF)
        self._frontier_BF = chosen_BF + self._num_grown
        self._num_grown += tokens.shape[1]
        self._num_looked_at += num_nodes
        rows_B1 = torch.arange(num_rows, device=tokens.device)[:, None]
        return tokens.gather(1, chosen_BF), parents_BF + rows_B1 * num_before

    def slots(self) -> Tensor:
        """(B, F): the slots of the frontier in its rows."""
        last, num_nodes = self._num_looked_at, self._frontier_BF.shape[1]
        return self._own_B1n[:, last - num_nodes : last] + self.start.first

    def draft(self, nodes: int) -> Draft:
        tokens, scores, parents = (torch.cat(x, 1) for x in (self._tokens, self._scores, self._parents))
        picked, parents_BN = tree.best(scores, parents, nodes)
        return Draft(tokens.gather(1, picked), parents_BN, None, scores.gather(1, picked).float())
