"""The policy's forward pass for an engine: rows of a cache, chains and trees of new tokens.

Shapes: B live rows, q new tokens of each, T tokens of one row, V vocabulary, d hidden size, f feature size:
d, and d more for each tapped layer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aedit.spec_rollout.model.attention_mask import ancestors, relative_positions
from aedit.spec_rollout.model.cache import KVCache, StepAttention
from aedit.spec_rollout.model.families import read_rope, read_weights
from aedit.spec_rollout.model.graphs import GraphCache, batch_bucket, context_bucket
from aedit.spec_rollout.model.host_to_device import to_device
from aedit.spec_rollout.model.kv_extent import KVExtent, kv_extents
from aedit.spec_rollout.model.layers import Rope, rms_norm, run_layer
from aedit.spec_rollout.model.weight_update import copy_weights

PREFILL_SCORES_BYTES = 32 << 20
"""A long prompt is computed in pieces whose attention scores take at most so much."""


class Target:
    """A `transformers` model as an engine needs it. It computes with the model's own parameters: what an
    optimizer or `adopt` writes into them is seen by the next call.

    A row's tokens have the slots 0, 1, ... of its cache, and a call says how many are there already: the
    target itself does not count.
    """

    def __init__(self, model: nn.Module, rows: int, max_tokens: int, nodes: int, taps: Sequence[int]) -> None:
        self.weights = read_weights(model)
        self.model, self.rows, self.max_tokens, self.nodes = model, rows, max_tokens, nodes
        self.taps = tuple(taps)
        self.version = 0
        # A draft that begins on a row's last token still has slots.
        slots = max_tokens + nodes + 1
        self.cache = KVCache(self.num_layers, self.weights.shape, rows, slots, self.embedding)
        self.rope = read_rope(model, slots)
        self.graphs = GraphCache(self.device) if self.device.type == "cuda" else None

    @classmethod
    def of(
        cls, model: nn.Module, *, rows: int, max_tokens: int, nodes: int = 16, taps: Sequence[int] = ()
    ) -> "Target":
        """For `rows` samples at a time of up to `max_tokens` tokens, prompt and answer; `nodes` is the most
        that are drafted at once. taps: layers whose outputs follow the last hidden state in `hidden`
        (EAGLE-3's fusion, arXiv 2503.01840: 2, L // 2, L - 3).

        ValueError that names what is not supported: other families than Llama, Qwen2 and Qwen3, sliding
        windows, experts, rotary positions that change with the length, sharded or quantised parameters.
        """
        if rows < 1 or max_tokens < 2 or nodes < 0:
            raise ValueError(f"rows {rows}, max_tokens {max_tokens}, nodes {nodes}: at least 1, 2 and 0")
        target = cls(model, rows, max_tokens, nodes, taps)
        if wrong := [tap for tap in taps if not 0 <= tap < target.num_layers]:
            raise ValueError(f"taps {wrong}: this model has the layers 0 to {target.num_layers - 1}")
        return target

    @property
    def embedding(self) -> Tensor:
        """(V, d): the model's parameter itself."""
        return self.weights.embedding

    @property
    def head(self) -> Tensor:
        """(V, d): the model's parameter itself."""
        return self.weights.head

    @property
    def hidden_size(self) -> int:
        return self.embedding.shape[1]

    @property
    def feature_size(self) -> int:
        return self.hidden_size * (1 + len(self.taps))

    @property
    def vocabulary(self) -> int:
        return self.head.shape[0]

    @property
    def num_layers(self) -> int:
        return len(self.weights.layers)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @torch.inference_mode()
    def prefill(self, tokens_T: Tensor, row: int, start: int = 0) -> Tensor:
        """Compute tokens of one row from position `start` on, after what the row has already. Returns their
        hidden states after the final norm, (T, f); `logits` makes logits of those that need them."""
        self._check_capacity(start + len(tokens_T))
        parts, at = [torch.empty(0, self.feature_size, dtype=self.dtype, device=self.device)], start
        while at < start + len(tokens_T):
            count = min(start + len(tokens_T) - at, self._chunk_size(at))
            parts.append(self._prefill_chunk(tokens_T[at - start : at - start + count], row, at))
            at += count
        return torch.cat(parts)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) of hidden states (..., f)."""
        return F.linear(hidden[..., : self.hidden_size], self.head)

    @torch.inference_mode()
    def step(
        self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each of the rows 0 .. B - 1, after the lengths_B tokens they have; returns
        logits (B, q, V) and hidden states after the final norm (B, q, f).

        The first token of a row is the root, at position lengths_B. Of a chain each token follows the one
        before. parents_BN (N = q - 1; -1 is the root) makes a tree: a node sees the row's past, the root and
        its own ancestors, and its position is its depth after the root. Keys and values go to the slots
        lengths_B .. lengths_B + q - 1 (after a tree, `keep` puts them in order).

        Lengths are best given as numbers: of a tensor on a GPU this has to wait. There, logits are good until
        the next step.
        """
        lengths = lengths_B.tolist() if isinstance(lengths_B, Tensor) else list(lengths_B)
        q = tokens_Bq.shape[1]
        if not 1 <= len(lengths) <= self.rows or tokens_Bq.shape[0] != len(lengths):
            raise ValueError(f"{tokens_Bq.shape[0]} rows of tokens, {len(lengths)} lengths, {self.rows} rows")
        self._check_capacity(max(lengths) + q)
        if self.graphs is not None:
            return self._captured_step(tokens_Bq, lengths, parents_BN)
        extents = kv_extents(lengths, q, self.cache.min_saved_slots)
        return self._forward(extents, tokens_Bq, self._lengths_tensor(lengths), parents_BN)

    @torch.inference_mode()
    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """After a step over a tree: the accepted nodes' keys and values follow one another after lengths_B,
        the lengths of before that step. path_Bm: int64, which of the q tokens, the root (0) first; counts_B:
        how many after the root. (A chain's are in order.)"""
        lengths = (
            lengths_B.to(self.device) if isinstance(lengths_B, Tensor) else self._lengths_tensor(lengths_B)
        )
        self.cache.keep_path(lengths, path_Bm, counts_B)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """The first `length` tokens of row `target` become those of row `source`."""
        self.cache.copy_row(source, target, length)

    move_row = copy_row

    @torch.inference_mode()
    def read_kv(self, row: int, length: int) -> Tensor:
        """A copy of the keys and values of a row's first tokens, (layers, 2, K, length, h)."""
        return self.cache.read_kv(row, length)

    @torch.inference_mode()
    def write_kv(self, row: int, kv: Tensor) -> None:
        """Put what `read_kv` gave, here or on another target of the same model, into a row. ValueError if it
        does not fit."""
        self.cache.write_kv(row, kv)

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Put new weights, named as in `model.state_dict()`, into the model's parameters, all or none;
        nothing is copied where they are the parameters themselves. What rows hold was made by the old ones:
        whoever wants it to be the new policy's prefills again. ValueError names a tensor that does not fit.
        """
        copy_weights(self.model, weights)
        self.version = version

    def _forward(
        self, extents: list[KVExtent], tokens_Bq: Tensor, lengths_B: Tensor, parents_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Nothing but tensor operations: what a CUDA graph records."""
        num_rows, q = tokens_Bq.shape
        if parents_BN is None:
            positions = lengths_B[:, None] + torch.arange(q, device=lengths_B.device)
            is_ancestor = None
        else:
            is_ancestor = ancestors(parents_BN)
            positions = lengths_B[:, None] + relative_positions(is_ancestor)
        past = self.cache.prepare(lengths_B, q, extents, is_ancestor)
        hidden_Tf = self._layers(tokens_Bq.reshape(-1), self.rope.at(positions), past)
        logits = self.logits(hidden_Tf)
        return logits.view(num_rows, q, -1), hidden_Tf.view(num_rows, q, -1)

    def _layers(self, tokens_T: Tensor, rope: Rope, past: StepAttention) -> Tensor:
        """The hidden states after the final norm, and after them those of the taps: (T, f)."""
        shape = self.weights.shape
        x = F.embedding(tokens_T, self.embedding)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            x = run_layer(x, layer, shape, rope, partial(past.attend, index))
            if index in self.taps:
                tapped[index] = x
        last = rms_norm(x, self.weights.norm, shape)
        return last if not tapped else torch.cat([last, *(tapped[tap] for tap in self.taps)], -1)

    def _captured_step(
        self, tokens_Bq: Tensor, lengths: list[int], parents_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The step as a recorded graph, for a number of rows and a context that are a little larger. Rows
        that do not live write where no row ever reads: after its last token."""
        num_rows, q = tokens_Bq.shape
        bucket = batch_bucket(num_rows, self.rows)
        context = context_bucket(max(lengths) + q, self.cache.slots)
        tokens = F.pad(tokens_Bq, (0, 0, 0, bucket - num_rows))
        inputs = [tokens, self._lengths_tensor(lengths + [self.cache.slots - q] * (bucket - num_rows))]
        if parents_BN is not None:
            inputs.append(F.pad(parents_BN, (0, 0, 0, bucket - num_rows), value=-1))
        assert self.graphs is not None
        key = (bucket, q, context, parents_BN is None)
        logits, hidden = self.graphs.run(key, self._recorded(bucket, context, parents_BN is None), *inputs)
        return logits[:num_rows], hidden[:num_rows].clone()

    def _recorded(self, rows: int, context: int, is_chain: bool) -> Callable[..., tuple[Tensor, Tensor]]:
        extents = [KVExtent(0, rows, context)]
        if is_chain:
            return lambda tokens, lengths: self._forward(extents, tokens, lengths, None)
        return lambda tokens, lengths, parents: self._forward(extents, tokens, lengths, parents)

    def _prefill_chunk(self, tokens_T: Tensor, row: int, start: int) -> Tensor:
        count = len(tokens_T)
        lengths = torch.full((1,), start, device=self.device)
        past = self.cache.prepare(lengths, count, [KVExtent(row, 1, start + count, needs_mask=count > 1)])
        positions = torch.arange(start, start + count, device=self.device)
        return self._layers(tokens_T, self.rope.at(positions), past)

    def _chunk_size(self, start: int) -> int:
        """How many tokens from `start` on are computed at once."""
        row_bytes = self.weights.shape.num_heads * self.embedding.element_size()
        most = PREFILL_SCORES_BYTES // row_bytes  # new tokens x tokens they see
        return max(16, int((start * start / 4 + most) ** 0.5 - start / 2))

    def _check_capacity(self, end: int) -> None:
        if end > self.cache.slots:
            raise ValueError(f"{end} tokens in a row: it has room for {self.max_tokens} and a draft")

    def _lengths_tensor(self, numbers: Sequence[int]) -> Tensor:
        """On the device, without waiting for it."""
        return to_device(numbers, self.device, torch.int64)
