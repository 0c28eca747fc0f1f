"""What hubs of the benchmarks are made from."""

from torch import nn

from aedit.async_sgd.rules.records import Layout, TensorLayout, UnitLayout
from aedit.edit.canonical import layout
from aedit.edit.units import find_units


def layout_of(model: nn.Module) -> Layout:
    """Return what a hub must know of `model`, one unit per layer."""
    units = layout(find_units(model, "auto"))
    return Layout(
        tuple(UnitLayout(name, tuple(TensorLayout(*t) for t in tensors)) for name, tensors in units)
    )
