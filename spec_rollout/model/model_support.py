"""Checks of models and sizes that all targets take, and copies of small host data to a device."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


@contextmanager
def generating(device: torch.device) -> Iterator[None]:
    """Enter inference mode without autocast: a policy generates in the dtype of its weights.

    A training loop may call an engine inside its own `torch.autocast`, where products have another dtype than
    keys and values.
    """
    with torch.inference_mode(), torch.autocast(device.type, enabled=False):
        yield


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside `DistributedDataParallel` or the result of `torch.compile`.

    The forward of the first communicates; that of the second would be compiled for every new shape.
    """
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def causal_model(model: nn.Module) -> nn.Module:
    """Return the `transformers` model whose forward the generic path calls.

    Args:
        model: Model, or a PEFT model whose adapters are inside its modules, such as LoRA.

    Raises:
        ValueError: It is no causal language model of `transformers`, or its parameters are sharded.
    """
    adapted: Any = model
    if hasattr(adapted, "peft_config") and hasattr(adapted, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in adapted.peft_config.values()):
            raise ValueError("PEFT prompt learning adds tokens to the text: use an adapter such as LoRA")
        model = adapted.get_base_model()
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"{name} is not a model of transformers")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: only causal language models are supported")
    source: Any = model
    if source.get_output_embeddings() is None or source.get_input_embeddings() is None:
        raise ValueError(f"{name} has no language model head: use a ...ForCausalLM class")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(f"{name}: the parameters are sharded (DTensor): pass a model with full parameters")
    for key, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name}: {key} of its state_dict is no tensor: pass a model that is not quantized"
            )
    return model


def position_limit(model: nn.Module) -> int:
    """Return the number of positions for which the model computes every token in the same way.

    It is the size of a learned position embedding, or the length at which RoPE frequencies change.
    """
    limits = [sys.maxsize]
    source: Any = model
    words = source.get_input_embeddings()
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module is not words and ("pos" in leaf or leaf == "wpe"):
            limits.append(module.num_embeddings - int(getattr(module, "offset", 0)))
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if kinds & set(LENGTH_DEPENDENT_ROPES):
            config, key = source.config.get_text_config(), "original_max_position_embeddings"
            parameters = getattr(config, "rope_parameters", None)
            original = parameters.get(key) if isinstance(parameters, dict) else None
            limits.append(int(original or getattr(config, key, None) or config.max_position_embeddings))
    return min(limits)


def whole(parameter: Tensor) -> Tensor:
    """Return a parameter, or the whole value of a sharded one, for which all ranks call it together."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


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


def check_sizes(rows: int, max_tokens: int, nodes: int) -> None:
    """Check that a target can have these sizes.

    Raises:
        ValueError: One is too small.
    """
    if rows < 1 or max_tokens < 2 or nodes < 0:
        raise ValueError(
            f"rows, max_tokens, nodes must be at least 1, 2, 0, got {rows}, {max_tokens}, {nodes}"
        )


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Check that the tapped layers exist.

    Raises:
        ValueError: One does not.
    """
    if wrong := [tap for tap in taps if not 0 <= tap < num_layers]:
        raise ValueError(f"taps {wrong} do not exist: this model has the layers 0 to {num_layers - 1}")
