"""Evaluate a node's model on held-out samples."""

import torch
from torch import nn

from aedit.edit import Shards
from aedit.launch.config import RunConfig
from aedit.launch.data import Corpus, batch, evaluation_indices
from aedit.launch.node.model import loss


@torch.no_grad()
def held_out_loss(model: nn.Module, corpus: Corpus, config: RunConfig, shards: Shards) -> float:
    """Return the mean loss over `train.eval_samples` held-out samples, in nats per token.

    All ranks of the node together.
    """
    indices = evaluation_indices(len(corpus.held_out), config.train.eval_samples)
    size, device = config.train.batch_size, next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64)
    model.eval()
    for start in range(0, len(indices), size):
        # FSDP2 needs all ranks in each forward pass: in a short last batch some get a sample of weight 0.
        mine = indices[start : start + size][shards.rank :: shards.size]
        shown = mine if len(mine) else indices[start : start + 1]
        mean = loss(model, batch(corpus.held_out, shown).to(device), config.model.dtype)
        sums += torch.tensor([float(mean) * len(mine), len(mine)], dtype=torch.float64)
    model.train()
    total, count = shards.sum(sums).tolist()
    return float(total / count)
