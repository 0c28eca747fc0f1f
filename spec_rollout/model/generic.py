"""Target of any `transformers` causal language model, through the model's own forward.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature size
(d, and d more for each tapped layer).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.host_to_device import to_device
from aedit.spec_rollout.model.model_forward import ModelForward
from aedit.spec_rollout.model.model_support import causal_model, position_limit
from aedit.spec_rollout.model.prefill import Segment
from aedit.spec_rollout.model.probe import Probe
from aedit.spec_rollout.model.row_passes import RowTokens
from aedit.spec_rollout.model.target_sizes import check_sizes
from aedit.spec_rollout.model.weight_update import PolicyWeights

PREFILL_TOKENS = 1024
"""Upper limit of the tokens of one forward pass of a prefill."""
PREFILL_PAIRS = 4 << 20
"""Upper limit of (token, slot) pairs of one row in one forward pass of a prefill."""


class GenericTarget:
    """Policy of an engine that runs the forward of the user's model.

    Hooks, adapters, biases, soft caps and attention of any kind take effect. A probe of a few tokens finds
    out how rows can share a forward pass; `path` says how. Changes of the parameters take effect at the next
    call. The tokens of a row have the slots 0, 1, ...; the caller passes the length of each row.
    """

    @classmethod
    def of(
        cls, model: nn.Module, *, rows: int, max_tokens: int, nodes: int = 16, taps: Sequence[int] = ()
    ) -> "GenericTarget":
        """Return a target for `rows` samples at a time; arguments as those of `Target.of`.

        Raises:
            ValueError: A size is too small, a tap does not exist, `max_tokens` exceeds the positions of the
                model, its parameters are sharded, or it is no causal language model of `transformers`.
        """
        check_sizes(rows, max_tokens, nodes)
        return cls(model, rows, max_tokens, nodes, taps)

    def __init__(self, model: nn.Module, rows: int, max_tokens: int, nodes: int, taps: Sequence[int]) -> None:
        self.model = causal_model(model)
        self.rows, self.max_tokens, self.nodes = rows, max_tokens, nodes
        self._policy = PolicyWeights(model)
        self._limit = position_limit(self.model)
        if max_tokens > self._limit:
            raise ValueError(
                f"max_tokens {max_tokens} exceeds the {self._limit} positions of {type(self.model).__name__}"
            )
        forward = ModelForward(self.model, taps)
        self._num_layers = forward.num_layers
        self._chosen = Probe(forward, self.dtype, self._limit).choose()
        self._check_forward_changes_nothing()
        # A draft that starts at a row's last token needs slots, too.
        self._passes = self._chosen.make(rows, max_tokens + nodes + 1)
        # The cache gets its shapes from a token.
        self.prefill([Segment(0, 0, [0])])
        self.release_row(0)

    @property
    def version(self) -> int:
        """Return the version of the policy that the weights are, 0 until `update_weights`."""
        return self._policy.version

    @property
    def path(self) -> str:
        """Return how rows are computed."""
        return f"generic ({self._passes.name})"

    @property
    def refused_passes(self) -> tuple[str, ...]:
        """Return why faster ways to compute rows are not used."""
        return self._chosen.refused

    @property
    def supports_trees(self) -> bool:
        """Return true if `step` accepts trees."""
        return self._passes.supports_trees

    @property
    def embedding(self) -> Tensor:
        """Return the model's embedding parameter itself, (V, d)."""
        return _weight(self.model.get_input_embeddings())  # type: ignore[operator]

    @property
    def head(self) -> Tensor:
        """Return the model's output head parameter itself, (V, d)."""
        return _weight(self.model.get_output_embeddings())  # type: ignore[operator]

    @property
    def hidden_size(self) -> int:
        """Return the hidden size d."""
        return self.embedding.shape[1]

    @property
    def feature_size(self) -> int:
        """Return the feature size f."""
        return self._chosen.feature_size

    @property
    def vocabulary(self) -> int:
        """Return the number of logits V."""
        return self._chosen.vocabulary

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self._num_layers

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the embedding, which features have, too."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the embedding."""
        return self.embedding.device

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values that are in use."""
        return self._passes.store.kv_bytes

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the upper limit of `kv_bytes`."""
        return self._passes.store.kv_bytes_reserved

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Compute tokens of several rows, each after the tokens that are cached in its row.

        Rows of similar length share a pass, and long segments are computed in chunks.

        Returns:
            Features of each segment, (T, f).

        Raises:
            ValueError: A row would exceed `max_tokens`.
        """
        for segment in segments:
            self._check_capacity(segment.start + len(segment.tokens))
        none = torch.empty(0, self.feature_size, dtype=self.dtype, device=self.device)
        parts, done = [[none] for _ in segments], [0] * len(segments)
        while True:
            left = [len(segment.tokens) - n for segment, n in zip(segments, done, strict=True)]
            order = sorted((i for i in range(len(left)) if left[i]), key=lambda i: -left[i])
            if not order:
                return [torch.cat(each) for each in parts]
            end = max(segments[i].start + len(segments[i].tokens) for i in order)
            q = min(left[order[0]], PREFILL_TOKENS, max(64, PREFILL_PAIRS // end))
            members = order[: max(1, PREFILL_TOKENS // q)]
            counts = [min(left[i], q) for i in members]
            features = self._compute([segments[i] for i in members], [done[i] for i in members], counts)
            for i, count, features_qf in zip(members, counts, features, strict=True):
                parts[i].append(features_qf[:count])
                done[i] += count

    def _compute(self, segments: Sequence[Segment], done: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Compute the next `counts` tokens of the segments; return features (B, q, f)."""
        q = max(counts)
        tokens = [
            [*segment.tokens[at : at + count], *[0] * (q - count)]
            for segment, at, count in zip(segments, done, counts, strict=True)
        ]
        starts = [segment.start + at for segment, at in zip(segments, done, strict=True)]
        tokens_Bq = to_device(tokens, self.device, torch.int64)
        new = RowTokens([segment.row for segment in segments], starts, tokens_Bq, counts)
        return self._passes.run(new, logits=False)[1].to(self.device, self.dtype)

    @torch.inference_mode()
    def step(
        self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each of the rows 0 .. B - 1; see `Target.step`.

        Raises:
            ValueError: The numbers of rows differ, a row would exceed `max_tokens`, or trees are not
                supported.
        """
        lengths = lengths_B.tolist() if isinstance(lengths_B, Tensor) else list(lengths_B)
        q = tokens_Bq.shape[1]
        if not 1 <= len(lengths) <= self.rows or tokens_Bq.shape[0] != len(lengths):
            raise ValueError(
                f"{tokens_Bq.shape[0]} rows of tokens and {len(lengths)} lengths: must be equally many, "
                f"at most {self.rows}"
            )
        self._check_capacity(max(lengths) + q)
        if parents_BN is not None and not self.supports_trees:
            raise ValueError(f"{type(self.model).__name__} cannot verify trees: use chains")
        # What follows from the last position on is never emitted.
        counts = [max(1, min(q, self._limit - length)) for length in lengths]
        new = RowTokens(range(len(lengths)), lengths, tokens_Bq, counts, parents_BN)
        logits, features = self._passes.run(new, logits=True)
        return logits.to(self.device), features.to(self.device, self.dtype)

    @torch.inference_mode()
    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move keys and values of the accepted nodes of a tree to consecutive slots. See `Target`."""
        lengths = lengths_B if isinstance(lengths_B, Tensor) else torch.tensor(lengths_B)
        self._passes.store.keep_path(lengths.to(path_Bm.device), path_Bm, counts_B)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self._passes.store.copy_row(source, target, length)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`, and release `source`."""
        self.copy_row(source, target, length)
        self.release_row(source)

    def release_row(self, row: int) -> None:
        """Declare that the keys and values of a row are not needed any more."""
        self._passes.store.release_row(row)

    @torch.inference_mode()
    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of what is kept of the tokens start .. length - 1 of a row; see the store."""
        return self._passes.store.read_kv(row, length, start)

    @torch.inference_mode()
    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write the result of `read_kv`, of this or another target, to a row from `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """
        self._passes.store.write_kv(row, kv, start)

    def check_weights(self, *, thorough: bool = False) -> None:
        """Raise RuntimeError if the weights have changed without notice; see `PolicyWeights.check`."""
        self._policy.check(thorough=thorough)

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` the policy's weights, all or none, and set the version; see `PolicyWeights.update`.

        The keys and values of the old weights are overwritten by zeros.
        """
        before = self.version
        self._policy.update(weights, version)
        if version != before:
            self._passes.store.clear()

    def _check_forward_changes_nothing(self) -> None:
        try:
            self._policy.check(thorough=True)
        except RuntimeError as error:
            name = type(self.model).__name__
            raise ValueError(f"the forward of {name} changes its own weights: {error}") from None

    def _check_capacity(self, end: int) -> None:
        slots = self.max_tokens + self.nodes + 1
        if end > slots:
            raise ValueError(
                f"{end} tokens in a row exceed max_tokens {self.max_tokens} and a draft: make the target "
                "with a larger max_tokens"
            )


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight
