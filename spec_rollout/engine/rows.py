"""Assignment of samples to rows: samples start, move and end.

The running rows are always the first ones. Where a sample ends, the next waiting sample starts in its row, or
the last row moves into it. Cache, noise, drafters and feature sink are informed of every change.

Samples start in the order of the queue. Between two passes over running samples, at most `prefill_tokens`
tokens of waiting ones are computed. A longer text is computed in parts; its sample is the first of the queue
until the last part, in a row after the running ones.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from aedit.spec_rollout.choose import EngineView
from aedit.spec_rollout.drafters import (
    Drafter,
    DrafterKind,
    FeatureSink,
    PolicyReader,
    RowStart,
    StepUpdate,
)
from aedit.spec_rollout.engine.prefill import FeatureHistory, Prefill, PrefixCache, PromptRow, SampleStart
from aedit.spec_rollout.engine.request_checks import EngineLimits
from aedit.spec_rollout.model import KVMemoryError, TargetModel
from aedit.spec_rollout.sampling import (
    FinishReason,
    LogitAdjustments,
    Rollout,
    RowNoise,
    RowSampling,
    SampleKV,
    StopStrings,
    TokenDecoder,
)

EARNED_STEPS = 256
"""Steps without collection of features whose unused allowance is kept."""


class RowScheduler:
    """Running samples by row, the waiting queue, and the per-row state."""

    def __init__(
        self,
        target: TargetModel,
        noise: RowNoise,
        drafters: Mapping[DrafterKind, Drafter],
        tokenizer: TokenDecoder | None,
        limits: EngineLimits,
    ) -> None:
        self.target, self.noise, self.drafters, self.tokenizer = target, noise, dict(drafters), tokenizer
        self.limits = limits
        self.prefix_cache = PrefixCache(limits.prefix_cache_bytes)
        self.prefill = Prefill(target, self.prefix_cache, needs_features=False)
        self._followers: dict[DrafterKind, Drafter] = {}
        """Drafters that follow the rows: all but those that were never trained."""
        self._need_features = False
        """One of them reads features."""
        self._token_readers: list[Drafter] = []
        """The other ones, which read tokens alone."""
        self._is_behind = False
        """They lack tokens of the running samples; see `catch_up`."""
        self.collecting_budget_s = 0.0
        """Cost that the sink may still have. Samples that start while it is negative are not collected."""
        self.running: list[RunningSample] = []
        self.waiting: deque[Rollout] = deque()
        self._sink: FeatureSink | None = None
        self._num_collected = 0
        """Number of running samples that the sink follows."""
        self._head: SampleStart | None = None
        """The first of the queue, if a part of its text has been computed."""
        self._budget = limits.prefill_tokens
        """Tokens of waiting samples that may be computed before the next pass."""
        self._again: list[Rollout] = []
        """Samples that were running when the weights changed, and have not started again."""
        self._is_full = False
        """Memory for keys and values is short: no sample starts before one has ended."""
        self._sampling: RowSampling | None = None
        self._some_greedy = False
        self._adjustments: LogitAdjustments | None = None
        self.wake_drafters()

    @property
    def sink(self) -> FeatureSink | None:
        """Return the receiver of the policy's features."""
        return self._sink

    @sink.setter
    def sink(self, sink: FeatureSink | None) -> None:
        self._sink = sink
        self.prefix_cache.clear()  # its blocks may lack the features

    @property
    def sampling(self) -> RowSampling:
        """Return the sampling settings of the rows 0 .. B - 1 as tensors."""
        if self._sampling is None:
            settings = [live.rollout.prompt.sampling for live in self.running]
            self._sampling = RowSampling.of(settings, self.target.vocabulary, self.target.device)
            self._some_greedy = any(sampling.temperature == 0 for sampling in settings)
            rollouts = [live.rollout for live in self.running]
            self._adjustments = LogitAdjustments.of(rollouts, self.target.vocabulary, self.target.device)
        return self._sampling

    @property
    def adjustments(self) -> LogitAdjustments | None:
        """Return bias, penalties and constraints of the rows; None if no row has any."""
        return self._adjustments if self.sampling else None

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
    def last_Bf(self) -> Tensor | None:
        """Return the features of all rows' last tokens, or None if a row's have not been computed."""
        known = [sample.last_f for sample in self.running if sample.last_f is not None]
        return torch.stack(known) if len(known) == len(self.running) else None

    @property
    def feature_bytes(self) -> int:
        """Return the bytes of features that are kept for samples that begin with the same tokens."""
        histories = (sample.features for sample in self.running if sample.features is not None)
        storages = (x.untyped_storage() for history in histories for x in history.tensors())
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def needs_features(self) -> bool:
        """Return true if features of samples that start now are kept."""
        return self._need_features or getattr(self._sink, "collects", self._sink is not None)

    def view(self) -> EngineView:
        """Return the state of the running samples for an arm chooser."""
        versions = {str(kind): _version(drafter) for kind, drafter in self._followers.items()}
        context = sum([sample.length for sample in self.running])
        return EngineView(len(self.running), context, versions)

    def follows(self, kind: str) -> bool:
        """Return true if the drafter of this kind follows the running samples."""
        return kind in self._followers

    def wake_drafters(self) -> None:
        """Let drafters that have been trained since the last call follow the rows from the next pass on.

        A drafter that was never trained (its version is negative) does not follow: it would cost something in
        each step. When it wakes, it begins with the running samples without features of their texts so far.
        """
        if len(self._followers) == len(self.drafters):
            return
        for kind, drafter in self.drafters.items():
            if kind in self._followers or _version(drafter) < 0:
                continue
            self.catch_up()
            self._followers[kind] = drafter
            if getattr(drafter, "needs_features", True):
                self._need_features = True
            else:
                self._token_readers.append(drafter)
            if self.running:
                for live in self.running:
                    live.take_unread()
                drafter.begin([self._start_of(row) for row in range(len(self.running))])

    def _start_of(self, row: int) -> RowStart:
        """Return the start of a sample that runs already, for a drafter that follows it from now on."""
        prompt, tokens = self.running[row].rollout.prompt, self.running[row].tokens
        empty_Tf = self.target.embedding.new_empty(0, self.target.feature_size, dtype=self.target.dtype)
        return RowStart(row, prompt.group, tokens, empty_Tf, len(prompt.tokens))

    def start_waiting(self) -> None:
        """Start waiting samples in free rows, as far as memory and the limit of computed tokens allow."""
        is_blocked = self._is_full and self.running
        if (self.waiting and not is_blocked) or self._head is not None:
            self._refill([])

    def catch_up(self) -> None:
        """Pass the tokens since the last call to the drafters that read tokens alone.

        They get them before they draft and before rows change: steps without drafts cost nothing for them.
        """
        if not self._is_behind:
            return
        self._is_behind = False
        shape = len(self.running), 0, self.target.feature_size
        none_B0f = self.target.embedding.new_empty(shape, dtype=self.target.dtype)
        update = StepUpdate([live.take_unread() for live in self.running], none_B0f)
        for drafter in self._token_readers:
            drafter.update(update)

    @property
    def is_followed(self) -> bool:
        """Return true if a drafter or the sink reads the features of the next pass."""
        return self._need_features or self._num_collected > 0

    def append(self, row: int, tokens: list[int], logprobs: list[float], num_drafted: int) -> None:
        """Append tokens of one pass to a row's sample; the first `num_drafted` of them were proposed."""
        self.running[row].append(tokens, logprobs, self.target.version, num_drafted)
        self._is_behind = bool(self._token_readers)

    def follow(
        self,
        kept: Sequence[list[int]],
        counts: Sequence[int],
        features: Callable[[Sequence[int]], Tensor],
        clock: Callable[[], float],
        began_s: float,
    ) -> float:
        """Pass the tokens and features that one pass has added to the drafters that need them and the sink.

        Args:
            kept: New tokens of each row.
            counts: Their numbers.
            features: Returns the features of so many new tokens of each row, (B, m, f).
            clock: Clock of the cost.
            began_s: Its time now.

        Returns:
            Its time when only the sink was left: what follows is the cost of the collection.
        """
        is_collected = self._num_collected > 0
        update = StepUpdate(kept, features(counts))
        if self._need_features and self.prefix_cache.is_on:
            for row, (live, count) in enumerate(zip(self.running, counts, strict=True)):
                # None is missing before these: a drafter may have begun to follow in the middle of a text.
                if live.features is not None and live.features.end + count == live.length:
                    live.features.append(update.features, row, count)
        for drafter in self._followers.values():
            if drafter not in self._token_readers:
                drafter.update(update)
        if self._sink is None or not is_collected:
            return math.inf
        collecting_s = clock() if self._need_features else began_s
        self._sink.update(update, self.target.version)
        return collecting_s

    def limit_collection(self, cost_s: float, collecting_s: float) -> None:
        """Allow the sink its share of the cost of a step, and subtract what it has cost."""
        share = getattr(self._sink, "max_share", 1.0) * cost_s
        budget_s = self.collecting_budget_s + share - collecting_s
        self.collecting_budget_s = min(budget_s, EARNED_STEPS * share)

    def renew_budget(self) -> None:
        """Allow the computation of more waiting samples, after a pass over the running ones."""
        self._budget = self.limits.prefill_tokens

    def end(self, rows: Sequence[int], finished: bool) -> None:
        """End the samples of these rows (ascending) and fill the rows again.

        Args:
            rows: Rows whose samples end.
            finished: Their text is complete; else it continues elsewhere.
        """
        if not rows:
            return
        self.catch_up()
        for row in rows:
            live = self.running[row]
            self.prefill.store(row, live.cached_tokens, live.features)
            self._release(row, finished)
        self._is_full = False
        self._refill(rows)

    @property
    def is_alone(self) -> bool:
        """Return true if one sample is running and no other has a row."""
        return len(self.running) == 1 and self._head is None

    def make_room(self) -> None:
        """Free memory for keys and values: the last running sample goes back to the front of the queue.

        A sample whose text is being computed goes first. None starts again before another one has ended.
        """
        self._is_full = True
        if self._head is not None:
            self._drop_head()
            return
        self.catch_up()
        row = len(self.running) - 1
        live = self.running[row]
        self.prefill.store(row, live.cached_tokens, live.features)
        self._release(row, finished=False)
        self._move_last_into(row)
        self.waiting.appendleft(live.rollout)

    def copy_kv(self, row: int) -> SampleKV:
        """Return a copy of the keys and values of a row's sample."""
        return SampleKV(self.target.read_kv(row, self.running[row].length), self.target.version)

    def recompute(self, *, in_steps: bool) -> None:
        """Compute the state of all running samples again with the current weights.

        in_steps: They start again like waiting samples, before all others and the shortest text first, within
        the limit of computed tokens even while no sample is running.
        """
        self.catch_up()
        for row in range(len(self.running)):
            self._release(row, finished=False)
            self.target.release_row(row)
        self._drop_head()
        self.prefix_cache.clear()
        self.prefill.needs_features = self.needs_features
        for drafter in self.drafters.values():
            if isinstance(drafter, PolicyReader):
                drafter.read_policy(self.target.embedding, self.target.head)
        rollouts = [live.rollout for live in self.running]
        if in_steps:  # the shortest text first: the next token of any sample comes as soon as possible
            rollouts.sort(key=lambda rollout: len(rollout.prompt.tokens) + len(rollout.tokens))
        self.running, self._sampling, self._is_full = [], None, False
        self.waiting.extendleft(reversed(rollouts))
        if in_steps:
            self._again += rollouts
        else:
            self._start([], math.inf, len(rollouts))

    def _refill(self, ended: Sequence[int]) -> None:
        """Start waiting samples in the rows of ended samples and after the last row; close remaining gaps."""
        self.prefill.needs_features = self.needs_features
        is_limited = len(self.running) > len(ended) or self._starts_again()
        budget = self._budget if is_limited else math.inf
        num_computed = self.prefill.num_computed
        if self._head is not None and (not self.waiting or self.waiting[0] is not self._head.rollout):
            self._drop_head()  # it was removed from the queue
        num_running = len(self.running) - len(ended)
        gaps, error = self._start(ended, budget, self.target.rows)
        for row in reversed(gaps):
            self._move_last_into(row)
        if error is not None and not self.running:
            raise error
        if len(self.running) == num_running and not self._is_full:
            self._advance_head(budget)
        self._budget = max(0, self._budget - self.prefill.num_computed + num_computed)

    def _start(
        self, ended: Sequence[int], budget: float, most: int
    ) -> tuple[list[int], KVMemoryError | None]:
        """Start waiting samples whose prefill can be completed, fewer of them if memory is short.

        Args:
            ended: Rows of ended samples, ascending.
            budget: Upper limit of tokens to compute.
            most: Upper limit of samples.

        Returns:
            Rows of ended samples that are left; the error if not even one sample could start.
        """
        rows = self._prompt_rows()
        while True:
            gaps = list(ended)
            starts = self._take(gaps, dict(rows), budget, most)
            try:
                self._begin(starts, are_alone=len(ended) == len(self.running))
                return gaps, None
            except KVMemoryError as error:
                for start, _ in reversed(starts):
                    self.prefill.drop(start)
                    self.waiting.appendleft(start.rollout)
                most = len(starts) // 2
                if not most:
                    self._is_full = True
                    return list(ended), error
                for row in ended:  # it may have been overwritten
                    rows.pop(row, None)

    def _take(
        self, gaps: list[int], rows: dict[int, PromptRow], budget: float, most: int
    ) -> list[tuple[SampleStart, int]]:
        """Take samples from the queue whose prefill can be completed, and choose their rows.

        Args:
            gaps: Rows of ended samples, ascending. Those that are chosen are removed.
            rows: Rows from which a prompt can be copied. Those that are chosen are removed.
            budget: Upper limit of tokens to compute.
            most: Upper limit of samples.
        """
        starts: list[tuple[SampleStart, int]] = []
        next_row = len(self.running)
        while self.waiting and len(starts) < most and (gaps or next_row < self.target.rows):
            before = [start for start, _ in starts]
            start = self._head or self.prefill.plan(self.waiting[0], rows.values(), before)
            if start.num_missing > budget:
                break
            budget -= start.num_missing
            self.waiting.popleft()
            # A row that was filled in parts is kept if it is the next one: nothing has to be copied.
            row = gaps.pop(0) if gaps and start.row != next_row else next_row
            next_row += row == next_row
            rows.pop(row, None)
            starts.append((start, row))
            self._head = None
        return starts

    def _advance_head(self, budget: float) -> None:
        """Compute the next part of the first sample of the queue, in a row after the running ones."""
        if not self.waiting or budget == 0 or len(self.running) == self.target.rows:
            return
        try:
            if self._head is None:
                self._head = self.prefill.plan(self.waiting[0], self._prompt_rows().values(), [])
                self.prefill.place(self._head, len(self.running))
            self.prefill.compute([self._head], int(budget))
        except KVMemoryError:  # another sample is running: it goes on when that has ended
            self._is_full = True
            self._drop_head()
            if not self.running:
                raise

    def _starts_again(self) -> bool:
        """Return true while samples wait that were running when the weights changed."""
        if self._again:
            waiting = {id(rollout) for rollout in self.waiting}
            self._again = [rollout for rollout in self._again if id(rollout) in waiting]
        return bool(self._again)

    def _drop_head(self) -> None:
        """Forget the computed part of the first sample of the queue."""
        if self._head is not None:
            self.prefill.drop(self._head)
            self._head = None

    def _prompt_rows(self) -> dict[int, PromptRow]:
        """Return the rows from which a prompt can be copied, also those of samples that have just ended."""
        return {
            row: PromptRow(row, live.rollout.prompt, live.features)
            for row, live in enumerate(self.running)
            if not self.prefill.needs_features or (live.features is not None and live.features.start == 0)
        }

    def _begin(self, starts: Sequence[tuple[SampleStart, int]], are_alone: bool) -> None:
        """Fill the rows of these samples and run them.

        are_alone: No other sample is running. Then their last tokens are computed with the texts before them,
        as the next pass would read all weights for these tokens alone.

        Raises:
            KVMemoryError: Memory is short. None of them runs.
        """
        if not starts:
            return
        for start, row in starts:
            self.prefill.place(start, row)
        with_last = are_alone and self.target.has_logits and not self.drafters
        self.prefill.compute([start for start, _ in starts], with_last=with_last)
        self.catch_up()
        begun = [self._run(start) for start, _ in starts]
        self._sampling = None
        for drafter in self._followers.values():
            drafter.begin(begun)
        is_wanted = getattr(self._sink, "collects", True) and self.collecting_budget_s >= 0
        if self._sink is not None and is_wanted:
            self._num_collected += len(begun)
            for each in begun:
                self.running[each.row].is_collected = True
            self._sink.begin(begun, self.target.version)

    def _run(self, start: SampleStart) -> RowStart:
        """Add a sample whose row has the state of all tokens but the last to the running ones."""
        rollout, row, tokens = start.rollout, start.row, start.tokens
        prompt, rollout.kv = rollout.prompt, None
        features_Tf = self.prefill.features(start)
        history = FeatureHistory(features_Tf, start.first_feature) if self.prefill.needs_features else None
        self.prefill.store(row, tokens[:-1], history)
        self.noise.begin(row, prompt.rollout, prompt.sample)
        self.running[row : row + 1] = [RunningSample.of(rollout, self.tokenizer, history)]
        self.running[row].last_f = start.last_f
        return RowStart(row, prompt.group, tokens, features_Tf, len(prompt.tokens))

    def _release(self, row: int, finished: bool) -> None:
        for drafter in self._followers.values():
            drafter.end(row)
        if self._sink is not None and self.running[row].is_collected:
            self._num_collected -= 1
            self._sink.end(row, finished)
        self.noise.end(row)

    def _move_last_into(self, row: int) -> None:
        """Move the last row into this one, whose sample has ended."""
        self._sampling = None
        self.target.release_row(row)
        last = self.running.pop()
        source = len(self.running)
        if row == source:
            return
        self.running[row] = last
        self.target.move_row(source, row, last.length)
        self.noise.move(source, row)
        for drafter in self._followers.values():
            drafter.move(source, row)
        if self._sink is not None and last.is_collected:
            self._sink.move(source, row)


