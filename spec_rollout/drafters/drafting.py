"""Chains and trees from the draft layer, one token of each row at a time.

In coupled mode the drafter samples like the policy, `argmax(log q / T + G)` with the same noise G, so that it
errs only where its distribution differs (Daliri, Musco and Suresh, arXiv:2408.07978). T = 0 selects the most
likely token.

Of a layer with a draft vocabulary of its own, V below is the size of that, until the tokens are returned.

No control flow depends on tensor values, so that a GPU can capture it as a graph.

Shapes: B rows, F nodes computed together, k depth, N nodes, C slots, V vocabulary, d hidden size.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import tree
from aedit.spec_rollout.drafters.draft_pass import DraftRunner
from aedit.spec_rollout.drafters.drafts import Arm


class DraftInputs(NamedTuple):
    """Last pairs of the rows 0 .. B - 1, which are in the cache, and sampling parameters."""

    fused_Bd: Tensor
    queries_Bq: Tensor
    last_B: Tensor
    """Slot of each row's last pair."""
    firsts_B: Tensor
    """First slot that each row attends to."""
    noise_BkV: Tensor
    """Gumbel noise of the drafted positions; 0 where T is 0."""
    inverse_B1: Tensor
    """1 / T; 1 where T is 0."""


@dataclass(frozen=True, slots=True)
class DraftContext:
    """Settings that all drafts of one captured graph share."""

    runner: DraftRunner
    arm: Arm
    first: int
    """First slot that any row attends to."""
    num_slots: int
    """End of the slots that any row attends to."""
    is_single_row: bool
    """There is one row, and it attends to all slots from `first` to its newest pair."""

    def kv_views(self, rows: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of these rows in the slots of this context."""
        keys, values = self.runner.kv_views(rows, self.num_slots)
        return (keys[:, :, self.first :], values[:, :, self.first :]) if self.first else (keys, values)

    def history_mask(self, last: Tensor, firsts_B: Tensor) -> Tensor:
        """Return the mask of the cached pairs, (*last.shape, num_slots - first).

        It is 0 for the slots firsts_B .. last and -inf for the rest. The last dimension of `last` is B.
        """
        slots = torch.arange(self.first, self.num_slots, device=last.device)
        seen = (slots <= last.unsqueeze(-1)) & (slots >= firsts_B[:, None])
        hidden = torch.zeros(seen.shape, device=last.device, dtype=self.runner.cache.dtype)
        return hidden.masked_fill_(~seen, -torch.inf)


def draft_chain(context: DraftContext, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return a chain of `arm.depth` tokens for every row.

    Returns:
        Tokens (B, k); log-probabilities of the paths to them, float32, (B, k); log softmax(logits / T),
        (B, k, V), where T is 1 if it is 0.
    """
    runner, depth, rows = context.runner, context.arm.depth, inputs.last_B.shape[0]
    positions_kB = inputs.last_B + torch.arange(depth, device=inputs.last_B.device)[:, None]
    positions, slots = positions_kB.unbind(0), (positions_kB + runner.row_offsets(rows)).unbind(0)
    keys, values = context.kv_views(rows)
    masks = (
        None
        if context.is_single_row
        else context.history_mask(positions_kB, inputs.firsts_B).unsqueeze(2).unbind(0)
    )
    pairs = inputs.fused_Bd, inputs.queries_Bq
    drawn: list[Tensor] = []
    logits: list[Tensor] = []
    for j, noise_BV in enumerate(inputs.noise_BkV.unbind(1)):
        if masks is None:
            count = keys.shape[2] - depth + 1 + j
            guessed = runner.predict(pairs, keys.narrow(2, 0, count), values.narrow(2, 0, count), None)
        else:
            guessed = runner.predict(pairs, keys, values, masks[j])
        logits.append(runner.logits(guessed))
        drawn.append(torch.addcmul(noise_BV, logits[j], inputs.inverse_B1).max(-1).indices)
        if j + 1 < depth:
            pairs = runner.write_pairs(runner.tokens(drawn[j]), guessed, slots[j + 1], positions[j + 1])
    tokens_Bk = torch.stack(drawn, 1)
    logq_BkV = torch.log_softmax(torch.stack(logits, 1) * inputs.inverse_B1.unsqueeze(-1), -1)
    scores_Bk = logq_BkV.gather(-1, tokens_Bk.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    return runner.tokens(tokens_Bk), scores_Bk.float(), logq_BkV


def draft_tree(context: DraftContext, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the best `arm.nodes` nodes of a tree whose levels grow from their `arm.width` best nodes.

    Returns:
        Tokens; log-probabilities of the paths to them, float32; parents: (B, N) each.
    """
    runner, rows, inverse_B11 = context.runner, inputs.last_B.shape[0], inputs.inverse_B1.unsqueeze(-1)
    builder, (keys, values) = _TreeBuilder(context, inputs), context.kv_views(rows)
    pairs = inputs.fused_Bd, inputs.queries_Bq
    for level, noise_BV in enumerate(inputs.noise_BkV.unbind(1)):
        guessed = runner.predict(pairs, keys, values, builder.mask())
        logits_PV = runner.logits(guessed)
        logits_BFV = logits_PV.view(rows, -1, logits_PV.shape[-1]) * inverse_B11
        builder.grow(logits_BFV + noise_BV.unsqueeze(1), torch.log_softmax(logits_BFV, -1))
        if level + 1 == context.arm.depth:
            break
        tokens_BF, origins_BF = builder.advance()
        slots_BF = builder.slots() + runner.row_offsets(rows)[:, None]
        positions_BF = (inputs.last_B + level + 1)[:, None].expand_as(tokens_BF)
        fed_back = guessed.index_select(0, origins_BF.flatten())
        tokens_P = runner.tokens(tokens_BF.flatten())
        pairs = runner.write_pairs(tokens_P, fed_back, slots_BF.flatten(), positions_BF.flatten())
    tokens_BN, scores_BN, parents_BN = builder.best(context.arm.nodes)
    return runner.tokens(tokens_BN), scores_BN, parents_BN


class _TreeBuilder:
    """A tree under construction: all its nodes, and the frontier of nodes that are expanded next.

    Expanded nodes have the slots after a row's last pair, n in all.
    """

    def __init__(self, context: DraftContext, inputs: DraftInputs) -> None:
        rows, device = inputs.last_B.shape[0], inputs.last_B.device
        self._width, self._first = context.arm.width, context.first
        num_slots = (context.arm.depth - 1) * context.arm.width
        self._past_B1C = context.history_mask(inputs.last_B, inputs.firsts_B).unsqueeze(1)
        self._sees_BFn = self._past_B1C.new_full((rows, 1, num_slots), -torch.inf)
        steps = torch.arange(1, num_slots + 1, device=device)
        self._own_Bn = inputs.last_B[:, None] + steps
        self._scores_BF = torch.zeros(rows, 1, dtype=torch.float32, device=device)
        self._frontier_BF = torch.full((rows, 1), -1, device=device)
        self._num_looked_at, self._num_grown = 0, 0
        self._tokens: list[Tensor] = []
        self._scores: list[Tensor] = []
        self._parents: list[Tensor] = []

    def mask(self) -> Tensor:
        """Return the mask of the frontier, (B, F, C): cached pairs, ancestors, and itself."""
        own_B1n = (self._own_Bn - self._first).unsqueeze(1)
        mask = self._past_B1C.repeat(1, self._sees_BFn.shape[1], 1)
        return mask.scatter_(2, own_B1n.expand_as(self._sees_BFn), self._sees_BFn)

    def grow(self, ranking_BFV: Tensor, logq_BFV: Tensor) -> None:
        """Add the frontier's children."""
        tokens, scores = tree.children(ranking_BFV, logq_BFV, self._scores_BF, self._width)
        width = tokens.shape[1] // self._frontier_BF.shape[1]
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(self._frontier_BF.repeat_interleave(width, 1))

    def advance(self) -> tuple[Tensor, Tensor]:
        """Make the best of the new children the frontier; return (tokens, origins), each (B, F).

        `origins` holds for each of them the index of its parent among the expanded nodes of all rows.
        """
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
        firsts_B1 = torch.arange(0, rows * num_before, num_before, device=self._own_Bn.device)[:, None]
        return tokens.gather(1, chosen_BF), parents_BF + firsts_B1

    def slots(self) -> Tensor:
        """Return the slots of the frontier in its rows, (B, F)."""
        return self._own_Bn[:, self._num_looked_at - self._frontier_BF.shape[1] : self._num_looked_at]

    def best(self, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, scores and parents of the best `nodes` nodes of all."""
        tokens, scores, parents = (torch.cat(x, 1) for x in (self._tokens, self._scores, self._parents))
        picked, parents_BN = tree.best(scores, parents, nodes)
        return tokens.gather(1, picked), scores.gather(1, picked).float(), parents_BN
