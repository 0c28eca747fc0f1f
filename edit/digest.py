"""An 8-byte digest of a tensor, computed where the tensor is: equal bits give equal digests on every
machine."""

import torch
from torch import Tensor

_CHUNK = 1 << 22
_ODD = 0x1E3779B97F4A7C15


@torch.no_grad()
def digest(flat: Tensor) -> Tensor:
    """0-dim int64 over the bits and the places of an fp32 vector. Sums wrap, so the order of adding cannot
    matter."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].view(torch.int32).long()
        place = torch.arange(start, start + bits.numel(), device=flat.device)
        total += ((bits ^ (bits << 29)) * (place * _ODD | 1)).sum()
    return total


def halves(digest: int) -> tuple[float, float]:
    """A digest as two numbers that float64 holds exactly."""
    unsigned = digest & 0xFFFFFFFFFFFFFFFF
    return float(unsigned >> 32), float(unsigned & 0xFFFFFFFF)
