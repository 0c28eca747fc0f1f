"""Choice of the passes for a model, by comparison with its own forward over whole texts.

What a model does with masks, positions and a cache is not declared anywhere. So a few tokens are computed in
every way, from the most general one down, and the first one with the right logits is used.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aedit.spec_rollout.model.layer_masks import mask_formats
from aedit.spec_rollout.model.model_forward import ModelForward
from aedit.spec_rollout.model.row_passes import EqualPasses, MaskedPasses, RowPasses, RowTokens, WholePasses
from aedit.spec_rollout.model.slot_store import SlotStore
from aedit.spec_rollout.model.text_store import TextStore

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Upper limit of ||difference|| / ||logits||, logits centered per token: rounding stays far below it.
Many models compute parts in float32 even in a float64 model."""
TEXT_TOKENS = 12
TREE_PARENTS = (-1, -1, 0, 1, 0)
"""Two subtrees. Nodes of equal depth have different slots."""

Make = Callable[[int, int], RowPasses]
"""(rows, slots) -> passes with an empty store."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Result of the choice."""

    make: Make
    vocabulary: int
    feature_size: int
    refused: tuple[str, ...]
    """Why the ways before this one were not chosen."""


class Probe:
    """Comparison of one model's passes with its logits of whole texts."""

    def __init__(self, forward: ModelForward, dtype: torch.dtype, max_positions: int) -> None:
        """Compute the reference.

        Raises:
            ValueError: The model is not deterministic, not causal, or its logits are not finite.
        """
        self._forward, self._dtype, self._max_positions = forward, dtype, max_positions
        vocabulary = forward.model.get_input_embeddings().weight.shape[0]
        self._device = forward.model.get_input_embeddings().weight.device
        count = min(TEXT_TOKENS, max_positions)
        ids = [(7919 * i + 13) % vocabulary for i in range(2 * count + len(TREE_PARENTS))]
        # Rows of different lengths and of equal ones.
        self._texts = ids[:count], ids[count : count + max(count - 3, 1)], ids[count : 2 * count]
        self._nodes = ids[2 * count :]
        self.logits = [self._whole(text) for text in self._texts]
        self._check_causal()

    def _whole(self, text: Sequence[int]) -> Tensor:
        tokens = torch.tensor([text], device=self._device)
        return self._forward(tokens, last=len(text), use_cache=False)[0][0]

    def _check_causal(self) -> None:
        name = type(self._forward.model).__name__
        first = self.logits[0]
        if not first.isfinite().all():
            raise ValueError(f"{name}: logits are not finite: check the weights")
        if not self._same(self._whole(self._texts[0]), first):
            raise ValueError(f"{name} gives other logits for the same text: it is not deterministic")
        if len(first) > 1 and not self._same(self._whole(self._texts[0][:-1]), first[:-1]):
            raise ValueError(f"{name} is not causal: logits of a token depend on the tokens after it")

    def _same(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, expected))
        return bool((a - b).norm() <= TOLERANCE[self._dtype] * b.norm())

    def choose(self) -> Chosen:
        """Return the most general passes whose logits are right.

        Raises:
            ValueError: There are none.
        """
        refused: list[str] = []
        for make, check in self._candidates():
            passes = make(len(self._texts), 2 * TEXT_TOKENS)
            try:
                reason = check(passes)
            except Exception as error:  # a model fails in its own way where it does not accept an argument
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not reason:
                features = self._forward(torch.tensor([[0]], device=self._device), last=0, use_cache=False)[1]
                return Chosen(make, self.logits[0].shape[-1], features.shape[-1], tuple(refused))
            refused.append(f"{passes.name}: {reason}")
        name = type(self._forward.model).__name__
        raise ValueError(f"{name}: no way to decode gives the logits of its forward ({'; '.join(refused)})")

    def _candidates(self) -> Iterator[tuple[Make, Callable[[RowPasses], str]]]:
        forward, limit = self._forward, self._max_positions
        num_layers = forward.num_layers

        def masked(masks: Any, trees: bool) -> Make:
            return lambda rows, slots: MaskedPasses(
                forward, SlotStore(rows, slots, num_layers), masks, limit, trees=trees
            )

        def equal(alone: bool) -> Make:
            return lambda rows, slots: EqualPasses(forward, SlotStore(rows, slots, num_layers), alone=alone)

        def whole(alone: bool) -> Make:
            return lambda rows, slots: WholePasses(forward, TextStore(rows, slots), alone=alone)

        if forward.takes_cache:
            if has_own_masks(forward) is None:
                formats = mask_formats(forward.config, forward.attention, self._dtype)
                for trees in (True, False):
                    for masks in formats:
                        yield masked(masks, trees), self._tree_error if trees else self._ragged_error
            for alone in (False, True):
                yield equal(alone), self._ragged_error
        for alone in (False, True):
            yield whole(alone), self._ragged_error

    def _ragged_error(self, passes: RowPasses) -> str:
        """Return how rows of different lengths go wrong: a prompt each, then three tokens each."""
        rows, lengths = range(len(self._texts)), [len(text) for text in self._texts]
        starts = [max(length - 3, 0) for length in lengths]
        if any(starts):
            parts = [text[:start] for text, start in zip(self._texts, starts, strict=True)]
            passes.run(self._batch(rows, [0] * len(rows), parts), logits=False)
        rest = [text[start:] for text, start in zip(self._texts, starts, strict=True)]
        logits, _ = passes.run(self._batch(rows, starts, rest), logits=True)
        store = passes.store
        if isinstance(store, SlotStore) and store.num_written_layers == 0:
            return "the model does not use the cache that it is given"
        for row, part in enumerate(rest):
            if not self._same(logits[row, : len(part)], self.logits[row][starts[row] :]):
                return f"other logits for a row of {lengths[row]} tokens"
        return ""

    def _tree_error(self, passes: RowPasses) -> str:
        """Return how a tree of drafted tokens goes wrong after the texts of all rows."""
        error = self._ragged_error(passes)
        if error:
            return error
        rows, starts = range(len(self._texts)), [len(text) - 1 for text in self._texts]
        drafted = [[text[-1], *self._nodes] for text in self._texts]
        batch = self._batch(rows, starts, drafted)
        parents = torch.tensor([TREE_PARENTS] * len(rows), device=self._device)
        tree = RowTokens(batch.rows, batch.starts, batch.tokens_Bq, batch.counts, parents)
        logits, _ = passes.run(tree, logits=True)
        for row, text in enumerate(self._texts):
            for node in range(len(TREE_PARENTS)):
                path = self._path(node)
                if len(text) + len(path) > self._max_positions:
                    continue
                expected = self._whole([*text, *(self._nodes[i] for i in path)])[-1:]
                if not self._same(logits[row, node + 1 : node + 2], expected):
                    return "other logits for the nodes of a tree"
        return ""

    def _path(self, node: int) -> list[int]:
        above = TREE_PARENTS[node]
        return [*(self._path(above) if above >= 0 else ()), node]

    def _batch(self, rows: Sequence[int], starts: Sequence[int], parts: Sequence[Sequence[int]]) -> RowTokens:
        longest = max(map(len, parts))
        padded = [[*part, *[0] * (longest - len(part))] for part in parts]
        tokens = torch.tensor(padded, device=self._device)
        return RowTokens(rows, starts, tokens, [len(part) for part in parts])


def has_own_masks(forward: ModelForward) -> str | None:
    """Return the name of something by which the model itself masks tokens, or None.

    Rows of different lengths would shift it; a probe of a few tokens does not reach a window's end.
    """
    for name, buffer in forward.model.named_buffers():
        if buffer.dim() >= 2 and buffer.shape[-1] == buffer.shape[-2] and buffer.shape[-1] >= TEXT_TOKENS:
            return str(name)
    known = {"sliding_window", "max_window_layers", "use_sliding_window", "attention_chunk_size"}
    for name, value in forward.config.to_dict().items():
        is_window = "window" in name and "pattern" not in name and name not in known
        if is_window and isinstance(value, int) and value > 1:
            return str(name)
    return None
