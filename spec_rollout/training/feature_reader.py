"""Reader of a feature ring, for the trainer process."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from aedit.spec_rollout.training.feature_ring import (
    CRC_BITS,
    DTYPES,
    EXTENT,
    FINISHED,
    FIRST_PAGE,
    FIRST_TOKEN,
    MAGIC,
    NUM_PROMPT,
    SEQUENCE,
    SERIAL,
    STEP,
    VERSION,
    Buffer,
    RingShape,
    RingViews,
    rows_checksum,
)


@dataclass(frozen=True, slots=True)
class Entry:
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

    def entries(self) -> list[Entry]:
        """Return the samples with at least two tokens, in the order in which they began."""
        table = self._views.entries.copy()
        again = self._views.entries[:, SEQUENCE].copy()
        steady = (table[:, SEQUENCE] == again) & (again % 2 == 0) & (again > 0) & (table[:, EXTENT] >> 32 > 0)
        found = [self._entry(slot, table[slot].tolist()) for slot in np.flatnonzero(steady).tolist()]
        return sorted(found, key=lambda entry: entry.serial)

    def read(self, entry: Entry) -> FeatureSample | None:
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

    def _entry(self, slot: int, row: list[int]) -> Entry:
        extent = row[EXTENT]
        return Entry(
            slot=slot,
            sequence=row[SEQUENCE],
            extent=extent,
            num_tokens=(extent >> 32) + 1,
            num_prompt=row[NUM_PROMPT],
            version=row[VERSION],
            step=row[STEP],
            serial=row[SERIAL],
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
