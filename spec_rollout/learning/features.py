"""What the engine has computed anyway goes into a feature ring: the sink that follows its rows."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.drafts import RowStart, StepUpdate
from aedit.spec_rollout.learning.feature_ring import FeatureRing, RingSample


@dataclass(slots=True)
class _Row:
    """What is known of a row's sample and not in the ring yet."""

    sample: RingSample | None
    version: int
    tokens: list[int] = field(default_factory=list)
    features: list[tuple[Tensor, int, int]] = field(default_factory=list)
    """Tensors of (B, m, F) that rows share; this row's index; how many of its m count."""

    def add(self, tokens: Sequence[int], features_BMF: Tensor, index: int) -> None:
        if tokens:
            self.tokens += tokens
            self.features.append((features_BMF, index, len(tokens)))


class RowFeatures:
    """A `FeatureSink`: writes the samples of an engine's rows into a ring as they grow.

    A step costs one copy on the features' own device and no synchronisation; every `flush_steps` steps, and
    when a sample ends, what has come together is written. So partial samples can be learned from before they
    are finished, and at most the features of so many steps wait outside of the ring.
    """

    def __init__(self, ring: FeatureRing, *, flush_steps: int = 32) -> None:
        self.ring = ring
        self._flush_steps = flush_steps
        self._num_steps = 0
        self._rows: dict[int, _Row] = {}

    def begin(self, rows: Sequence[RowStart], version: int) -> None:
        for start in rows:
            # What has no features is as if it had not been: the text begins later.
            missing = len(start.tokens) - 1 - len(start.features_Td)
            num_prompt = max(1, start.num_prompt - missing)
            sample = self.ring.begin(start.tokens[missing], num_prompt, version)
            row = self._rows[start.row] = _Row(sample, version)
            if sample is not None:
                row.add(start.tokens[missing + 1 :], self._copy(start.features_Td).unsqueeze(0), 0)

    def update(self, update: StepUpdate, version: int) -> None:
        """ValueError if a row's sample began with another version."""
        features_BMF = self._copy(update.features)
        for index, tokens in enumerate(update.tokens):
            row = self._rows[index]
            if row.version != version:
                raise ValueError(
                    f"row {index} began with version {row.version} of the policy and goes on with {version}: "
                    "end it and begin it again"
                )
            if row.sample is not None:
                row.add(tokens, features_BMF, index)
        self._num_steps += 1
        if self._num_steps % self._flush_steps == 0:
            self.flush()

    def move(self, source: int, target: int) -> None:
        self._rows[target] = self._rows.pop(source)

    def end(self, row: int, finished: bool) -> None:
        ended = self._rows.pop(row)
        self._write(ended)
        if ended.sample is not None:
            self.ring.end(ended.sample, finished)

    def status(self) -> dict[str, object]:
        """The ring's, and the bytes of what waits outside of it."""
        waiting = {x.data_ptr(): x.nbytes for row in self._rows.values() for x, _, _ in row.features}
        return {**self.ring.status(), "bytes_waiting": sum(waiting.values())}

    def flush(self) -> None:
        """Write what has come together; on a GPU this waits for the steps that made it."""
        for row in self._rows.values():
            self._write(row)

    def _copy(self, features: Tensor) -> Tensor:
        """The engine may use the memory again."""
        return features.detach().to(self.ring.shape.dtype, copy=True)

    def _write(self, row: _Row) -> None:
        if row.sample is None or not row.tokens:
            return
        parts = [features_BMF[index, :count] for features_BMF, index, count in row.features]
        kept = self.ring.append(row.sample, torch.tensor(row.tokens), torch.cat(parts).cpu())
        row.tokens, row.features = [], []
        if not kept:
            row.sample = None
