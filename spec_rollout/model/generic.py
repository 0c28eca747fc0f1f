"""Target of any `transformers` causal language model, through the model's own forward.

Shapes: B running rows, q new tokens per row, T tokens of one row, V vocabulary, d hidden size, f feature size
(d, and d more for each tapped layer).
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from aedit.spec_rollout.model.attention_mask import mask_formats
from aedit.spec_rollout.model.kv_storage import KVMemoryError
from aedit.spec_rollout.model.model_forward import ModelForward
from aedit.spec_rollout.model.model_support import (
    causal_model,
    check_sizes,
    position_limit,
    to_device,
    unwrapped,
)
from aedit.spec_rollout.model.prefill import Segment
from aedit.spec_rollout.model.row_passes import EqualPasses, MaskedPasses, RowPasses, RowTokens, WholePasses
from aedit.spec_rollout.model.slot_store import SlotStore, TextStore
from aedit.spec_rollout.model.target import Target
from aedit.spec_rollout.model.target_model import TargetModel
from aedit.spec_rollout.model.weight_update import PolicyWeights
from aedit.weights import refuse_meta_default

PREFILL_TOKENS = 1024
"""Upper limit of the tokens of one forward pass of a prefill."""
PREFILL_PAIRS = 4 << 20
"""Upper limit of (token, slot) pairs of one row in one forward pass of a prefill."""


class GenericTarget(TargetModel):
    """Policy of an engine that runs the forward of the user's model.

    Hooks, adapters, biases, soft caps and attention of any kind take effect. A probe of a few tokens finds
    out how rows can share a forward pass; `path` says how. Changes of the parameters take effect at the next
    call. The tokens of a row have the slots 0, 1, ...; the caller passes the length of each row.
    """

    @classmethod
    def of(
        cls, model: nn.Module, *, rows: int, max_tokens: int, nodes: int = 16, taps: Sequence[int] = ()
    ) -> "GenericTarget":
        """Return a target for `rows` samples at a time; arguments as those of `Target.of`.

        Raises:
            ValueError: A size is too small, a tap does not exist, `max_tokens` exceeds the positions of the
                model, its parameters are sharded, or it is no causal language model of `transformers`.
        """
        check_sizes(rows, max_tokens, nodes)
        return cls(model, rows, max_tokens, nodes, taps)

    def __init__(self, model: nn.Module, rows: int, max_tokens: int, nodes: int, taps: Sequence[int]) -> None:
        self.model = causal_model(model)
        self.rows, self.max_tokens, self.nodes = rows, max_tokens, nodes
        self._policy = PolicyWeights(model)
        self._limit = position_limit(self.model)
        if max_tokens > self._limit:
            raise ValueError(
                f"max_tokens {max_tokens} exceeds the {self._limit} positions of {type(self.model).__name__}"
            )
        forward = ModelForward(self.model, taps)
        self._num_layers = forward.num_layers
        probe = Probe(forward, self.dtype, self._limit)
        make = probe.choose()
        self._vocabulary, self._feature_size = probe.logits[0].shape[-1], probe.feature_size
        self._refused = tuple(probe.refused)
        try:
            self._policy.check(thorough=True)
        except RuntimeError as error:
            name = type(self.model).__name__
            raise ValueError(f"the forward of {name} changes its own weights: {error}") from None
        # A draft that starts at a row's last token needs slots, too.
        self._passes = make(rows, max_tokens + nodes + 1)
        # The cache gets its shapes from a token.
        self.prefill([Segment(0, 0, [0])])
        self.release_row(0)

    @property
    def path(self) -> str:
        """Return how rows are computed."""
        return f"generic ({self._passes.name})"

    @property
    def refused_passes(self) -> tuple[str, ...]:
        """Return why faster ways to compute rows are not used."""
        return self._refused

    @property
    def supports_trees(self) -> bool:
        """Return true if `step` accepts trees."""
        return self._passes.supports_trees

    @property
    def embedding(self) -> Tensor:
        """Return the model's embedding parameter itself, (V, d)."""
        return _weight(self.model.get_input_embeddings())  # type: ignore[operator]

    @property
    def head(self) -> Tensor:
        """Return the model's output head parameter itself, (V, d)."""
        return _weight(self.model.get_output_embeddings())  # type: ignore[operator]

    @property
    def feature_size(self) -> int:
        """Return the feature size f."""
        return self._feature_size

    @property
    def vocabulary(self) -> int:
        """Return the number of logits V."""
        return self._vocabulary

    @property
    def num_layers(self) -> int:
        """Return the number of decoder layers."""
        return self._num_layers

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values that are in use."""
        return self._passes.store.kv_bytes

    @property
    def kv_bytes_reserved(self) -> int:
        """Return the upper limit of `kv_bytes`."""
        return self._passes.store.kv_bytes_reserved

    @torch.inference_mode()
    def prefill(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Compute tokens of several rows, each after the tokens that are cached in its row.

        Rows of similar length share a pass, and long segments are computed in chunks.

        Returns:
            Features of each segment, (T, f).

        Raises:
            ValueError: A row would exceed `max_tokens`.
        """
        for segment in segments:
            self._check_capacity(segment.start + len(segment.tokens))
        none = torch.empty(0, self.feature_size, dtype=self.dtype, device=self.device)
        parts, done = [[none] for _ in segments], [0] * len(segments)
        while True:
            left = [len(segment.tokens) - n for segment, n in zip(segments, done, strict=True)]
            order = sorted((i for i in range(len(left)) if left[i]), key=lambda i: -left[i])
            if not order:
                return [torch.cat(each) for each in parts]
            end = max(segments[i].start + len(segments[i].tokens) for i in order)
            q = min(left[order[0]], PREFILL_TOKENS, max(64, PREFILL_PAIRS // end))
            members = order[: max(1, PREFILL_TOKENS // q)]
            counts = [min(left[i], q) for i in members]
            features = self._compute([segments[i] for i in members], [done[i] for i in members], counts)
            for i, count, features_qf in zip(members, counts, features, strict=True):
                parts[i].append(features_qf[:count])
                done[i] += count

    def _compute(self, segments: Sequence[Segment], done: Sequence[int], counts: Sequence[int]) -> Tensor:
        """Compute the next `counts` tokens of the segments; return features (B, q, f)."""
        q = max(counts)
        tokens = [
            [*segment.tokens[at : at + count], *[0] * (q - count)]
            for segment, at, count in zip(segments, done, counts, strict=True)
        ]
        starts = [segment.start + at for segment, at in zip(segments, done, strict=True)]
        tokens_Bq = to_device(tokens, self.device, torch.int64)
        new = RowTokens([segment.row for segment in segments], starts, tokens_Bq, counts)
        return self._passes.run(new, logits=False)[1].to(self.device, self.dtype)

    @torch.inference_mode()
    def step(
        self,
        tokens_Bq: Tensor,
        lengths_B: Sequence[int] | Tensor,
        parents_BN: Tensor | None = None,
        counts_B: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute q new tokens of each of the rows 0 .. B - 1; see `TargetModel.step`.

        Raises:
            ValueError: The numbers of rows differ, a row would exceed `max_tokens`, or trees are not
                supported.
        """
        lengths = self._step_lengths(tokens_Bq, lengths_B)
        q = tokens_Bq.shape[1]
        if parents_BN is not None and not self.supports_trees:
            raise ValueError(f"{type(self.model).__name__} cannot verify trees: use chains")
        # What follows from the last position on is never emitted.
        most = counts_B or [q] * len(lengths)
        counts = [max(1, min(n, self._limit - length)) for n, length in zip(most, lengths, strict=True)]
        new = RowTokens(range(len(lengths)), lengths, tokens_Bq, counts, parents_BN)
        logits, features = self._passes.run(new, logits=True)
        return logits.to(self.device), features.to(self.device, self.dtype)

    @torch.inference_mode()
    def keep_path(self, lengths_B: Sequence[int] | Tensor, path_Bm: Tensor, counts_B: Tensor) -> None:
        """Move keys and values of the accepted nodes of a tree to consecutive slots. See `Target`."""
        lengths = lengths_B if isinstance(lengths_B, Tensor) else torch.tensor(lengths_B)
        self._passes.store.keep_path(lengths.to(path_Bm.device), path_Bm, counts_B)

    @torch.inference_mode()
    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of row `source` to row `target`."""
        self._passes.store.copy_row(source, target, length)

    def release_row(self, row: int) -> None:
        """Declare that the keys and values of a row are not needed any more."""
        self._passes.store.release_row(row)

    @torch.inference_mode()
    def read_kv(self, row: int, length: int, start: int = 0) -> Tensor:
        """Return a copy of what is kept of the tokens start .. length - 1 of a row; see the store."""
        return self._passes.store.read_kv(row, length, start)

    @torch.inference_mode()
    def write_kv(self, row: int, kv: Tensor, start: int = 0) -> None:
        """Write the result of `read_kv`, of this or another target, to a row from `start` on.

        Raises:
            ValueError: It is of another model, or too long.
        """
        self._passes.store.write_kv(row, kv, start)

    def update_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` the policy's weights, all or none, and set the version; see `PolicyWeights.update`.

        The keys and values of the old weights are overwritten by zeros.
        """
        before = self.version
        self._policy.update(weights, version)
        if version != before:
            self._passes.store.clear()


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight


TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Upper limit of ||difference|| / ||logits||, logits centered per token: rounding stays far below it.
Many models compute parts in float32 even in a float64 model."""
TEXT_TOKENS = 12
TREE_PARENTS = (-1, -1, 0, 1, 0)
"""Two subtrees. Nodes of equal depth have different slots."""

Make = Callable[[int, int], RowPasses]
"""(rows, slots) -> passes with an empty store."""


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
        self.refused: list[str] = []
        """Why ways before the chosen one were not chosen."""
        name, first = type(forward.model).__name__, self.logits[0]
        if not first.isfinite().all():
            raise ValueError(f"{name}: logits are not finite: check the weights")
        if not self._same(self._whole(self._texts[0]), first):
            raise ValueError(f"{name} gives other logits for the same text: it is not deterministic")
        if len(first) > 1 and not self._same(self._whole(self._texts[0][:-1]), first[:-1]):
            raise ValueError(f"{name} is not causal: logits of a token depend on the tokens after it")

    @property
    def feature_size(self) -> int:
        """Return the size of a feature."""
        return self._forward(torch.tensor([[0]], device=self._device), last=0, use_cache=False)[1].shape[-1]

    def _whole(self, text: Sequence[int]) -> Tensor:
        tokens = torch.tensor([text], device=self._device)
        return self._forward(tokens, last=len(text), use_cache=False)[0][0]

    def _same(self, found: Tensor, expected: Tensor) -> bool:
        if found.shape != expected.shape:
            return False
        a, b = (x.double() - x.double().mean(-1, keepdim=True) for x in (found, expected))
        return bool((a - b).norm() <= TOLERANCE[self._dtype] * b.norm())

    def choose(self) -> Make:
        """Return what makes the most general passes whose logits are right.

        Raises:
            ValueError: There are none.
        """
        for make, check in self._candidates():
            passes = make(len(self._texts), 2 * TEXT_TOKENS)
            try:
                reason = check(passes)
            except Exception as error:  # a model fails in its own way where it does not accept an argument
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not reason:
                return make
            self.refused.append(f"{passes.name}: {reason}")
        name = type(self._forward.model).__name__
        raise ValueError(
            f"{name}: no way to decode gives the logits of its forward ({'; '.join(self.refused)})"
        )

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

        if forward.cache_argument:
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


Path = Literal["auto", "fast", "generic"]
"""Forward pass of a target: `fast` is this package's own, `generic` is the model's, `auto` is `fast` where it
supports the model, else `generic`."""


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
    refuse_meta_default()
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
