"""Inner optimizers and their learning rate."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from aedit.launch.config import TrainConfig
from aedit.launch.node.model import blocks
from aedit.types import UserError


def make_inners(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `train.optimizer` names; each parameter is in one of them.

    Raises UserError if Muon cannot step the model: it has no blocks with matrices, or one of them has fewer
    rows than the node has ranks, which torch's DTensor cannot do.
    """
    if config.optimizer == "adamw":
        return [make_inner(model, config)]
    hidden = _hidden_matrices(model)
    muon = torch.optim.Muon(
        hidden, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    known = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    return [muon, _adamw(rest, config)] if rest else [muon]


def _hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained matrices of the transformer blocks."""
    named = [
        (f"{outer}.{name}", p)
        for outer, block in blocks(model)
        for name, p in block.named_parameters()
        if p.ndim == 2 and p.requires_grad
    ]
    if not named:
        raise UserError('train.optimizer = "muon": the model has no blocks with matrices; use "adamw"')
    for name, p in named:
        ranks = p.device_mesh.size() if isinstance(p, DTensor) else 1
        if len(p) < ranks:
            raise UserError(
                f'train.optimizer = "muon": {name} has {len(p)} rows, fewer than the node has ranks '
                f'({ranks}); use fewer ranks or "adamw"'
            )
    return [p for _, p in named]


def make_inner(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices and none on vectors (norms, biases)."""
    return _adamw([p for p in model.parameters() if p.requires_grad], config)


def _adamw(params: Sequence[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
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
