"""Numbers of the host that a device needs: on their way while the host goes on."""

from typing import Any

import torch
from torch import Tensor


def to_device(numbers: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of these numbers, lists of them, or a NumPy array, as `torch.tensor` makes it.

    A GPU takes them out of pinned memory, in its own time: the host waits for nothing it still has to do."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)
