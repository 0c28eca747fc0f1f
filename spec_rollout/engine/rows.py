"""Assignment of samples to rows: samples start, move and end.

The running rows are always the first ones. Where a sample ends, the next waiting sample starts in its row, or
the last row moves into it. Cache, noise, drafters and feature sink are informed of every change.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedit.spec_rollout.drafters.drafts import Drafter, DrafterKind, FeatureSink, RowStart
from aedit.spec_rollout.model.target import Segment
from aedit.spec_rollout.model.target_model import TargetModel
from aedit.spec_rollout.sampling.distribution import RowSampling
from aedit.spec_rollout.sampling.noise import RowNoise
from aedit.spec_rollout.sampling.samples import FinishReason, Prompt, Rollout, SampleKV
from aedit.spec_rollout.sampling.stops import StopStrings, TokenDecoder

RECOMPUTED_TOKENS = 64
"""Number of last tokens that are computed again for a sample that came with keys and values, if features are
needed: a drafter starts from the features of these tokens."""


@dataclass(slots=True)
class RunningSample:
    """A sample in its row."""

    rollout: Rollout
    length: int
    """Number of tokens whose keys and values are in the row: all but the last."""
    last: int
    """Token that goes through the policy next."""
    stops: StopStrings | None
    prompt_features: Tensor | None
    """Features of all prompt tokens but the last, for other samples of the group. None if no features are
    needed, or they are on another engine."""

    @property
    def max_remaining(self) -> int:
        """Return the upper limit of new tokens that the sample may still get."""
        return self.rollout.prompt.sampling.max_new_tokens - len(self.rollout.tokens)

    def find_end(self, tokens: Sequence[int]) -> tuple[int, FinishReason]:
        """Return how many of these next tokens belong to the rollout, and its finish reason.

        The reason is empty if the rollout does not end with them.
        """
        sampling, num_tokens = self.rollout.prompt.sampling, len(self.rollout.tokens)
        for i, token in enumerate(tokens, 1):
            completed = self.stops is not None and self.stops.completes(token)
            if token in sampling.stop_tokens or (completed and num_tokens + i >= sampling.min_new_tokens):
                return i, "stop"
            if num_tokens + i >= sampling.max_new_tokens:
                return i, "length"
        return len(tokens), ""

    def append(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append the tokens of one pass of the policy."""
        rollout = self.rollout
        rollout.tokens += tokens
        rollout.logprobs += logprobs
        rollout.versions += [version] * len(tokens)
        rollout.passes += 1
        self.length += len(tokens)
        self.last = tokens[-1]


