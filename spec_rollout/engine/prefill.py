"""Prefill of a sample's text into its row, and the cache of prefixes that samples have in common.

State that exists is copied: keys and values that came with the sample, the row of a sample with the same
prompt, blocks of the prefix cache. The policy computes the rest, for all samples that start in one call.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aedit.spec_rollout.model import KVMemoryError, Segment, TargetModel
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKV

RECOMPUTED_TOKENS = 64
"""Number of last tokens that are computed again for a sample that came with keys and values, if features are
needed: a drafter starts from the features of these tokens."""


class FeatureHistory:
    """Features of the tokens of one sample from token `start` on.

    Those of a step are a view of a tensor of all rows, until `JOINED_STEPS` steps are joined.
    """

    def __init__(self, features_Tf: Tensor, start: int) -> None:
        """Make a history of T tokens.

        Args:
            features_Tf: Their features.
            start: Index of the first of them in the text.
        """
        self.start = start
        self._joined = [features_Tf]
        self._steps: list[tuple[Tensor, int, int]] = []

        self.end = start + len(features_Tf)
        """Index of the token after the last one."""

    def append(self, features_Bmf: Tensor, row: int, count: int) -> None:
        """Append the features of the first `count` tokens of a row."""
        self._steps.append((features_Bmf, row, count))
        self.end += count
        if len(self._steps) == JOINED_STEPS:
            self._join()

    def first(self, count: int) -> Tensor:
        """Return a view of the features of the first `count` tokens, which the sample started with."""
        return self._joined[0][:count]

    def read(self, start: int, end: int) -> Tensor:
        """Return a copy of the features of the tokens from index `start` up to `end` of the text."""
        self._join()
        if len(self._joined) > 1:
            self._joined = [torch.cat(self._joined)]
        return self._joined[0][start - self.start : end - self.start].clone()

    def tensors(self) -> Iterator[Tensor]:
        """Return the tensors that hold the features."""
        yield from self._joined
        yield from (features_Bmf for features_Bmf, _, _ in self._steps)

    def _join(self) -> None:
        if self._steps:
            self._joined.append(torch.cat([x[row, :count] for x, row, count in self._steps]))
            self._steps = []


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row that contains the state of a prompt."""

    row: int
    prompt: Prompt
    features: FeatureHistory | None
    """Features of the prompt; None if they were not needed when its sample began."""


@dataclass(slots=True, eq=False)
class SampleStart:
    """A waiting sample whose row is being filled.

    Its state is that of all tokens but the last, which goes through the policy in the next pass, or together
    with them.
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
    """Features of the tokens from `first_feature` to `length`."""
    first_feature: int = 0
    last_f: Tensor | None = None
    """Features of the last token, if it has been through the policy together with those before it."""

    @property
    def is_copied_whole(self) -> bool:
        """Return true if its text is that of its source, which is computed in this call."""
        return isinstance(self.source, SampleStart) and self.source.tokens == self.tokens

    @property
    def num_missing(self) -> int:
        """Return the number of tokens that are still to be computed."""
        return len(self.tokens) - 1 - self.length


_Key = tuple[int, int, bytes]
"""Policy version, serial number of the block before (0 at the beginning of a text), token ids."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixBlock:
    """State of `BLOCK_TOKENS` tokens after those of other blocks, as copies."""

    key: _Key
    serial: int
    kv: Tensor
    """(layers, 2, key/value heads, BLOCK_TOKENS, head size)."""
    features_Tf: Tensor | None
    """None if no drafter and no sink followed the sample."""

    @property
    def num_bytes(self) -> int:
        """Return the memory of the block in bytes."""
        features = 0 if self.features_Tf is None else self.features_Tf.nbytes
        return KEY_BYTES + self.kv.nbytes + features


