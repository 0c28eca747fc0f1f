"""Ways to run a model's own forward over rows with cached tokens, from the most general to the slowest.

- `MaskedPasses`: all rows in one forward pass with masks of this package. Rows differ in length; trees work.
- `EqualPasses`: the model makes its own masks, so only rows of equal length share a pass. No trees.
- `WholePasses`: no cache; the whole text of each row in every pass. No trees.

Shapes: B rows, q new tokens per row, V vocabulary, f feature size.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aedit.spec_rollout.model.attention_mask import MaskFormat, Visibility, ancestors
from aedit.spec_rollout.model.model_forward import ModelForward
from aedit.spec_rollout.model.slot_store import SlotStore, StepSlots, TextStore, step_cache


@dataclass(frozen=True, slots=True, eq=False)
class RowTokens:
    """New tokens of some rows."""

    rows: Sequence[int]
    starts: Sequence[int]
    """Number of tokens of each row before the new ones."""
    tokens_Bq: Tensor
    """int64. Entries beyond `counts` are any valid token."""
    counts: Sequence[int]
    """Number of new tokens of each row whose results are needed, at least 1."""
    parents_BN: Tensor | None = None
    """Parents of the nodes of a tree; None for chains."""


class MaskedPasses:
    """One pass for all rows, with masks and positions of this package."""

    name = "one pass for all rows"

    def __init__(
        self, forward: ModelForward, store: SlotStore, masks: MaskFormat, max_positions: int, *, trees: bool
    ) -> None:
        self.store, self.supports_trees = store, trees
        self._forward, self._masks, self._max_positions = forward, masks, max_positions

    def run(self, new: RowTokens, *, logits: bool) -> tuple[Tensor, Tensor]:
        """Compute new tokens.

        Returns:
            Logits (B, q, V), or (B, 0, V) unless `logits`, and features (B, q, f). Those of entries beyond
            `counts` are arbitrary.
        """
        q, past, device = new.tokens_Bq.shape[1], max(new.starts), new.tokens_Bq.device
        context = min(past + q, self.store.slots)
        starts_B = torch.tensor(new.starts, device=device)
        is_ancestor = None if new.parents_BN is None else ancestors(new.parents_BN)
        visibility = Visibility.of(starts_B, q, context, is_ancestor)
        arguments: dict[str, Any] = {"attention_mask": self._masks.masks(visibility)}
        # A draft may reach beyond the last position of a sample; what follows from there is never emitted.
        positions = visibility.positions_Bq.clamp(max=self._max_positions - 1)
        if self._forward.takes_positions:
            arguments["position_ids"] = positions
        slots_Bq = (starts_B[:, None] + torch.arange(q, device=device)).clamp(max=self.store.slots - 1)
        step = StepSlots(_rows(new.rows), torch.tensor(new.rows, device=device), slots_Bq, context)
        self.store.mark_used(new.rows, [start + q for start in new.starts])
        arguments[self._forward.cache_argument] = step_cache(self.store, step)
        return self._forward(new.tokens_Bq, last=q if logits else 0, use_cache=True, **arguments)


class EqualPasses:
    """One pass for each group of rows with equally many tokens, as `generate` calls the model."""

    supports_trees = False

    def __init__(self, forward: ModelForward, store: SlotStore, *, alone: bool) -> None:
        self.store = store
        self.name = "one pass for each row" if alone else "one pass for rows of equal length"
        self._forward, self._alone = forward, alone

    def run(self, new: RowTokens, *, logits: bool) -> tuple[Tensor, Tensor]:
        """Compute new tokens; see `MaskedPasses.run`."""
        groups = defaultdict(list)
        for i, key in enumerate(zip(new.starts, new.counts, strict=True)):
            groups[*key, i if self._alone else 0].append(i)
        q = new.tokens_Bq.shape[1]
        parts = [
            (members, self._group(new, members, start, count, logits))
            for (start, count, _), members in groups.items()
        ]
        return _joined(parts, 0, q if logits else 0), _joined(parts, 1, q)

    def _group(
        self, new: RowTokens, members: Sequence[int], start: int, count: int, logits: bool
    ) -> tuple[Tensor, Tensor]:
        rows, device = [new.rows[i] for i in members], new.tokens_Bq.device
        slots_Bq = torch.arange(start, start + count, device=device).expand(len(rows), -1)
        step = StepSlots(_rows(rows), torch.tensor(rows, device=device), slots_Bq, start + count)
        self.store.mark_used(rows, [start + count] * len(rows))
        tokens_Bq = new.tokens_Bq[list(members), :count]
        return self._forward(
            tokens_Bq,
            last=count if logits else 0,
            use_cache=True,
            **{self._forward.cache_argument: step_cache(self.store, step)},
        )


class WholePasses:
    """The whole text of each row in every pass: right for every causal model, and slow."""

    supports_trees = False

    def __init__(self, forward: ModelForward, store: TextStore, *, alone: bool) -> None:
        self.store = store
        self.name = "the whole text in every pass" + (", one pass for each row" if alone else "")
        self._forward, self._alone = forward, alone

    def run(self, new: RowTokens, *, logits: bool) -> tuple[Tensor, Tensor]:
        """Compute new tokens; see `MaskedPasses.run`."""
        tokens = new.tokens_Bq.tolist()
        texts = [
            self.store.extend(row, start, tokens[i][:count])
            for i, (row, start, count) in enumerate(zip(new.rows, new.starts, new.counts, strict=True))
        ]
        everyone = range(len(texts))
        groups = [[i] for i in everyone] if self._alone else [list(everyone)]
        q = new.tokens_Bq.shape[1]
        parts = [(members, self._group(new, members, texts, logits)) for members in groups]
        return _joined(parts, 0, q if logits else 0), _joined(parts, 1, q)

    def _group(
        self, new: RowTokens, members: Sequence[int], texts: Sequence[Sequence[int]], logits: bool
    ) -> tuple[Tensor, Tensor]:
        """Run texts padded at their ends, which a causal model does not see."""
        longest, device = max(len(texts[i]) for i in members), new.tokens_Bq.device
        padded = torch.tensor([[*texts[i], *[0] * (longest - len(texts[i]))] for i in members], device=device)
        first = min(new.starts[i] for i in members)
        last = longest - first if logits else 0
        found, features = self._forward(padded, last=last, use_cache=False)
        q = new.tokens_Bq.shape[1]
        starts_B1 = torch.tensor([[new.starts[i]] for i in members], device=device)
        index = (starts_B1 + torch.arange(q, device=device)).clamp(max=longest - 1)
        picked = _tokens_at(found, index - first) if logits else found
        return picked, _tokens_at(features, index)


RowPasses = MaskedPasses | EqualPasses | WholePasses
"""Forward passes over the rows of a store."""


def _tokens_at(x_BTD: Tensor, index_Bq: Tensor) -> Tensor:
    """Return the entries of these tokens of each row, (B, q, D)."""
    return x_BTD.gather(1, index_Bq[..., None].to(x_BTD.device).expand(-1, -1, x_BTD.shape[-1]))


def _rows(rows: Sequence[int]) -> slice | Tensor:
    """Return the rows as a slice if they are consecutive: reading them needs no copy."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(list(rows))


def _joined(parts: Sequence[tuple[Sequence[int], tuple[Tensor, Tensor]]], which: int, q: int) -> Tensor:
    """Return the results of all groups in the order of the rows, padded with zeros to q tokens."""
    first = parts[0][1][which]
    num_rows = sum(len(members) for members, _ in parts)
    if len(parts) == 1 and first.shape[1] == q:
        return first
    joined = first.new_zeros(num_rows, q, first.shape[-1])
    for members, results in parts:
        joined[list(members), : results[which].shape[1]] = results[which]
    return joined
