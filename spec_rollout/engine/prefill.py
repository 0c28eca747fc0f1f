"""Prefill: the state of a sample's text comes into its row before the sample runs.

State that exists is copied: keys and values that came with the sample, the row of a sample with the same
prompt, blocks of the prefix cache. The policy computes the rest, for all samples that start in one call.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aedit.spec_rollout.engine.feature_history import FeatureHistory
from aedit.spec_rollout.engine.prefix_cache import BLOCK_TOKENS, PrefixBlock, PrefixCache
from aedit.spec_rollout.model import KVMemoryError, Segment, TargetModel
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKV

RECOMPUTED_TOKENS = 64
"""Number of last tokens that are computed again for a sample that came with keys and values, if features are
needed: a drafter starts from the features of these tokens."""


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row that contains the state of a prompt."""

    row: int
    prompt: Prompt
    features: FeatureHistory | None
    """Features of the prompt; None if they are not needed."""


@dataclass(slots=True, eq=False)
class SampleStart:
    """A waiting sample whose row is being filled.

    Its state is that of all tokens but the last, which has not been through the policy.
    """

    rollout: Rollout
    tokens: list[int]
    """Prompt and emitted tokens."""
    source: "PromptRow | SampleStart | list[PrefixBlock] | SampleKV | None" = None
    """Where the state of the first `length` tokens comes from. A `SampleStart` is computed in this call."""
    length: int = 0
    """Number of tokens that are not, or no longer, to be computed."""
    row: int = -1
    features: list[Tensor] = field(default_factory=list)
    """Features of the tokens from `first_feature` to `length`, if features are needed."""
    first_feature: int = 0

    @property
    def num_missing(self) -> int:
        """Return the number of tokens that are still to be computed."""
        return len(self.tokens) - 1 - self.length


