"""Samples a drafter can learn from, in a bounded number of shared bytes: one writer, readers, no locks.

The bytes are a table of entries and a pool of pages. A sample is one entry and a chain of pages, which grows
as the sample does. What has been written of it is never changed again; how much that is, and its CRC-32, are
one 8-byte word, so that a reader sees a whole prefix or, from the entry's sequence number (odd: nobody's),
that the sample has gone. The writer never waits, and a reader that is stopped at any point holds up nobody.
"""

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

Buffer = Any
"""Writable bytes that both sides see: a memoryview of shared memory, an mmap, a bytearray."""

SMALL_KL_NATS = 0.05
"""A policy that has moved by less, per token, teaches the same."""

MAGIC = 0x6165646974463031
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER_WORDS = 8
ENTRY_WORDS = 10
SEQUENCE, EXTENT, FIRST_PAGE, FIRST_TOKEN, NUM_PROMPT, VERSION, STEP, SERIAL, FINISHED = range(9)
WORD_BYTES = 8
CRC_BITS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class RingShape:
    """How the bytes of a ring are divided."""

    width: int
    """Numbers of a feature: the hidden size, or more with taps."""
    dtype: torch.dtype
    num_pages: int
    page_tokens: int = 32

    @property
    def row_bytes(self) -> int:
        """A pair: the token, and the feature of the token before it."""
        feature_bytes = self.width * self.dtype.itemsize
        return WORD_BYTES + -(-feature_bytes // WORD_BYTES) * WORD_BYTES

    @property
    def table_words(self) -> int:
        return HEADER_WORDS + self.num_pages * (ENTRY_WORDS + 1)

    @property
    def num_bytes(self) -> int:
        return self.table_words * WORD_BYTES + self.num_pages * self.page_tokens * self.row_bytes

    @staticmethod
    def within(num_bytes: int, width: int, dtype: torch.dtype, page_tokens: int = 32) -> "RingShape":
        """As many pages as fit. ValueError if not even two do, or the dtype is not one that is kept."""
        if dtype not in DTYPES:
            raise ValueError(f"features of {dtype} cannot be kept: one of {', '.join(map(str, DTYPES))}")
        one = RingShape(width, dtype, 1, page_tokens)
        page_bytes = (ENTRY_WORDS + 1) * WORD_BYTES + page_tokens * one.row_bytes
        num_pages = (num_bytes - HEADER_WORDS * WORD_BYTES) // page_bytes
        if num_pages < 2:
            raise ValueError(
                f"{num_bytes} bytes hold no features: a page takes {page_bytes}, and two are needed"
            )
        return RingShape(width, dtype, num_pages, page_tokens)


class RingViews:
    """The parts of the bytes."""

    def __init__(self, buffer: Buffer, shape: RingShape) -> None:
        if len(buffer) < shape.num_bytes:
            raise ValueError(f"a ring of {shape.num_bytes} bytes does not fit into {len(buffer)}")
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
        """Tokens and features, as views of rows of bytes."""
        end = WORD_BYTES + self.shape.width * self.shape.dtype.itemsize
        return rows[:, :WORD_BYTES].view(torch.int64)[:, 0], rows[:, WORD_BYTES:end].view(self.shape.dtype)


def checksum(rows: Tensor, before: int = 0) -> int:
    """CRC-32 of rows of bytes, going on from that of the rows before them."""
    return zlib.crc32(rows.numpy().data, before)


@dataclass(slots=True, eq=False)
class RingSample:
    """A sample as its writer knows it."""

    slot: int
    step: int
    version: int
    pages: list[int] = field(default_factory=list)
    num_rows: int = 0
    checksum: int = 0
    is_open: bool = True
    """More may come: it is not taken away for others."""
    is_kept: bool = True


class FeatureRing:
    """Where the engine leaves what it has computed anyway; the one writer of its bytes.

    When they are full, whole samples go: those of the oldest steps first, among them the shortest first, for
    the long ones are rare and are what a drafter is slow at (one-step-off sampling, arXiv:2511.16665). A
    sample that grows is not taken away; if all of them do, the one that wants more is given up.
    """

    def __init__(self, buffer: Buffer, shape: RingShape) -> None:
        """Begins anew, whatever was in the buffer; it must start at a multiple of 8 bytes."""
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
        self._num_begun = self._num_evicted = self._num_given_up = 0
        self._version, self._step_has_samples = 0, False

    def begin_step(self, kl_nats: float | None = None) -> None:
        """A new step of reinforcement learning. What is older than two steps goes. Whoever forgets to say so
        is forgiven: samples of a new policy begin a step of their own.

        kl_nats: how far the policy has moved, per token, since the oldest sample: below 0.05 it teaches the
        same, and stays as long as there is room. None: not known.
        """
        self.step, self._step_has_samples = self.step + 1, False
        if kl_nats is None or kl_nats >= SMALL_KL_NATS:
            for sample in [s for s in self._samples if s.step < self.step - 2 and not s.is_open]:
                self._evict(sample)

    def begin(self, first_token: int, num_prompt: int, version: int) -> RingSample | None:
        """A sample to `append` to; None if there is no room that could be made."""
        if version != self._version and self._step_has_samples:
            self.begin_step()
        if not self._free_slots and not self._make_room():
            return None
        self._version, self._step_has_samples = version, True
        slot = self._free_slots.pop()
        entry = self._views.entries[slot]
        entry[EXTENT : FINISHED + 1] = (0, 0, first_token, num_prompt, version, self.step, self._num_begun, 0)
        entry[SEQUENCE] += 1
        sample = RingSample(slot, self.step, version)
        self._samples.append(sample)
        self._num_begun += 1
        return sample

    def append(self, sample: RingSample, tokens_M: Tensor, features_MF: Tensor) -> bool:
        """Pairs that follow: each token with the policy's hidden state at the token before it, on the CPU.
        False, and nothing is kept of the sample, if there is no room that could be made."""
        rows = self._rows(tokens_M, features_MF)
        if not sample.is_kept or not self._reserve(sample, len(rows)):
            return False
        size, at, done = self.shape.page_tokens, sample.num_rows, 0
        while done < len(rows):
            page, start = sample.pages[at // size], at % size
            part = rows[done : done + size - start]
            self._views.pages[page, start : start + len(part)] = part
            at, done = at + len(part), done + len(part)
        sample.num_rows, sample.checksum = at, checksum(rows, sample.checksum)
        entry = self._views.entries[sample.slot]
        entry[FIRST_PAGE] = sample.pages[0]
        entry[EXTENT] = at << 32 | sample.checksum
        return True

    def end(self, sample: RingSample, finished: bool) -> None:
        """No more of it will come. It stays for its readers until the room is needed."""
        sample.is_open = False
        if not sample.is_kept:
            return
        if not sample.num_rows:
            self._free(sample)
            return
        self._views.entries[sample.slot, FINISHED] = int(finished)

    def status(self) -> dict[str, object]:
        """Bytes that are taken once and for all, and what is in them."""
        return {
            "bytes": self.shape.num_bytes,
            "bytes_used": self.num_used_bytes,
            "samples": len(self._samples),
            "tokens": sum(sample.num_rows for sample in self._samples),
            "versions": dict(sorted(Counter(sample.version for sample in self._samples).items())),
            "step": self.step,
            "evicted": self._num_evicted,
            "given_up": self._num_given_up,
        }

    @property
    def num_used_bytes(self) -> int:
        free = len(self._free_pages) * self.shape.page_tokens * self.shape.row_bytes
        return self.shape.num_bytes - free

    def _rows(self, tokens_M: Tensor, features_MF: Tensor) -> Tensor:
        if features_MF.shape != (len(tokens_M), self.shape.width):
            raise ValueError(
                f"{len(tokens_M)} tokens and features of shape {tuple(features_MF.shape)}: a ring of width "
                f"{self.shape.width} wants one feature for each token"
            )
        rows = torch.empty(len(tokens_M), self.shape.row_bytes, dtype=torch.uint8)
        tokens, features = self._views.split(rows)
        tokens.copy_(tokens_M)
        features.copy_(features_MF)
        return rows

    def _reserve(self, sample: RingSample, num_rows: int) -> bool:
        """Pages for so many rows more, linked to those before them."""
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
        """Takes away the sample that can best be missed. False if all are growing."""
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
