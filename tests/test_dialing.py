"""Tests when the addresses of peers are called again after calls that failed."""

import random
from itertools import pairwise

import pytest

from aedit.proto.swarm.dialing import DialList, Evidence

PEER = "10.0.0.1:7000"


def pauses(dials, calls, now=0.0):
    """Let so many calls fail; return the pauses between them."""
    times = []
    while len(times) <= calls:
        if dials.due(now, 1):
            times.append(now)
            dials.failed(PEER)
        now += 0.05
        assert now < 5000.0
    return [b - a for a, b in pairwise(times)]


def test_a_peer_that_has_answered_before_is_called_every_few_seconds_for_a_minute():
    """Found: a machine that had been cut off for 30 s was called again up to 16 s later; its parts waited."""
    dials = DialList(10, random.Random(0))
    dials.answered(PEER, 0.0)
    found = pauses(dials, 25)
    assert max(found[:20]) <= 4.1
    assert 40.0 < sum(found[:20]) < 90.0
    assert min(found[20:]) > 29.0


def test_a_peer_that_never_answered_is_called_less_and_less_and_then_forgotten():
    dials = DialList(10, random.Random(0))
    dials.add(PEER, Evidence.HINT, 0.0)
    found = pauses(dials, 6)
    assert all(2.0**k / 2 <= pause <= 2.0**k + 0.1 for k, pause in enumerate(found))
    assert len(dials) == 1
    for now in range(1000, 2000, 100):
        for address in dials.due(float(now), 1):
            dials.failed(address)
    assert len(dials) == 0


@pytest.mark.parametrize(("before", "due"), [(Evidence.ANSWERED, [PEER]), (Evidence.CALLED, [])])
def test_a_peer_that_calls_is_due_at_once_if_it_has_answered_before(before, due):
    """One that has not could name any address, and have it called as often as it calls."""
    dials = DialList(10, random.Random(0))
    dials.add(PEER, before, 0.0)
    for now in (0.0, 10.0, 20.0):
        assert dials.due(now, 1) == [PEER]
        dials.failed(PEER)
    assert dials.due(20.1, 1) == []
    dials.add(PEER, Evidence.CALLED, 20.2)
    assert dials.due(20.2, 1) == due
