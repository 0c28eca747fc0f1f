"""Distribution of samples over workers: longest first, each to the one that will finish first."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aedit.spec_rollout.migration import EngineSpeed, LengthDistribution, UnfinishedSample

SMALLEST_PART = 0.25
"""Share of an equal part below which a group is not divided further for a slow worker."""
GUESS = EngineSpeed(fixed_s=0.01, row_s=0.001, prefill_s=0.001)
"""Speed of all workers before the first measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Work and speed of one worker."""

    tokens: float
    """Expected tokens that it has yet to draw."""
    rows: int
    """Samples that it decodes at a time."""
    speed: EngineSpeed | None
    """None: not measured yet; that of the others counts."""
    delay_s: float = 0.0
    """Seconds until it can begin."""
    room: int | None = None
    """Further samples that it takes; None: any number."""

    def token_s(self, speed: EngineSpeed) -> float:
        """Return the seconds per token of a sample with all rows in use.

        speed: Of a worker that has not been measured.
        """
        return max(1e-9, (self.speed or speed).token_s(self.rows))

    def finish_s(self, tokens: float, longest: float, speed: EngineSpeed) -> float:
        """Return when it has drawn so many tokens, of which one sample has `longest`, one after another.

        A step costs its fixed part once and the part of each row for each token: fewer tokens in as many
        steps end sooner.
        """
        speed = self.speed or speed
        steps = max(tokens / self.rows, longest)
        return self.delay_s + max(1e-9, steps * speed.fixed_s + tokens * speed.row_s)


def place(
    samples: Sequence[UnfinishedSample], workers: Mapping[int, WorkerLoad], lengths: LengthDistribution
) -> list[tuple[int, UnfinishedSample]]:
    """Return the worker of each sample, in the order in which workers should get them.

    Samples of one group stay together as far as no worker gets more than its share of all: their prompt is
    computed once, and each draws drafts from the others' text. The longest expected part goes first, to the
    worker that will finish it first (Graham 1969, longest processing time first). A slow one that is free may
    take longer for a single sample than the others for all of theirs. Samples for which no worker has room
    are left out.

    Args:
        samples: Samples to place.
        workers: Load of each worker.
        lengths: Distribution of lengths.
    """
    room = {i: math.inf if each.room is None else each.room for i, each in workers.items()}
    workers = {i: each for i, each in workers.items() if room[i] > 0}
    if not workers:
        return []
    known = next((each.speed for each in workers.values() if each.speed is not None), GUESS)
    rate = {i: each.rows / each.token_s(known) for i, each in workers.items()}
    work = {i: each.tokens for i, each in workers.items()}
    parts = [part for group in _groups(samples) for part in _parts(group, _largest(len(samples), rate))]

    def expected(part: Sequence[UnfinishedSample]) -> float:
        return sum(sample.expected_remaining(lengths) for sample in part)

    placed = []
    for part in sorted(parts, key=expected, reverse=True):
        more, longest = expected(part), max(sample.expected_remaining(lengths) for sample in part)
        free = [i for i in work if room[i] >= len(part)] or [i for i in work if room[i] > 0]
        if not free:
            break
        # Where rows cost no time, all would end equally soon: then the one with less work.
        chosen = min(free, key=lambda i: (workers[i].finish_s(work[i] + more, longest, known), work[i]))
        work[chosen] += more
        longest_first = sorted(part, key=lambda sample: -sample.expected_remaining(lengths))
        taken = longest_first[: int(min(room[chosen], len(part)))]
        room[chosen] -= len(taken)
        placed += [(chosen, sample) for sample in taken]
    return placed


def _largest(count: int, rate: Mapping[int, float]) -> int:
    """Return the most samples of one part: the share of the slowest worker, which must not be tiny."""
    equal = count / len(rate)
    return math.ceil(max(SMALLEST_PART * equal, count * min(rate.values()) / sum(rate.values()) - 1e-6))


def _groups(samples: Sequence[UnfinishedSample]) -> list[list[UnfinishedSample]]:
    groups: dict[tuple[int, ...], list[UnfinishedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.group,) if sample.group >= 0 else sample.key, []).append(sample)
    return list(groups.values())


def _parts(group: list[UnfinishedSample], largest: int) -> list[list[UnfinishedSample]]:
    """Return a group in equal parts of at most `largest` samples."""
    count = math.ceil(len(group) / largest)
    return [group[i::count] for i in range(count)]
