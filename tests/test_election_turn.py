"""Tests when a replica of a swarm asks to be elected after its owner was lost."""

import pytest

from aedit.launch.hub.standby import ElectionTurn


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def taken_at(turn, clock, limit_s=20.0):
    """Return after how many seconds the turn is taken first."""
    begun_s = clock.now_s
    while not turn.take():
        clock.now_s += 0.1
        assert clock.now_s < begun_s + limit_s
    return round(clock.now_s - begun_s, 1)


def test_replicas_that_lose_their_owner_ask_one_after_the_other(clock):
    turns = [ElectionTurn(6.0, clock) for _ in range(3)]
    for place, turn in enumerate(turns):
        turn.lost_owner(place)
    assert [turn.take() for turn in turns] == [True, False, False]
    assert taken_at(turns[1], clock) == pytest.approx(1.0, abs=0.15)
    assert taken_at(turns[2], clock) == pytest.approx(1.0, abs=0.15)


def test_one_that_was_not_elected_asks_again_after_a_random_time(clock):
    again = set()
    for _ in range(40):
        turn = ElectionTurn(6.0, clock)
        turn.lost_owner(0)
        assert turn.take()
        again.add(taken_at(turn, clock))
    assert min(again) >= 3.0
    assert max(again) <= 9.1
    assert len(again) > 5


def test_one_without_a_place_waits_as_long_as_one_that_never_had_an_owner(clock):
    waited = []
    for lose in (True, False):
        turn = ElectionTurn(6.0, clock)
        if lose:
            turn.lost_owner(None)
        waited.append(taken_at(turn, clock))
    assert all(3.0 <= one <= 9.1 for one in waited)
