"""Rotary positions of a `transformers` model: which layers rotate how, and the tables of angles."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.layers import (
    RopeTable,
    Rotate,
    apply_float_rope,
    apply_partial_rope,
    apply_rope,
)

ROPES = ("default", "linear", "llama3", "yarn", "longrope")
"""RoPE types whose angles do not depend on the length of the text; "longrope" up to its original length."""


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary module, which may have frequencies per type of layer (Gemma 3)."""

    module: Any
    layer_types: tuple[str | None, ...]
    """Types of layers with frequencies of their own; one None where all layers have the same."""
    like: Tensor
    """A parameter: device and dtype of the tables."""

    @classmethod
    def of(cls, model: Any) -> "Rotary | None":
        """Return the rotary module of a model, or None if it has none.

        Raises:
            ValueError: The angles depend on the length of the text.
        """
        module = getattr(model.model, "rotary_emb", None) if hasattr(model, "model") else None
        if module is None:
            return None
        kinds = module.rope_type if isinstance(module.rope_type, dict) else {None: module.rope_type}
        for kind in kinds.values():
            if kind not in ROPES:
                raise ValueError(f"rope_type {kind!r} is not supported: it must be one of {', '.join(ROPES)}")
        return cls(module, tuple(kinds), next(model.parameters()))

    @property
    def max_positions(self) -> int | None:
        """Return how many positions keep their angles however long the text is; None if all do."""
        parameters = self.module.config.rope_parameters
        each = [parameters if kind is None else parameters[kind] for kind in self.layer_types]
        return min(
            (one["original_max_position_embeddings"] for one in each if one["rope_type"] == "longrope"),
            default=None,
        )

    def tables(self, num_positions: int) -> tuple[RopeTable, ...]:
        """Return the rotations of the positions 0 .. num_positions - 1, for each type of layers."""
        return tuple(RopeTable.of(*self._table(kind, num_positions)) for kind in self.layer_types)

    def of_layer(self, layer_type: str | None, head_dim: int) -> tuple[Rotate, int]:
        """Return how a layer of this type rotates, and the index of its table."""
        index = 0 if self.layer_types == (None,) else self.layer_types.index(layer_type)
        cos, _ = self._table(self.layer_types[index], 1)
        if cos.shape[-1] < head_dim:
            return apply_partial_rope, index
        return (apply_rope if cos.dtype == self.like.dtype else apply_float_rope), index

    def _table(self, layer_type: str | None, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, (positions, r), as precise as the module's own."""
        positions = torch.arange(num_positions, device=self.like.device)[None]
        with torch.no_grad():
            more = {} if layer_type is None else {"layer_type": layer_type}
            cos, sin = self.module(self.like, positions, **more)
        exact = torch.promote_types(cos.dtype, self.like.dtype)
        return cos[0].to(exact), sin[0].to(exact)


def read_ropes(model: nn.Module, num_positions: int) -> tuple[RopeTable, ...]:
    """Return the tables to which `Attention.rope` refers; none for a model without rotary positions.

    Positions that the model does not have rotate as its last one. Only drafted tokens after the last token of
    a text have such positions; they are never kept.
    """
    rotary = Rotary.of(model)
    if rotary is None:
        return ()
    count = min(num_positions, rotary.max_positions or num_positions)
    rows = torch.arange(num_positions, device=rotary.like.device).clamp_(max=count - 1)
    return tuple(RopeTable(table.both[rows]) for table in rotary.tables(count))
