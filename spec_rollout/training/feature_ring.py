"""Ring of training samples in shared memory: bounded size, one writer, several readers, no locks.

The memory contains a table of entries and a pool of pages. A sample is one entry and a chain of pages that
grows with it. Written data never changes. Its length and CRC-32 are one 8-byte word, so that a reader sees a
complete prefix or, from the entry's sequence number (odd: unused), that the sample was evicted. The writer
never waits, and a suspended reader blocks no other.
"""

import zlib
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Buffer = Any
"""Writable bytes that both sides map: a memoryview of shared memory, an mmap, a bytearray."""

MAGIC = 0x6165646974463031
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER_WORDS = 8
ENTRY_WORDS = 10
SEQUENCE, EXTENT, FIRST_PAGE, FIRST_TOKEN, NUM_PROMPT, VERSION, STEP, SERIAL, GROUP, FINISHED = range(10)
KNOWN_PROMPTS = 4096
"""Prompts of a step that the writer remembers."""
MAX_GROUP = 64
"""Samples of a group: where one prompt is asked all the time, its answers belong to several."""
WORD_BYTES = 8
CRC_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RingShape:
    """Division of the bytes of a ring."""

    width: int
    """Size of a feature: the hidden size, or more with taps."""
    dtype: torch.dtype
    num_pages: int
    page_tokens: int = 32

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a pair: the token, and the feature of the token before it."""
        feature_bytes = self.width * self.dtype.itemsize
        return WORD_BYTES + -(-feature_bytes // WORD_BYTES) * WORD_BYTES

    @property
    def table_words(self) -> int:
        """Return the number of 8-byte words of header, entries and page links."""
        return HEADER_WORDS + self.num_pages * (ENTRY_WORDS + 1)

    @property
    def num_bytes(self) -> int:
        """Return the size of the ring in bytes."""
        return self.table_words * WORD_BYTES + self.num_pages * self.page_tokens * self.row_bytes

    @staticmethod
    def within(num_bytes: int, width: int, dtype: torch.dtype, page_tokens: int = 32) -> "RingShape":
        """Return the shape with as many pages as fit into `num_bytes`.

        Raises:
            ValueError: Not even two pages fit, or the dtype is not supported.
        """
        if dtype not in DTYPES:
            raise ValueError(f"features must be in one of {', '.join(map(str, DTYPES))}, got {dtype}")
        one = RingShape(width, dtype, 1, page_tokens)
        page_bytes = (ENTRY_WORDS + 1) * WORD_BYTES + page_tokens * one.row_bytes
        num_pages = (num_bytes - HEADER_WORDS * WORD_BYTES) // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"a ring of features needs at least two pages of {page_bytes} bytes, got {num_bytes} bytes"
            )
        return RingShape(width, dtype, num_pages, page_tokens)


class RingViews:
    """Arrays over the parts of a ring's bytes."""

    def __init__(self, buffer: Buffer, shape: RingShape) -> None:
        if len(buffer) < shape.num_bytes:
            raise ValueError(f"a ring of {shape.num_bytes} bytes does not fit into a buffer of {len(buffer)}")
        self.shape = shape
        words = np.frombuffer(buffer, np.int64, count=shape.table_words)
        entries_end = HEADER_WORDS + shape.num_pages * ENTRY_WORDS
        self.header = words[:HEADER_WORDS]
        self.entries = words[HEADER_WORDS:entries_end].reshape(shape.num_pages, ENTRY_WORDS)
        self.next_page = words[entries_end:]
        num_rows = shape.num_pages * shape.page_tokens
        rows = torch.frombuffer(
            buffer,
            dtype=torch.uint8,
            offset=shape.table_words * WORD_BYTES,
            count=num_rows * shape.row_bytes,
        )
        self.pages = rows.view(shape.num_pages, shape.page_tokens, shape.row_bytes)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens and features as views of rows of bytes."""
        end = WORD_BYTES + self.shape.width * self.shape.dtype.itemsize
        return rows[:, :WORD_BYTES].view(torch.int64)[:, 0], rows[:, WORD_BYTES:end].view(self.shape.dtype)


def rows_checksum(rows: Tensor, before: int = 0) -> int:
    """Return the CRC-32 of rows of bytes, continued from that of the rows before them."""
    return zlib.crc32(rows.numpy().data, before)


@dataclass(slots=True, eq=False)
class RingSample:
    """State of a sample at the writer."""

    slot: int
    step: int
    version: int
    pages: list[int] = field(default_factory=list)
    num_rows: int = 0
    checksum: int = 0
    is_open: bool = True
    """The sample may grow, so it is not evicted."""
    is_kept: bool = True


class FeatureRing:
    """Writer of a ring of features.

    When the ring is full, whole samples are evicted: those of the oldest steps first, and the shortest of
    these first, as long samples are rare and drafters are slow at them (one-step-off sampling,
    arXiv:2511.16665). Growing samples are not evicted; if all samples are growing, the one that needs more
    space is dropped.
    """

    def __init__(self, buffer: Buffer, shape: RingShape) -> None:
        """Initialize the ring in `buffer`, which must be aligned to 8 bytes. Earlier contents are lost."""
        self.shape = shape
        self.step = 0
        self._views = RingViews(buffer, shape)
        self._views.entries[:, SEQUENCE] += 1 + self._views.entries[:, SEQUENCE] % 2
        self._views.header[:5] = (
            MAGIC,
            shape.width,
            DTYPES.index(shape.dtype),
            shape.num_pages,
            shape.page_tokens,
        )
        self._free_pages = list(range(shape.num_pages))
        self._free_slots = list(range(shape.num_pages))
        self._samples: list[RingSample] = []
        self._groups: OrderedDict[Hashable, tuple[int, int]] = OrderedDict()
        """Number and size of the present groups by prompt."""
        self._num_begun = self._num_evicted = self._num_given_up = self._num_groups = 0
        self._version, self._step_has_samples = 0, False

    def begin_step(self) -> None:
        """Start a new step of reinforcement learning and evict samples older than two steps.

        Samples of a new policy start a step of their own if this is not called.
        """
        self.step, self._step_has_samples = self.step + 1, False
        self._groups.clear()
        for sample in [s for s in self._samples if s.step < self.step - 2 and not s.is_open]:
            self._evict(sample)

    def begin(
        self, first_token: int, num_prompt: int, version: int, prompt: Hashable = None
    ) -> RingSample | None:
        """Start a sample and return it for `append`; None if no room can be made.

        Args:
            first_token: Its first token.
            num_prompt: Tokens of the prompt that belong to the sample.
            version: Version of the policy that computes the features.
            prompt: Equal for the samples of a step that form a group; None: the sample is a group by itself.
        """
        if version != self._version and self._step_has_samples:
            self.begin_step()
        if not self._free_slots and not self._make_room():
            return None
        self._version, self._step_has_samples = version, True
        slot = self._free_slots.pop()
        entry = self._views.entries[slot]
        group = self._group(prompt)
        entry[EXTENT:] = (0, 0, first_token, num_prompt, version, self.step, self._num_begun, group, 0)
        entry[SEQUENCE] += 1
        sample = RingSample(slot, self.step, version)
        self._samples.append(sample)
        self._num_begun += 1
        return sample

    def append(self, sample: RingSample, tokens_M: Tensor, features_MF: Tensor) -> bool:
        """Append pairs: each token with the policy's hidden state of the token before it, on the CPU.

        Returns:
            False if no room can be made. Nothing is kept of the sample then.

        Raises:
            ValueError: Numbers of tokens and features differ, or the feature size is wrong.
        """
        rows = self._rows(tokens_M, features_MF)
        if not sample.is_kept or not self._reserve(sample, len(rows)):
            return False
        size, at, done = self.shape.page_tokens, sample.num_rows, 0
        while done < len(rows):
            page, start = sample.pages[at // size], at % size
            part = rows[done : done + size - start]
            self._views.pages[page, start : start + len(part)] = part
            at, done = at + len(part), done + len(part)
        sample.num_rows, sample.checksum = at, rows_checksum(rows, sample.checksum)
        entry = self._views.entries[sample.slot]
        entry[FIRST_PAGE] = sample.pages[0]
        entry[EXTENT] = at << 32 | sample.checksum
        return True

    def end(self, sample: RingSample, finished: bool) -> None:
        """Close a sample. It stays available until its room is needed.

        Args:
            sample: Sample of `begin`.
            finished: Its text is complete.
        """
        sample.is_open = False
        if not sample.is_kept:
            return
        if not sample.num_rows:
            self._free(sample)
            return
        self._views.entries[sample.slot, FINISHED] = int(finished)

    def status(self) -> dict[str, object]:
        """Return the contents of the ring by name."""
        return {
            "bytes": self.shape.num_bytes,
            "bytes_used": self.num_used_bytes,
            "begun": self._num_begun,
            "samples": len(self._samples),
            "tokens": sum(sample.num_rows for sample in self._samples),
            "versions": dict(sorted(Counter(sample.version for sample in self._samples).items())),
            "step": self.step,
            "evicted": self._num_evicted,
            "given_up": self._num_given_up,
        }

    @property
    def num_used_bytes(self) -> int:
        """Return the bytes that are in use."""
        free = len(self._free_pages) * self.shape.page_tokens * self.shape.row_bytes
        return self.shape.num_bytes - free

    def _group(self, prompt: Hashable) -> int:
        """Return the number of the group of a sample of this prompt."""
        group, size = self._groups.pop(prompt, (self._num_groups, 0))
        self._num_groups = max(self._num_groups, group + 1)
        if prompt is not None and size + 1 < MAX_GROUP:
            self._groups[prompt] = group, size + 1
            if len(self._groups) > KNOWN_PROMPTS:
                self._groups.popitem(last=False)
        return group

    def _rows(self, tokens_M: Tensor, features_MF: Tensor) -> Tensor:
        if features_MF.shape != (len(tokens_M), self.shape.width):
            raise ValueError(
                f"{len(tokens_M)} tokens and features of shape {tuple(features_MF.shape)}: a ring of width "
                f"{self.shape.width} needs one feature per token"
            )
        rows = torch.empty(len(tokens_M), self.shape.row_bytes, dtype=torch.uint8)
        tokens, features = self._views.split(rows)
        tokens.copy_(tokens_M)
        features.copy_(features_MF)
        return rows

    def _reserve(self, sample: RingSample, num_rows: int) -> bool:
        """Add pages for `num_rows` more rows to the sample; return false if no room can be made."""
        wanted = -(-(sample.num_rows + num_rows) // self.shape.page_tokens)
        while len(sample.pages) < wanted:
            if not self._free_pages and not self._make_room():
                self._free(sample)
                self._num_given_up += 1
                return False
            page = self._free_pages.pop()
            if sample.pages:
                self._views.next_page[sample.pages[-1]] = page
            sample.pages.append(page)
        return True

    def _make_room(self) -> bool:
        """Evict the oldest, shortest sample; return false if all are growing."""
        closed = [sample for sample in self._samples if not sample.is_open]
        if not closed:
            return False
        self._evict(min(closed, key=lambda sample: (sample.step, sample.num_rows)))
        return True

    def _evict(self, sample: RingSample) -> None:
        self._free(sample)
        self._num_evicted += 1

    def _free(self, sample: RingSample) -> None:
        self._views.entries[sample.slot, SEQUENCE] += 1
        sample.is_kept = False
        self._samples.remove(sample)
        self._free_slots.append(sample.slot)
        self._free_pages += sample.pages


@dataclass(frozen=True, slots=True)
class RingEntry:
    """Table entry of a sample."""

    slot: int
    sequence: int
    extent: int
    num_tokens: int
    num_prompt: int
    version: int
    """Version of the policy that computed the features."""
    step: int
    serial: int
    """Counts the samples of this ring, from 0."""
    group: int
    """Counts the groups of this ring, from 0: samples of one step with the same prompt."""
    finished: bool


@dataclass(frozen=True, slots=True)
class FeatureSample:
    """Copy of a sample, or of its part that was written so far."""

    tokens_N: Tensor
    """int64."""
    features_MF: Tensor
    """The policy's hidden states of all tokens but the last: M = N - 1."""
    num_prompt: int
    version: int
    step: int
    serial: int
    finished: bool


