"""Layouts for hubs of the benchmarks."""

from torch import nn

from aedit.edit import find_units, layout
from aedit.types import Layout


def layout_of(model: nn.Module) -> Layout:
    """Return what a hub must know of `model`, one unit per layer."""
    return layout(find_units(model, "auto"))
