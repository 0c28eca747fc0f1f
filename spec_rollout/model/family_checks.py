"""Refusal, by name, of what a model may contain and the forward pass of its family does not implement."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def check_parameters(model: nn.Module) -> None:
    """Check that the parameters are plain tensors in one dtype.

    Raises:
        ValueError: Parameters are sharded, quantized, or in several or unknown dtypes.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                "the model's parameters are sharded (DTensor): pass a model with full parameters"
            )
        if type(parameter) is not nn.Parameter or type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise ValueError(f"{name} is a {kind}: only plain tensors are supported, no quantized ones")
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1 or not (kinds <= {torch.float64, torch.float32, torch.bfloat16}):
        raise ValueError(
            f"parameters in {', '.join(sorted(map(str, kinds)))}: all must be in one of fp64, fp32, bf16"
        )


def check_value(config: Any, key: str, implemented: tuple[Any, ...]) -> None:
    """Check one value of a configuration. A key that it lacks is not checked.

    Raises:
        ValueError: The value is none of `implemented`.
    """
    value = getattr(config, key, implemented[0])
    if value not in implemented:
        rule = " or ".join(map(str, implemented))
        raise ValueError(f"{key} {value!r} is not supported: it must be {rule}")
