"""Policy versions as tensors for an engine."""

from collections.abc import Mapping

import torch
from torch import Tensor

from aedit.proto.versions import Patterns, VersionLayout

_TORCH = {
    "bf16": ("<i2", torch.bfloat16),
    "fp32": ("<f4", torch.float32),
    "fp64": ("<f8", torch.float64),
}


def version_tensors(
    layout: VersionLayout, units: Mapping[str, Patterns], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Return the parameters of a version by name, as copies in the engine's dtype on its device."""
    number, stored = _TORCH[layout.dtype]
    found = {}
    for unit in layout.layout.units:
        flat = torch.from_numpy(units[unit.name].view(number)).view(stored)
        sizes = [tensor.numel for tensor in unit.tensors]
        for tensor, part in zip(unit.tensors, torch.split(flat, sizes), strict=True):
            found[tensor.name] = part.view(tensor.shape).to(device=device, dtype=dtype, copy=True)
    return found
