"""Parameters of a decoder-only language model, and what is computed before and after its layers.

Shapes: T tokens, V vocabulary, d hidden size, f feature size, P positions.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.model.layers import AttentionSpec, Function, Layer, LayerShape
from aedit.spec_rollout.model.linear_layers import linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A model's own parameters, sizes and constants."""

    embedding: Tensor
    """(V, d)."""
    layers: tuple[Layer, ...]
    norm: Function
    head: Tensor
    """(V, d). The same tensor as `embedding` where the two are tied."""
    shape: LayerShape
    attention: tuple[AttentionSpec, ...]
    """One for each layer."""
    embedding_scale: float | None = None
    """Factor of the embedding, of Gemma."""
    position_embedding: Tensor | None = None
    """(P, d), added to the embedding: learned positions, of GPT-2."""
    logit_cap: float | None = None
    """Upper limit c of the logits' absolute values: c * tanh(logits / c), of Gemma 2."""
    max_positions: int | None = None
    """Number of positions that the model has; None where the number has no limit."""
    is_static: bool = True
    """Whether the calls do not depend on values, so that a CUDA graph can capture them."""

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the input of the first layer, (T, d)."""
        x_Td = F.embedding(tokens_T, self.embedding)
        if self.embedding_scale is not None:
            x_Td = x_Td * self.embedding_scale
        if self.position_embedding is not None:
            # Only drafted tokens after the last token of a text lie beyond; they are never kept.
            known = positions_T.clamp(max=len(self.position_embedding) - 1)
            x_Td = x_Td + F.embedding(known, self.position_embedding)
        return x_Td

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits (..., V) of features (..., f)."""
        logits = linear(features[..., : self.embedding.shape[1]], self.head)
        if self.logit_cap is None:
            return logits
        return logits.div_(self.logit_cap).tanh_().mul_(self.logit_cap)
