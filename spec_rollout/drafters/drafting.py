"""Chains and trees from the draft layer, one token of each row at a time.

In coupled mode the drafter draws as the policy will, `argmax(log q / T + G)` with the noise G of the place,
and is wrong only where its distribution is (Daliri, Musco and Suresh, arXiv:2408.07978). T = 0 is the
most likely token.

Nothing here depends on the value of a tensor, so that a GPU can record it as a graph.

Shapes: B rows, F nodes looked at together, k depth, N nodes, C slots, V vocabulary, d hidden size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import tree
from aedit.spec_rollout.drafters.draft_pass import DraftPass, Pairs
from aedit.spec_rollout.drafters.drafts import Arm


class Start(NamedTuple):
    """Where drafts begin: the last pairs of the rows 0..B-1, which are in the cache, and how to draw."""

    fused_Bd: Tensor
    queries_Bq: Tensor
    last_B: Tensor
    """The slot of each row's last pair."""
    firsts_B: Tensor
    """The first slot that each row sees."""
    noise_BkV: Tensor
    """Gumbel noise of the positions drafted; 0 where T is 0."""
    inverse_B1: Tensor
    """1 / T; 1 where T is 0."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is the same for all drafts that one recorded graph makes."""

    run: DraftPass
    arm: Arm
    first: int
    """No row sees a slot before this one,"""
    context: int
    """and none from this one on."""
    is_alone: bool
    """There is one row, and it sees all that is between them, but for what it drafts later."""

    def seen(self, rows: int) -> tuple[Tensor, Tensor]:
        keys, values = self.run.seen(rows, self.context)
        return (keys[:, :, self.first :], values[:, :, self.first :]) if self.first else (keys, values)

    def unseen(self, last: Tensor, firsts_B: Tensor) -> Tensor:
        """(*last.shape, context - first): 0 for the slots from firsts_B up to last, -inf for the rest. `last`
        ends in B."""
        slots = torch.arange(self.first, self.context, device=last.device)
        seen = (slots <= last.unsqueeze(-1)) & (slots >= firsts_B[:, None])
        hidden = torch.zeros(seen.shape, device=last.device, dtype=self.run.cache.dtype)
        return hidden.masked_fill_(~seen, -torch.inf)


class Chain(NamedTuple):
    tokens_Bk: Tensor
    scores_Bk: Tensor
    """Float32, of the path to each token."""
    logq_BkV: Tensor
    """log softmax(logits / T); 1 for T where that is 0."""


class Tree(NamedTuple):
    tokens_BN: Tensor
    parents_BN: Tensor
    scores_BN: Tensor
    """Float32, of the path to each node."""


