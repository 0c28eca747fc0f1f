"""Read the parameters of a `transformers` model of the Llama or Qwen family, by reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from aedit.spec_rollout.model.layers import AttentionSpec, LayerShape, LayerWeights, Rope
from aedit.spec_rollout.model.supported import unsupported_reason

FAMILIES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ROPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose angles do not depend on the length of the text."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's own parameters and sizes."""

    embedding: Tensor
    """(V, d)."""
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    """(V, d). The same tensor as `embedding` where the two are tied."""
    shape: LayerShape
    attention: tuple[AttentionSpec, ...]
    """One for each layer."""


def read_weights(model: nn.Module) -> ModelWeights:
    """Return the parameters and sizes that `Target` computes with.

    Raises:
        ValueError: The family, activation, RoPE type, attention, sharding, dtype or a layer type is not
            supported.
    """
    family = type(model).__name__
    if family not in FAMILIES:
        raise ValueError(f"{family} is not supported: use one of {', '.join(FAMILIES)}")
    _check_supported(model)
    if reason := unsupported_reason(model):
        raise ValueError(f"not supported: {reason}")
    config: Any = model.config
    inner: Any = model.model
    attention = inner.layers[0].self_attn
    heads = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    shape = LayerShape.of(*heads, config.rms_norm_eps, inner.norm.weight)
    head: Any = model.lm_head
    layers = tuple(_layer(layer) for layer in inner.layers)
    specs = tuple(AttentionSpec(scale=layer.self_attn.scaling) for layer in inner.layers)
    return ModelWeights(inner.embed_tokens.weight, layers, inner.norm.weight, head.weight, shape, specs)


def read_rope(model: nn.Module, num_positions: int) -> Rope:
    """Return the model's RoPE rotations of the positions 0 .. num_positions - 1, in the model's dtype."""
    rotary: Any = model.model.rotary_emb  # type: ignore[union-attr]
    like = next(model.parameters())
    positions = torch.arange(num_positions, device=like.device)
    with torch.no_grad():
        cos, sin = rotary(like, positions[None])
    return Rope.of(cos[0], sin[0])


def _check_supported(model: nn.Module) -> None:
    """Raise ValueError for a feature of the family that this forward pass does not implement."""
    config: Any = model.config
    inner: Any = model.model
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act {config.hidden_act!r} is not supported: it must be silu")
    if inner.rotary_emb.rope_type not in ROPES:
        raise ValueError(
            f"rope_type {inner.rotary_emb.rope_type!r} is not supported: it must be one of {', '.join(ROPES)}"
        )
    if any(getattr(layer.self_attn, "sliding_window", None) for layer in inner.layers):
        raise ValueError("sliding-window attention is not supported: set use_sliding_window to false")
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model's parameters are sharded (DTensor): pass a model with full parameters")
    kinds = {parameter.dtype for parameter in model.parameters()}
    if len(kinds) > 1 or not (kinds <= {torch.float64, torch.float32, torch.bfloat16}):
        raise ValueError(
            f"parameters in {', '.join(sorted(map(str, kinds)))}: all must be in one of fp64, fp32, bf16"
        )
    for name, module in model.named_modules():
        if name.endswith("_proj") and type(module) is not nn.Linear:
            raise ValueError(f"{name} is a {type(module).__name__}: only plain nn.Linear is supported")


def _layer(layer: Any) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    linears = {
        "q": attention.q_proj,
        "k": attention.k_proj,
        "v": attention.v_proj,
        "o": attention.o_proj,
        "gate": mlp.gate_proj,
        "up": mlp.up_proj,
        "down": mlp.down_proj,
    }
    tensors: dict[str, Tensor | None] = {name: linear.weight for name, linear in linears.items()}
    tensors |= {f"{name}_bias": linear.bias for name, linear in linears.items()}
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name, None)
        tensors[name] = None if norm is None else norm.weight
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        post_norm=layer.post_attention_layernorm.weight,
        **tensors,  # type: ignore[arg-type]
    )
