"""In-place update of a model's parameters: all of them or none."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the parameters of `model`.

    A tensor that is already the model's own storage is not copied. For tied parameters one of the names is
    enough.

    Args:
        model: Model whose parameters are overwritten in place.
        weights: Tensors by the names of `model.state_dict()`.

    Raises:
        ValueError: A tensor is missing, unknown, of another shape, not in floating point, or differs from a
            tensor that it is tied to. The model is unchanged.
    """
    own = model.state_dict()
    for name, tensor in weights.items():
        _check(name, own.get(name), tensor)
    given: dict[int, Tensor] = {}
    for name, tensor in weights.items():
        first = given.setdefault(own[name].data_ptr(), tensor)
        if first is not tensor and not _same_storage(first, tensor) and not torch.equal(first, tensor):
            raise ValueError(
                f"weights: {name} is tied to another tensor and differs from it: pass equal values"
            )
    for name, parameter in own.items():
        if parameter.data_ptr() not in given:
            raise ValueError(f"weights: {name} is missing: pass all tensors of the model's state_dict")
    with torch.no_grad():
        for name, tensor in weights.items():
            if not _same_storage(own[name], tensor):
                own[name].copy_(tensor)


def _check(name: str, parameter: Tensor | None, tensor: Tensor) -> None:
    if parameter is None:
        raise ValueError(f"weights: {name} is not in this model's state_dict")
    if parameter.shape != tensor.shape:
        raise ValueError(
            f"weights: {name} must be of shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise ValueError(f"weights: {name} must be in floating point, got {tensor.dtype}")


def _same_storage(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype
