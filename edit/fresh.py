"""Optimizer state of one parameter, as a new optimizer has it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from aedit.edit.shards import local

Optimizer = torch.optim.Optimizer


@torch.no_grad()
def renew(optimizer: Optimizer, p: nn.Parameter) -> None:
    """Make what `optimizer` remembers of `p` what a new optimizer of its class and options would.

    Tensors of the classes in `torch.optim` are overwritten in place, so that a checkpoint finds all it
    expects. State of another class is what its constructor makes, or is dropped, so that the next step
    makes it. What an optimizer keeps per group stays.
    """
    if not optimizer.state.get(p):
        return
    group = next((g for g in optimizer.param_groups if any(q is p for q in g["params"])), None)
    if group is None:
        return
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.state[p].clear()
        optimizer.state[p].update(func_evals=0, n_iter=0)  # this may be inside a step that counts on them
    elif type(optimizer).__module__.startswith("torch.optim"):
        _overwrite(optimizer, optimizer.state[p], group)
    else:
        _drop(optimizer, p, group)


def _overwrite(optimizer: Optimizer, state: dict[str, Any], group: dict[str, Any]) -> None:
    if isinstance(optimizer, torch.optim.SGD) and group["dampening"]:
        state.pop("momentum_buffer", None)  # the first gradient is not damped
    for key, value in state.items():
        first = float(_first(optimizer, key, group))
        if isinstance(value, Tensor):
            local(value).fill_(first)
        elif isinstance(value, int | float):
            state[key] = type(value)(first)


def _first(optimizer: Optimizer, key: str, group: dict[str, Any]) -> Any:
    """Return what state `key` starts from, as the classes of torch.optim initialise it."""
    match optimizer, key:
        case torch.optim.Adagrad(), "sum":
            return group["initial_accumulator_value"]
        case (torch.optim.NAdam(), "mu_product") | (torch.optim.ASGD(), "mu"):
            return 1.0
        case (torch.optim.Rprop(), "step_size") | (torch.optim.ASGD(), "eta"):
            return group["lr"]
    return 0.0


def _drop(optimizer: Optimizer, p: nn.Parameter, group: dict[str, Any]) -> None:
    options = {key: value for key, value in group.items() if key != "params"}
    known = inspect.signature(type(optimizer)).parameters
    arguments = {key: value for key, value in options.items() if key in known}
    try:
        twin = nn.Parameter(p.detach().clone())
        made = type(optimizer)([{**options, "params": [twin]}], **arguments).state.get(twin)
    except Exception:  # a constructor that wants more: it is somebody else's, and may raise anything
        made = None
    if made:
        optimizer.state[p] = made
    else:
        del optimizer.state[p]
