"""Features for a ring: of the rows of an engine, and of a training forward."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from aedit.spec_rollout.drafters import RowStart, StepUpdate
from aedit.spec_rollout.model import HiddenStates, tapped_layers, unwrapped
from aedit.spec_rollout.training.feature_ring import FeatureRing, RingSample
from aedit.types import NonNegativeInt, checked


@dataclass(slots=True)
class _Row:
    """Part of a row's sample that is not in the ring yet."""

    sample: RingSample | None
    version: int
    tokens: list[int] = field(default_factory=list)
    features: list[tuple[Tensor, int, int]] = field(default_factory=list)
    """Tensors (B, m, F) that rows share, the row's index, and its number of valid entries."""

    def add(self, tokens: Sequence[int], features_BMF: Tensor, index: int) -> None:
        if tokens:
            self.tokens += tokens
            self.features.append((features_BMF, index, len(tokens)))


def _prompt(tokens: Sequence[int], num_prompt: int) -> tuple[int, ...] | None:
    """Return what the samples of a group have in common; None: at most the token that begins any text."""
    return tuple(tokens[:num_prompt]) if num_prompt > 1 else None


class RowFeatures:
    """A `FeatureSink` that writes the samples of an engine's rows into a ring as they grow.

    A step costs one copy on the features' own device and no synchronization. Every `flush_steps` steps, and
    when a sample ends, the collected features are written. So unfinished samples can be trained on, and at
    most the features of that many steps are kept outside of the ring.
    """

    def __init__(self, ring: FeatureRing, *, flush_steps: int = 32, max_share: float = 1.0) -> None:
        """Make a sink that writes into `ring` every `flush_steps` steps.

        Args:
            ring: The ring.
            flush_steps: Steps between two flushes.
            max_share: See `FeatureSink`.
        """
        self.ring, self.max_share = ring, max_share
        self.collects = True
        """False: samples that begin from now on are left out, at no cost."""
        self._flush_steps = flush_steps
        self._steps: list[Tensor] = []
        """Copied features of the steps since the last flush; (B, m, F) each."""
        self._rows: dict[int, _Row] = {}

    def begin(self, rows: Sequence[RowStart], version: int) -> None:
        """Add samples that start in these rows."""
        for start in rows:
            if not self.collects:
                self._rows[start.row] = _Row(None, version)
                continue
            # Tokens without features are dropped: the sample starts after them.
            missing = len(start.tokens) - 1 - len(start.features_Td)
            num_prompt = max(1, start.num_prompt - missing)
            prompt = _prompt(start.tokens, start.num_prompt)
            sample = self.ring.begin(start.tokens[missing], num_prompt, version, prompt)
            row = self._rows[start.row] = _Row(sample, version)
            if sample is not None:
                row.add(start.tokens[missing + 1 :], self._copy(start.features_Td).unsqueeze(0), 0)

    def update(self, update: StepUpdate, version: int) -> None:
        """Collect the tokens and features of one step.

        Raises:
            ValueError: A row's sample began with another policy version.
        """
        features_BMF = self._copy(update.features)
        for index, row in self._rows.items():
            if row.version != version:
                raise ValueError(
                    f"row {index} began with version {row.version} of the policy and goes on with {version}: "
                    "end it and begin it again"
                )
            if row.sample is not None:
                row.add(update.tokens[index], features_BMF, index)
        self._steps.append(features_BMF)
        if len(self._steps) >= self._flush_steps:
            self.flush()

    def move(self, source: int, target: int) -> None:
        """Rename row `source` to `target`, whose sample has ended."""
        self._rows[target] = self._rows.pop(source)

    def end(self, row: int, finished: bool) -> None:
        """Write the rest of the row's sample and close it."""
        ended = self._rows.pop(row)
        self._write(ended)
        if ended.sample is not None:
            self.ring.end(ended.sample, finished)

    def status(self) -> dict[str, object]:
        """Return the status of the ring, and the bytes of collected features outside of it."""
        waiting = {x.data_ptr(): x.nbytes for row in self._rows.values() for x, _, _ in row.features}
        return {**self.ring.status(), "bytes_waiting": sum(waiting.values())}

    def flush(self) -> None:
        """Write the collected features. On a GPU this synchronizes with the steps that computed them."""
        steps, self._steps = self._steps, []
        num_rows = min((len(step) for step in steps), default=0)
        stacked_SBF = None
        for row in self._rows.values():
            count = len(row.features)
            if row.sample is not None and 0 < count == len(row.tokens) and count <= len(steps):
                first, index, _ = row.features[0]
                # One token in each step, all in the same row: plain decoding. One slice instead of many.
                if first is steps[-count] and index == row.features[-1][1] < num_rows:
                    if stacked_SBF is None:
                        stacked_SBF = torch.stack([step[:num_rows, 0] for step in steps])
                    self._append(row, stacked_SBF[-count:, index])
                    continue
            self._write(row)

    def _copy(self, features: Tensor) -> Tensor:
        """Copy features: the engine may reuse the memory."""
        return features.detach().to(self.ring.shape.dtype, copy=True)

    def _write(self, row: _Row) -> None:
        if row.sample is None or not row.tokens:
            return
        parts = [features_BMF[index, :count] for features_BMF, index, count in row.features]
        self._append(row, torch.cat(parts))

    def _append(self, row: _Row, features_MF: Tensor) -> None:
        assert row.sample is not None
        kept = self.ring.append(row.sample, torch.tensor(row.tokens), features_MF.cpu())
        row.tokens, row.features = [], []
        if not kept:
            row.sample = None


