"""Tests `python -m benchmarks.peers`: placement over simulated peers, and a small crowd of real ones."""

import pytest
from benchmarks.peers import QUICK, Swarm, balance, crowd


def test_simulated_peers_move_no_replica_without_need_and_as_many_as_independent_draws_let_expect():
    found = balance(peers=24, parts=32, copies=3, changes=16, seed=3)
    assert found.needless == 0
    assert found.mean == 4.0
    low, high = found.ideal_most_within
    assert low <= found.most <= high
    assert found.moved == pytest.approx(found.ideal_moved, rel=0.5)


def test_a_simulated_peer_that_leaves_keeps_nothing():
    swarm = Swarm(peers=8, parts=8, copies=3)
    gone = swarm.leave(2)
    new = swarm.join()
    there = {key for keys in swarm.places().values() for key in keys}
    assert gone not in there
    assert new in there
    assert swarm.known.own_key in there


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_peers_in_few_processes_have_all_copies_again_after_some_have_left_and_others_come(tmp_path):
    found = crowd(tmp_path, QUICK[0], None, seed=1)
    assert found.is_settled
    assert (found.failed, found.refused) == (0, 0)
    # Fewer may begin than are chosen: a peer that still has a replica that it was to give up keeps it.
    assert min(found.replicas_begun, found.ideal_replicas_begun) > 0
    assert found.pushes_per_s > 0
