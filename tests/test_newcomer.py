"""Tests that a peer that has just started waits until it knows the others before it keeps parts."""

import pytest

from aedit.launch.swarm.newcomer import Newcomer


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.mark.parametrize("found_at", [(), (0.2,), (0.5, 2.9), (1.0, 2.5, 4.0)])
def test_it_begins_when_it_finds_nobody_else_any_more(found_at):
    clock = Clock()
    newcomer, live, began = Newcomer(clock), {b"me"}, None
    for tick in range(200):
        clock.now = 100.0 + tick / 10
        live |= {b"%f" % at for at in found_at if clock.now - 100.0 >= at}
        if newcomer.knows_enough(live):
            began = clock.now - 100.0
            break
    assert began == pytest.approx(max(3.0, max(found_at, default=0.0) + 2.0), abs=0.2)


def test_it_begins_after_a_while_though_others_come_all_the_time():
    clock = Clock()
    newcomer = Newcomer(clock)
    for tick in range(149):
        clock.now = 100.0 + tick / 10
        assert not newcomer.knows_enough({b"%d" % n for n in range(tick)})
    clock.now = 115.0
    assert newcomer.knows_enough({b"%d" % n for n in range(1000)})


def test_those_that_go_and_come_again_are_no_news():
    clock = Clock()
    newcomer = Newcomer(clock)
    newcomer.knows_enough({b"a", b"b"})
    clock.now += 3.5
    assert newcomer.knows_enough({b"a"})
    assert newcomer.knows_enough({b"a", b"b"})
