"""The mathematics of one decoder layer of the Llama and Qwen kind, as pure functions over its parameters.

Shapes: T tokens (of any rows), d hidden size, H heads, K key/value heads, h head size. How tokens see each
other is the caller's: `attend` gets what the layer has made of them and says what they read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries_THh, keys_TKh, values_TKh), positions already in them -> what the queries read, (T, H * h)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The sizes that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Of the norms."""
    eps_1: Tensor | None = None
    """The same as a tensor of one number, where `rms_norm` wants it: on the CPU, but for bfloat16."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, like: Tensor) -> "LayerShape":
        """For layers on the device and in the dtype of `like`."""
        is_fused = like.device.type != "cpu" or like.dtype == torch.bfloat16
        eps_1 = None if is_fused else torch.tensor([eps], dtype=like.dtype)
        return cls(num_heads, num_kv_heads, head_dim, eps, eps_1)

    @property
    def group(self) -> int:
        """Heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """What the products of queries and keys are multiplied with."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's parameters themselves, not copies: a step of an optimizer on them is seen at once."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Where tokens stand, as rotations: cosines and sines of all positions, (positions, h)."""

    cos: Tensor
    sin: Tensor
    """Of the first half of a head's dimensions negative, as `rotate` wants them."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> "Rope":
        """cos, sin: (positions, h), as the rotary modules of `transformers` make them."""
        half = sin.shape[-1] // 2
        return cls(cos, torch.cat((-sin[:, :half], sin[:, half:]), -1))

    def at(self, positions_T: Tensor) -> "Rope":
        """The rotations of these positions, ready for `rotate`: (T, 1, h)."""
        rows = positions_T.reshape(-1)
        return Rope(self.cos.index_select(0, rows).unsqueeze(1), self.sin.index_select(0, rows).unsqueeze(1))


def rotate(x_THh: Tensor, rope: Rope) -> Tensor:
    """Turn each head by its token's position (RoPE, arXiv 2104.09864, halves as in `transformers`)."""
    return torch.addcmul(x_THh * rope.cos, x_THh.roll(x_THh.shape[-1] // 2, -1), rope.sin)


def rms_norm(x: Tensor, weight: Tensor, shape: LayerShape) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if shape.eps_1 is None:
        return F.rms_norm(x, weight.shape, weight, shape.eps)
    # Half the time of F.rms_norm, which on the CPU is eight kernels and no fused one.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(shape.eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_() * weight


def gated_mlp(x_Td: Tensor, w: LayerWeights) -> Tensor:
    gate = F.silu(F.linear(x_Td, w.gate, w.gate_bias))
    return F.linear(gate * F.linear(x_Td, w.up, w.up_bias), w.down, w.down_bias)


def _heads(x_Td: Tensor, shape: LayerShape) -> Tensor:
    return x_Td.view(x_Td.shape[0], -1, shape.head_dim)


def run_layer(x_Td: Tensor, w: LayerWeights, shape: LayerShape, rope: Rope, attend: Attend) -> Tensor:
    """The hidden states after one layer: attention and gated MLP, each on normed input, added to x_Td."""
    normed = rms_norm(x_Td, w.input_norm, shape)
    q_Td, k_Td = F.linear(normed, w.q, w.q_bias), F.linear(normed, w.k, w.k_bias)
    v_TKh = _heads(F.linear(normed, w.v, w.v_bias), shape)
    # Queries and keys turn together: half as many calls.
    if w.q_norm is None or w.k_norm is None:
        heads_TJh = _heads(torch.cat((q_Td, k_Td), -1), shape)
    else:
        q_THh, k_TKh = (_heads(x, shape) for x in (q_Td, k_Td))
        normed_heads = rms_norm(q_THh, w.q_norm, shape), rms_norm(k_TKh, w.k_norm, shape)
        heads_TJh = torch.cat(normed_heads, -2)
    turned = rotate(heads_TJh, rope)
    read = attend(turned[:, : shape.num_heads], turned[:, shape.num_heads :], v_TKh)
    x_Td = x_Td + F.linear(read, w.o, w.o_bias)
    return x_Td + gated_mlp(rms_norm(x_Td, w.post_norm, shape), w)