class FeatureReader:
    """Reads what a `FeatureRing` writes, possibly in another process. There may be several readers."""

    def __init__(self, buffer: Buffer) -> None:
        """Open the ring in `buffer`.

        Raises:
            ValueError: The buffer does not contain a ring.
        """
        magic, width, dtype, num_pages, page_tokens = np.frombuffer(buffer, np.int64, count=5).tolist()
        if magic != MAGIC or not 0 <= dtype < len(DTYPES):
            raise ValueError("the buffer does not contain a feature ring")
        self._views = RingViews(buffer, RingShape(width, DTYPES[dtype], num_pages, page_tokens))

    @property
    def shape(self) -> RingShape:
        """Return the shape of the ring."""
        return self._views.shape

    def entries(self) -> list[RingEntry]:
        """Return the samples with at least two tokens, in the order in which they began."""
        table = self._views.entries.copy()
        again = self._views.entries[:, SEQUENCE].copy()
        steady = (table[:, SEQUENCE] == again) & (again % 2 == 0) & (again > 0) & (table[:, EXTENT] >> 32 > 0)
        found = [self._entry(slot, table[slot].tolist()) for slot in np.flatnonzero(steady).tolist()]
        return sorted(found, key=lambda entry: entry.serial)

    def read(self, entry: RingEntry) -> FeatureSample | None:
        """Return the part of the sample that `entry` describes, or None if the sample was evicted."""
        row = self._views.entries[entry.slot]
        num_rows = entry.num_tokens - 1
        rows = self._views.pages[list(self._chain(int(row[FIRST_PAGE]), num_rows))].flatten(0, 1)[:num_rows]
        first = int(row[FIRST_TOKEN])
        if (
            int(row[SEQUENCE]) != entry.sequence
            or len(rows) < num_rows
            or rows_checksum(rows) != entry.extent & CRC_BITS
        ):
            return None
        tokens_M, features_MF = self._views.split(rows)
        return FeatureSample(
            torch.cat((torch.tensor([first]), tokens_M)),
            features_MF,
            entry.num_prompt,
            entry.version,
            entry.step,
            entry.serial,
            entry.finished,
        )

    def _entry(self, slot: int, row: list[int]) -> RingEntry:
        extent = row[EXTENT]
        return RingEntry(
            slot=slot,
            sequence=row[SEQUENCE],
            extent=extent,
            num_tokens=(extent >> 32) + 1,
            num_prompt=row[NUM_PROMPT],
            version=row[VERSION],
            step=row[STEP],
            serial=row[SERIAL],
            group=row[GROUP],
            finished=bool(row[FINISHED]),
        )

    def _chain(self, page: int, num_rows: int) -> Iterator[int]:
        """Yield the pages of a sample, at most as many as it had.

        While the sample is being evicted, these may be any pages; the checksum of `read` detects this.
        """
        for _ in range(-(-num_rows // self.shape.page_tokens)):
            if not 0 <= page < self.shape.num_pages:
                return
            yield page
            page = int(self._views.next_page[page])
