"""An 8-byte digest of a tensor, computed on its device: equal bits give equal digests on every machine."""

import torch
from torch import Tensor

_CHUNK = 1 << 21
_ODD = 0x1E3779B97F4A7C15


@torch.no_grad()
def digest(flat: Tensor) -> Tensor:
    """Return a 0-dim int64 digest of the bits and places of an fp32 vector.

    Sums wrap, so the order of additions cannot matter.
    """
    if flat.numel() % 2 or flat.storage_offset() % 2:
        flat = torch.cat([flat, flat.new_zeros(flat.numel() % 2)])
    pairs = flat.view(torch.int64)  # two numbers at a time: half the work of a slow multiplication
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, pairs.numel(), _CHUNK):
        bits = pairs[start : start + _CHUNK]
        weights = torch.arange(start, start + bits.numel(), device=flat.device).mul_(_ODD).bitwise_or_(1)
        total += (bits << 29).bitwise_xor_(bits).mul_(weights).sum()
    return total


def halves(digest: int) -> tuple[float, float]:
    """Return a digest as two numbers that float64 holds exactly."""
    unsigned = digest & 0xFFFFFFFFFFFFFFFF
    return float(unsigned >> 32), float(unsigned & 0xFFFFFFFF)