class RowScheduler:
    """Running samples by row, the waiting queue, and the per-row state."""

    def __init__(
        self,
        target: TargetModel,
        noise: RowNoise,
        drafters: Mapping[DrafterKind, Drafter],
        tokenizer: TokenDecoder | None,
    ) -> None:
        self.target, self.noise, self.drafters, self.tokenizer = target, noise, dict(drafters), tokenizer
        self.sink: FeatureSink | None = None
        self.running: list[RunningSample] = []
        self.waiting: deque[Rollout] = deque()
        self.num_prefilled = 0
        """Tokens that were computed when samples started."""
        self.num_restored = 0
        """Tokens that were not computed, as their keys and values came along."""
        self._sampling: RowSampling | None = None
        self._some_greedy = False

    @property
    def needs_features(self) -> bool:
        """Return true if a drafter or a sink uses features."""
        return bool(self.drafters) or self.sink is not None

    @property
    def sampling(self) -> RowSampling:
        """Return the sampling settings of the rows 0 .. B - 1 as tensors."""
        if self._sampling is None:
            settings = [live.rollout.prompt.sampling for live in self.running]
            self._sampling = RowSampling.of(settings, self.target.vocabulary, self.target.device)
            self._some_greedy = any(sampling.temperature == 0 for sampling in settings)
        return self._sampling

    @property
    def mixed_temperature_B(self) -> Tensor | None:
        """Return the temperatures, or None if no row is greedy."""
        sampling = self.sampling
        return sampling.temperature_B if self._some_greedy else None

    @property
    def max_remaining(self) -> int:
        """Return the upper limit of new tokens of all running samples, at least 1."""
        return max(sample.max_remaining for sample in self.running)

    @property
    def feature_bytes(self) -> int:
        """Return the bytes of prompt features that are kept for samples with the same prompt."""
        features = [sample.prompt_features for sample in self.running if sample.prompt_features is not None]
        storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in features}
        return sum(storages.values())

    def admit_waiting(self) -> None:
        """Start waiting samples in free rows."""
        num_free = self.target.rows - len(self.running)
        if self.waiting and num_free:
            first = len(self.running)
            self._begin(range(first, first + min(num_free, len(self.waiting))))

    def end(self, rows: Sequence[int], finished: bool) -> None:
        """End the samples of these rows (ascending) and fill the rows again.

        Args:
            rows: Rows whose samples end.
            finished: Their text is complete; else it continues elsewhere.
        """
        for row in rows:
            self._release(row, finished)
        num_next = min(len(rows), len(self.waiting))
        self._begin(rows[:num_next])
        for row in reversed(rows[num_next:]):
            self._move_last_into(row)

    def copy_kv(self, row: int) -> SampleKV:
        """Return a copy of the keys and values of a row's sample."""
        return SampleKV(self.target.read_kv(row, self.running[row].length), self.target.version)

    def recompute(self) -> None:
        """Compute the state of all running samples again with the current weights."""
        for row in range(len(self.running)):
            self._release(row, finished=False)
        rollouts = [live.rollout for live in self.running]
        self.running = []
        self.waiting.extendleft(reversed(rollouts))
        self._begin(range(len(rollouts)))

    def _begin(self, rows: Iterable[int]) -> None:
        """Start the next waiting samples in these rows, which are free or follow the last one."""
        starts = [self._start(row, self.waiting.popleft()) for row in rows]
        if not starts:
            return
        self._sampling = None
        for drafter in self.drafters.values():
            drafter.begin(starts)
        if self.sink is not None:
            self.sink.begin(starts, self.target.version)

    def _start(self, row: int, rollout: Rollout) -> RowStart:
        """Fill the row with the state of all tokens of the rollout but the last."""
        prompt = rollout.prompt
        tokens, num_prompt = [*prompt.tokens, *rollout.tokens], len(prompt.tokens)
        restored, rollout.kv = self._restore_kv(row, tokens, rollout.kv), None
        if not restored:
            features_Tf = self._prefill(row, prompt, tokens)
        elif self.needs_features:
            start = max(0, len(tokens) - 1 - RECOMPUTED_TOKENS)
            features_Tf = self._compute(row, tokens[start:-1], start)
        else:
            features_Tf = self._no_features()
        self.noise.begin(row, prompt.rollout, prompt.sample)
        has_all = self.needs_features and len(features_Tf) == len(tokens) - 1
        kept = features_Tf[: num_prompt - 1] if has_all else None
        self.running[row : row + 1] = [
            RunningSample(rollout, len(tokens) - 1, tokens[-1], self._stops(rollout), kept)
        ]
        return RowStart(row, prompt.group, tokens, features_Tf, num_prompt)

    def _stops(self, rollout: Rollout) -> StopStrings | None:
        """Return the search for the sample's stop strings, after its text so far."""
        strings = rollout.prompt.sampling.stop_strings
        if not strings or self.tokenizer is None:
            return None
        stops = StopStrings(strings, self.tokenizer, rollout.prompt.tokens)
        for token in rollout.tokens:
            stops.completes(token)
        return stops

    def _restore_kv(self, row: int, tokens: Sequence[int], kept: SampleKV | None) -> bool:
        """Write the keys and values that came with a sample; return true if they could be used.

        They must be of this policy version and of all tokens but the last.
        """
        if kept is None or kept.version != self.target.version or kept.num_tokens != len(tokens) - 1:
            return False
        try:
            self.target.write_kv(row, kept.kv)
        except ValueError:
            return False
        self.num_restored += kept.num_tokens
        return True

    def _prefill(self, row: int, prompt: Prompt, tokens: Sequence[int]) -> Tensor:
        """Compute all tokens but the last; return their features, if features are needed."""
        parts, start = [self._no_features()], 0
        source = self._same_prompt(prompt)
        if source is not None:
            start = len(prompt.tokens) - 1
            if source != row:
                self.target.copy_row(source, row, start)
            kept = self.running[source].prompt_features
            parts += [kept] if kept is not None else []
        if start < len(tokens) - 1:
            parts.append(self._compute(row, tokens[start:-1], start))
        return torch.cat(parts) if self.needs_features else parts[0]

    def _compute(self, row: int, tokens: Sequence[int], start: int) -> Tensor:
        self.num_prefilled += len(tokens)
        return self.target.prefill([Segment(row, start, tokens)])[0]

    def _no_features(self) -> Tensor:
        return torch.empty(0, self.target.feature_size, dtype=self.target.dtype, device=self.target.device)

    def _same_prompt(self, prompt: Prompt) -> int | None:
        """Return a row whose cache holds this prompt, or None.

        The row belongs to a running sample of the group, or to one that has just ended.
        """
        if prompt.group < 0:
            return None
        for row, live in enumerate(self.running):
            other = live.rollout.prompt
            has_features = live.prompt_features is not None or not self.needs_features
            if other.group == prompt.group and other.tokens == prompt.tokens and has_features:
                return row
        return None

    def _release(self, row: int, finished: bool) -> None:
        for drafter in self.drafters.values():
            drafter.end(row)
        if self.sink is not None:
            self.sink.end(row, finished)
        self.noise.end(row)

    def _move_last_into(self, row: int) -> None:
        """Move the last row into this one, whose sample has ended."""
        self._sampling = None
        last = self.running.pop()
        source = len(self.running)
        if row == source:
            return
        self.running[row] = last
        self.target.move_row(source, row, last.length)
        self.noise.move(source, row)
        for drafter in self.drafters.values():
            drafter.move(source, row)
        if self.sink is not None:
            self.sink.move(source, row)