def draft_chain(frame: Frame, start: Start) -> Chain:
    """`arm.depth` tokens in a line for every row."""
    run, depth, rows = frame.run, frame.arm.depth, start.last_B.shape[0]
    positions_kB = start.last_B + torch.arange(depth, device=start.last_B.device)[:, None]
    positions, slots = positions_kB.unbind(0), (positions_kB + run.places(rows)).unbind(0)
    keys, values = frame.seen(rows)
    masks = None if frame.is_alone else frame.unseen(positions_kB, start.firsts_B).unsqueeze(2).unbind(0)
    pairs = Pairs(start.fused_Bd, start.queries_Bq)
    drawn: list[Tensor] = []
    logits: list[Tensor] = []
    for j, noise_BV in enumerate(start.noise_BkV.unbind(1)):
        if masks is None:
            count = keys.shape[2] - depth + 1 + j
            guessed = run.guess(pairs, keys.narrow(2, 0, count), values.narrow(2, 0, count), None)
        else:
            guessed = run.guess(pairs, keys, values, masks[j])
        logits.append(run.logits(guessed))
        drawn.append(torch.addcmul(noise_BV, logits[j], start.inverse_B1).max(-1).indices)
        if j + 1 < depth:
            pairs = run.enter(drawn[j], guessed, slots[j + 1], positions[j + 1])
    tokens_Bk = torch.stack(drawn, 1)
    logq_BkV = torch.log_softmax(torch.stack(logits, 1) * start.inverse_B1.unsqueeze(-1), -1)
    scores_Bk = logq_BkV.gather(-1, tokens_Bk.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    return Chain(tokens_Bk, scores_Bk.float(), logq_BkV)


def draft_tree(frame: Frame, start: Start) -> Tree:
    """The best `arm.nodes` of a tree whose levels grow from their `arm.width` best nodes."""
    run, rows, inverse_B11 = frame.run, start.last_B.shape[0], start.inverse_B1.unsqueeze(-1)
    growth, (keys, values) = _Growth(frame, start), frame.seen(rows)
    pairs = Pairs(start.fused_Bd, start.queries_Bq)
    for level, noise_BV in enumerate(start.noise_BkV.unbind(1)):
        guessed = run.guess(pairs, keys, values, growth.mask())
        logits_BFV = run.logits(guessed).view(rows, -1, run.head.shape[0]) * inverse_B11
        growth.grow(logits_BFV + noise_BV.unsqueeze(1), torch.log_softmax(logits_BFV, -1))
        if level + 1 == frame.arm.depth:
            break
        tokens_BF, origins_BF = growth.advance()
        slots_BF = growth.slots() + run.places(rows)[:, None]
        positions_BF = (start.last_B + level + 1)[:, None].expand_as(tokens_BF)
        fed_back = guessed.index_select(0, origins_BF.flatten())
        pairs = run.enter(tokens_BF.flatten(), fed_back, slots_BF.flatten(), positions_BF.flatten())
    return growth.best(frame.arm.nodes)


class _Growth:
    """A tree as it grows: all its nodes, and the frontier of nodes that are looked at. These have the slots
    after a row's last pair, n in all."""

    def __init__(self, frame: Frame, start: Start) -> None:
        rows, device = start.last_B.shape[0], start.last_B.device
        self._width, self._first = frame.arm.width, frame.first
        num_slots = (frame.arm.depth - 1) * frame.arm.width
        self._past_B1C = frame.unseen(start.last_B, start.firsts_B).unsqueeze(1)
        self._sees_BFn = self._past_B1C.new_full((rows, 1, num_slots), -torch.inf)
        steps = torch.arange(1, num_slots + 1, device=device)
        self._own_Bn = start.last_B[:, None] + steps
        self._scores_BF = torch.zeros(rows, 1, device=device)
        self._frontier_BF = torch.full((rows, 1), -1, device=device)
        self._num_looked_at, self._num_grown = 0, 0
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []

    def mask(self) -> Tensor:
        """(B, F, C): what the frontier sees: the row's past, and of the tree its ancestors and itself."""
        own_B1n = (self._own_Bn - self._first).unsqueeze(1)
        mask = self._past_B1C.repeat(1, self._sees_BFn.shape[1], 1)
        return mask.scatter_(2, own_B1n.expand_as(self._sees_BFn), self._sees_BFn)

    def grow(self, ranking_BFV: Tensor, logq_BFV: Tensor) -> None:
        """The frontier's children."""
        tokens, scores = tree.children(ranking_BFV, logq_BFV, self._scores_BF, self._width)
        width = tokens.shape[1] // self._frontier_BF.shape[1]
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(self._frontier_BF.repeat_interleave(width, 1))

    def advance(self) -> tuple[Tensor, Tensor]:
        """(tokens, origins), each (B, F): the best of the children become the frontier; of each, which of the
        nodes that were looked at, of all rows, is its parent."""
        tokens, scores = self._tokens[-1], self._scores[-1]
        rows, num_before = self._frontier_BF.shape
        chosen_BF = tree.frontier(scores, self._width)
        parents_BF = chosen_BF // (tokens.shape[1] // num_before)
        wide = parents_BF.unsqueeze(-1).expand(-1, -1, self._sees_BFn.shape[2])
        self._sees_BFn = self._sees_BFn.gather(1, wide)
        self._sees_BFn.diagonal(self._num_looked_at, 1, 2)[:, : chosen_BF.shape[1]] = 0
        self._scores_BF = scores.gather(1, chosen_BF)
        self._frontier_BF = chosen_BF + self._num_grown
        self._num_grown += tokens.shape[1]
        self._num_looked_at += chosen_BF.shape[1]
        return tokens.gather(1, chosen_BF), parents_BF + self._first_of(rows, num_before)

    def _first_of(self, rows: int, num_before: int) -> Tensor:
        return torch.arange(0, rows * num_before, num_before, device=self._own_Bn.device)[:, None]

    def slots(self) -> Tensor:
        """(B, F): the slots of the frontier in its rows."""
        return self._own_Bn[:, self._num_looked_at - self._frontier_BF.shape[1] : self._num_looked_at]

    def best(self, nodes: int) -> Tree:
        tokens, scores, parents = (torch.cat(x, 1) for x in (self._tokens, self._scores, self._parents))
        picked, parents_BN = tree.best(scores, parents, nodes)
        return Tree(tokens.gather(1, picked), parents_BN, scores.gather(1, picked).float())
