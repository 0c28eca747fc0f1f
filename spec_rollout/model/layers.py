"""Parts of a decoder layer, as functions of a model's own parameters, and the layer that they make up.

A part holds parameters by reference: an optimizer step on them takes effect immediately. No part holds a view
or a copy of a parameter. Which parts a layer has is decided once, by the reader of its family.

Shapes: T tokens (of any rows), d hidden size, H heads, K key/value heads, J = H + K, h head size. The caller
supplies attention: `attend` receives queries, keys and values and returns the attention output.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aedit.system import HUGE_PAGE_BYTES, HUGE_PAGES_AT_ONCE, use_huge_pages

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


Rope = tuple[Tensor, Tensor]
"""Rotary position embedding of T tokens: cosines and sines, (T, 1, r), r <= h. The first half of the rotated
dimensions of the sines is negated, as `apply_rope` expects it."""


def rope_at(table: Tensor, positions_T: Tensor) -> Rope:
    """Return the rotations of these positions from a table of `read_ropes`."""
    cos, sin = table.index_select(0, positions_T).unbind(1)
    return cos, sin


Rotate = Callable[[Tensor, Rope], Tensor]
"""Rotates heads (T, J, h)."""


def apply_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied (arXiv:2104.09864; halves are paired as in `transformers`)."""
    cos, sin = rope
    return torch.addcmul(x_TJh * cos, x_TJh.roll(x_TJh.shape[-1] // 2, -1), sin)


def apply_partial_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied to as many of the first head dimensions as `rope` has."""
    rotated, rest = x_TJh.tensor_split([rope[0].shape[-1]], -1)
    return torch.cat((apply_rope(rotated, rope), rest), -1)


def apply_float_rope(x_TJh: Tensor, rope: Rope) -> Tensor:
    """Return x_TJh with RoPE applied in fp32, where the tables are more precise than x_TJh."""
    return apply_rope(x_TJh, rope).to(x_TJh.dtype)


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight, or * (1 + weight) in fp32 or better, the norm of Gemma."""

    weight: Tensor
    eps: float
    eps_1: Tensor | None
    """`eps` as a one-element tensor, in fp32 or fp64, for the CPU. None where there is a fused kernel."""
    adds_one: bool = False

    @classmethod
    def of(cls, weight: Tensor, eps: float, *, adds_one: bool = False) -> "RMSNorm":
        """Return the norm with this weight."""
        exact = torch.promote_types(weight.dtype, torch.float32)
        eps_1 = torch.tensor([eps], dtype=exact) if weight.device.type == "cpu" else None
        return cls(weight, eps, eps_1, adds_one)

    def __call__(self, x: Tensor) -> Tensor:
        """Return x normalized over the last dimension."""
        if self.eps_1 is None and not self.adds_one:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        exact = x.float() if x.dtype == torch.bfloat16 else x
        if self.eps_1 is None:
            normed = F.rms_norm(exact, self.weight.shape, None, self.eps)
        else:
            # Takes half the time of F.rms_norm, which on the CPU runs eight kernels instead of a fused one.
            norm = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
            normed = exact * torch.addcmul(self.eps_1, norm, norm, value=1 / x.shape[-1]).rsqrt_()
        # 1 + weight in bf16 would round small weights away.
        normed = torch.addcmul(normed, normed, self.weight) if self.adds_one else normed.mul_(self.weight)
        return normed if exact is x else normed.bfloat16()


QKV = Callable[[Tensor], tuple[Tensor, Tensor]]
"""x_Td -> queries and keys, (T, J, h), which RoPE rotates together, and values, (T, K, h)."""


def _heads(x_Td: Tensor, head_dim: int) -> Tensor:
    return x_Td.view(x_Td.shape[0], -1, head_dim)


def separate_qkv(
    to_qkv: "JoinedLinear",
    head_dim: int,
    sizes: tuple[int, int],
    norms: tuple[Function, Function] | None = None,
    *,
    norms_heads: bool = False,
) -> QKV:
    """Return the projections to queries, keys and values with a weight each.

    sizes: J and K, numbers of heads.
    norms: of queries and keys; over each head for itself with `norms_heads`, else over all heads together, as
    in OLMo 2.
    """

    def project(x_Td: Tensor) -> tuple[Tensor, Tensor]:
        if norms is None and (joined := to_qkv.joined(x_Td)) is not None:
            heads_TJh, v_TKh = _heads(joined, head_dim).split_with_sizes(sizes, 1)
            return heads_TJh, v_TKh
        q, k, v = to_qkv(x_Td)
        if norms_heads:
            q, k = _heads(q, head_dim), _heads(k, head_dim)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        qk = torch.cat((q, k), -2) if norms_heads else _heads(torch.cat((q, k), -1), head_dim)
        return qk, _heads(v, head_dim)

    return project


def fused_qkv(qkv: Function, head_dim: int, sizes: tuple[int, int]) -> QKV:
    """Return one projection to queries, keys and values. sizes: J and K, numbers of heads."""

    def project(x_Td: Tensor) -> tuple[Tensor, Tensor]:
        heads_TJh, v_TKh = _heads(qkv(x_Td), head_dim).split_with_sizes(sizes, 1)
        return heads_TJh, v_TKh

    return project


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention of one layer, from hidden states to hidden states."""

    qkv: QKV
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


def gated_mlp(gate_up: "JoinedLinear", down: Function, activation: Function) -> Function:
    """Return the MLP down(activation(gate) * up), whose gate and up have a weight each."""

    def run(x_Td: Tensor) -> Tensor:
        gate, up = gate_up(x_Td)
        return down(activation(gate).mul_(up))

    return run


def fused_gated_mlp(gate_up: Function, down: Function, activation: Function) -> Function:
    """Return the gated MLP with one projection to gate and up, in this order."""

    def run(x_Td: Tensor) -> Tensor:
        gate, up = gate_up(x_Td).chunk(2, -1)
        return down(activation(gate).mul_(up))

    return run


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
    x_Td = (inner if layer.after_attention is None else layer.after_attention(inner)).add_(x_Td)
    inner = x_Td if layer.before_mlp is None else layer.before_mlp(x_Td)
    inner = layer.mlp(inner)
    return (inner if layer.after_mlp is None else layer.after_mlp(inner)).add_(x_Td)


SMALL_WEIGHTS = 1 << 17
"""Weights of fewer numbers stay in the cache, where the overhead of oneDNN is not worth it for few rows."""

HUGE_WEIGHTS = 1 << 24
"""Weights of at least as many numbers are in no cache: packing gains nothing for one row in bf16."""

NARROW_INPUTS = 1280
"""Inputs up to which one or two rows in fp32 are faster as W x': W is read at twice the speed on one core."""

PACKED_ROWS = 4
"""Rows that a product with a packed copy computes at least: two alone take longer, by a tenth to a half."""

WIDE_INPUTS = 768
"""Inputs from which on one row in bf16 is faster without packing: by a twentieth to a third on one core."""

MANY_ROWS = 256
"""Number of rows from which on oneDNN is faster with small weights, too."""

EXACT_ROWS = 32
"""Up to this number of rows, a step of decoding, no row is added."""

_HAS_ONEDNN: bool = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@dataclass(slots=True, eq=False)
class Linear:
    """x W' + b with a model's own parameters, of which a packed copy can be used."""

    weight: Tensor
    """(o, i), or (i, o) if it is stored transposed (GPT-2)."""
    bias_o: Tensor | None = None
    is_transposed: bool = False
    _packed: Tensor | None = None
    _version: int = 0

    def __call__(self, x_Ti: Tensor) -> Tensor:
        """Return x W' + b, (..., o)."""
        if self._packed is not None and self._version != self.weight._version:
            self._packed = None  # the weight has changed in place
        return linear(x_Ti, self.weight_oi, self.bias_o, self._packed)

    @property
    def weight_oi(self) -> Tensor:
        """Return the weight, (o, i)."""
        return self.weight.t() if self.is_transposed else self.weight

    @property
    def nbytes(self) -> int:
        """Return the size of a packed copy, in bytes."""
        return self.weight.nbytes

    @property
    def can_be_packed(self) -> bool:
        """Return whether a packed copy makes products faster: large fp32 or bf16 weights on a CPU."""
        return _can_be_packed(self.weight) and self.weight.numel() >= SMALL_WEIGHTS

    @property
    def is_packed(self) -> bool:
        """Return whether there is a packed copy."""
        return self._packed is not None

    def pack(self) -> None:
        """Copy the weight into the layout that oneDNN multiplies by, which else it makes in each product.

        The copy is used until the weight changes in place, as far as PyTorch counts that
        (`Tensor._version`); a holder of this object that replaces values otherwise must make a new one.
        """
        self._version = self.weight._version
        self._packed = _packed_copy(self.weight_oi.detach())

    def moves_to_huge_pages(self) -> Iterator[None]:
        """Move the packed copy, if there is one, to memory in which it is read faster, a part at a time."""
        return _moves_to_huge_pages(self._packed)


@dataclass(slots=True, eq=False)
class JoinedLinear:
    """Several `Linear`s of one input. With a packed copy of all weights, one product computes them."""

    parts: tuple[Linear, ...]
    _copy: Tensor | None = None
    """The weights below each other, packed; see `Linear.pack`."""
    _bias_o: Tensor | None = None
    _versions: tuple[tuple[Tensor, int], ...] = ()
    """Weights and biases, and what PyTorch's counts of their changes were when they were copied."""

    def __call__(self, x_Ti: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs of the parts, (..., o) each."""
        joined = self.joined(x_Ti)
        if joined is None:
            return tuple(part(x_Ti) for part in self.parts)
        return joined.split_with_sizes([len(part.weight_oi) for part in self.parts], -1)

    def joined(self, x_Ti: Tensor) -> Tensor | None:
        """Return the outputs of all parts beside each other. None where each part computes its own."""
        if self._copy is None or torch.is_grad_enabled():
            return None
        if any(tensor._version != version for tensor, version in self._versions):
            self._copy = self._bias_o = None  # a weight or a bias has changed in place
            return None
        rows = x_Ti.numel() // x_Ti.shape[-1]
        if rows < _least_packed_rows(self.parts[0].weight_oi, self._copy.numel()):
            return None
        return _with_added_rows(x_Ti, rows, self._copy, self._bias_o, self._copy)

    @property
    def nbytes(self) -> int:
        """Return the size of a packed copy, in bytes."""
        return sum(part.nbytes for part in self.parts)

    @property
    def can_be_packed(self) -> bool:
        """Return whether a packed copy makes products faster; see `Linear.can_be_packed`."""
        is_uniform = len({(part.weight.dtype, part.bias_o is None) for part in self.parts}) == 1
        is_large = sum(part.weight.numel() for part in self.parts) >= SMALL_WEIGHTS
        return is_uniform and is_large and all(map(_can_be_packed, self._tensors()))

    @property
    def is_packed(self) -> bool:
        """Return whether there is a packed copy."""
        return self._copy is not None

    def pack(self) -> None:
        """Copy the weights of all parts into one packed weight; see `Linear.pack`."""
        self._versions = tuple((tensor, tensor._version) for tensor in self._tensors())
        self._copy = _packed_copy(torch.cat([part.weight_oi.detach() for part in self.parts]))
        biases = [part.bias_o for part in self.parts if part.bias_o is not None]
        self._bias_o = torch.cat([bias_o.detach() for bias_o in biases]) if biases else None

    def moves_to_huge_pages(self) -> Iterator[None]:
        """Move the packed copy, if there is one, to memory in which it is read faster, a part at a time."""
        return _moves_to_huge_pages(self._copy)

    def _tensors(self) -> list[Tensor]:
        """Return all weights and biases."""
        return [each for part in self.parts for each in (part.weight, part.bias_o) if each is not None]


def _can_be_packed(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and not weight.is_inference() and weight.dtype in _packed_dtypes()


def _packed_copy(weight_oi: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_oi.contiguous(), None)
    return packed


def _moves_to_huge_pages(packed: Tensor | None) -> Iterator[None]:
    if packed is None:
        return
    first = torch.ops.mkldnn.data_ptr(packed)
    end = first + packed.numel() * packed.element_size()  # without padding, of which there may be some
    while first < end:
        upto = min(end, (first // HUGE_PAGE_BYTES + HUGE_PAGES_AT_ONCE) * HUGE_PAGE_BYTES)
        use_huge_pages(first, upto - first)
        first = upto
        yield


@cache
def _packed_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes for which this processor gains by packing."""
    if not _HAS_ONEDNN:
        return ()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return (torch.float32, torch.bfloat16) if has_bf16 else (torch.float32,)


def _least_packed_rows(weight_oi: Tensor, size: int) -> int:
    """Return the number of rows from which on a product with a packed copy is faster.

    weight_oi: The weight, or one of those that are joined.
    size: Numbers of the copy.
    """
    inputs = weight_oi.shape[1]
    if weight_oi.dtype == torch.bfloat16:
        is_wide = inputs >= WIDE_INPUTS and weight_oi.is_contiguous()
        return 2 if size >= HUGE_WEIGHTS or is_wide else 1
    return 3 if inputs <= NARROW_INPUTS and weight_oi.is_contiguous() else 2


def linear(
    x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None = None, packed: Tensor | None = None
) -> Tensor:
    """Return x W' + b, as `F.linear`, of another rounding.

    Calls that need gradients, and devices other than the CPU, use `F.linear` itself.

    packed: The weight in oneDNN's layout, if there is one; see `Linear`.
    """
    if x_Ti.is_cuda or torch.is_grad_enabled() or not _HAS_ONEDNN:
        return F.linear(x_Ti, weight_oi, bias_o)
    rows = x_Ti.numel() // x_Ti.shape[-1]
    if rows <= EXACT_ROWS or weight_oi.dtype == torch.float64:  # which has no kernels of oneDNN
        return _product(x_Ti, weight_oi, bias_o, rows, packed)
    return _with_added_rows(x_Ti, rows, weight_oi, bias_o, packed)


def _with_added_rows(
    x_Ti: Tensor, rows: int, weight_oi: Tensor, bias_o: Tensor | None, packed: Tensor | None
) -> Tensor:
    """Return `_product`, computed for `padded_rows`."""
    num_added = padded_rows(rows) - rows
    if not num_added:
        return _product(x_Ti, weight_oi, bias_o, rows, packed)
    padded_Ti = F.pad(x_Ti.reshape(rows, -1), (0, 0, 0, num_added))
    product = _product(padded_Ti, weight_oi, bias_o, rows + num_added, packed)
    return product[:rows].view(*x_Ti.shape[:-1], -1)


def padded_rows(rows: int) -> int:
    """Return how many rows to compute for `rows`: at most an eighth more, of 8 numbers per power of two."""
    if rows <= EXACT_ROWS:
        return rows
    step = 1 << (rows.bit_length() - 4)
    return -(-rows // step) * step


def _product(
    x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None, rows: int, packed: Tensor | None
) -> Tensor:
    """Return `F.linear` by the kernel that the rule selects."""
    if packed is not None and rows >= _least_packed_rows(weight_oi, weight_oi.numel()):
        return _with_packed(x_Ti, rows, packed, bias_o)
    if not weight_oi.is_contiguous():
        # A weight that is stored transposed (GPT-2): oneDNN is faster for several rows.
        is_slow = weight_oi.dtype == torch.float32 and rows > 1 and weight_oi.numel() >= SMALL_WEIGHTS
        if not is_slow or not weight_oi.t().is_contiguous():
            return F.linear(x_Ti, weight_oi, bias_o)
        return _onednn(x_Ti, weight_oi, bias_o)
    if weight_oi.dtype == torch.bfloat16 and rows == 1:
        return _without_onednn(x_Ti, weight_oi, bias_o)
    is_small = weight_oi.numel() < SMALL_WEIGHTS and rows < MANY_ROWS
    if weight_oi.dtype != torch.float32 or is_small or not rows:
        return F.linear(x_Ti, weight_oi, bias_o)
    out, size = weight_oi.shape
    if x_Ti.dim() == 2 and (
        size <= NARROW_INPUTS if rows <= 2 else rows <= 4 and out >= size and bias_o is None
    ):
        return _from_left(x_Ti, rows, weight_oi, bias_o)
    return _onednn(x_Ti, weight_oi, bias_o)


def _from_left(x_Ti: Tensor, rows: int, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return `F.linear` as the transpose of W x'. One row is computed as two, for which there is a kernel."""
    x_iT = (x_Ti if rows > 1 else torch.cat((x_Ti, x_Ti))).t()
    y_oT = torch.mm(weight_oi, x_iT) if bias_o is None else torch.addmm(bias_o[:, None], weight_oi, x_iT)
    return y_oT.t()[:rows].contiguous()


def _with_packed(x_Ti: Tensor, rows: int, packed: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return `F.linear` with a packed weight; two rows are computed as `PACKED_ROWS`."""
    if rows != 2 or x_Ti.dim() != 2:
        return _onednn(x_Ti, packed, bias_o)
    return _onednn(F.pad(x_Ti, (0, 0, 0, PACKED_ROWS - 2)), packed, bias_o)[:2]


def _onednn(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return `F.linear` by oneDNN, whose own layout the weight may have."""
    return torch.ops.mkldnn._linear_pointwise(x_Ti, weight_oi, bias_o, "none", [], "")  # type: ignore[no-any-return]


def _without_onednn(x_Ti: Tensor, weight_oi: Tensor, bias_o: Tensor | None) -> Tensor:
    """Return `F.linear` by PyTorch's own matrix-vector product, which sums in float32.

    There is no argument that selects it. The switch is the process's: another thread that calls a linear
    layer in the meantime gets a right result, perhaps more slowly.
    """
    was_enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        return F.linear(x_Ti, weight_oi, bias_o)
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)


@dataclass(frozen=True, slots=True)
class Experts:
    """Router and experts of one layer (Mixtral, arXiv:2401.04088; Qwen3-MoE)."""

    router: Tensor
    """(E, d)."""
    gate_up: Tensor
    """(E, 2 * i, d)."""
    down: Tensor
    """(E, d, i)."""
    top_k: int
    is_normalized: bool
    """Whether the weights of the k chosen experts are divided by their sum."""
    activation: Function

    def __call__(self, x_Td: Tensor) -> Tensor:
        """Return the output, (T, d). Only the weights of chosen experts are read."""
        logits = linear(x_Td, self.router)
        exact = torch.promote_types(logits.dtype, torch.float32)
        weights_Tk, experts_Tk = torch.softmax(logits, -1, dtype=exact).topk(self.top_k, -1)
        if self.is_normalized:
            weights_Tk = weights_Tk / weights_Tk.sum(-1, keepdim=True)
        chosen = experts_Tk.flatten()
        order = chosen.argsort()  # by expert: one product for all its tokens
        tokens = x_Td.index_select(0, order // self.top_k)
        counts = torch.bincount(chosen, minlength=len(self.router)).tolist()
        outputs = torch.empty_like(tokens)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                gate, up = linear(tokens[part], self.gate_up[expert]).chunk(2, -1)
                outputs[part] = linear(self.activation(gate) * up, self.down[expert])
                start += count
        outputs = torch.empty_like(outputs).index_copy_(0, order, outputs)
        weighted = outputs.view(len(x_Td), self.top_k, -1) * weights_Tk[:, :, None]
        return weighted.sum(1).to(x_Td.dtype)


ROPES = ("default", "linear", "llama3", "yarn", "longrope")
"""RoPE types whose angles do not depend on the length of the text; "longrope" up to its original length."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary module, which may have frequencies per type of layer (Gemma 3)."""

    module: Any
    layer_types: tuple[str | None, ...]
    """Types of layers with frequencies of their own; one None where all layers have the same."""
    like: Tensor
    """A parameter: device and dtype of the tables."""

    @classmethod
    def of(cls, model: Any) -> "Rotary | None":
        """Return the rotary module of a model, or None if it has none.

        Raises:
            ValueError: The angles depend on the length of the text.
        """
        module = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
        if module is None:
            return None
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        for kind in kinds.values():
            if kind not in ROPES:
                raise ValueError(f"rope_type {kind!r} is not supported: it must be one of {', '.join(ROPES)}")
        return cls(module, tuple(kinds), next(model.parameters()))

    @property
    def max_positions(self) -> int | None:
        """Return how many positions keep their angles however long the text is; None if all do."""
        parameters = self.module.config.rope_parameters
        each = [parameters if kind is None else parameters[kind] for kind in self.layer_types]
        return min(
            (one["original_max_position_embeddings"] for one in each if one["rope_type"] == "longrope"),
            default=None,
        )

    def tables(self, num_positions: int) -> tuple[Tensor, ...]:
        """Return the rotations of the positions 0 .. num_positions - 1, for each type of layers.

        Cosines and sines are together, so that one call reads them: (positions, 2, 1, r).
        """
        found = []
        for kind in self.layer_types:
            cos, sin = self._table(kind, num_positions)
            half = sin.shape[-1] // 2
            sin = torch.cat((-sin[:, :half], sin[:, half:]), -1)
            found.append(torch.stack((cos, sin), 1).unsqueeze(2))
        return tuple(found)

    def of_layer(self, layer_type: str | None, head_dim: int) -> tuple[Rotate, int]:
        """Return how a layer of this type rotates, and the index of its table."""
        index = 0 if self.layer_types == (None,) else self.layer_types.index(layer_type)
        cos, _ = self._table(self.layer_types[index], 1)
        if cos.shape[-1] < head_dim:
            return apply_partial_rope, index
        return (apply_rope if cos.dtype == self.like.dtype else apply_float_rope), index

    def _table(self, layer_type: str | None, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (positions, r), as precise as the module's own."""
        positions = torch.arange(num_positions, device=self.like.device)[None]
        with torch.no_grad():
            more = {} if layer_type is None else {"layer_type": layer_type}
            cos, sin = self.module(self.like, positions, **more)
        exact = torch.promote_types(cos.dtype, self.like.dtype)
        return cos[0].to(exact), sin[0].to(exact)


def read_ropes(model: nn.Module, num_positions: int) -> tuple[Tensor, ...]:
    """Return the tables to which `Attention.rope` refers; none for a model without rotary positions.

    Positions that the model does not have rotate as its last one. Only drafted tokens after the last token of
    a text have such positions; they are never kept.
    """
    rotary = Rotary.of(model)
    if rotary is None:
        return ()
    count = min(num_positions, rotary.max_positions or num_positions)
    rows = torch.arange(num_positions, device=rotary.like.device).clamp_(max=count - 1)
    return tuple(table[rows] for table in rotary.tables(count))
