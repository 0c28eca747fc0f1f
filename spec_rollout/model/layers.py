"""Computation of one decoder layer of the Llama or Qwen family, as pure functions of its parameters.

Shapes: T tokens (of any rows), d hidden size, H heads, K key/value heads, h head size. The caller supplies
attention: `attend` receives queries, keys and values and returns the attention output.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries_THh, keys_TKh, values_TKh), with RoPE applied -> attention output, (T, H * h)."""
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`Attend` for the layer of an index."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the RMS norms."""
    eps_1: Tensor | None = None
    """`eps` as a one-element tensor, for the CPU path of `rms_norm`. None where the fused kernel is used."""

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, head_dim: int, eps: float, like: Tensor) -> "LayerShape":
        """Return the shape for layers on the device and in the dtype of `like`."""
        is_fused = like.device.type != "cpu" or like.dtype == torch.bfloat16
        eps_1 = None if is_fused else torch.tensor([eps], dtype=like.dtype)
        return cls(num_heads, num_kv_heads, head_dim, eps, eps_1)

    @property
    def group(self) -> int:
        """Return the number of query heads per key/value head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Scale, window and softcap of one layer's attention."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Number of last positions that a token attends to, itself included; None for all."""
    softcap: float | None = None
    """Limit c of the scores s, c * tanh(s / c), as in Gemma 2 (arXiv:2408.00118); None for none."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Parameters of one layer by reference: an optimizer step on them takes effect immediately."""

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
    """Rotary position embedding: cosines and sines of all positions, (positions, h)."""

    cos: Tensor
    sin: Tensor
    """The first half of each head's dimensions is negated, as `apply_rope` expects it."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> "Rope":
        """Return the tables for `cos` and `sin` of a `transformers` rotary module, each (positions, h)."""
        half = sin.shape[-1] // 2
        return cls(cos, torch.cat((-sin[:, :half], sin[:, half:]), -1))

    def at(self, positions_T: Tensor) -> "Rope":
        """Return the rotations of `positions_T` in the shape that `apply_rope` expects, (T, 1, h)."""
        rows = positions_T.reshape(-1)
        return Rope(self.cos.index_select(0, rows).unsqueeze(1), self.sin.index_select(0, rows).unsqueeze(1))


def apply_rope(x_THh: Tensor, rope: Rope) -> Tensor:
    """Return x_THh with RoPE applied (arXiv:2104.09864; halves are paired as in `transformers`)."""
    return torch.addcmul(x_THh * rope.cos, x_THh.roll(x_THh.shape[-1] // 2, -1), rope.sin)


def rms_norm(x: Tensor, weight: Tensor, shape: LayerShape) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension."""
    if shape.eps_1 is None:
        return F.rms_norm(x, weight.shape, weight, shape.eps)
    # Takes half the time of F.rms_norm, which on the CPU runs eight kernels instead of a fused one.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(shape.eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_() * weight


def gated_mlp(x_Td: Tensor, w: LayerWeights) -> Tensor:
    """Return the output of the gated MLP (SiLU), (T, d)."""
    gate = F.silu(F.linear(x_Td, w.gate, w.gate_bias))
    return F.linear(gate * F.linear(x_Td, w.up, w.up_bias), w.down, w.down_bias)


def _heads(x_Td: Tensor, shape: LayerShape) -> Tensor:
    return x_Td.view(x_Td.shape[0], -1, shape.head_dim)


def run_layer(x_Td: Tensor, w: LayerWeights, shape: LayerShape, rope: Rope, attend: Attend) -> Tensor:
    """Return the hidden states after one layer, (T, d).

    Attention and gated MLP read RMS-normed input, and each is added to the residual.
    """
    normed = rms_norm(x_Td, w.input_norm, shape)
    q_Td, k_Td = F.linear(normed, w.q, w.q_bias), F.linear(normed, w.k, w.k_bias)
    v_TKh = _heads(F.linear(normed, w.v, w.v_bias), shape)
    # Rotate queries and keys together: half as many calls.
    if w.q_norm is None or w.k_norm is None:
        heads_TJh = _heads(torch.cat((q_Td, k_Td), -1), shape)
    else:
        q_THh, k_TKh = (_heads(x, shape) for x in (q_Td, k_Td))
        normed_heads = rms_norm(q_THh, w.q_norm, shape), rms_norm(k_TKh, w.k_norm, shape)
        heads_TJh = torch.cat(normed_heads, -2)
    rotated = apply_rope(heads_TJh, rope)
    read = attend(rotated[:, : shape.num_heads], rotated[:, shape.num_heads :], v_TKh)
    x_Td = x_Td + F.linear(read, w.o, w.o_bias)
    return x_Td + gated_mlp(rms_norm(x_Td, w.post_norm, shape), w)
