"""Sizes and rotary positions of a draft layer, derived from the policy's configuration."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from aedit.types import check

_STEADY_ROPE = ("default", "linear", "llama3", "yarn")
_POLICIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3", "mixtral", "qwen3_moe")
"""Model types whose logits are a linear function of the feature, and whose layers rotate alike."""


@dataclass(frozen=True, slots=True)
class DraftShape:
    """Sizes of a draft layer and the frequencies of its rotary positions."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocabulary: int
    norm_epsilon: float
    has_qk_norm: bool
    has_qkv_bias: bool
    frequencies: tuple[float, ...]
    """Radians per position of each pair of head dimensions."""
    rope_scale: float
    taps: int
    """Number of policy layers whose outputs follow the last hidden state in a feature (EAGLE-3's fusion)."""

    @classmethod
    def of(cls, config: Any, *, taps: int = 0) -> Self:
        """Return the shape for a transformers configuration.

        Raises:
            ValueError: There is no draft layer for this type of model: logits with a cap, angles that differ
                between layers, learned positions. The rotary positions depend on the length, or `taps` is
                negative.
        """
        check(taps >= 0, "taps", "must be 0 or more", taps)
        rule = f"must be one of {', '.join(_POLICIES)} for a draft layer"
        check(config.model_type in _POLICIES, "the policy's model_type", rule, config.model_type)
        frequencies, scale = _rotary(config)
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=heads,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocabulary=config.vocab_size,
            norm_epsilon=config.rms_norm_eps,
            has_qk_norm=config.model_type == "qwen3",
            has_qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
            frequencies=frequencies,
            rope_scale=scale,
            taps=taps,
        )

    @property
    def feature_size(self) -> int:
        """Return w, the size of the feature of one token."""
        return self.hidden_size * (1 + self.taps)

    @property
    def kv_size(self) -> int:
        """Return the number of values that one position takes in a cache, keys and values together."""
        return 2 * self.num_kv_heads * self.head_size

    @property
    def split(self) -> tuple[int, int]:
        """Return the widths of queries and of keys in the joint projection; values are as wide as keys."""
        return self.num_heads * self.head_size, self.num_kv_heads * self.head_size


def tapped(taps: int, num_layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs are part of a feature with this many taps, for `Target.of`.

    Three taps are the low, middle and high layer of EAGLE-3 (arXiv:2503.01840).

    Raises:
        ValueError: `taps` is neither 0 nor 3.
    """
    check(taps in (0, 3), "taps", "must be 0 or 3", taps)
    eagle_3 = min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)
    return tuple(sorted(eagle_3)) if taps else ()


def rotations(shape: DraftShape, positions: Tensor) -> Tensor:
    """Return the rotation of each pair of head dimensions, complex, (*positions.shape, e / 2)."""
    frequencies = torch.tensor(shape.frequencies, dtype=torch.float64, device=positions.device)
    angles = positions.to(torch.float64).unsqueeze(-1) * frequencies
    return torch.polar(torch.full_like(angles, shape.rope_scale), angles)


def rotate_pairs(x: Tensor, rotations: Tensor) -> Tensor:
    """Return x (..., e) with rotary positions, as one product of complex numbers.

    The dimensions 2i and 2i + 1 rotate together. (Policies pair i with i + e / 2, which is the same up to the
    order of a projection's rows.)
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(exact).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations.to(pairs.dtype)).flatten(-2).to(x.dtype)


def _rotary(config: Any) -> tuple[tuple[float, ...], float]:
    """Return frequencies and scale as transformers computes them."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = LlamaRotaryEmbedding(config)
    rule = f"must be one of {', '.join(_STEADY_ROPE)}"
    check(rope.rope_type in _STEADY_ROPE, "kind of rotary positions", rule, rope.rope_type)
    return tuple(rope.inv_freq.double().tolist()), float(rope.attention_scaling)
