"""The drafter as a sync unit of its own, which the nodes of a run share."""

from typing import Any

import torch
from torch import nn

from aedit.async_sgd.rules import DRAFTER
from aedit.edit import SharedModule
from aedit.launch.config import RunConfig, unit_rules
from aedit.spec_rollout.drafters import DraftLayer, DraftShape


def make_shared(config: RunConfig, model: nn.Module, device: torch.device) -> SharedModule | None:
    """Return the unit of the drafter; None if the run shares none, or has no draft layer for this model."""
    if DRAFTER not in unit_rules(config):
        return None
    untyped: Any = model
    try:
        shape = DraftShape.of(untyped.config)
    except ValueError:
        return None
    with torch.device("meta"):  # names and shapes only
        layer = DraftLayer(shape)
    shapes = {name: tensor.shape for name, tensor in layer.state_dict().items()}
    return SharedModule(DRAFTER, shapes, device)
