"""Tests the leadership of a hub process: what waits for replicas, and promises that are on disk."""

import errno
import os
from unittest import mock

import pytest
from kit.full_disk import full_disk

from aedit.async_sgd.journal import File, Ledger, NoSpace, Store, Unconfirmed, batches, segment_path
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import Configured, Led
from aedit.async_sgd.service import RequestGuard
from aedit.launch.config import RunConfig
from aedit.launch.hub.folder import make_hub
from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import (
    Proposal,
    Voter,
    VoteReply,
    answer_in,
    answer_out,
    proposal_in,
    proposal_out,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.types import UserError

STANDBY, NODE, OTHER = 7, 8, 9


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.01
        return self.now


def leading(tmp_path, num_others=1):
    """Return the leadership of a new hub, and its ledger."""
    hub, store = make_hub(RunConfig(), (0, 1)), Store(tmp_path)
    ledger = Ledger(hub, store.recover(hub), store)
    clock = Clock()
    made = Leadership(tmp_path / "votes.json", num_others, clock)
    position = ledger.commit(made.begin((0, 1, 0), (), is_new=True) or [Led(1)])
    ledger.journal.sync(position)
    made.attach(ledger, position)
    return made, ledger, clock


def tick(made, ledger, live=(NODE,)):
    extent = (ledger.hub.state.term, *ledger.journal.position)
    made.tick(live, ledger.journal.complete, extent)


def test_whoever_waits_for_the_disk_waits_for_the_standby_that_has_joined(tmp_path):
    made, ledger, _ = leading(tmp_path)
    ledger.durable(ledger.commit([Led(1)]))  # there is none yet
    made.confirm(STANDBY, ledger.journal.position)
    tick(made, ledger)
    assert ledger.hub.state.configs[-1].replicas == tuple(sorted((made.identity, STANDBY)))
    assert made.in_sync() == (0, 0), "it has not agreed"
    with pytest.raises(Unconfirmed):
        made.wait(ledger.journal.position, limit_s=0.02)
    made.confirm(STANDBY, ledger.journal.position)
    ledger.durable(ledger.journal.position)
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    assert made.in_sync() == (1, 1)


def test_a_version_is_shown_once_it_is_on_disk(tmp_path):
    """Found in simulation: after a power loss a leader without standbys showed an older one."""
    made, ledger, _ = leading(tmp_path)
    guard = RequestGuard(ledger, None, "run", made)
    with mock.patch.object(os, "fdatasync", wraps=os.fdatasync) as flush:
        position = ledger.commit([Led(1)])
        assert flush.call_count == 0
        guard.shown(position)
        guard.shown(position)
    assert flush.call_count == 1


def test_a_part_goes_to_the_replica_of_the_best_place_only_once_that_has_been_in_sync_for_a_while(tmp_path):
    """Found: an owner that came back took its part again at once, and failed again with it."""
    made, ledger, clock = leading(tmp_path)

    def confirm():
        made.confirm(STANDBY, ledger.journal.position, "b:1")

    confirm()
    tick(made, ledger)
    confirm()
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    tick(made, ledger)
    clock.now += 9.0
    confirm()
    tick(made, ledger)
    assert not made.hand_over("b:1")
    clock.now += 1.5
    confirm()
    assert made.hand_over("b:1")


def test_an_owner_that_ends_hands_over_at_once(tmp_path):
    made, ledger, _ = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position, "b:1")
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position, "b:1")
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    assert made.hand_over()


def test_a_silent_standby_is_taken_out_when_the_nodes_agree(tmp_path):
    made, ledger, clock = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position)
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position)
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    position = ledger.commit([Led(1)])
    clock.now += 10.0
    assert not made.asks_elector(NODE)
    tick(made, ledger)
    assert made.asks_elector(NODE), "also a node whose heartbeats are answered is told to vote"
    assert not made.asks_elector(NODE + 1)
    with pytest.raises(Unconfirmed):
        made.wait(position, limit_s=0.02)
    made.count(VoteReply(NODE, made.identity, made.asks().ballot, True, 1))
    ledger.durable(position)
    assert made.in_sync() == (0, 1)


def test_a_full_leader_whose_standby_has_promised_a_higher_term_gives_way_and_asks_for_no_votes(tmp_path):
    """Found in simulation: it won each vote and could not write it down, and the others could not stand."""
    made, ledger, clock = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position)
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position)
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    clock.now += 10.0
    assert not made.has_successor(ledger.journal.complete)
    made.note_promise(VoteReply(STANDBY, 0, (0, 0), False, 5))
    extent = (ledger.hub.state.term, *ledger.journal.position)
    made.tick((NODE,), ledger.journal.complete, extent, is_full=True)
    assert made.asks() is None
    assert made.has_successor(ledger.journal.complete)


