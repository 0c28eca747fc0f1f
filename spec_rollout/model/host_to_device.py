"""Asynchronous copies of small host data to a device."""

from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor of `numbers` on `device`, as `torch.tensor` makes it.

    On CUDA the data is copied from pinned memory without blocking the host.

    Args:
        numbers: Scalars, nested lists of them, or a NumPy array.
        device: Device of the result.
        dtype: Dtype of the result; None infers it.
    """
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
