"""The parts of a policy that a drafter reads: embedding, output head, and their version."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model import whole
from aedit.spec_rollout.training.losses import PolicyEmbeddings
from aedit.types import NonNegativeInt, checked


class PolicySource(Protocol):
    """The parts of a policy that its drafter needs, such as those of an engine's `TargetModel`."""

    @property
    def model(self) -> Any:
        """Return the `transformers` model."""

    @property
    def version(self) -> int:
        """Return the version of the weights."""

    @property
    def embedding(self) -> Tensor:
        """Return the embedding, (V, d)."""

    @property
    def head(self) -> Tensor:
        """Return the output head, (V, d)."""

    @property
    def feature_size(self) -> int:
        """Return the size of the feature of one token."""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the features."""

    @property
    def device(self) -> torch.device:
        """Return the device of the features."""


@checked()
class TrainedPolicy:
    """`PolicySource` of a rank that trains a `transformers` model whose rollouts are generated elsewhere.

    Of sharded parameters (DTensor) it keeps the whole embedding and head, on each rank: all ranks of the node
    make it together, and update it together.
    """

    def __init__(self, model: nn.Module, version: NonNegativeInt = 0) -> None:
        self.model: Any = model
        self.update(version)

    def update(self, version: int) -> None:
        """Read embedding and head of this version of the weights. Call it after each hand-over."""
        self.version = version
        embedding, head = self.model.get_input_embeddings().weight, self.model.get_output_embeddings().weight
        self._embedding = whole(embedding)
        self._head = self._embedding if head is embedding else whole(head)

    @property
    def embedding(self) -> Tensor:
        """Return the embedding, (V, d)."""
        return self._embedding

    @property
    def head(self) -> Tensor:
        """Return the output head, (V, d); the embedding itself where they are tied."""
        return self._head

    @property
    def feature_size(self) -> int:
        """Return the hidden size: the model has no taps."""
        return int(self.model.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the parameters."""
        dtype: torch.dtype = next(self.model.parameters()).dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the parameters."""
        device: torch.device = next(self.model.parameters()).device
        return device


def embeddings_of(policy: PolicySource) -> PolicyEmbeddings:
    """Return the policy's embedding and head as they are now, without a copy."""
    return PolicyEmbeddings(policy.embedding.detach(), policy.head.detach(), policy.version)
