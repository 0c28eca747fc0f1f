"""New weights for a model, put into its parameters in place: all of them or none."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights`, named as in `model.state_dict()`, into the model. A tensor that is the model's own is
    not copied; of tied tensors one name is enough.

    ValueError that names the tensor if one is missing, unknown, of another shape, not of numbers, or differs
    from one it is tied to; then nothing has changed.
    """
    own = model.state_dict()
    for name, tensor in weights.items():
        _check(name, own.get(name), tensor)
    given: dict[int, Tensor] = {}
    for name, tensor in weights.items():
        first = given.setdefault(own[name].data_ptr(), tensor)
        if first is not tensor and not _same_storage(first, tensor) and not torch.equal(first, tensor):
            raise ValueError(f"weights: {name} is tied to another tensor and differs from it")
    for name, mine in own.items():
        if mine.data_ptr() not in given:
            raise ValueError(f"weights: {name} is missing")
    with torch.no_grad():
        for name, tensor in weights.items():
            if not _same_storage(own[name], tensor):
                own[name].copy_(tensor)


def _check(name: str, mine: Tensor | None, tensor: Tensor) -> None:
    if mine is None:
        raise ValueError(f"weights: {name} is not a tensor of this model")
    if mine.shape != tensor.shape:
        raise ValueError(f"weights: {name} has shape {tuple(tensor.shape)}, this model's {tuple(mine.shape)}")
    if not tensor.is_floating_point():
        raise ValueError(f"weights: {name} is in {tensor.dtype}, not in floating point")


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