class PrefixCache:
    """Blocks of texts whose samples ran on this engine, up to a number of bytes.

    A block counts as used after all blocks that follow it, and is evicted after them. So a stored block can
    always be reached from the beginning of its text.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Make an empty cache.

        Args:
            limit_bytes: Upper limit of `num_bytes`; 0 stores nothing.
        """
        self.limit_bytes = limit_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[_Key, PrefixBlock] = OrderedDict()  # the least recently used first
        self._num_made = self._num_lookups = self._num_hits = self._num_hit_tokens = self._num_evicted = 0

    @property
    def is_on(self) -> bool:
        """Return true if blocks are stored."""
        return self.limit_bytes > 0

    def find(self, tokens: Sequence[int], version: int) -> list[PrefixBlock]:
        """Return the stored blocks that these tokens begin with. The lookup does not count as a use."""
        found: list[PrefixBlock] = []
        serial = 0
        for chunk in _chunks(tokens):
            block = self._blocks.get((version, serial, chunk))
            if block is None:
                break
            found.append(block)
            serial = block.serial
        return found

    def record_lookup(self, blocks: Sequence[PrefixBlock]) -> None:
        """Count a lookup that gave these blocks, and mark them as used."""
        self._num_lookups += 1
        self._num_hits += bool(blocks)
        self._num_hit_tokens += len(blocks) * BLOCK_TOKENS
        self._mark_used([block.key for block in blocks])

    def insert(
        self,
        known: Sequence[PrefixBlock],
        tokens: Sequence[int],
        version: int,
        read: Callable[[int, int], tuple[Tensor, Tensor | None]],
    ) -> None:
        """Store the blocks of a text that are not stored yet, as many as the limit allows.

        Other blocks are evicted, but none of the same text.

        Args:
            known: Result of `find` for these tokens.
            tokens: Tokens whose state exists. The last ones that do not fill a block are ignored.
            version: Version of the policy that computed the state.
            read: Returns copies of the keys and values, and of the features, of the tokens from the first
                index up to the second.
        """
        keys = [block.key for block in known]
        kept = set(keys)
        self._mark_used(keys)
        serial = known[-1].serial if known else 0
        for i, chunk in enumerate(_chunks(tokens)[len(known) :], len(known)):
            kv, features_Tf = read(i * BLOCK_TOKENS, (i + 1) * BLOCK_TOKENS)
            self._num_made += 1
            block = PrefixBlock((version, serial, chunk), self._num_made, kv, features_Tf)
            if not self._make_room(block.num_bytes, kept):
                break
            self._blocks[block.key] = block
            self.num_bytes += block.num_bytes
            keys.append(block.key)
            kept.add(block.key)
            serial = block.serial
        self._mark_used(keys)

    def clear(self) -> None:
        """Drop all blocks."""
        self._blocks.clear()
        self.num_bytes = 0

    def status(self) -> dict[str, object]:
        """Return memory use and counts.

        `hits` of the `lookups` found at least one block, together `hit_tokens` tokens.
        """
        return {
            "bytes": self.num_bytes,
            "limit_bytes": self.limit_bytes,
            "blocks": len(self._blocks),
            "lookups": self._num_lookups,
            "hits": self._num_hits,
            "hit_tokens": self._num_hit_tokens,
            "evicted_blocks": self._num_evicted,
        }

    def _make_room(self, num_bytes: int, kept: set[_Key]) -> bool:
        """Evict until `num_bytes` more fit; return false if only blocks of the set `kept` are left."""
        while self.num_bytes + num_bytes > self.limit_bytes:
            oldest = next(iter(self._blocks), None)
            if oldest is None or oldest in kept:
                return False
            self.num_bytes -= self._blocks.pop(oldest).num_bytes
            self._num_evicted += 1
        return True

    def _mark_used(self, keys: Sequence[_Key]) -> None:
        """Mark the first blocks of a text as used, so that the first of them is evicted last."""
        for key in reversed(keys):
            self._blocks.move_to_end(key)


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
        self.on_pass: Callable[[int], None] = lambda num_tokens: None
        """Called with the number of tokens before each pass."""

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
        if isinstance(source, PromptRow):
            if source.features is None:
                start.first_feature = start.length
            else:
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

    def compute(
        self, starts: Sequence[SampleStart], most: int | None = None, *, with_last: bool = False
    ) -> None:
        """Compute what is missing of samples that have a row.

        Args:
            starts: The samples.
            most: Upper limit of computed tokens of each sample; None computes all.
            with_last: Compute `SampleStart.last_f`, too, if that takes no further pass; `most` is None.

        Raises:
            KVMemoryError: Memory is short.
        """
        # Where a sample lacks nothing but the last token, the next pass computes it for all of them.
        with_last = with_last and all(start.num_missing or start.is_copied_whole for start in starts)
        self._pass([start for start in starts if not isinstance(start.source, SampleStart)], most, with_last)
        followers = [start for start in starts if isinstance(start.source, SampleStart)]
        for start in followers:
            first = start.source
            assert isinstance(first, SampleStart)
            if start.is_copied_whole:
                start.last_f = first.last_f
            self.target.copy_row(first.row, start.row, start.length + (start.last_f is not None))
            if first.first_feature == 0 and first.features:
                start.features = [torch.cat(first.features)[: start.length]]
            else:
                start.first_feature = start.length
        self._pass(followers, most, with_last)

    def features(self, start: SampleStart) -> Tensor:
        """Return the features of the tokens from `first_feature` on."""
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
            features_Tf = None
            if history is not None and end <= history.end:
                features_Tf = history.read(start, end)
            return self.target.read_kv(row, end, start), features_Tf

        self.cache.insert(known, tokens, self.target.version, read)

    def _pass(self, starts: Sequence[SampleStart], most: int | None, with_last: bool) -> None:
        computed = [start for start in starts if start.num_missing]
        if not computed:
            return
        segments = []
        for start in computed:
            num_tokens = start.num_missing + with_last if most is None else min(start.num_missing, most)
            end = start.length + num_tokens
            segments.append(Segment(start.row, start.length, start.tokens[start.length : end]))
        self.on_pass(sum(len(segment.tokens) for segment in segments))
        for start, features_Tf in zip(computed, self.target.prefill(segments), strict=True):
            if with_last:
                features_Tf, start.last_f = features_Tf[:-1], features_Tf[-1]
            start.length += len(features_Tf)
            self.num_computed += len(features_Tf)
            if self.needs_features:
                start.features.append(features_Tf)
            else:  # those of an earlier part are of no use without these
                start.features, start.first_feature = [], start.length

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
        for number, block in enumerate(blocks, 1):
            if block.features_Tf is None:
                start.features, start.first_feature = [], number * BLOCK_TOKENS
            else:
                start.features.append(block.features_Tf)

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


JOINED_STEPS = 64
"""Number of steps after which features of a sample are copied out of the tensors that all rows share."""
BLOCK_TOKENS = 16
KEY_BYTES = 1024
"""Upper bound of the memory of a block besides its tensors."""


def _chunks(tokens: Sequence[int]) -> list[bytes]:
    """Return the token ids of all whole blocks."""
    data, size = array("q", tokens).tobytes(), BLOCK_TOKENS * array("q").itemsize
    return [data[end - size : end] for end in range(size, len(data) + 1, size)]