@dataclass(slots=True)
class RunningSample:
    """A sample in its row."""

    rollout: Rollout
    length: int
    """Number of tokens whose keys and values are in the row: all but the last."""
    last: int
    """Token that goes through the policy next."""
    stops: StopStrings | None
    features: FeatureHistory | None
    """Features of the prompt, for other samples of the group; with a prefix cache, of all tokens but the last
    if a drafter or the sink follows. None if they were not needed when the sample began."""
    num_read: int
    """Number of the rollout's tokens that drafters which read tokens alone have."""
    is_collected: bool = False
    """The sink follows this sample."""
    last_f: Tensor | None = None
    """Features of `last`, until the next pass, if they were computed with the text before it."""

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: TokenDecoder | None, features: FeatureHistory | None) -> Self:
        """Return a sample that begins or continues after all tokens of its rollout so far."""
        length = len(rollout.prompt.tokens) + len(rollout.tokens) - 1
        last = rollout.tokens[-1] if rollout.tokens else rollout.prompt.tokens[-1]
        return cls(rollout, length, last, _stops(rollout, tokenizer), features, len(rollout.tokens))

    @property
    def tokens(self) -> list[int]:
        """Return prompt and emitted tokens."""
        return [*self.rollout.prompt.tokens, *self.rollout.tokens]

    @property
    def cached_tokens(self) -> list[int]:
        """Return the tokens whose keys and values are in the row."""
        return self.tokens[: self.length]

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

    def take_unread(self) -> list[int]:
        """Return the tokens that `num_read` does not count yet, and count them."""
        unread = self.rollout.tokens[self.num_read :]
        self.num_read += len(unread)
        return unread

    def append(self, tokens: list[int], logprobs: list[float], version: int, num_drafted: int = 0) -> None:
        """Append the tokens of one pass of the policy, of which the first `num_drafted` were proposed."""
        rollout = self.rollout
        rollout.drafted += range(len(rollout.tokens), len(rollout.tokens) + num_drafted)
        rollout.tokens += tokens
        rollout.logprobs += logprobs
        rollout.versions += [version] * len(tokens)
        rollout.passes += 1
        self.length += len(tokens)
        self.last, self.last_f = tokens[-1], None


def _version(drafter: Drafter) -> int:
    """Return the version of the drafter's weights: 0 if it has none, negative if it was never trained."""
    return int(getattr(drafter, "version", 0))


def _stops(rollout: Rollout, tokenizer: TokenDecoder | None) -> StopStrings | None:
    """Return the search for the sample's stop strings, after its text so far."""
    strings = rollout.prompt.sampling.stop_strings
    if not strings or tokenizer is None:
        return None
    stops = StopStrings(strings, tokenizer, rollout.prompt.tokens)
    for token in rollout.tokens:
        stops.completes(token)
    return stops
