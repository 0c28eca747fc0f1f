"""Attention masks for chains and trees of new tokens that follow the cached tokens of a row.

Shapes: B rows, N drafted nodes, q = N + 1 new tokens (the root first), C cache slots of a row.
"""

import math

import torch
from torch import Tensor


def ancestors(parents_BN: Tensor) -> Tensor:
    """Return for each new token which of the q new tokens it attends to: its ancestors and itself.

    Args:
        parents_BN: int64, index of each node's parent among the nodes, -1 for the root. Parents precede their
            children.

    Returns:
        Bool, (B, q, q). Entry [b, i, j] is true if token j is token i or an ancestor of token i.
    """
    num_rows, num_nodes = parents_BN.shape
    q = num_nodes + 1
    is_ancestor = torch.eye(q, device=parents_BN.device).repeat(num_rows, 1, 1)
    is_ancestor[:, 1:].scatter_(2, (parents_BN + 1)[:, :, None], 1.0)
    # Each squaring doubles the number of generations that are covered.
    for _ in range(math.ceil(math.log2(max(num_nodes, 1)))):
        is_ancestor = torch.bmm(is_ancestor, is_ancestor).clamp_(max=1.0)
    return is_ancestor > 0


def relative_positions(ancestors_Bqq: Tensor) -> Tensor:
    """Return the position of each new token relative to the root, which is its depth in the tree: (B, q)."""
    return ancestors_Bqq.sum(-1) - 1


def attention_mask(
    lengths_B: Tensor, q: int, context: int, ancestors_Bqq: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return the additive attention mask of q new tokens: 0 where a token attends, -inf elsewhere.

    Args:
        lengths_B: Number of cached tokens of each row; the new tokens follow them.
        q: Number of new tokens per row.
        context: Number of cache slots C that the mask covers.
        ancestors_Bqq: Result of `ancestors` for a tree; None for a chain, where each token attends to all
            before it.
        window: Number of last positions that a token attends to, itself included; None for all. Nodes of a
            tree have the position of their depth.

    Returns:
        float32, (B, q, C).
    """
    device, masked = lengths_B.device, float("-inf")
    slots_C = torch.arange(context, device=device)
    new_q = torch.arange(q, device=device)
    if ancestors_Bqq is None:
        positions_Bq1 = (lengths_B[:, None] + new_q)[:, :, None]
        hidden = slots_C > positions_Bq1
        if window is not None:
            hidden = hidden | (slots_C <= positions_Bq1 - window)
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, masked)
    hidden = (slots_C >= lengths_B[:, None])[:, None].expand(-1, q, -1)
    if window is not None:
        depths_Bq = relative_positions(ancestors_Bqq)
        hidden = hidden | (slots_C <= (lengths_B[:, None] + depths_Bq - window)[:, :, None])
        # An ancestor that is `window` or more generations away is too far.
        ancestors_Bqq = ancestors_Bqq & (depths_Bq[:, :, None] - depths_Bq[:, None] < window)
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, masked)
    # New tokens of padding rows lie beyond the context; clamp their slots into it.
    new_slots = (lengths_B[:, None] + new_q).clamp_(max=context - 1)[:, None].expand(-1, q, -1)
    seen = torch.zeros(ancestors_Bqq.shape, device=device).masked_fill_(~ancestors_Bqq, masked)
    return mask.scatter_(2, new_slots, seen)
