"""Who sees whom: chains and trees of new tokens after what a row has already.

Shapes: B rows, N drafted nodes, q = N + 1 new tokens (the root first), C slots of a row.
"""

import math

import torch
from torch import Tensor


def ancestors(parents_BN: Tensor) -> Tensor:
    """Which of the q new tokens are on each one's way from the root, itself and the root included.

    parents_BN: int64, each node's parent among the nodes, -1 for the root; parents come first. Returns bool,
    (B, q, q): [b, i, j] says whether token i sees token j.
    """
    num_rows, num_nodes = parents_BN.shape
    q = num_nodes + 1
    is_ancestor = torch.eye(q, device=parents_BN.device).repeat(num_rows, 1, 1)
    is_ancestor[:, 1:].scatter_(2, (parents_BN + 1)[:, :, None], 1.0)
    # Each square doubles how many generations are seen.
    for _ in range(math.ceil(math.log2(max(num_nodes, 1)))):
        is_ancestor = torch.bmm(is_ancestor, is_ancestor).clamp_(max=1.0)
    return is_ancestor > 0


def relative_positions(ancestors_Bqq: Tensor) -> Tensor:
    """How far each new token's position is from the root's: its depth, (B, q)."""
    return ancestors_Bqq.sum(-1) - 1


def attention_mask(lengths_B: Tensor, q: int, context: int, ancestors_Bqq: Tensor | None = None) -> Tensor:
    """What is added to the scores of q new tokens after the first lengths_B of each row: (B, q, C) float32,
    0 for what is seen and -inf for the rest. In a chain each sees all before it."""
    device, hidden = lengths_B.device, float("-inf")
    slots_C = torch.arange(context, device=device)
    new_q = torch.arange(q, device=device)
    if ancestors_Bqq is None:
        later = slots_C > (lengths_B[:, None] + new_q)[:, :, None]
        return torch.zeros(later.shape, device=device).masked_fill_(later, hidden)
    later = (slots_C >= lengths_B[:, None])[:, None].expand(-1, q, -1)
    mask = torch.zeros(later.shape, device=device).masked_fill_(later, hidden)
    # Rows that are only computed along have their new tokens beyond what is looked at.
    new_slots = (lengths_B[:, None] + new_q).clamp_(max=context - 1)[:, None].expand(-1, q, -1)
    seen = torch.zeros(ancestors_Bqq.shape, device=device).masked_fill_(~ancestors_Bqq, hidden)
    return mask.scatter_(2, new_slots, seen)
