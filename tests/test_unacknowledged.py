"""Tests a leading hub that can acknowledge nothing for a while: how it treats nodes meanwhile."""

from types import SimpleNamespace

import pytest
from kit.leading_hub import leading_hub

from aedit.async_sgd.journal import Unconfirmed
from aedit.async_sgd.rules import Configured
from aedit.async_sgd.service import HubWorker
from aedit.proto.rpc import HubClient, HubRefused

STANDBY = 7
LONG_S = 60.0


def test_a_join_that_a_silent_replica_holds_up_is_refused_soon_so_that_the_node_can_vote(tmp_path):
    with leading_hub(tmp_path, 'standby = "127.0.0.1:0"') as hub:
        elector = hub.node("elector")
        elector.join()
        replica = hub.leading.leadership._replica
        pair = tuple(sorted((replica.voter.me, STANDBY)))
        replica.configs = (Configured(replica.term, 9, replica.voter.me, pair, (50, 51, 52)),)
        late = hub.node("late")
        late.hub = HubClient(hub.address, call_timeout_s=LONG_S)
        with pytest.raises(HubRefused, match="another hub of the run must confirm this first: try again"):
            late.join()
        assert hub.leading.leadership.asks() is not None


def test_a_join_waits_for_a_replica_that_only_lags(tmp_path):
    with leading_hub(tmp_path, 'standby = "127.0.0.1:0"') as hub:
        waits, leadership = [], hub.leading.leadership

        def wait(position, limit_s):
            waits.append(limit_s)
            if len(waits) < 4:
                raise Unconfirmed("not yet")

        leadership.wait = wait
        assert hub.node("patient").join().session
        assert len(waits) == 4


def test_a_finished_run_has_not_ended_before_its_replicas_have_what_was_decided_last(tmp_path):
    confirmed = False
    with leading_hub(tmp_path) as hub:
        ledger = hub.leading.ledger
    state = SimpleNamespace(members={0: None}, live={})
    ledger.hub = SimpleNamespace(state=state, progress=lambda now: 1.0)
    ledger.is_confirmed = lambda position: confirmed
    worker = HubWorker(ledger, print, snapshot_bytes=1)
    worker._look_for_the_end(0.0)
    worker._look_for_the_end(100.0)
    assert not worker.over.is_set(), "nodes may wait for answers that it has held back"
    confirmed = True
    worker._look_for_the_end(101.0)
    assert not worker.over.is_set(), "a node has had no time to come back"
    worker._look_for_the_end(105.0)
    assert worker.over.is_set()


def test_a_finished_run_ends_though_its_replicas_are_always_a_little_behind(tmp_path):
    """The hub writes each second how old the run is, and a follower has that a moment later."""
    with leading_hub(tmp_path) as hub:
        ledger = hub.leading.ledger
    state = SimpleNamespace(members={0: None}, live={})
    ledger.hub = SimpleNamespace(state=state, progress=lambda now: 1.0)
    ledger.journal = SimpleNamespace(position=(1, 100))
    ledger.is_confirmed = lambda position: position < ledger.journal.position
    worker = HubWorker(ledger, print, snapshot_bytes=1)
    for second in range(6):
        assert not worker.over.is_set()
        worker._look_for_the_end(float(second))
        ledger.journal.position = (1, 100 + second)
    assert worker.over.is_set()
