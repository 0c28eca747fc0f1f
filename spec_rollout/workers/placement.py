"""Distribution of samples over workers: longest first, each to the one that will finish first."""

import math
from collections.abc import Mapping, Sequence

from aedit.spec_rollout.migration.lengths import LengthDistribution
from aedit.spec_rollout.migration.reallocate import UnfinishedSample


def place(
    samples: Sequence[UnfinishedSample], busy: Mapping[int, float], lengths: LengthDistribution
) -> list[tuple[int, UnfinishedSample]]:
    """Return the worker of each sample, in the order in which workers should get them.

    Samples of one group stay together as far as no worker gets more than its share of all: their prompt is
    computed once, and each draws drafts from the others' text. The longest expected part goes first, to the
    worker with the least work (Graham 1969, longest processing time first).

    Args:
        samples: Samples to place.
        busy: Expected tokens that each worker has yet to draw.
        lengths: Distribution of lengths.
    """
    if not busy:
        return []
    work, largest = dict(busy), math.ceil(len(samples) / len(busy))
    parts = [part for group in _groups(samples) for part in _parts(group, largest)]

    def expected(part: Sequence[UnfinishedSample]) -> float:
        return sum(sample.expected_remaining(lengths) for sample in part)

    placed = []
    for part in sorted(parts, key=expected, reverse=True):
        worker = min(work, key=work.__getitem__)
        work[worker] += expected(part)
        longest_first = sorted(part, key=lambda sample: -sample.expected_remaining(lengths))
        placed += [(worker, sample) for sample in longest_first]
    return placed


def _groups(samples: Sequence[UnfinishedSample]) -> list[list[UnfinishedSample]]:
    groups: dict[tuple[int, ...], list[UnfinishedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.group,) if sample.group >= 0 else sample.key, []).append(sample)
    return list(groups.values())


def _parts(group: list[UnfinishedSample], largest: int) -> list[list[UnfinishedSample]]:
    """Return a group in equal parts of at most `largest` samples."""
    count = math.ceil(len(group) / largest)
    return [group[i::count] for i in range(count)]
