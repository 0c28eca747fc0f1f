"""Inner optimizer and its learning rate."""

import math

import torch
from torch import nn

from aedit.launch.config.config import TrainConfig


def make_inner(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and none on vectors (norms, biases)."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas)


def lr_at(progress: float, config: TrainConfig, nodes: int = 1) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to `lr_final`.

    progress: share of the run, 0 to 1. nodes: live nodes, by whose number the rate grows as `lr_by_nodes`
    says.
    """
    peak = config.lr * math.pow(nodes, config.lr_by_nodes)
    if progress < config.lr_warmup:
        return peak * (progress + 1e-3) / (config.lr_warmup + 1e-3)
    done = min(1.0, (progress - config.lr_warmup) / (1 - config.lr_warmup))
    share = config.lr_final + (1 - config.lr_final) * 0.5 * (1 + math.cos(math.pi * done))
    return peak * share


def set_lr(inner: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in inner.param_groups:
        group["lr"] = lr
