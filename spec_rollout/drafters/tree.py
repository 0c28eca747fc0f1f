"""Trees of drafted tokens, grown best-first (EAGLE-2, arXiv:2406.16858), as pure functions.

The score of a node is the log-probability of its path. So no child scores above its parent, and the best
nodes of a tree are connected. For attention masks of trees see `attention_mask.ancestors`.

Shapes: B rows, F nodes that are expanded together (the frontier), K children of each, M nodes grown, N nodes
that are verified, V vocabulary.
"""

import torch
from torch import Tensor


def children(ranking_BFV: Tensor, logq_BFV: Tensor, scores_BF: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the children of the frontier as (tokens, scores), each (B, F * K), K = min(width, V).

    Args:
        ranking_BFV: Values by which each node's children are chosen, largest first.
        logq_BFV: Log-probabilities of the tokens.
        scores_BF: Scores of the frontier.
        width: Number of children per node.
    """
    top = torch.topk(ranking_BFV, min(width, ranking_BFV.shape[-1])).indices
    scores = scores_BF[..., None] + logq_BFV.gather(-1, top).clamp_(max=0)
    return top.flatten(1), scores.flatten(1)


def frontier(scores_BC: Tensor, width: int) -> Tensor:
    """Return the indices of the best of C candidates, int64, (B, min(width, C)); the first among equals."""
    order = torch.sort(scores_BC, dim=-1, descending=True, stable=True).indices
    return order[:, :width]


def best(scores_BM: Tensor, parents_BM: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """Return the nodes to verify, best first, and the parent of each among them.

    Parents must precede their children in M, as in a tree that grows by levels. Then they do so in the
    result, and its first n nodes are the best n, connected, for every n.

    Returns:
        Indices of the nodes and of their parents, each (B, min(nodes, M)). The parent of the first level is
        -1.
    """
    picked = frontier(scores_BM, nodes)
    # Index of each grown node in the result; the last column is the root's.
    indices = torch.full_like(parents_BM[:, :1], -1).expand(-1, parents_BM.shape[1] + 1).contiguous()
    indices.scatter_(1, picked, torch.arange(picked.shape[1], device=picked.device).expand_as(picked))
    parents = parents_BM.gather(1, picked)
    parents = torch.where(parents < 0, parents_BM.shape[1], parents)
    return picked, indices.gather(1, parents)
