"""Tests that a peer waits until it knows the others before it keeps parts."""

import pytest

from aedit.launch.swarm.peer_service import Overview

LEASE_S = 10.0


class Look:
    """A peer that looks ten times a second, and takes three answers a second."""

    def __init__(self):
        self.now = 100.0
        self.overview = Overview(LEASE_S, lambda: self.now)
        self.began_s, self.per_s = 100.0, 3

    def at(self, seconds, live):
        self.now = self.began_s + seconds
        answers = int((self.now - 100.0) * self.per_s)
        return self.overview.is_enough({b"me", *live}, answers)

    def first(self, live, from_s=0.0, most_s=100.0):
        """Return the seconds until it is enough. live: returns the others that are live then."""
        for tick in range(int(10 * most_s)):
            if self.at(from_s + tick / 10, live(from_s + tick / 10)):
                return from_s + tick / 10
        return None


@pytest.mark.parametrize("found_at", [(), (0.2,), (0.5, 2.9), (1.0, 2.5, 4.0)])
def test_it_begins_when_it_finds_nobody_else_any_more(found_at):
    began = Look().first(lambda s: {b"%f" % at for at in found_at if s >= at})
    assert began == pytest.approx(max(3.0, max(found_at, default=0.0) + 2.0), abs=0.2)


def test_it_begins_after_a_while_though_others_come_all_the_time():
    began = Look().first(lambda s: {b"%d" % n for n in range(int(10 * s))})
    assert began == pytest.approx(60.0, abs=0.2)


def test_on_a_busy_machine_it_waits_for_answers():
    """Found: 32 peers on two cores, to whom nobody had answered for 2 s, kept 73 replicas in place of 24."""
    look = Look()
    look.per_s = 0.2
    assert look.first(lambda s: {b"a"}) == pytest.approx(15.0, abs=0.2)


def test_it_waits_again_after_a_stop():
    look, others = Look(), {b"a", b"b", b"c"}
    look.first(lambda s: others)
    assert look.at(4.0, others)
    assert not look.at(34.0, set()), "stopped for 30 s"
    assert look.first(lambda s: {b"a"} if s < 36.0 else others, 34.1) == pytest.approx(38.0, abs=0.2)


def test_it_waits_again_when_many_vanish_and_not_for_a_single_one():
    look, others = Look(), {b"%d" % n for n in range(8)}
    look.first(lambda s: others)
    assert look.at(5.0, others - {b"1"})
    assert look.at(6.0, others - {b"1", b"2"})
    assert not look.at(7.0, others - {b"1", b"2", b"3"}), "three of nine within a lease"
    rest = others - {b"1", b"2", b"3"}
    assert look.first(lambda s: rest, 7.1) == pytest.approx(10.0, abs=0.2)


def test_those_that_vanished_before_the_last_lease_are_no_longer_many():
    look, others = Look(), {b"%d" % n for n in range(8)}
    look.first(lambda s: others)
    assert all(look.at(4.0 + tick / 10, others - {b"1", b"2"}) for tick in range(110))
    assert look.at(15.0, others - {b"1", b"2", b"3"})


def test_one_that_comes_delays_nothing_once_it_knows_the_others():
    look = Look()
    look.first(lambda s: {b"a", b"b"})
    assert look.at(4.0, {b"a", b"b", b"c"})
