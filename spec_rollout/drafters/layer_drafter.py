"""The learned drafter of an engine: follows the rows and drafts with a `DraftLayer`.

A draft starts from the policy's own features up to the last verified token. After a step the accepted pairs
are computed from them again, over the drafted pairs, so that no predicted feature outlives its draft.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from math import prod
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from aedit.spec_rollout.drafters.draft_layer import DraftLayer, DraftShape
from aedit.spec_rollout.drafters.draft_pass import Pairs, runner_of
from aedit.spec_rollout.drafters.drafting import DraftContext, DraftInputs, draft_chain, draft_tree
from aedit.spec_rollout.drafters.drafts import Arm, Draft, Noise, RowStart, StepUpdate
from aedit.spec_rollout.model import GraphCache, TargetModel, batch_bucket, context_bucket, to_device
from aedit.types import PositiveInt, check, checked

VerifyMode = Literal["coupled", "rejection"]
_EXTRA_SLOTS = 256
"""Slots of a row for drafted pairs."""
_CHUNK = 2048
"""Number of missed pairs that are computed at a time."""


MissingPairs = tuple[list[int], Tensor, list[int], list[int], list[int]]
"""Pairs of some rows that must be computed, at least one per row, in order: tokens, features (P, w), row of
each pair, position of each pair's feature, and the index of each row's last pair."""


@dataclass(slots=True, eq=False)
class RowBacklog:
    """Pairs of one sample.

    Pair i consists of the feature of token i and of token i + 1, and has slot i of its row.
    """

    length: int
    """Number of pairs so far."""
    first: int
    """Index of the first pair that has not been dropped."""
    num_computed: int
    """Pairs from `first` to this index are in the cache."""
    last: int
    """Last token."""
    tokens: Sequence[int] = ()
    """Tokens of the initial pairs, as long as these are not in the cache."""
    features_Tw: Tensor | None = None

    @classmethod
    def of(cls, start: RowStart, window: int) -> "RowBacklog":
        """Return the backlog of a sample that starts, limited to its last `window` pairs."""
        length = len(start.tokens) - 1
        features = start.features_Td
        missing = length - len(features)
        first = max(missing, length - window)
        if first > missing:
            features = features[first - missing :].clone()
        return cls(length, first, first, start.tokens[-1], start.tokens[first + 1 :], features)

    def skip(self, count: int) -> None:
        """Drop the next `count` pairs: the row's pairs begin after them."""
        start = len(self.tokens)
        self.tokens, self.features_Tw = (), None
        self.first = self.num_computed = self.num_computed + start + count


