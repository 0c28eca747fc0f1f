"""Features of a model's training forward: what a drafter learns from where rollouts are generated elsewhere.

features = ForwardFeatures(online.sink)
with features.collecting(model, texts, version):
    loss = ...  # calls the model once
loss.backward()
features.write()
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aedit.spec_rollout.model import HiddenStates, unwrapped
from aedit.spec_rollout.training.features import RowFeatures
from aedit.types import NonNegativeInt, checked


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

    def __init__(self, sink: RowFeatures) -> None:
        self._sink, self.ring = sink, sink.ring
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
        hidden = HiddenStates()
        with hidden.hooks(unwrapped(model)):
            yield
        self._begin_copy(hidden.features().detach(), texts, version)

    def write(self) -> None:
        """Write what was collected. Call it after the backward pass: on a GPU it waits for the copy."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        if copy.done is not None:
            copy.done.synchronize()
        sizes = [len(text.tokens) - 1 for text in copy.texts]
        for text, features_MF in zip(copy.texts, torch.split(copy.features_MF, sizes), strict=True):
            sample = self.ring.begin(text.tokens[0], text.num_prompt, copy.version)
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
