"""Tests which node brings the anchors of a part that was founded again, and what the run then knows."""

import pytest

from aedit.async_sgd.hub import HubState, Member, Unit
from aedit.async_sgd.hub.recovery_anchors import RecoveryAnchors
from aedit.async_sgd.rules import Leased, Used
from aedit.proto.agent.agent import RunNews
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.rpc import last_term_before, stamp, term_text, version_of

AGAIN = last_term_before(1, b"founder") + 1


def anchors_of_nodes(live=(0, 1, 2), term=AGAIN):
    state = HubState(term=term, units={0: Unit(), 1: Unit()})
    state.members = [Member(f"n{node}", node) for node in live]
    for member in state.members:
        member.live = True
        state.roster.add(member)
    return RecoveryAnchors(lambda: state, gather_s=10.0), state


def test_the_newest_anchor_of_each_unit_wins():
    found, _ = anchors_of_nodes()
    found.note(0, [stamp(0, 7), stamp(0, 5)], 0, 100.0)
    found.note(1, [stamp(0, 8), stamp(0, 4)], 0, 103.0)
    assert (found.founder(0, 109.0), found.founder(1, 109.0)) == (None, None), "others may have newer ones"
    assert (found.founder(0, 110.0), found.founder(1, 110.0)) == (1, 0)
    assert (found.brings(1, 110.0), found.brings(2, 110.0)) == ([0], [])


def test_an_anchor_of_a_later_generation_is_newer_whatever_its_version_is():
    found, _ = anchors_of_nodes()
    found.note(0, [stamp(0, 9000), 0], 0, 0.0)
    found.note(1, [stamp(1, 1), 0], 0, 0.0)
    assert found.founder(0, 10.0) == 1
    assert version_of(found.stamp(0, 0)) == 9000


def test_versions_after_the_anchor_that_is_brought_are_told_by_name_and_change_nothing():
    found, _ = anchors_of_nodes()
    found.note(0, [stamp(1, 7), 0], 0, 0.0, [stamp(1, 7), 0])
    found.note(1, [stamp(1, 4), 0], 0, 0.0, [stamp(1, 9), 0])
    found.note(2, [0], 0, 0.0, [stamp(2, 3)])
    assert found.lost_after(0, 0) == [(2, 3), (1, 2)], "a later generation began again at version 1"
    assert found.lost_after(0, 1) == []
    assert found.founder(0, 10.0) == 0, "who has the newest anchor, whatever others were told of"
    found.note(1, [stamp(1, 4), 0], 0, 0.0, [stamp(0, 9000), 2**64 - 1])
    assert found.lost_after(0, 0) == [(2, 3)], "an earlier generation is older"
    assert found.lost_after(0, 1) == [(1, 2**32 - 1)]


def test_a_bounded_number_of_nodes_is_named():
    found, _ = anchors_of_nodes(range(20))
    for node in range(20):
        found.note(node, [stamp(0, 1)], 0, 0.0, [stamp(0, 2 + node)])
    assert found.lost_after(0, 0) == [(node, node + 1) for node in range(19, 3, -1)]


def test_nobody_without_an_anchor_brings_one_and_no_member_that_has_gone():
    found, state = anchors_of_nodes()
    found.note(2, [0, 0], 0, 0.0)
    assert found.founder(0, 1000.0) is None, "a new node has only the weights it was made with"
    found.note(0, [stamp(0, 3), 0], 0, 1000.0)
    found.note(1, [stamp(0, 2), 0], 0, 1000.0)
    assert (found.founder(0, 1010.0), found.founder(1, 1010.0)) == (0, None)
    state.members[0].live = False
    state.roster.remove(state.members[0])
    assert found.founder(0, 1010.0) == 1


def test_in_the_first_generation_the_founder_is_who_has_joined_first():
    found, state = anchors_of_nodes(term=5)
    state.founder = 2
    found.note(0, [stamp(0, 7)], 0, 0.0)
    assert (found.founder(0, 0.0), found.brings(0, 100.0), found.skipped(0)) == (2, [], [])
    assert found.leases(0.0)


def test_positions_that_nodes_have_had_are_given_to_nobody_again():
    found, state = anchors_of_nodes()
    found.note(0, [stamp(0, 1)], 320, 0.0)
    assert not found.leases(5.0), "another node may have been given more"
    found.note(1, [0], 640, 5.0)
    found.note(2, [0], 2**61, 6.0)  # nobody's word
    assert found.leases(10.0)
    assert found.skipped(0) == [Leased(0, 0, 640), Used(0, 0, 640)]
    for record in found.skipped(0):
        state.apply(record)
    assert state.pool.offer(64) == [(640, 704)]
    assert found.skipped(1) == []


def news(**values):
    return pb.News(**({"term": 3} | values))


def test_what_a_trainer_is_told_does_not_go_back_when_part_0_begins_anew():
    told = RunNews()
    told.take_news(0, news(round=7, total_steps=700, elapsed_s=90.0, progress=0.5))
    told.take_news(1, news(total_steps=710, elapsed_s=91.0, progress=0.51))
    before = told.current()
    told.take_news(0, news(term=AGAIN, round=0))
    after = told.current()
    assert (after.round, after.total_steps, after.elapsed_s) == (7, 710, 91.0)
    assert after.progress == 0.51 > before.progress == 0.5
    told.take_news(0, news(term=AGAIN, round=2, total_steps=40, elapsed_s=5.0, progress=0.1))
    assert (told.current().round, told.current().total_steps) == (9, 740)
    assert told.current().progress == pytest.approx(0.6)
    assert not told.current().finished
    told.take_news(1, news(progress=1.0))
    assert told.current().finished


def test_a_term_shows_its_generation():
    assert (term_text(12), term_text(AGAIN + 2)) == ("12", "1:3")