class Prefill:
    """Sources of state, the passes that compute what they lack, and counts of both."""

    def __init__(self, target: TargetModel, cache: PrefixCache, *, needs_features: bool) -> None:
        self.target, self.cache = target, cache
        self.needs_features = needs_features
        """A drafter or a sink uses features."""
        self.num_computed = 0
        """Tokens that were computed."""
        self.num_restored = 0
        """Tokens that were not computed, as their keys and values came along."""

    def plan(self, rollout: Rollout, rows: Iterable[PromptRow], starts: Sequence[SampleStart]) -> SampleStart:
        """Return the start of a waiting sample from the source that leaves the least to compute.

        Args:
            rollout: The sample.
            rows: Rows from which a prompt can be copied.
            starts: Samples that start in the same call, before this one.
        """
        prompt = rollout.prompt
        start = SampleStart(rollout, [*prompt.tokens, *rollout.tokens])
        if self._fits(rollout.kv, len(start.tokens) - 1):
            start.source = rollout.kv
            start.length = max(0, start.num_missing - RECOMPUTED_TOKENS * self.needs_features)
            start.first_feature = start.length
            return start
        if self.cache.is_on and (blocks := self.cache.find(start.tokens[:-1], self.target.version)):
            start.source, start.length = blocks, len(blocks) * BLOCK_TOKENS
        num_shared = len(prompt.tokens) - 1
        if num_shared > start.length and (same := self._same_prompt(prompt, rows, starts)) is not None:
            start.source, start.length = same, num_shared
        return start

    def place(self, start: SampleStart, row: int) -> None:
        """Give the sample a row and copy the state from its source, unless that is computed first.

        The state of a sample that has a row moves to the new one.

        Raises:
            KVMemoryError: Memory is short.
        """
        if start.row >= 0:
            if start.row != row:
                self.target.release_row(row)
                self.target.move_row(start.row, row, start.length)
            start.row = row
            return
        start.row, source = row, start.source
        if not (isinstance(source, PromptRow) and source.row == row):
            self.target.release_row(row)
        if isinstance(source, PromptRow) and source.row != row:
            self.target.copy_row(source.row, row, start.length)
        if isinstance(source, PromptRow) and source.features is not None:
            start.features = [source.features.first(start.length)]
        elif isinstance(source, list):
            self._restore_blocks(start, source)
        elif isinstance(source, SampleKV):
            self._restore_kv(start, source)
        if self.cache.is_on and (source is None or isinstance(source, list)):
            self.cache.record_lookup(source or [])

    def drop(self, start: SampleStart) -> None:
        """Free the row of a sample that does not start."""
        if start.row >= 0:
            self.target.release_row(start.row)

    def compute(self, starts: Sequence[SampleStart], most: int | None = None) -> None:
        """Compute what is missing of samples that have a row.

        Args:
            starts: The samples.
            most: Upper limit of computed tokens of each sample; None computes all.

        Raises:
            KVMemoryError: Memory is short.
        """
        self._pass([start for start in starts if not isinstance(start.source, SampleStart)], most)
        followers = [start for start in starts if isinstance(start.source, SampleStart)]
        for start in followers:
            first = start.source
            assert isinstance(first, SampleStart)
            self.target.copy_row(first.row, start.row, start.length)
            if self.needs_features:
                start.features = [torch.cat(first.features)[: start.length]]
        self._pass(followers, most)

    def features(self, start: SampleStart) -> Tensor:
        """Return the features of the tokens from `first_feature` on, empty if they are not needed."""
        empty = torch.empty(0, self.target.feature_size, dtype=self.target.dtype, device=self.target.device)
        return torch.cat([empty, *start.features])

    def store(self, row: int, tokens: Sequence[int], history: FeatureHistory | None) -> None:
        """Store the state of a row in the prefix cache.

        Args:
            row: The row.
            tokens: Tokens whose state is in the row.
            history: Their features; None if features are not needed.
        """
        if not self.cache.is_on or len(tokens) < BLOCK_TOKENS:
            return
        known = self.cache.find(tokens, self.target.version)
        if history is not None and history.start > len(known) * BLOCK_TOKENS:
            return  # the first ones are on another engine

        def read(start: int, end: int) -> tuple[Tensor, Tensor | None]:
            features_Tf = None if history is None else history.read(start, end)
            return self.target.read_kv(row, end, start), features_Tf

        self.cache.insert(known, tokens, self.target.version, read)

    def _pass(self, starts: Sequence[SampleStart], most: int | None) -> None:
        computed = [start for start in starts if start.num_missing]
        if not computed:
            return
        segments = []
        for start in computed:
            end = len(start.tokens) - 1 if most is None else min(len(start.tokens) - 1, start.length + most)
            segments.append(Segment(start.row, start.length, start.tokens[start.length : end]))
        for start, features_Tf in zip(computed, self.target.prefill(segments), strict=True):
            start.length += len(features_Tf)
            self.num_computed += len(features_Tf)
            if self.needs_features:
                start.features.append(features_Tf)

    def _restore_kv(self, start: SampleStart, kept: SampleKV) -> None:
        """Write the keys and values that came with a sample; compute them if they are of another model."""
        try:
            self.target.write_kv(start.row, kept.kv)
        except KVMemoryError:
            raise
        except ValueError:
            start.length = start.first_feature = 0
            return
        self.num_restored += kept.num_tokens

    def _restore_blocks(self, start: SampleStart, blocks: list[PrefixBlock]) -> None:
        self.target.write_kv(start.row, torch.cat([block.kv for block in blocks], dim=3))
        start.features = [block.features_Tf for block in blocks if block.features_Tf is not None]

    def _fits(self, kept: SampleKV | None, num_tokens: int) -> bool:
        """Return true if keys and values are of this policy version and of as many tokens."""
        return kept is not None and (kept.version, kept.num_tokens) == (self.target.version, num_tokens)

    def _same_prompt(
        self, prompt: Prompt, rows: Iterable[PromptRow], starts: Sequence[SampleStart]
    ) -> PromptRow | SampleStart | None:
        """Return a sample of the group whose row holds, or will hold, this prompt and its features."""
        if prompt.group < 0:
            return None
        for each in rows:
            if each.prompt.group == prompt.group and each.prompt.tokens == prompt.tokens:
                return each
        for start in starts:
            other = start.rollout.prompt
            has_features = not self.needs_features or start.first_feature == 0
            if other.group == prompt.group and other.tokens == prompt.tokens and has_features:
                return start
        return None
