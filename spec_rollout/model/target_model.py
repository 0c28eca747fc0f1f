"""Interface of the policy of an engine, and the parts that its implementations share.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature
size.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from aedit.spec_rollout.model.prefill import Segment
from aedit.spec_rollout.model.weight_update import PolicyWeights


class TargetModel(Protocol):
    """The policy of an engine: forward passes over cached rows.

    The tokens of a row have the cache slots 0, 1, ...; the caller passes the length of each row.
    """

    model: Any
    """The `transformers` model."""
    rows: int
    """Number of samples that are decoded at the same time."""
    max_tokens: int
    """Upper limit of prompt and answer of one sample, in tokens."""
    nodes: int
    """Upper limit of drafted tokens of one row in one step."""
    _policy: PolicyWeights

    @property
    def path(self) -> str:
        """Return which forward pass is used."""

    @property
    def supports_trees(self) -> bool:
        """Return true if `step` accepts trees."""

    @property
    def embedding(self) -> Tensor:
        """Return the embedding parameter itself, (V, d)."""

    @property
    def head(self) -> Tensor:
        """Return the parameter of the output head itself, (V, d)."""

    @property
    def feature_size(self) -> int:
        """Return the feature size f: d, and d more for each tapped layer."""

    @property
    def vocabulary(self) -> int:
        """Return the number of logits V."""

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""

    @property
    def has_logits(self) -> bool:
        """Return whether `logits` computes the policy's logits of features; else only `step` does."""
        return False

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., V) of features (..., f), as results of `prefill`.

        Raises:
            NotImplementedError: `has_logits` is false.
        """
        raise NotImplementedError(f"{type(self).__name__} computes logits in `step` alone")

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that keys and values take now."""

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the upper limit of `kv_bytes`."""

    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Compute tokens of several rows, each after the tokens that are cached in its row.

        Args:
            segments: Tokens, each of another row.

        Returns:
            For each segment, hidden states after the final norm, with tapped layers, (T, f).

        Raises:
            ValueError: A row does not exist or occurs twice, or would exceed `max_tokens`.
        """

    def step(
        self,
        tokens_Bq: Tensor,
        lengths_B: Sequence[int] | Tensor,
        parents_BN: Tensor | None = None,
        counts_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each of the rows 0 .. B - 1.

        The first token of a row is the root, at position lengths_B. In a chain each token follows the one
        before. In a tree a node attends to the cached tokens, the root and its own ancestors, and its
        position is its depth after the root. Keys and values are written to the slots lengths_B .. lengths_B
        + q - 1; after a tree, call `keep_path`.

        Args:
            tokens_Bq: int64, the new tokens.
            lengths_B: Number of cached tokens of each row. Pass numbers: a GPU tensor forces a
                synchronization.
            parents_BN: int64, parent of each node of a tree (N = q - 1; -1 is the root); None for a chain.
            counts_B: Number of tokens of each row whose results are needed, from 1 to q: the first ones. None
                for all. The others may be left out of the pass.

        Returns:
            Logits (B, q, V) and hidden states after the final norm (B, q, f). Those beyond `counts_B` are
            arbitrary. On CUDA the logits are valid until the next step.

        Raises:
            ValueError: The numbers of rows differ, a row would exceed `max_tokens`, or trees are not
                supported.
        """

    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move keys and values of the accepted nodes of a tree to consecutive slots.

        Call it after `step` over a tree. The nodes of a chain are in order already.

        Args:
            lengths_B: Lengths of the rows before that step.
            path_Bm: int64, indices of accepted tokens among the q tokens, the root (0) first.
            counts_B: Number of accepted tokens of each row after the root.
        """

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""

    def release_row(self, row: int) -> None:
        """Free the memory of a row whose sample has ended."""

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of slots start .. length - 1 of a row. Dimension 3 of 5 is the token."""

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write what `read_kv` returned to a row, from slot `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` the policy's weights, all or none, and set the policy version.

        The cache still holds keys and values of the old weights; a caller that needs those of the new weights
        must prefill again.

        Args:
            weights: See `PolicyWeights.update`.
            version: Version of the policy that these weights are.

        Raises:
            ValueError: A tensor does not fit, or the version is that of other weights; nothing has changed.
            RuntimeError: A rank was lost while tensors were gathered.
        """

    def pack(self, most_bytes: int) -> None:
        """Make passes faster by a copy of the weights, until the next `update_weights`.

        It takes as long as five to ten passes. On a CPU, large weights are multiplied in a layout that oneDNN
        else makes anew in each product: in fp32 of several rows, in bf16 of any. Nothing is done elsewhere,
        or if the copies would take more than `most_bytes`.
        """

    def moves_to_huge_pages(self) -> Iterator[None]:
        """Move the copies of `pack` to huge pages, where passes of several rows take a twentieth less time.

        Each step of the iterator moves a part, in a fraction of a pass; all together take as long as ten.
        There is none if there is no copy. End it before the next `update_weights`.
        """

    @property
    def version(self) -> int:
        """Return the version of the policy that the weights are, 0 until `update_weights`."""
        return self._policy.version

    @property
    def hidden_size(self) -> int:
        """Return the hidden size d."""
        return self.embedding.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the embedding, which features have, too."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the embedding."""
        return self.embedding.device

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`, and release `source`."""
        if source != target:
            self.copy_row(source, target, length)
            self.release_row(source)

    def check_weights(self, *, thorough: bool = False) -> None:
        """Raise RuntimeError if the weights have changed since they became `version`.

        Args:
            thorough: Look closer, which takes longer; see `WeightWatch.changed`.
        """
        self._policy.check(thorough=thorough)

    def _check_capacity(self, end: int) -> None:
        # A draft that starts at a row's last token needs slots, too.
        if end > self.max_tokens + self.nodes + 1:
            raise ValueError(
                f"{end} tokens in a row exceed max_tokens {self.max_tokens} and a draft: make the target "
                "with a larger max_tokens"
            )

    def _step_lengths(self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor) -> list[int]:
        """Return the lengths of the rows of a step, checked."""
        lengths = lengths_B.tolist() if isinstance(lengths_B, Tensor) else list(lengths_B)
        if not 1 <= len(lengths) <= self.rows or tokens_Bq.shape[0] != len(lengths):
            raise ValueError(
                f"{tokens_Bq.shape[0]} rows of tokens and {len(lengths)} lengths: must be equally many, "
                f"at most {self.rows}"
            )
        self._check_capacity(max(lengths) + tokens_Bq.shape[1])
        return lengths