def test_a_hub_without_others_writes_no_configuration(tmp_path):
    made, ledger, _ = leading(tmp_path, num_others=0)
    ledger.durable(ledger.commit([Led(1)]))
    assert ledger.hub.state.configs == ()
    assert made.leads
    assert not (tmp_path / "votes.json").exists()


def test_a_hub_that_starts_must_be_elected_unless_it_is_the_only_replica(tmp_path):
    made, _, _ = leading(tmp_path)
    file, me = tmp_path / "votes.json", made.identity

    def begins(*replicas):
        again = Leadership(file, 2)
        configs = (Configured(1, 1, me, replicas, (NODE,)),)
        return again, again.begin((1, 1, 100), configs, is_new=False)

    again, records = begins(me, STANDBY, OTHER)
    assert records is None
    assert again.needs_nodes(set())
    assert not again.needs_nodes({OTHER})
    assert again.promised == 1
    again, records = begins(me)
    assert records[0] == Led(2)
    assert Leadership(file, 2).promised == 2, "on disk"


def test_a_node_that_starts_again_before_it_has_voted_is_the_same_voter(tmp_path):
    """Found in simulation: configurations named electors that were gone, and none could be agreed on."""
    file = tmp_path / "votes" / "box"
    assert Elector(file).shown.voter == Elector(file).shown.voter
    assert Elector(None).shown.voter != Elector(None).shown.voter


def test_a_promise_is_on_disk_before_the_answer(tmp_path):
    made = Leadership(tmp_path / "votes.json", 1)
    made.begin((3, 1, 100), (Configured(3, 1, 99, (98, 99, made.identity), (NODE,)),), is_new=False)
    assert made.answer(Proposal(5, 0, 99, (3, 1))).granted
    again = Leadership(tmp_path / "votes.json", 1)
    assert again.identity == made.identity
    assert not again.answer(Proposal(5, 0, 98, (3, 1))).granted


def test_votes_survive_the_wire_and_the_disk(tmp_path):
    me = Voter.load(None)
    key = me.signing_key
    proposal = Proposal(5, 2, me.me, (4, 9), (4, 7, 2**40))
    answer = VoteReply(me.me, 2**62, (5, 2), True, 5, (4, 8))
    assert proposal_in(pb.Proposal.FromString(proposal_out(proposal, key).SerializeToString())) == proposal
    assert answer_in(pb.Answer.FromString(answer_out(answer, key).SerializeToString())) == answer
    file, voter = tmp_path / "a" / "votes.json", Voter(me.me, 4, 5, (6, 7), (8, 9, 10), me.key)
    voter.save(file)
    assert file.stat().st_mode & 0o777 == 0o600, "it has the key with which the voter signs"
    assert Voter.load(file) == voter
    file.write_text(file.read_text().replace(me.key, Voter.load(None).key))
    with pytest.raises(UserError, match="another voter"):
        Voter.load(file)
    (tmp_path / "a" / "votes.json").write_text("{}")
    with pytest.raises(UserError, match="register of a voter"):
        Voter.load(file)


def yes(voter, proposal):
    return VoteReply(voter, proposal.proposer, proposal.ballot, True, proposal.term)


def test_a_vote_that_cannot_be_written_is_not_given_however_often_it_is_asked_for(tmp_path):
    """Found: the second time it was given with nothing on disk, and after a restart to another hub, too."""
    made = Leadership(tmp_path / "votes.json", 1)
    made.begin((3, 1, 100), (Configured(3, 1, 99, (99, made.identity), (NODE,)),), is_new=False)
    with full_disk(tmp_path):
        for _ in range(2):
            with pytest.raises(NoSpace, match="no space"):
                made.answer(Proposal(5, 0, 99, (3, 1)))
            assert made.promised == 0
    again = Leadership(tmp_path / "votes.json", 1)
    assert again.answer(Proposal(5, 0, 98, (3, 1))).granted
    assert made.answer(Proposal(6, 0, 99, (3, 1))).granted, "there is room"


def test_what_was_acknowledged_and_cannot_be_written_is_not_forgotten(tmp_path):
    made = Leadership(tmp_path / "votes.json", 1)
    with full_disk(tmp_path), pytest.raises(NoSpace):
        made.forget((3, 1, 90))
    config = Configured(3, 1, 99, (99, made.identity), (NODE,))
    assert made.stand((config,), (3, 1, 90), 1.0) == "", "its journal is still there"


