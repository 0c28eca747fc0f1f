"""Tests virtual time: it advances only when told, and its threads run in the order of their clocks."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from aedit.clock import Turns, VirtualClock


def test_a_virtual_clock_moves_only_forward_and_only_when_told():
    clock = VirtualClock(5.0)
    clock.advance(1.5)
    clock.advance_to(3.0)
    assert clock() == 6.5
    clock.advance_to(9.0)
    assert clock() == 9.0
    with pytest.raises(ValueError, match=r"by -1 s: give 0 or more"):
        clock.advance(-1)


def test_in_virtual_time_the_thread_that_is_behind_goes_first():
    turns, steps_s = Turns(3), (1.0, 2.5, 0.7)
    seen = []

    def live(node):
        turns.begin(node)
        while turns.clocks[node]() < 10:
            seen.append((turns.clocks[node](), node))
            turns.step(node, steps_s[node])
        turns.leave(node)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(live, range(3)))
    assert seen == sorted(seen)
    assert [sum(n == node for _, n in seen) for node in range(3)] == [10, 4, 15]


def test_who_waits_goes_on_at_the_time_of_the_last_part():
    turns, given, seen = Turns(2), set(), []

    def live(node):
        turns.begin(node)
        turns.step(node, (1.0, 7.0)[node])
        given.add(node)
        turns.give(node, "sum")
        turns.wait(node, "sum", lambda: len(given) == 2)
        seen.append(turns.clocks[node]())
        turns.leave(node)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(live, range(2)))
    assert seen == [7.0, 7.0]
