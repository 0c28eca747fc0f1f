"""Inference of the draft layer with a KV cache per row, in few kernel calls per drafted token.

`DraftLayer` defines the computation and is used for training; this module returns the same numbers. Its
weights are copies in which norm weights, scales and the embedding's gain are folded into the matrices that
follow them. Embedding and head are the policy's tensors themselves, so that optimizer steps on them take
effect immediately.

Shapes: P pairs, B rows, F nodes of each row that are computed together, d hidden size, w feature size, C
slots that are read, D draft vocabulary. A row's slots hold its pairs by position of the feature, then drafted
pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.drafters.draft_layer import DraftLayer, Eagle3Layer, rotations
from aedit.spec_rollout.model import PagedTensor, linear

Pairs = tuple[Tensor, Tensor]
"""Layer inputs (P, d) and queries (P, q) of pairs whose keys and values are in the cache."""


class DraftRunner:
    """Weights, cache and tables of one draft layer, in the dtype and on the device of the embedding."""

    def __init__(self, layer: DraftLayer, embedding: Tensor, head: Tensor, *, rows: int, slots: int) -> None:
        self.shape, self.rows, self.slots = layer.shape, rows, slots
        self._draft_tokens = layer.draft_tokens
        self.embedding, self.head = embedding.detach(), head.detach()
        dtype, device = embedding.dtype, embedding.device
        exact = torch.complex128 if dtype == torch.float64 else torch.complex64
        with torch.inference_mode(False):  # inference tensors could not be written outside of that mode
            self._memory = PagedTensor((rows * slots, layer.shape.kv_size), dtype, device)
            self.cache = self._memory.tensor
            self._rotations = (
                rotations(layer.shape, torch.arange(slots, device=device)).to(exact).unsqueeze(1)
            )
            self._row_offsets = torch.arange(rows, device=device) * slots
            self._epsilon = torch.tensor(layer.shape.norm_epsilon, dtype=dtype, device=device)
            folded = self._folded(layer)
            self._weights = {k: v.to(device, dtype, copy=True) for k, v in folded.items()}
            if self._draft_tokens is not None:
                self._draft_tokens = self._draft_tokens.to(device)
        self._is_lean = device.type == "cpu" and dtype in (torch.float32, torch.float64)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of cache, tables and weights, with all rows at their greatest length."""
        tensors = [self.cache, self._rotations, *self._weights.values()]
        return sum(tensor.numel() * tensor.itemsize for tensor in tensors)

    def replace(self, layer: DraftLayer) -> None:
        """Use the weights of `layer` from now on.

        Raises:
            ValueError: The layer has another shape.
        """
        if layer.shape != self.shape:
            raise ValueError("the new draft layer has another shape: make a new drafter for it")
        for name, value in self._folded(layer).items():
            self._weights[name].copy_(value)

    def read_policy(self, embedding: Tensor, head: Tensor) -> bool:
        """Use these tensors from now on; return whether they are elsewhere in memory than the last ones."""
        before = self.embedding.data_ptr(), self.head.data_ptr()
        self.embedding, self.head = embedding.detach(), head.detach()
        return before != (embedding.data_ptr(), head.data_ptr())

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` slots of row `source` to row `target`."""
        rows = self.cache.view(self.rows, self.slots, -1)
        rows[target, :length] = rows[source, :length]

    def release(self, row: int) -> None:
        """Give back the memory of a row on a CPU. What was written to it is lost."""
        row_bytes = self.slots * self.cache.shape[1] * self.cache.itemsize
        self._memory.discard(row * row_bytes, (row + 1) * row_bytes)

    def write_pairs(
        self, tokens_P: Tensor, features_Pw: Tensor, slots_P: Tensor, positions_P: Tensor
    ) -> Pairs:
        """Compute the layer inputs of pairs and write their keys and values to the cache.

        Args:
            tokens_P: int64, tokens after the features.
            features_Pw: Features; w is the feature size, or d for predictions.
            slots_P: Slots in the flat cache, row * slots + slot.
            positions_P: Positions of the features.
        """
        weights, (q, k) = self._weights, self.shape.split
        fused, attention_inputs = self._inputs(F.embedding(tokens_P, self.embedding), features_Pw)
        qkv = linear(attention_inputs, weights["qkv"], weights.get("bias"))
        heads = qkv[:, : q + k].view(fused.shape[0], -1, self.shape.head_size)
        if (norm := weights.get("qk_norm")) is not None:
            heads.copy_(self._normed(heads) * norm)
        rotation = self._rotations.index_select(0, positions_P)
        if heads.dtype in (torch.float32, torch.float64):
            torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2)).mul_(rotation)
        else:
            pairs = torch.view_as_complex(heads.float().view(*heads.shape[:2], -1, 2)) * rotation
            heads.copy_(torch.view_as_real(pairs).flatten(-2))
        self.cache.index_copy_(0, slots_P, qkv[:, q:])
        return fused, qkv[:, :q]

    def row_offsets(self, rows: int) -> Tensor:
        """Return the first flat slot of each of the rows 0 .. rows - 1."""
        return self._row_offsets[:rows]

    def kv_views(self, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """Return keys and values, (rows, K, context, e), of the rows 0 .. rows - 1 as views."""
        sizes = (self.rows, self.slots, 2, self.shape.num_kv_heads, self.shape.head_size)
        keys, values = self.cache.view(sizes)[:rows, :context].permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def predict(self, pairs: Pairs, keys: Tensor, values: Tensor, mask_BFC: Tensor | None) -> Tensor:
        """Return the predicted features, (P, d), P = B * F.

        Args:
            pairs: Pairs to predict from.
            keys: Result of `kv_views`.
            values: Result of `kv_views`.
            mask_BFC: 0 where a node attends, -inf elsewhere; None if it attends to all slots.
        """
        return self._normed(self._after(pairs, keys, values, mask_BFC)).mul_(self._weights["final_norm"])

    def _after(self, pairs: Pairs, keys: Tensor, values: Tensor, mask_BFC: Tensor | None) -> Tensor:
        """Return the sum of the residual path after attention and feed-forward part."""
        fused_Pd, queries_Pq = pairs
        weights, rows, num_pairs = self._weights, keys.shape[0], fused_Pd.shape[0]
        mixed = self._attend(queries_Pq, num_pairs // rows, (keys, values), mask_BFC)
        x = torch.addmm(fused_Pd, mixed.reshape(num_pairs, -1), weights["attended"])
        gate, up = linear(self._normed(x), weights["gate_up"]).chunk(2, -1)
        return torch.addmm(x, F.silu(gate).mul_(up), weights["down"])

    def _inputs(self, embedded_Pd: Tensor, features_Pw: Tensor) -> Pairs:
        """Return what the residual path begins with, (P, d), and what attention reads."""
        if features_Pw.shape[-1] != self.shape.hidden_size:
            features_Pw = linear(features_Pw, self._weights["reduce"])
        fused = linear(torch.cat([embedded_Pd, features_Pw], -1), self._weights["fuse"])
        return fused, self._normed(fused)

    def _attend(
        self, queries: Tensor, nodes: int, seen: tuple[Tensor, Tensor], mask_BFC: Tensor | None
    ) -> Tensor:
        """Return the attention output.

        Heads that share keys form one product, so that no key is read or copied twice.
        """
        rows, kinds, size = seen[0].shape[0], self.shape.num_kv_heads, self.shape.head_size
        if nodes == 1:
            mask = None if mask_BFC is None else mask_BFC.unsqueeze(1)
            return F.scaled_dot_product_attention(queries.view(rows, kinds, -1, size), *seen, mask, scale=1.0)
        apart = queries.view(rows, nodes, kinds, -1, size).transpose(1, 2)
        group = apart.shape[3]
        mask = None if mask_BFC is None else mask_BFC.repeat_interleave(group, 1).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(apart.flatten(2, 3), *seen, mask, scale=1.0)
        return mixed.view(rows, kinds, nodes, group, size).transpose(1, 2)

    def logits(self, features_Pd: Tensor) -> Tensor:
        """Return the logits of predicted features, (P, D)."""
        return linear(features_Pd, self.head)

    def tokens(self, indices: Tensor) -> Tensor:
        """Return the tokens with these indices in the draft vocabulary."""
        return indices if self._draft_tokens is None else self._draft_tokens[indices]

    def narrow(self, values: Tensor) -> Tensor:
        """Return the values of the draft vocabulary, (..., D), of those of all tokens, (..., V)."""
        return values if self._draft_tokens is None else values.index_select(-1, self._draft_tokens)

    def widen(self, logq: Tensor) -> Tensor:
        """Return log-probabilities of all tokens, (..., V), of those of the draft vocabulary, (..., D)."""
        if self._draft_tokens is None:
            return logq
        wide = logq.new_full((*logq.shape[:-1], self.shape.vocabulary), -torch.inf)
        return wide.index_copy_(-1, self._draft_tokens, logq)

    @staticmethod
    def _folded(layer: DraftLayer) -> dict[str, Tensor]:
        """Return the layer's weights with norms, gain and scale folded into the matrices after them."""
        with torch.no_grad():
            gains = torch.cat([layer.gain, torch.ones_like(layer.gain)])
            weights = _common(layer, layer.input_norm) | {
                "fuse": layer.fuse.weight * gains,
                "final_norm": layer.final_norm,
            }
            if layer.reduce is not None:
                weights["reduce"] = layer.reduce.weight
            return {name: weight.detach() for name, weight in weights.items()}

    def _normed(self, x: Tensor) -> Tensor:
        if not self._is_lean:
            return F.rms_norm(x, x.shape[-1:], None, self.shape.norm_epsilon)
        # Takes a third of the time of F.rms_norm, which on the CPU runs eight kernels instead of a fused one.
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x * torch.addcmul(self._epsilon, norm, norm, value=1 / x.shape[-1]).rsqrt_()


class Eagle3Runner(DraftRunner):
    """The same for a layer of EAGLE-3's form; `fused` is the begin of the residual path."""

    def predict(self, pairs: Pairs, keys: Tensor, values: Tensor, mask_BFC: Tensor | None) -> Tensor:
        """Return the predicted features, (P, d); see `DraftRunner.predict`."""
        return self._after(pairs, keys, values, mask_BFC)

    def logits(self, features_Pd: Tensor) -> Tensor:
        """Return the logits of predicted features, (P, D)."""
        return linear(self._normed(features_Pd), self._weights["output"])

    def _inputs(self, embedded_Pd: Tensor, features_Pw: Tensor) -> Pairs:
        weights, d = self._weights, self.shape.hidden_size
        if features_Pw.shape[-1] != d:
            features_Pw = linear(features_Pw[:, d:], weights["reduce"])
        normed = self._normed(features_Pw)
        scale = weights.get("residual_scale")
        residual = features_Pw if scale is None else normed * scale
        return residual, torch.cat([self._normed(embedded_Pd), normed], -1)

    @staticmethod
    def _folded(layer: DraftLayer) -> dict[str, Tensor]:
        assert isinstance(layer, Eagle3Layer)
        with torch.no_grad():
            weights = _common(layer, torch.cat([layer.gain, layer.feature_norm])) | {
                "reduce": layer.reduce.weight,
                "output": layer.output.weight * layer.final_norm,
            }
            if layer.shape.residual_after_norm:
                weights["residual_scale"] = layer.feature_norm
            return {name: weight.detach() for name, weight in weights.items()}


def runner_of(layer: DraftLayer, embedding: Tensor, head: Tensor, *, rows: int, slots: int) -> DraftRunner:
    """Return the runner of this kind of layer."""
    kind = Eagle3Runner if isinstance(layer, Eagle3Layer) else DraftRunner
    return kind(layer, embedding, head, rows=rows, slots=slots)


def _common(layer: DraftLayer, input_norm: Tensor) -> dict[str, Tensor]:
    """Return the folded weights of attention and feed-forward part.

    Matrices that are multiplied from the right are transposed.
    """
    shape, (q, k) = layer.shape, layer.shape.split
    scale = torch.ones(q + 2 * k, dtype=layer.gain.dtype, device=layer.gain.device)
    if not shape.has_qk_norm:
        scale[:q] = shape.head_size**-0.5
    weights = {
        "qkv": layer.qkv.weight * input_norm * scale[:, None],
        "attended": layer.attended.weight.t(),
        "gate_up": layer.gate_up.weight * layer.middle_norm,
        "down": layer.down.weight.t(),
    }
    if shape.has_qkv_bias:
        weights["bias"] = layer.qkv.bias * scale
    if layer.qk_norm is not None:
        queries, keys = layer.qk_norm.unbind(0)
        kinds = [queries * shape.head_size**-0.5] * shape.num_heads + [keys] * shape.num_kv_heads
        weights["qk_norm"] = torch.stack(kinds)
    return weights