def test_an_election_on_a_full_disk_can_be_won_once_there_is_room(tmp_path):
    made = Leadership(tmp_path / "votes.json", 1)
    config = Configured(3, 1, 99, (99, made.identity), (NODE,))
    made.begin((3, 1, 100), (config,), is_new=False)
    made.stand((config,), (3, 1, 90), 60.0)
    asked = made.asks()
    with full_disk(tmp_path):
        for _ in range(2):
            with pytest.raises(NoSpace):
                made.count(yes(NODE, asked))
            assert (made.leads, made.asks()) == (False, asked)
    assert made.count(yes(NODE, asked))[0] == Led(4)
    assert made.leads


def test_a_hub_that_could_not_write_its_first_records_supports_others_and_stands_again(tmp_path):
    """Found: it had accepted a configuration that no journal has, and refused everybody without it."""
    clock = Clock()
    made = Leadership(tmp_path / "votes.json", 1, clock)
    config = Configured(3, 1, 99, (99, made.identity), (NODE,))
    made.begin((3, 1, 100), (config,), is_new=False)
    made.stand((config,), (3, 1, 90), 60.0)
    assert made.count(yes(NODE, made.asks()))[0] == Led(4)
    made.resign((config,))
    assert (made.leads, made.asks()) == (False, None)
    for one in (made, Leadership(tmp_path / "votes.json", 1, Clock())):  # it goes on, or was killed
        one.begin((3, 1, 100), (config,), is_new=False)
        clock.now += 10.0
        assert one.stand((config,), (3, 1, 90), 60.0) == ""
        assert one.answer(Proposal(5, 0, 99, (3, 1), (3, 1, 90))).granted


def test_a_configuration_that_cannot_be_written_is_proposed_once_there_is_room(tmp_path):
    """Found: a leader whose replicas or nodes changed while its disk was full ended with a traceback."""
    made, ledger, _ = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position)
    with full_disk(tmp_path):
        for _ in range(2):
            with pytest.raises(NoSpace):
                tick(made, ledger)
            assert made.asks() is None
            assert len(ledger.hub.state.configs) == 1
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position)
    assert made.asks().ballot == ledger.hub.state.configs[-1].ballot == (1, 2)
    assert Voter.load(tmp_path / "votes.json").accepted == (1, 2)
    assert [one.ballot for one in records_of_configurations(tmp_path)] == [(1, 1), (1, 2)], "each once"


@pytest.mark.parametrize("full", ["votes", "journal"])
def test_a_configuration_is_accepted_on_disk_before_it_is_proposed(tmp_path, monkeypatch, full):
    made, ledger, _ = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position)
    failing = {"votes": (Voter, "save"), "journal": (type(ledger.journal), "append")}[full]
    error = OSError(errno.ENOSPC, "full") if full == "votes" else NoSpace("full")
    with monkeypatch.context() as patched:
        patched.setattr(*failing, mock.Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises(NoSpace):
                tick(made, ledger)
            made.confirm(STANDBY, ledger.journal.position)
            assert made.asks() is None
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position)
    assert made.asks().ballot == Voter.load(tmp_path / "votes.json").accepted == (1, 2)
    assert [one.ballot for one in records_of_configurations(tmp_path)] == [(1, 1), (1, 2)]


def records_of_configurations(folder):
    return [
        record
        for batch, _ in batches(File(segment_path(folder, 1)))
        for record in batch
        if isinstance(record, Configured)
    ]


def test_a_leader_has_a_successor_before_its_newest_configuration_is_agreed(tmp_path):
    """Found in simulation: a full disk kept the agreement out of the journal, and the leader led on."""
    made, ledger, _ = leading(tmp_path)
    made.confirm(STANDBY, ledger.journal.position)
    tick(made, ledger)
    made.confirm(STANDBY, ledger.journal.position)
    complete = ledger.journal.complete
    assert not made.has_successor(complete), "the standby is in the newest configuration alone"
    made.count(VoteReply(STANDBY, made.identity, made.asks().ballot, True, 1))
    made.confirm(STANDBY, ledger.journal.position)
    tick(made, ledger, live=(NODE, NODE + 1))
    assert len(made._replica.configs) == 2
    assert not made.has_successor(ledger.journal.complete), "it lacks the end of the journal"
    made.confirm(STANDBY, ledger.journal.complete)
    assert made.has_successor(ledger.journal.complete)
