"""Interface of the policy of an engine, and the choice of the class that implements it.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature
size.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.generic import GenericTarget
from aedit.spec_rollout.model.kv_storage import KVMemoryError
from aedit.spec_rollout.model.model_support import unwrapped
from aedit.spec_rollout.model.target import Segment, Target

Path = Literal["auto", "fast", "generic"]
"""Forward pass of a target: `fast` is this package's own, `generic` is the model's, `auto` is `fast` where it
supports the model, else `generic`."""


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

    @property
    def version(self) -> int:
        """Return the version of the policy that the weights are; see `PolicyWeights`."""

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

    def check_weights(self, *, thorough: bool = False) -> None:
        """Raise RuntimeError if the weights have changed since they became `version`.

        See `PolicyWeights.check`.
        """

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` the policy's weights, all or none, and set the version.

        See `PolicyWeights.update`. Drop what was made of the old weights.
        """


def make_target(
    model: nn.Module,
    *,
    rows: int,
    max_tokens: int,
    nodes: int = 16,
    taps: Sequence[int] = (),
    path: Path = "auto",
) -> TargetModel:
    """Return a target for `rows` samples at a time.

    Args:
        model: `transformers` causal language model. Of `DistributedDataParallel` and `torch.compile` the
            model inside is used.
        rows: Number of samples that are decoded at the same time.
        max_tokens: Upper limit of prompt and answer of one sample, in tokens.
        nodes: Upper limit of drafted tokens of one row in one step.
        taps: Layers whose outputs are appended to the last hidden state in the features.
        path: Forward pass. With "auto", a model that the fast path does not support takes the generic path,
            and a warning gives the reason.

    Raises:
        ValueError: A size is too small, a tap does not exist, or the model is not supported.
    """
    model = unwrapped(model)
    if path not in get_args(Path):
        raise ValueError(f"path must be one of {', '.join(get_args(Path))}, got {path!r}")
    sizes: Any = {"rows": rows, "max_tokens": max_tokens, "nodes": nodes, "taps": taps}
    if path == "generic":
        return GenericTarget.of(model, **sizes)
    try:
        return Target.of(model, **sizes)
    except KVMemoryError:
        raise
    except ValueError as error:
        if path == "fast":
            raise
        reason = str(error)
    target = GenericTarget.of(model, **sizes)
    # Attributed to the caller of `Engine.of`, which calls this function.
    warnings.warn(
        f"{type(model).__name__} takes the {target.path} path, not the fast one: {reason}", stacklevel=3
    )
    return target
