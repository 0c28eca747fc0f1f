"""Parts of a decoder layer, as functions of a model's own parameters, and the layer that they make up.

A part holds parameters by reference: an optimizer step on them takes effect immediately. No part holds a view
or a copy of a parameter. Which parts a layer has is decided once, by the reader of its family.

Shapes: T tokens (of any rows), d hidden size, H heads, K key/value heads, J = H + K, h head size. The caller
supplies attention: `attend` receives queries, keys and values and returns the attention output.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.model.linear_layers import linear

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(queries_THh, keys_TKh, values_TKh), with RoPE applied -> attention output, (T, H * h)."""
LayerAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`Attend` for the layer of an index."""
Function = Callable[[Tensor], Tensor]
"""A norm, a projection, an activation or an MLP: of the last dimension of each token."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of attention that all layers of a model share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

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


class Rope(NamedTuple):
    """Rotary position embedding of T tokens: cosines and sines, (T, 1, r), r <= h."""

    cos: Tensor
    sin: Tensor
    """The first half of the rotated dimensions is negated, as `apply_rope` expects it."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary position embedding of all positions."""

    both: Tensor
    """Cosines and sines together, so that one call reads them: (positions, 2, 1, r)."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> "RopeTable":
        """Return the table for `cos` and `sin` of a `transformers` rotary module, each (positions, r)."""
        half = sin.shape[-1] // 2
        sin = torch.cat((-sin[:, :half], sin[:, half:]), -1)
        return cls(torch.stack((cos, sin), 1).unsqueeze(2))

    def at(self, positions_T: Tensor) -> Rope:
        """Return the rotations of these positions."""
        cos, sin = self.both.index_select(0, positions_T).unbind(1)
        return Rope(cos, sin)


Rotate = Callable[[Tensor, Rope], Tensor]
"""Rotates heads (T, J, h)."""


def apply_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied (arXiv:2104.09864; halves are paired as in `transformers`)."""
    return torch.addcmul(x_TJh * rope.cos, x_TJh.roll(x_TJh.shape[-1] // 2, -1), rope.sin)


def apply_partial_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied to as many of the first head dimensions as `rope` has."""
    rotated, rest = x_TJh.tensor_split([rope.cos.shape[-1]], -1)
    return torch.cat((apply_rope(rotated, rope), rest), -1)


def apply_float_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied in fp32, where the tables are more precise than x_TJh."""
    return apply_rope(x_TJh, rope).to(x_TJh.dtype)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight."""

    weight: Tensor
    eps: float
    eps_1: Tensor | None
    """`eps` as a one-element tensor, for the CPU path. None where the fused kernel is used."""

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "RMSNorm":
        """Return the norm with this weight."""
        return cls(weight, eps, _lean_eps(weight, eps))

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        if self.eps_1 is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return _normalized(x, self.eps_1) * self.weight


@dataclass(frozen=True, slots=True)
class OffsetRMSNorm:
    """x / sqrt(mean(x^2) + eps) * (1 + weight), in fp32 or better: the norm of Gemma."""

    weight: Tensor
    eps: float
    eps_1: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, eps: float) -> "OffsetRMSNorm":
        """Return the norm with this weight."""
        return cls(weight, eps, _lean_eps(weight, eps))

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        if self.eps_1 is None:
            # 1 + weight in bf16 would round small weights away.
            exact = torch.promote_types(x.dtype, torch.float32)
            normed = F.rms_norm(x.to(exact), self.weight.shape, None, self.eps)
            return torch.addcmul(normed, normed, self.weight).to(x.dtype)
        normed = _normalized(x, self.eps_1)
        return torch.addcmul(normed, normed, self.weight)


def _lean_eps(like: Tensor, eps: float) -> Tensor | None:
    is_fused = like.device.type != "cpu" or like.dtype == torch.bfloat16
    return None if is_fused else torch.tensor([eps], dtype=like.dtype)


def _normalized(x: Tensor, eps_1: Tensor) -> Tensor:
    # Takes half the time of F.rms_norm, which on the CPU runs eight kernels instead of a fused one.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_()


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class Linear:
    """Product with a weight (out, in), as in `nn.Linear`."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias."""
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class TransposedLinear:
    """Product with a weight (in, out), as in GPT-2's `Conv1D`."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return x_Td @ weight + bias."""
        return linear(x_Td, self.weight.t(), self.bias)


def _heads(x_Td: Tensor, head_dim: int) -> Tensor:
    return x_Td.view(x_Td.shape[0], -1, head_dim)


@dataclass(frozen=True, slots=True)
class SeparateQKV:
    """Projections to queries, keys and values with a weight each.

    Norms of queries and keys are over all heads together, as in OLMo 2.
    """

    q: Function
    k: Function
    v: Function
    head_dim: int
    q_norm: Function | None = None
    k_norm: Function | None = None

    def __call__(self, x_Td: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (T, J, h), and values, (T, K, h). RoPE rotates both together."""
        q_Td, k_Td = self.q(x_Td), self.k(x_Td)
        if self.q_norm is not None and self.k_norm is not None:
            q_Td, k_Td = self.q_norm(q_Td), self.k_norm(k_Td)
        return _heads(torch.cat((q_Td, k_Td), -1), self.head_dim), _heads(self.v(x_Td), self.head_dim)


@dataclass(frozen=True, slots=True)
class HeadNormQKV:
    """Projections to queries, keys and values; each head of queries and keys is normalized for itself."""

    q: Function
    k: Function
    v: Function
    head_dim: int
    q_norm: Function
    k_norm: Function

    def __call__(self, x_Td: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (T, J, h), and values, (T, K, h)."""
        q_THh = self.q_norm(_heads(self.q(x_Td), self.head_dim))
        k_TKh = self.k_norm(_heads(self.k(x_Td), self.head_dim))
        return torch.cat((q_THh, k_TKh), -2), _heads(self.v(x_Td), self.head_dim)


@dataclass(frozen=True, slots=True)
class FusedQKV:
    """One projection to queries, keys and values, in this order."""

    qkv: Function
    head_dim: int
    sizes: tuple[int, int]
    """J and K: heads of queries and keys, and of values."""

    def __call__(self, x_Td: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries and keys, (T, J, h), and values, (T, K, h)."""
        heads_TJh, v_TKh = _heads(self.qkv(x_Td), self.head_dim).split_with_sizes(self.sizes, 1)
        return heads_TJh, v_TKh


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer, from hidden states to hidden states."""

    qkv: Callable[[Tensor], tuple[Tensor, Tensor]]
    rotate: Rotate | None
    """None where positions are not rotated."""
    rope: int
    """Index of the layer's rotations among those of the model."""
    sizes: tuple[int, int]
    """H and K."""
    output: Function

    def __call__(self, x_Td: Tensor, ropes: tuple[Rope, ...], attend: Attend) -> Tensor:
        """Return the attention output after its projection, (T, d)."""
        heads_TJh, v_TKh = self.qkv(x_Td)
        if self.rotate is not None:
            heads_TJh = self.rotate(heads_TJh, ropes[self.rope])
        q_THh, k_TKh = heads_TJh.split_with_sizes(self.sizes, 1)
        return self.output(attend(q_THh, k_TKh, v_TKh))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """activation(gate) * up, projected back."""

    gate: Function
    up: Function
    down: Function
    activation: Function

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return the output, (T, d)."""
        return self.down(self.activation(self.gate(x_Td)) * self.up(x_Td))


@dataclass(frozen=True, slots=True)
class FusedGatedMLP:
    """The gated MLP with one projection to gate and up, in this order."""

    gate_up: Function
    down: Function
    activation: Function

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return the output, (T, d)."""
        gate, up = self.gate_up(x_Td).chunk(2, -1)
        return self.down(self.activation(gate) * up)


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """Two projections with an activation between them."""

    up: Function
    down: Function
    activation: Function

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return the output, (T, d)."""
        return self.down(self.activation(self.up(x_Td)))


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer: attention and MLP, each with a norm before it, after it, or both."""

    attention: Attention
    mlp: Function
    before_attention: Function | None = None
    after_attention: Function | None = None
    before_mlp: Function | None = None
    after_mlp: Function | None = None


def run_layer(x_Td: Tensor, layer: Layer, ropes: tuple[Rope, ...], attend: Attend) -> Tensor:
    """Return the hidden states after one layer, (T, d).

    What attention and MLP return, normalized where the layer has a norm after them, is added to the residual.
    """
    inner = x_Td if layer.before_attention is None else layer.before_attention(x_Td)
    inner = layer.attention(inner, ropes, attend)
    x_Td = x_Td + (inner if layer.after_attention is None else layer.after_attention(inner))
    inner = x_Td if layer.before_mlp is None else layer.before_mlp(x_Td)
    inner = layer.mlp(inner)
    return x_Td + (inner if layer.after_mlp is None else layer.after_mlp(inner))
