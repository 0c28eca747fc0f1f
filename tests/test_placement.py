"""Tests which worker gets which samples: by measured speed, groups together, nobody who would be last."""

from collections import Counter
from itertools import product

import pytest

from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.dispatcher import WorkerLoad, place
from aedit.spec_rollout.remote.reallocate import LengthDistribution, UnfinishedSample

KNOWN = LengthDistribution.of([100])  # every sample has 100 tokens


def samples(groups, size=4):
    return [UnfinishedSample((g, i), 10, 0, 1000, g) for g in range(groups) for i in range(size)]


def worker(step_s=0.01, rows=8, tokens=0.0, **more):
    return WorkerLoad(tokens=tokens, rows=rows, speed=EngineSpeed(step_s, 0.0, 0.0), **more)


def ends_s(load, count):
    """Return when a worker of equal steps has drawn so many samples of 100 tokens after its own work."""
    return load.delay_s + max((load.tokens + 100 * count) / load.rows, 100 * (count > 0)) * load.speed.fixed_s


def counts(placed):
    return Counter(index for index, _ in placed)


@pytest.mark.parametrize(
    ("workers", "groups"),
    [
        ([worker(), worker(), worker()], 12),
        ([worker(), worker(0.02)], 18),
        ([worker(), worker(0.04), worker(rows=2)], 20),
        ([worker(tokens=3000.0), worker()], 16),
        ([worker(delay_s=1.0), worker()], 12),
    ],
)
def test_all_are_done_nearly_as_soon_as_with_the_best_numbers_of_groups(workers, groups):
    asked = samples(groups)
    placed = place(asked, dict(enumerate(workers)), KNOWN)
    assert sorted(sample.key for _, sample in placed) == [sample.key for sample in asked]
    found = max(ends_s(load, counts(placed)[i]) for i, load in enumerate(workers))
    shares = product(range(groups + 1), repeat=len(workers))
    best = min(
        max(ends_s(load, 4 * n) for load, n in zip(workers, share, strict=True))
        for share in shares
        if sum(share) == groups
    )
    one_more = max(4 * 100 / load.rows * load.speed.fixed_s for load in workers if load.speed.fixed_s < 0.04)
    assert found <= best + one_more


def test_a_group_stays_together_where_that_is_no_more_than_a_fair_share():
    placed = place(samples(6), {0: worker(), 1: worker()}, KNOWN)
    assert len({(index, sample.group) for index, sample in placed}) == 6
    alone = place(samples(1, size=16), {0: worker(), 1: worker()}, KNOWN)
    assert counts(alone) == {0: 8, 1: 8}


def test_a_worker_that_would_take_longer_for_one_sample_than_the_others_for_all_gets_none():
    """Eight free rows do not help: the tokens of a sample come one after another."""
    fast, slow = worker(0.01), worker(0.05)
    placed = place(samples(6), {0: fast, 1: fast, 2: slow}, KNOWN)
    assert counts(placed)[2] == 0
    assert counts(place(samples(60), {0: fast, 1: fast, 2: slow}, KNOWN))[2] > 0


@pytest.mark.parametrize("row_s", [0.0, 0.001])
def test_samples_that_would_all_fit_into_one_worker_are_spread_over_equal_ones(row_s):
    """Both have a row for each of them, and one after another their tokens take as long in either."""
    two = {i: WorkerLoad(tokens=0.0, rows=8, speed=EngineSpeed(0.01, row_s, 0.0)) for i in range(2)}
    assert counts(place(samples(1), two, KNOWN)) == {0: 2, 1: 2}
    unknown = {i: WorkerLoad(tokens=0.0, rows=8, speed=None) for i in range(2)}
    assert counts(place(samples(2), unknown, KNOWN)) == {0: 4, 1: 4}


def test_one_without_room_gets_none_and_what_fits_nowhere_waits():
    full, some = worker(room=0), worker(room=3)
    placed = place(samples(2), {0: full, 1: some}, KNOWN)
    assert counts(placed) == {1: 3}
    assert place(samples(2), {0: full}, KNOWN) == []


def test_the_speed_of_the_others_counts_for_one_that_was_not_measured():
    unknown = WorkerLoad(tokens=0.0, rows=8, speed=None)
    assert counts(place(samples(8), {0: worker(0.5), 1: unknown}, KNOWN)) == {0: 16, 1: 16}
