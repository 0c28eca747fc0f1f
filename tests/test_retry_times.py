"""Tests of the times after which refused samples come back, with clients simulated at an injected clock."""

import heapq

from aedit.spec_rollout.server import host_figures
from aedit.spec_rollout.server.host_figures import MAX_RETRY_S, MIN_RETRY_S, RetryTimes


def simulate(num_clients, over_per_s, places=16, seconds=120.0):
    """Return (refusals, samples served, seconds without work) of clients that always come back as told.

    The server ends one sample every 1 / over_per_s seconds, and the client asks for the next one at once.
    """
    now = [0.0]
    times = RetryTimes(lambda: now[0])
    arrivals = [0.0] * num_clients
    waiting, refusals, served, idle_s, next_end_s = 0, 0, 0, 0.0, 0.0
    while now[0] < seconds:
        now[0] = min(next_end_s, arrivals[0]) if arrivals else next_end_s
        while arrivals and arrivals[0] <= now[0]:
            heapq.heappop(arrivals)
            if waiting < places:
                waiting += 1
            else:
                refusals += 1
                heapq.heappush(arrivals, now[0] + times.refuse(waiting, over_per_s))
        if next_end_s <= now[0]:
            next_end_s = now[0] + 1 / over_per_s
            if waiting:
                waiting, served = waiting - 1, served + 1
                heapq.heappush(arrivals, now[0])
            else:
                idle_s += 1 / over_per_s
    return refusals, served, idle_s


def test_many_clients_ask_little_more_often_than_samples_end_and_leave_no_row_empty():
    for num_clients in (40, 128, 300):
        refusals, served, idle_s = simulate(num_clients, over_per_s=4.0)
        assert refusals < 3.2 * served
        assert idle_s == 0


def test_the_first_ones_are_told_when_the_queue_is_over_and_later_ones_later():
    times = RetryTimes(lambda: 0.0)
    told = [times.refuse(8, 2.0) for _ in range(100)]
    assert told[0] == 4.0
    assert told == sorted(told)
    assert told[-1] == 4.0 + 99 / host_figures.RETURNS_PER_ROW / 2.0
    assert times.refuse(10_000, 2.0) == MAX_RETRY_S


def test_those_whose_time_is_over_no_longer_count():
    now = [0.0]
    times = RetryTimes(lambda: now[0])
    first = [times.refuse(8, 2.0) for _ in range(10)]
    now[0] = max(first) + 1
    assert times.refuse(8, 2.0) == first[0]


def test_without_a_measured_speed_the_time_is_the_shortest_and_a_flood_takes_no_memory(monkeypatch):
    monkeypatch.setattr(host_figures, "MOST_RETURNS", 5)
    times = RetryTimes(lambda: 0.0)
    assert [times.refuse(8, 0.0) for _ in range(50)] == [MIN_RETRY_S] * 50
    assert times.refuse(8, 2.0) == 4.0 + 5 / host_figures.RETURNS_PER_ROW / 2.0