@checked()
@dataclass(frozen=True, slots=True)
class TrainedText:
    """A finished sample: prompt and answer."""

    tokens: Sequence[int]
    num_prompt: NonNegativeInt


@dataclass(frozen=True, slots=True)
class _Copy:
    """Features of texts, one after the other, on their way to the CPU."""

    texts: Sequence[TrainedText]
    features_MF: Tensor
    version: int
    done: torch.cuda.Event | None


@checked()
class ForwardFeatures:
    """Writes the hidden states of forward passes that happen anyway into the ring of a sink.

    It runs no module. While `RowFeatures.collects` is false it does nothing. Else a pass costs one copy of
    the features of its tokens, at most of as many as the ring holds; on a GPU the copy runs beside the
    backward pass. The features of one pass at most are kept outside of the ring.
    """

    def __init__(self, sink: RowFeatures, taps: Sequence[int] = ()) -> None:
        self._sink, self.ring, self._taps = sink, sink.ring, tuple(taps)
        self._copy: _Copy | None = None

    @contextmanager
    def collecting(self, model: Any, texts: Sequence[TrainedText], version: int) -> Iterator[None]:
        """Collect the features of the call of `model` inside the context.

        Args:
            model: `transformers` causal language model, sharded or not.
            texts: What the rows of the call begin with, from position 0 on. Padding follows.
            version: Version of the policy that the weights are.

        Raises:
            ValueError: The model was not called, or on another number of rows or tokens.
        """
        if not self._sink.collects:
            yield
            return
        hidden, own = HiddenStates(), unwrapped(model)
        layers = tapped_layers(own, self._taps)
        with hidden.hooks(own, layers):
            yield
        self._begin_copy(hidden.features(layers).detach(), texts, version)

    def write(self) -> None:
        """Write what was collected. Call it after the backward pass: on a GPU it waits for the copy."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        if copy.done is not None:
            copy.done.synchronize()
        sizes = [len(text.tokens) - 1 for text in copy.texts]
        for text, features_MF in zip(copy.texts, torch.split(copy.features_MF, sizes), strict=True):
            prompt = _prompt(text.tokens, text.num_prompt)
            sample = self.ring.begin(text.tokens[0], text.num_prompt, copy.version, prompt)
            if sample is not None:
                self.ring.append(sample, torch.tensor(text.tokens[1:]), features_MF)
                self.ring.end(sample, True)

    @property
    def num_waiting_bytes(self) -> int:
        """Return the bytes of features that are not in the ring yet."""
        return self._copy.features_MF.nbytes if self._copy is not None else 0

    def _begin_copy(self, hidden_BLd: Tensor, texts: Sequence[TrainedText], version: int) -> None:
        longest = max(len(text.tokens) for text in texts)
        if hidden_BLd.shape[0] != len(texts) or hidden_BLd.shape[1] < longest:
            raise ValueError(
                f"features of a forward pass: {len(texts)} texts of up to {longest} tokens, and a call with "
                f"hidden states of shape {tuple(hidden_BLd.shape)}: pass what the rows of the call begin with"
            )
        kept = self._that_fit(texts)
        parts = [row[: len(text.tokens) - 1] for row, text in zip(hidden_BLd, kept, strict=False)]
        if not parts:
            return
        on_gpu = hidden_BLd.is_cuda
        features_MF = torch.cat(parts).to(self.ring.shape.dtype).to("cpu", non_blocking=on_gpu)
        done = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        if done is not None:
            done.record()
        self._copy = _Copy(kept, features_MF, version, done)

    def _that_fit(self, texts: Sequence[TrainedText]) -> list[TrainedText]:
        """Return the first texts, as many as the ring holds at a time."""
        shape, used, kept = self.ring.shape, 0, []
        for text in texts:
            used += -(-(len(text.tokens) - 1) // shape.page_tokens)
            if used > shape.num_pages:
                break
            kept.append(text)
        return kept