@checked()
class LayerDrafter:
    """`drafts.Drafter` for the arms `layer:...`.

    While another arm is in use, a step costs one list entry. At the next draft, keys and values of all missed
    pairs of all rows are computed at once.
    """

    def __init__(
        self,
        layer: DraftLayer,
        embeddings: tuple[Tensor, Tensor],
        *,
        rows: PositiveInt,
        max_tokens: PositiveInt,
        mode: VerifyMode = "coupled",
        window: PositiveInt = 512,
    ) -> None:
        """Make a drafter.

        Args:
            layer: Draft layer; its weights are copied.
            embeddings: The policy's embedding and head, each (V, d). They are used in place, never copied.
            rows: As the engine's.
            max_tokens: As the engine's.
            mode: As the engine's. "rejection" draws chains from q and returns `Draft.logq_BNV`.
            window: Upper limit of queued pairs per row while no drafts are requested; older ones are dropped.
        """
        sizes = layer.shape.vocabulary, layer.shape.hidden_size
        for name, tensor in zip(("embedding", "head"), embeddings, strict=True):
            check(tensor.shape == sizes, f"the policy's {name}", f"must be of shape {sizes}", tensor.shape)
        self.mode, self.version = mode, 0
        self._runner = runner_of(layer, *embeddings, rows=rows, slots=max_tokens + _EXTRA_SLOTS)
        self._backlog = Backlog(rows, window)
        self._device = embeddings[0].device
        self._temperature_cache: tuple[Tensor, Tensor, Tensor] | None = None
        self.graphs = GraphCache(self._device) if self._device.type == "cuda" else None

    @classmethod
    def of(
        cls, layer: DraftLayer, target: TargetModel, *, mode: VerifyMode = "coupled", window: int = 512
    ) -> Self:
        """Return a drafter for the engine of this target.

        Raises:
            ValueError: The layer expects another feature size.
        """
        sizes = layer.shape.feature_size, target.feature_size
        check(sizes[0] == sizes[1], "features of this draft layer", f"must be {sizes[1]} wide", sizes[0])
        embeddings, rows, max_tokens = (target.embedding, target.head), target.rows, target.max_tokens
        return cls(layer, embeddings, rows=rows, max_tokens=max_tokens, mode=mode, window=window)

    @property
    def shape(self) -> DraftShape:
        """Return the shape of the draft layer."""
        return self._runner.shape

    @property
    def num_bytes(self) -> int:
        """Return the bytes of weights and cache, with all rows at their greatest length.

        Embedding and head belong to the policy.
        """
        return self._runner.num_bytes

    def replace(self, layer: DraftLayer, version: int) -> None:
        """Draft with the weights of `layer` from now on.

        Cached pairs of the old weights stay, and new pairs join them.

        Raises:
            ValueError: The layer has another shape.
        """
        self._runner.replace(layer)
        self.version = version

    def read_policy(self, embedding: Tensor, head: Tensor) -> None:
        """Draft with these tensors of the policy from now on."""
        if self._runner.read_policy(embedding, head) and self.graphs is not None:
            self.graphs.clear()  # captured kernels would read the old addresses

    def begin(self, rows: Sequence[RowStart]) -> None:
        """Add samples that start in these rows."""
        for start in rows:
            self._backlog.begin(start)

    def update(self, update: StepUpdate) -> None:
        """Queue the tokens and features of one step."""
        self._backlog.update(update)

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        backlogs = self._backlog.rows
        backlogs[target], backlogs[source] = backlogs[source], None
        if (row := backlogs[target]) is not None and row.num_computed > row.first:
            self._runner.move(source, target, row.num_computed)
        self._runner.release(source)

    def end(self, row: int) -> None:
        """Remove the sample of `row`, and give back its memory."""
        self._backlog.rows[row] = None
        self._runner.release(row)

    @torch.inference_mode()
    def propose(self, arm: Arm, rows: int, noise: Noise, temperature_B: Tensor) -> Draft:
        """Return a draft (see `Drafter.propose`). On CUDA it is valid until the next call.

        Raises:
            ValueError: The arm is not a `layer` arm, is a tree in rejection mode, or a row has no sample or
                no step since its last draft.
        """
        self._check(arm)
        backlogs = self._backlog.running_rows(rows)
        starts = [row.num_computed for row in backlogs]
        update = self._backlog.take_single_step(backlogs)
        if update is None:
            pairs = self._write_missing(self._backlog.take_missing(backlogs))
        else:
            pairs = self._write_step(update, starts)
        noise_BkV = noise.at(range(rows), [row.length + 1 for row in backlogs], arm.depth)
        is_warm_B1, inverse_B1 = self._temperatures(temperature_B)
        # A row without a pair uses its placeholder.
        last_B = self._ints(max(row.length - 1, 0) for row in backlogs)
        start = DraftInputs(
            fused_Bd=pairs[0],
            queries_Bq=pairs[1],
            last_B=last_B,
            firsts_B=self._ints(row.first for row in backlogs),
            noise_BkV=self._runner.narrow(noise_BkV) * is_warm_B1.unsqueeze(-1),
            inverse_B1=inverse_B1,
        )
        tokens, scores, more = self._run_draft(arm, backlogs, start)
        if not arm.is_chain:
            return Draft(tokens, more, None, scores)
        if more is None:
            return Draft(tokens, None, None, scores)
        # At temperature 0 the drafted token has probability 1.
        more = self._runner.widen(more)
        certain = torch.full_like(more, -torch.inf).scatter_(-1, tokens[:, :, None], 0.0)
        return Draft(tokens, None, None, scores, torch.where(is_warm_B1.unsqueeze(-1), more, certain).float())

    def _run_draft(
        self, arm: Arm, backlogs: list[RowBacklog], start: DraftInputs
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the tensors of a chain or a tree.

        Returns:
            (tokens, scores, log q) of a chain, with log q in rejection mode only, or (tokens, scores,
            parents) of a tree.
        """
        num_rows, longest = len(backlogs), max(max(row.length, 1) for row in backlogs)
        num_slots = longest + (arm.depth - 1) * arm.width
        if self.graphs is None:
            context = DraftContext(
                self._runner, arm, min(row.first for row in backlogs), num_slots, num_rows == 1
            )
            return _three(_draft(context, start, self.mode))
        rows = batch_bucket(num_rows, self._runner.rows)
        num_slots = context_bucket(num_slots, self._runner.slots)
        context = DraftContext(self._runner, arm, 0, num_slots, False)
        # Padding rows draft too; their results are dropped.
        padded = [F.pad(x, [0, 0] * (x.dim() - 1) + [0, rows - num_rows]) for x in start]
        made = self.graphs.run(
            (arm, rows, num_slots), lambda *x: _draft(context, DraftInputs(*x), self.mode), *padded
        )
        return _three(tuple(x[:num_rows] for x in made))

    def _temperatures(self, temperature_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return T > 0 and 1 / T, each (B, 1). The engine passes the same tensor until its rows change."""
        if self._temperature_cache is None or self._temperature_cache[0] is not temperature_B:
            is_warm_B1 = temperature_B[:, None] > 0
            inverse_B1 = torch.where(is_warm_B1, temperature_B[:, None], 1.0).reciprocal_()
            self._temperature_cache = temperature_B, is_warm_B1, inverse_B1
        return self._temperature_cache[1:]

    def _check(self, arm: Arm) -> None:
        check(arm.drafter == "layer", "arm of the layer drafter", "must be layer:...", arm)
        is_verifiable = arm.is_chain or self.mode == "coupled"
        check(is_verifiable, "arm in rejection mode", "must be a chain", arm)
        drafted = (arm.depth - 1) * arm.width
        check(drafted <= _EXTRA_SLOTS, "arm", f"must not expand more than {_EXTRA_SLOTS} nodes", arm)

    def _write_step(self, update: StepUpdate, starts: list[int]) -> Pairs:
        """Compute the pairs of one step as one block with padding.

        The padding is overwritten later or never attended to.
        """
        rows, longest = update.features.shape[:2]
        counts = [len(tokens) for tokens in update.tokens]
        filled = (chain(t, repeat(0, longest - n)) for t, n in zip(update.tokens, counts, strict=True))
        positions = self._ints(starts)[:, None]
        if longest > 1:
            steps = torch.arange(longest, device=self._device)
            positions = positions + steps
            if max(starts) + longest > self._runner.slots:
                positions.clamp_(max=self._runner.slots - 1)
        slots = (positions + self._runner.row_offsets(rows)[:, None]).flatten()
        tokens = self._ints(chain.from_iterable(filled))
        pairs = self._runner.write_pairs(tokens, update.features.flatten(0, 1), slots, positions.flatten())
        if longest == 1:
            return pairs
        last = self._ints(b * longest + n - 1 for b, n in enumerate(counts))
        return pairs[0].index_select(0, last), pairs[1].index_select(0, last)

    def _write_missing(self, missing: MissingPairs) -> Pairs:
        tokens, rows, positions, last = (self._ints(missing[i]) for i in (0, 2, 3, 4))
        slots, features = self._runner.row_offsets(self._runner.rows)[rows] + positions, missing[1]
        for i in range(0, len(missing[0]), _CHUNK):
            part = slice(i, i + _CHUNK)
            self._runner.write_pairs(tokens[part], features[part], slots[part], positions[part])
        return self._runner.write_pairs(tokens[last], features[last], slots[last], positions[last])

    def _ints(self, values: Iterable[int]) -> Tensor:
        return to_device(list(values), self._device)


def _draft(context: DraftContext, start: DraftInputs, mode: VerifyMode) -> tuple[Tensor, ...]:
    """Return the tensors of a draft; log q, which is as large as the logits, only in rejection mode."""
    if not context.arm.is_chain:
        return draft_tree(context, start)
    tokens_Bk, scores_Bk, logq_BkV = draft_chain(context, start)
    return (tokens_Bk, scores_Bk) if mode == "coupled" else (tokens_Bk, scores_Bk, logq_BkV)


def _three(made: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor | None]:
    return made[0], made[1], made[2] if len(made) > 2 else None


class Backlog:
    """Samples by row, and the steps that no draft has needed yet."""

    def __init__(self, rows: int, window: int) -> None:
        self.window = window
        self.rows: list[RowBacklog | None] = [None] * rows
        self._steps: deque[tuple[StepUpdate, list[RowBacklog]]] = deque()
        """Updates of the engine's steps, with the samples of their rows."""
        self._num_pairs = 0

    @property
    def num_pairs(self) -> int:
        """Return the number of queued pairs."""
        return self._num_pairs

    def running_rows(self, rows: int) -> list[RowBacklog]:
        """Return the backlogs of the rows 0 .. rows - 1.

        Raises:
            ValueError: One of the rows has no sample.
        """
        backlogs = [backlog for backlog in self.rows[:rows] if backlog is not None]
        if len(backlogs) != rows:
            raise ValueError(
                f"a draft of {rows} rows is requested, but only {len(backlogs)} of them have a sample"
            )
        return backlogs

    def begin(self, start: RowStart) -> None:
        """Add a sample."""
        self.rows[start.row] = RowBacklog.of(start, self.window)

    def update(self, update: StepUpdate) -> None:
        """Queue the tokens and features of one step."""
        rows = self.running_rows(len(update.tokens))
        for backlog, tokens in zip(rows, update.tokens, strict=True):
            backlog.length += len(tokens)
            backlog.last = tokens[-1]
        self._steps.append((update, rows))
        self._num_pairs += prod(update.features.shape[:2])
        while self._num_pairs > len(self.rows) * self.window and len(self._steps) > 1:
            dropped, rows = self._steps.popleft()
            self._num_pairs -= prod(dropped.features.shape[:2])
            for backlog, tokens in zip(rows, dropped.tokens, strict=True):
                backlog.skip(len(tokens))

    def take_single_step(self, backlogs: list[RowBacklog]) -> StepUpdate | None:
        """Return the only queued step of these rows and mark it as computed.

        Returns None if more than one step is queued.
        """
        if len(self._steps) != 1 or self._steps[0][1] != backlogs:
            return None
        if any(backlog.features_Tw is not None for backlog in backlogs):
            return None
        update, _ = self._steps[0]
        self._clear(backlogs)
        return update

    def take_missing(self, backlogs: list[RowBacklog]) -> MissingPairs:
        """Return all queued pairs of these rows and mark them as computed.

        Raises:
            ValueError: A row has no new pair since the last call.
        """
        pairs_of_row: dict[RowBacklog, list[tuple[Sequence[int], Tensor]]] = {
            backlog: [] for backlog in backlogs
        }
        for backlog, row_pairs in pairs_of_row.items():
            if backlog.features_Tw is not None:
                row_pairs.append((backlog.tokens, backlog.features_Tw))
        for update, rows in self._steps:
            for b, backlog in enumerate(rows):
                if backlog in pairs_of_row:
                    tokens = update.tokens[b]
                    pairs_of_row[backlog].append((tokens, update.features[b, : len(tokens)]))
        missing = _join_pairs(backlogs, pairs_of_row)
        self._clear(backlogs)
        return missing

    def _clear(self, backlogs: list[RowBacklog]) -> None:
        self._steps.clear()
        self._num_pairs = 0
        for backlog in backlogs:
            backlog.tokens, backlog.features_Tw, backlog.num_computed = (), None, backlog.length


def _join_pairs(
    backlogs: list[RowBacklog], pairs_of_row: dict[RowBacklog, list[tuple[Sequence[int], Tensor]]]
) -> MissingPairs:
    tokens: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    last: list[int] = []
    features: list[Tensor] = []
    for row, backlog in enumerate(backlogs):
        row_pairs = [piece for piece in pairs_of_row[backlog] if piece[0]]
        if backlog.length == 0:
            # A prompt of one token has no pair yet: use a placeholder until the first real pair.
            width = pairs_of_row[backlog][0][1] if pairs_of_row[backlog] else None
            if width is None:
                raise ValueError(f"row {row} has no step since its last draft: call update first")
            row_pairs = [((backlog.last,), width.new_zeros(1, width.shape[-1]))]
        if not row_pairs:
            raise ValueError(f"row {row} has no step since its last draft: call update first")
        for row_tokens, row_features in row_pairs:
            tokens += row_tokens
            features.append(row_features)
        count = len(tokens) - len(rows)
        rows += [row] * count
        positions += range(backlog.num_computed, backlog.num_computed + count)
        last.append(len(tokens) - 1)
    return tokens, torch.cat(features), rows, positions, last
