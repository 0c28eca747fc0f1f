"""Attention masks for chains and trees of new tokens that follow the cached tokens of a row.

Shapes: B rows, N drafted nodes, q = N + 1 new tokens (the root first), C cache slots of a row.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def ancestors(parents_BN: Tensor) -> Tensor:
    """Return for each new token which of the q new tokens it attends to: its ancestors and itself.

    Args:
        parents_BN: int64, index of each node's parent among the nodes, -1 for the root. Parents precede their
            children.

    Returns:
        Bool, (B, q, q). Entry [b, i, j] is true if token j is token i or an ancestor of token i.
    """
    num_rows, num_nodes = parents_BN.shape
    q = num_nodes + 1
    is_ancestor = torch.eye(q, device=parents_BN.device).repeat(num_rows, 1, 1)
    is_ancestor[:, 1:].scatter_(2, (parents_BN + 1)[:, :, None], 1.0)
    # Each squaring doubles the number of generations that are covered.
    for _ in range(math.ceil(math.log2(max(num_nodes, 1)))):
        is_ancestor = torch.bmm(is_ancestor, is_ancestor).clamp_(max=1.0)
    return is_ancestor > 0


def relative_positions(ancestors_Bqq: Tensor) -> Tensor:
    """Return the position of each new token relative to the root, which is its depth in the tree: (B, q)."""
    return ancestors_Bqq.sum(-1) - 1


def attention_mask(
    lengths_B: Tensor, q: int, context: int, ancestors_Bqq: Tensor | None = None, window: int | None = None
) -> Tensor:
    """Return the additive attention mask of q new tokens: 0 where a token attends, -inf elsewhere.

    Args:
        lengths_B: Number of cached tokens of each row; the new tokens follow them.
        q: Number of new tokens per row.
        context: Number of cache slots C that the mask covers.
        ancestors_Bqq: Result of `ancestors` for a tree; None for a chain, where each token attends to all
            before it.
        window: Number of last positions that a token attends to, itself included; None for all. Nodes of a
            tree have the position of their depth.

    Returns:
        float32, (B, q, C).
    """
    device, masked = lengths_B.device, float("-inf")
    slots_C = torch.arange(context, device=device)
    new_q = torch.arange(q, device=device)
    if ancestors_Bqq is None:
        positions_Bq1 = (lengths_B[:, None] + new_q)[:, :, None]
        hidden = slots_C > positions_Bq1
        if window is not None:
            hidden = hidden | (slots_C <= positions_Bq1 - window)
        return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, masked)
    hidden = (slots_C >= lengths_B[:, None])[:, None].expand(-1, q, -1)
    if window is not None:
        depths_Bq = relative_positions(ancestors_Bqq)
        hidden = hidden | (slots_C <= (lengths_B[:, None] + depths_Bq - window)[:, :, None])
        # An ancestor that is `window` or more generations away is too far.
        ancestors_Bqq = ancestors_Bqq & (depths_Bq[:, :, None] - depths_Bq[:, None] < window)
    mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, masked)
    # New tokens of padding rows lie beyond the context; clamp their slots into it.
    new_slots = (lengths_B[:, None] + new_q).clamp_(max=context - 1)[:, None].expand(-1, q, -1)
    seen = torch.zeros(ancestors_Bqq.shape, device=device).masked_fill_(~ancestors_Bqq, masked)
    return mask.scatter_(2, new_slots, seen)


KINDS = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True, eq=False)
class Visibility:
    """Slots that the new tokens may attend to, without windows."""

    causal_BqC: Tensor
    """Bool: the slot holds the token itself or one before it in the row or in the tree."""
    positions_Bq: Tensor
    """int64: positions of the new tokens."""
    slot_positions_BC: Tensor
    """int64: positions of the tokens in the slots."""

    @classmethod
    def of(cls, starts_B: Tensor, q: int, context: int, ancestors_Bqq: Tensor | None) -> "Visibility":
        """Return the visibility of q new tokens after the first `starts_B` slots of each row.

        Args:
            starts_B: int64, number of cached tokens of each row.
            q: Number of new tokens per row.
            context: C.
            ancestors_Bqq: Result of `attention_mask.ancestors` for a tree; None for a chain.
        """
        slots_C = torch.arange(context, device=starts_B.device)
        new_Bq = starts_B[:, None] + torch.arange(q, device=starts_B.device)
        slots_BC = slots_C.expand(len(starts_B), -1)
        if ancestors_Bqq is None:
            return cls(slots_C <= new_Bq[:, :, None], new_Bq, slots_BC)
        cached = (slots_C < starts_B[:, None])[:, None].expand(-1, q, -1)
        index = new_Bq[:, None].expand(-1, q, -1)
        causal = cached.scatter(2, index, ancestors_Bqq)
        positions = starts_B[:, None] + ancestors_Bqq.sum(-1) - 1
        return cls(causal, positions, slots_BC.scatter(1, new_Bq, positions))

    def mask(self, kind: str, config: Any) -> Tensor:
        """Return which slots layers of one of `KINDS` attend to, bool, (B, 1, q, C)."""
        query, key = self.positions_Bq[:, :, None], self.slot_positions_BC[:, None]
        if kind == "sliding_attention":
            near = key > query - int(config.sliding_window)
            return (self.causal_BqC & near)[:, None]
        if kind == "chunked_attention":
            size = int(config.attention_chunk_size)
            return (self.causal_BqC & (key // size == query // size))[:, None]
        return self.causal_BqC[:, None]


@dataclass(frozen=True, slots=True)
class MaskFormat:
    """Form of the masks of one model."""

    config: Any
    """Configuration of the text model."""
    kinds: tuple[str, ...]
    """Kinds of layers."""
    by_kind: bool
    """The model takes a mapping from kinds to masks."""
    additive: torch.dtype | None
    """Masks are added to the scores in this dtype; None: they are bool."""

    def masks(self, visibility: Visibility) -> Any:
        """Return the `attention_mask` of the model's forward."""
        masks = {kind: visibility.mask(kind, self.config) for kind in self.kinds}
        if self.additive is not None:
            zero = torch.zeros((), dtype=self.additive, device=visibility.causal_BqC.device)
            hidden = torch.finfo(self.additive).min
            masks = {kind: torch.where(visible, zero, hidden) for kind, visible in masks.items()}
        return masks if self.by_kind else masks[self.kinds[0]]


def mask_formats(config: Any, attention: str, dtype: torch.dtype) -> list[MaskFormat]:
    """Return the formats that a model may accept, the likeliest first.

    Args:
        config: Configuration of the text model.
        attention: Attention implementation of the model.
        dtype: Dtype of the model's hidden states.
    """
    kinds = tuple(sorted(set(getattr(config, "layer_types", None) or ())))
    if not kinds:
        window, chunk = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        kinds = ("sliding_attention",) if window else ("chunked_attention",) if chunk else KINDS[:1]
    if not set(kinds) <= set(KINDS):
        return []
    has_types = getattr(config, "layer_types", None) is not None
    additive = [dtype, None] if attention == "eager" else [None, dtype]
    forms = [True, False] if has_types else [False]
    return [
        MaskFormat(config, kinds, by_kind, kind)
        for by_kind in forms
        for kind in additive
        if by_kind or len(kinds) == 1
    ]
