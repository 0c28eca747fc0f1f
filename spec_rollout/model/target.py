"""Forward pass of the policy for an engine: cached rows, chains and trees of new tokens.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature size
(d, and d more for each tapped layer).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from aedit.spec_rollout.model.attention_mask import ancestors, relative_positions
from aedit.spec_rollout.model.cache import KVCache, KVMemory
from aedit.spec_rollout.model.families import read_weights
from aedit.spec_rollout.model.graphs import GraphCache, batch_bucket, context_bucket
from aedit.spec_rollout.model.kv_storage import KVExtent, KVSizes, kv_extents
from aedit.spec_rollout.model.layers import LayerAttend, read_ropes, rope_at, run_layer
from aedit.spec_rollout.model.model_support import check_sizes, check_taps, to_device
from aedit.spec_rollout.model.prefill import PrefillAttention, pass_limits, plan_passes
from aedit.spec_rollout.model.prefill import Segment as Segment
from aedit.spec_rollout.model.target_model import TargetModel
from aedit.spec_rollout.model.weight_update import PolicyWeights
from aedit.types import NonNegativeInt, PositiveInt, checked


@checked()
class Target(TargetModel):
    """A `transformers` model in the form that the engine needs.

    It computes with the model's own parameters: changes in place take effect at the next call. After any
    change, call `update_weights`; `check_weights` raises if that was forgotten. The tokens of a row have
    the cache slots 0, 1, ...; the caller passes the length of each row with every call.
    """

    def __init__(
        self,
        model: nn.Module,
        rows: PositiveInt,
        max_tokens: PositiveInt,
        nodes: NonNegativeInt,
        taps: Sequence[int],
        kv: KVMemory | None = None,
    ) -> None:
        self.weights = read_weights(model)
        limit = self.weights.max_positions
        if limit is not None and max_tokens > limit:
            raise ValueError(f"max_tokens {max_tokens} exceeds the {limit} positions of this model")
        self.model: Any = model
        self.rows, self.max_tokens, self.nodes = rows, max_tokens, nodes
        self.taps = tuple(taps)
        self._policy = PolicyWeights(model)
        # A draft that starts at a row's last token needs slots, too.
        slots = max_tokens + nodes + 1
        shape = self.weights.shape
        sizes = KVSizes(self.num_layers, rows, shape.num_kv_heads, slots, shape.head_dim)
        self.cache = KVCache(self.weights.attention, shape, (kv or KVMemory()).storage(sizes, self.embedding))
        self.ropes = read_ropes(model, slots)
        is_captured = self.device.type == "cuda" and self.weights.is_static
        self.graphs = GraphCache(self.device) if is_captured else None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        rows: int,
        max_tokens: int,
        nodes: int = 16,
        taps: Sequence[int] = (),
        kv: KVMemory | None = None,
    ) -> "Target":
        """Return a target for `rows` samples at a time.

        Args:
            model: Causal language model of `transformers`, of a class in `families.FAMILIES`.
            rows: Number of samples that are decoded at the same time.
            max_tokens: Upper limit of prompt and answer of one sample, in tokens.
            nodes: Upper limit of drafted tokens of one row in one step.
            taps: Layers whose outputs are appended to the last hidden state in the features (EAGLE-3's
                fusion, arXiv:2503.01840: 2, L // 2, L - 3).
            kv: Layout of keys and values in memory.

        Raises:
            ValueError: A size is too small, the memory for keys and values is not available, a tap does
                not exist, `max_tokens` exceeds the positions that the model has, or the model is not
                supported: another class, a value of its configuration that is not implemented, sharded or
                quantized parameters.
        """
        check_sizes(rows, max_tokens, nodes)
        target = cls(model, rows, max_tokens, nodes, taps, kv)
        check_taps(taps, target.num_layers)
        return target

    @property
    def path(self) -> str:
        """Return "fast": the forward pass of this package."""
        return "fast"

    @property
    def supports_trees(self) -> bool:
        """Return true: `step` accepts trees."""
        return True

    @property
    def embedding(self) -> Tensor:
        """Return the model's embedding parameter itself, (V, d)."""
        return self.weights.embedding

    @property
    def head(self) -> Tensor:
        """Return the model's output head parameter itself, (V, d)."""
        return self.weights.head

    @property
    def feature_size(self) -> int:
        """Return the feature size f: d, and d more for each tapped layer."""
        return self.hidden_size * (1 + len(self.taps))

    @property
    def vocabulary(self) -> int:
        """Return the vocabulary size V."""
        return self.head.shape[0]

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return len(self.weights.layers)

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that keys and values take now."""
        return self.cache.storage.kv_bytes

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the upper limit of `kv_bytes`: all rows at their greatest length, or the pool of blocks."""
        return self.cache.storage.kv_bytes_reserved

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Compute tokens of several rows; see `TargetModel.prefill`. `logits` takes the result."""
        rows = [segment.row for segment in segments]
        if len(set(rows)) != len(rows) or not all(0 <= row < self.rows for row in rows):
            raise ValueError(f"segments must be of different rows in 0 .. {self.rows - 1}, got {rows}")
        for segment in segments:
            self._check_capacity(segment.start + len(segment.tokens))
        parts: list[list[Tensor]] = [[] for _ in segments]
        for pieces in plan_passes(segments, *pass_limits(self.cache, 4 * self.hidden_size)):
            self.cache.reserve([(piece.row, piece.start, piece.end) for piece in pieces])
            attention = PrefillAttention(self.cache, pieces)
            tokens = list(chain.from_iterable(piece.tokens for piece in pieces))
            tokens_T = to_device(tokens, self.device, torch.int64)
            hidden_Tf = self._layers(tokens_T, attention.positions_T, attention.attend)
            for piece, hidden in zip(
                pieces, torch.split(hidden_Tf, [len(p.tokens) for p in pieces]), strict=True
            ):
                parts[piece.segment].append(hidden)
        empty = torch.empty(0, self.feature_size, dtype=self.dtype, device=self.device)
        return [torch.cat(part) if part else empty for part in parts]

    @property
    def has_logits(self) -> bool:
        """Return true: `logits` computes them."""
        return True

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., V) of features (..., f)."""
        return self.weights.logits(features)

    @torch.inference_mode()
    def step(
        self,
        tokens_Bq: Tensor,
        lengths_B: Sequence[int] | Tensor,
        parents_BN: Tensor | None = None,
        counts_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each row; see `TargetModel.step`."""
        lengths, q = self._step_lengths(tokens_Bq, lengths_B), tokens_Bq.shape[1]
        self.cache.reserve([(row, length, length + q) for row, length in enumerate(lengths)])
        if self.graphs is not None:
            return self._captured_step(tokens_Bq, lengths, parents_BN)
        extents = kv_extents(lengths, q, self.cache.min_saved_slots)
        needed_T = None
        if counts_B is not None and min(counts_B) < q:
            needed = [row * q + i for row, count in enumerate(counts_B) for i in range(count)]
            needed_T = self._lengths_tensor(needed)
        return self._forward(extents, tokens_Bq, self._lengths_tensor(lengths), parents_BN, needed_T)

    @torch.inference_mode()
    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move the accepted nodes of a tree to consecutive slots; see `TargetModel.keep_path`."""
        lengths = (
            lengths_B.to(self.device) if isinstance(lengths_B, Tensor) else self._lengths_tensor(lengths_B)
        )
        self.cache.keep_path(lengths, path_Bm, counts_B)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self.cache.storage.copy(source, target, length)

    def release_row(self, row: int) -> None:
        """Give back the memory of a row, whose keys and values are not needed any more."""
        self.cache.storage.release(row)

    @torch.inference_mode()
    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of the keys and values of the tokens start .. length - 1 of a row.

        Their shape is (layers, 2, K, length - start, h).
        """
        return self.cache.read_kv(row, length, start)

    @torch.inference_mode()
    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write keys and values from `read_kv`, of this or another target, to a row from `start` on.

        Raises:
            ValueError: They are of another shape or dtype, or too long.
        """
        self.cache.write_kv(row, kv, start)

    def pack(self, most_bytes: int) -> None:
        """Copy weights into the layout in which products of several rows are fastest; see `TargetModel`."""
        self.weights.pack(most_bytes)

    def moves_to_huge_pages(self) -> Iterator[None]:
        """Move packed copies to huge pages, a part at a time; see `TargetModel`."""
        return self.weights.moves_to_huge_pages()

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` the policy's weights, all or none; see `TargetModel.update_weights`."""
        moved = self._policy.update(weights, version)
        self.weights = read_weights(self.model)
        if moved:
            self.ropes = read_ropes(self.model, self.cache.slots)  # a cast there and back has rounded them
            if self.graphs is not None:
                self.graphs.clear()  # captured kernels would read the old addresses

    def _forward(
        self,
        extents: list[KVExtent],
        tokens_Bq: Tensor,
        lengths_B: Tensor,
        parents_BN: Tensor | None,
        needed_T: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run the forward pass with tensor operations only, so that a CUDA graph can capture it.

        needed_T: int64, indices of the tokens to compute, of the B * q tokens; None for all. The keys and
        values of the others are 0, and so are their results.
        """
        num_rows, q = tokens_Bq.shape
        if parents_BN is None:
            positions = lengths_B[:, None] + torch.arange(q, device=lengths_B.device)
            is_ancestor = None
        else:
            is_ancestor = ancestors(parents_BN)
            positions = lengths_B[:, None] + relative_positions(is_ancestor)
        past = self.cache.prepare(lengths_B, q, extents, is_ancestor)
        tokens_T, positions_T = tokens_Bq.reshape(-1), positions.reshape(-1)
        if needed_T is None:
            hidden_Tf = self._layers(tokens_T, positions_T, past.attend)
            logits_TV = self.logits(hidden_Tf)
        else:
            attend = partial(_attend_padded, past.attend, needed_T, len(tokens_T))
            hidden_Tf = self._layers(tokens_T[needed_T], positions_T[needed_T], attend)
            logits_TV = _padded(self.logits(hidden_Tf), needed_T, len(tokens_T))
            hidden_Tf = _padded(hidden_Tf, needed_T, len(tokens_T))
        return logits_TV.view(num_rows, q, -1), hidden_Tf.view(num_rows, q, -1)

    def _layers(self, tokens_T: Tensor, positions_T: Tensor, attend: LayerAttend) -> Tensor:
        """Return hidden states after the final norm, followed by those of the taps, (T, f)."""
        x = self.weights.embed(tokens_T, positions_T)
        ropes = tuple(rope_at(table, positions_T) for table in self.ropes)
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            x = run_layer(x, layer, ropes, partial(attend, index))
            if index in self.taps:
                tapped[index] = x
        last = self.weights.norm(x)
        return last if not tapped else torch.cat([last, *(tapped[tap] for tap in self.taps)], -1)

    def _captured_step(
        self, tokens_Bq: Tensor, lengths: list[int], parents_BN: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the step as a captured graph of a slightly larger number of rows and slots.

        The padding rows write to slots that no row reads: those after the last token.
        """
        num_rows, q = tokens_Bq.shape
        bucket = batch_bucket(num_rows, self.rows)
        context = context_bucket(max(lengths) + q, self.cache.slots)
        tokens = F.pad(tokens_Bq, (0, 0, 0, bucket - num_rows))
        inputs = [tokens, self._lengths_tensor(lengths + [self.cache.slots - q] * (bucket - num_rows))]
        if parents_BN is not None:
            inputs.append(F.pad(parents_BN, (0, 0, 0, bucket - num_rows), value=-1))
        assert self.graphs is not None
        key = (bucket, q, context, parents_BN is None)
        extents = [KVExtent(0, bucket, context)]

        def run(tokens: Tensor, lengths: Tensor, parents: Tensor | None = None) -> tuple[Tensor, Tensor]:
            return self._forward(extents, tokens, lengths, parents)

        logits, hidden = self.graphs.run(key, run, *inputs)
        return logits[:num_rows], hidden[:num_rows].clone()

    def _lengths_tensor(self, numbers: Sequence[int]) -> Tensor:
        """Return the numbers as a tensor on the device, without a synchronization."""
        return to_device(numbers, self.device, torch.int64)


def _attend_padded(
    attend: LayerAttend, needed_T: Tensor, num_tokens: int, layer: int, *qkv: Tensor
) -> Tensor:
    """Return the attention output of some of `num_tokens` tokens; `attend` gets all of them."""
    q_THh, k_TKh, v_TKh = (_padded(x, needed_T, num_tokens) for x in qkv)
    return attend(layer, q_THh, k_TKh, v_TKh).index_select(0, needed_T)


def _padded(x: Tensor, needed_T: Tensor, num_tokens: int) -> Tensor:
    """Return x with `num_tokens` entries: its own at these indices, zeros elsewhere."""
    return x.new_zeros(num_tokens, *x.shape[1:]).index_copy_(0, needed_T, x)
