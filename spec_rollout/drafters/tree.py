"""Trees of drafted tokens, grown best-first (EAGLE-2, arXiv:2406.16858): pure functions.

A node's score is the log-probability of its path, so that no child's is above its parent's and the best nodes
of a tree are connected. Who sees whom in a tree is in `sight`.

Shapes: B rows, F nodes that are looked at together (the frontier), K children of each, M nodes grown, N nodes
that are verified, V vocabulary.
"""

import torch
from torch import Tensor


def children(ranking_BFV: Tensor, logq_BFV: Tensor, scores_BF: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(tokens, scores), each (B, F * K): the K = width first tokens of each frontier node by `ranking_BFV`,
    in order; all children of a node stand together. K is V if there are no more."""
    top = torch.topk(ranking_BFV, min(width, ranking_BFV.shape[-1])).indices
    scores = scores_BF[..., None] + logq_BFV.gather(-1, top).clamp_(max=0)
    return top.flatten(1), scores.flatten(1)


def frontier(scores_BC: Tensor, width: int) -> Tensor:
    """int64, (B, min(width, C)): the best of C candidates, the first among equals."""
    order = torch.sort(scores_BC, dim=-1, descending=True, stable=True).indices
    return order[:, :width]


def best(scores_BM: Tensor, parents_BM: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """(picked, parents), each (B, min(nodes, M)): the nodes to verify, best first, and the parent of each
    among them, -1 for the root.

    Parents must come before their children in M, as in a tree that grows by levels; then they do so here, and
    the first n of the result are the best n, connected, for every n."""
    picked = frontier(scores_BM, nodes)
    # Where each grown node has come to stand; the last column is the root's.
    places = torch.full_like(parents_BM[:, :1], -1).expand(-1, parents_BM.shape[1] + 1).contiguous()
    places.scatter_(1, picked, torch.arange(picked.shape[1], device=picked.device).expand_as(picked))
    parents = parents_BM.gather(1, picked)
    parents = torch.where(parents < 0, parents_BM.shape[1], parents)
    return picked, places.gather(1, parents)
