"""Tests the hand-over of leadership: a leader's vote for the replica that should lead in its place."""

import json

import pytest
from kit.hub_processes import Client
from test_swarm_attacks import CONFIG, address, replica

from aedit.async_sgd.journal import Unconfirmed
from aedit.async_sgd.replication import Leadership, Replica
from aedit.async_sgd.rules import Configured
from aedit.launch.hub.endpoint import HubEndpoint, OtherHubs
from aedit.launch.hub.main import _Process
from aedit.proto.rpc import HubUnreachable, Proposal, Voter
from aedit.proto.rpc import hub_pb2 as pb

ME, OTHER, THIRD, STRANGER = 1, 2, 3, 9


def leader(*replicas):
    """Return a leader of term 1 whose replicas were all heard at time 0."""
    found = Replica(Voter(ME), promise_s=4.0, lease_s=2.0)
    found.found(0)
    found.configs = (Configured(1, 2, ME, tuple(sorted({ME, *replicas})), (50, 51, 52)),)
    for one in replicas:
        found.confirm(one, (1, 100), 0.0)
    return found


def vote_for(proposer, term=2):
    return Proposal(term, 0, proposer, (1, 2), (1, 1, 100))


def test_a_leader_that_holds_its_lease_votes_only_for_the_one_it_yields_to():
    machine = leader(OTHER, THIRD)
    assert not machine.answer(vote_for(OTHER), 1.0).granted
    assert machine.yield_to(OTHER, 4.0)
    assert not machine.answer(vote_for(THIRD), 1.0).granted
    assert machine.term == 1
    assert machine.answer(vote_for(OTHER), 1.0).granted
    assert machine.term == 0, "it leads no more once it has voted for another"


def test_a_leader_yields_for_a_while_only():
    machine = leader(OTHER)
    assert machine.yield_to(OTHER, 1.5)
    assert not machine.answer(vote_for(OTHER), 1.6).granted
    assert machine.term == 1


@pytest.mark.parametrize("whom", [STRANGER, ME])
def test_it_does_not_yield_to_one_that_is_not_a_replica_in_sync(whom):
    assert not leader(OTHER).yield_to(whom, 4.0)


def test_it_does_not_yield_while_a_configuration_is_not_agreed():
    machine = leader(OTHER)
    machine.propose({OTHER, THIRD}, (50, 51, 52))
    assert not machine.yield_to(OTHER, 4.0)


def test_a_follower_does_not_yield():
    follower = Replica(Voter(ME), promise_s=4.0, lease_s=2.0)
    assert not follower.yield_to(OTHER, 4.0)


def test_a_successor_that_lacks_what_was_acknowledged_gets_no_vote():
    machine = leader(OTHER)
    machine.voter = machine.voter.saw((1, 1, 500))
    machine.yield_to(OTHER, 4.0)
    assert not machine.answer(vote_for(OTHER), 1.0).granted


def test_a_follower_of_a_leader_that_says_it_has_ended_votes_for_another_at_once():
    follower = Replica(Voter(ME), promise_s=4.0, lease_s=2.0)
    follower.configs = (Configured(1, 2, THIRD, (ME, OTHER, THIRD), ()),)
    follower.note_leader(0.0)
    assert not follower.answer(vote_for(OTHER), 1.0).granted
    follower.leader_ended()
    assert follower.answer(vote_for(OTHER), 1.0).granted


def test_the_replica_at_an_address_is_told_to_stand_when_it_confirms_next_and_not_again_soon(tmp_path):
    now = [0.0]
    leadership = Leadership(tmp_path / "votes.json", 3, clock=lambda: now[0])
    leadership.begin((0, 1, 0), (), is_new=True)
    me = leadership.identity
    leadership._replica.configs = (Configured(1, 2, me, (me, OTHER, THIRD), ()),)
    assert not leadership.confirm(OTHER, (1, 10), "b:1")
    assert not leadership.hand_over("c:1"), "nobody in sync is there"
    assert leadership.hand_over("b:1")
    assert not leadership.confirm(THIRD, (1, 10), "c:1")
    assert leadership.confirm(OTHER, (1, 10), "b:1")
    now[0] = 4.0
    assert not leadership.confirm(OTHER, (1, 10), "b:1"), "it has had its time"
    assert not leadership.hand_over("b:1")
    now[0] = 11.0
    leadership.confirm(OTHER, (1, 10), "b:1")
    assert leadership.hand_over()


def test_an_owner_acknowledges_nothing_alone_while_other_peers_could_have_it(tmp_path):
    least = [2]
    leadership = Leadership(tmp_path / "votes.json", 3, least=lambda: least[0])
    leadership.begin((0, 1, 0), (), is_new=True)
    me = leadership.identity
    leadership.wait((1, 10), 0.0)  # no node has joined: nothing can be lost
    leadership._replica.configs = (Configured(1, 2, me, (me,), (50, 51, 52)),)
    with pytest.raises(Unconfirmed):
        leadership.wait((1, 10), 0.0)
    least[0] = 1
    leadership.wait((1, 10), 0.0)
    least[0] = 2
    leadership._replica.configs = (Configured(1, 3, me, (me, OTHER), (50, 51, 52)),)
    leadership.confirm(OTHER, (1, 10))
    leadership.wait((1, 10), 0.0)


def test_an_owner_that_was_replaced_follows_though_no_other_replica_answers(tmp_path, monkeypatch):
    """Found: it asked all others for their terms first, and one silent machine held up the successor."""
    with replica(tmp_path, 0, standby=False) as (owner, file):
        at = address(owner)
    monkeypatch.setattr(OtherHubs, "newest_term", lambda self: pytest.fail("asked the other replicas"))
    endpoint = HubEndpoint(CONFIG, tmp_path, (0, 2), True, "127.0.0.1:0", None, replicas=file, copies=3)
    process = _Process(endpoint, insecure=False)
    try:
        process.follow()
        told = json.loads(Client(address(process)).hub.status(pb.StatusRequest()).json)
        assert (address(process), told["term"]) == (at, 1)
        assert "follows" in told
    finally:
        process.close(0.0)


def test_a_hub_asks_what_each_other_one_has_or_had_before_it_was_damaged(monkeypatch):
    """A follower that fetches its journal anew has less than what it has confirmed."""

    def says(voter, term):
        return pb.HelloReply(term=term, promise=pb.Answer(voter=voter))

    hellos = {
        "new:1": says(1, 4),
        "old:1": says(2, 3),
        "dumb:1": says(3, 4),
        "anew:1": says(4, 0),
        "gone:1": HubUnreachable("gone"),
    }
    found = {
        "new:1": {"term": 4, "segment": 2, "offset": 50, "confirmed": [4, 2, 900]},
        "old:1": {"term": 3, "segment": 9, "offset": 999},
        "dumb:1": {},
        "anew:1": {"term": 0, "segment": 1, "offset": 0, "confirmed": [4, 2, 950]},
    }
    monkeypatch.setattr(OtherHubs, "_hellos", lambda self, limit_s: iter(hellos.items()))
    monkeypatch.setattr(OtherHubs, "_limit_s", 1.0)
    monkeypatch.setattr(OtherHubs, "_status", lambda self, address: found[address])
    others = OtherHubs(None, None)
    assert others.ahead_of((4, 2, 899)) == ("anew:1", (4, 2, 950))
    assert others.ahead_of((4, 2, 950)) is None
    assert others.ahead_of((3, 9, 999)) == ("anew:1", (4, 2, 950)), "of a later term"
    del hellos["anew:1"]
    assert others.ahead_of((4, 2, 899)) == ("new:1", (4, 2, 900))
