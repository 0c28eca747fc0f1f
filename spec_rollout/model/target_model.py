"""Interface of the policy of an engine, and the choice of the class that implements it.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature
size.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.cache import KVMemory
from aedit.spec_rollout.model.target import Segment, Target


class TargetModel(Protocol):
    """The policy of an engine: forward passes over cached rows.

    The tokens of a row have the cache slots 0, 1, ...; the caller passes the length of each row.
    """

    rows: int
    """Number of samples that are decoded at the same time."""
    max_tokens: int
    """Upper limit of prompt and answer of one sample, in tokens."""
    nodes: int
    """Upper limit of drafted tokens of one row in one step."""
    version: int
    """Version of the policy."""

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
    def hidden_size(self) -> int:
        """Return the hidden size d."""

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
    def dtype(self) -> torch.dtype:
        """Return the dtype of features and logits."""

    @property
    def device(self) -> torch.device:
        """Return the device of tokens, features and logits."""

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that keys and values take now."""

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the upper limit of `kv_bytes`."""

    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Compute tokens of several rows; return the features (T, f) of each segment."""

    def step(
        self, tokens_Bq: Tensor, lengths_B: Sequence[int] | Tensor, parents_BN: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each row 0 .. B - 1.

        Returns:
            Logits (B, q, V) and features (B, q, f). See `Target.step`.
        """

    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move the accepted nodes of a tree to consecutive slots. See `Target.keep_path`."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Move the first `length` tokens of row `source` to row `target`."""

    def release_row(self, row: int) -> None:
        """Free the memory of a row whose sample has ended."""

    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of slots start .. length - 1 of a row. Dimension 3 of 5 is the token."""

    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write what `read_kv` returned to a row, from slot `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """

    def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy new weights into the parameters, all or none, and set the version."""


def make_target(
    model: nn.Module,
    *,
    rows: int,
    max_tokens: int,
    nodes: int = 16,
    taps: Sequence[int] = (),
    kv: KVMemory | None = None,
) -> TargetModel:
    """Return a target for `rows` samples at a time. See `Target.of` for arguments and errors."""
    return Target.of(model, rows=rows, max_tokens=max_tokens, nodes=nodes, taps=taps, kv=kv)
