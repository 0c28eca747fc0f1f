"""Tests the leadership of a hub process: what waits for replicas, and promises that are on disk."""

import pytest

from aedit.async_sgd.journal import Ledger, Store, Unconfirmed
from aedit.async_sgd.replication import Leadership
from aedit.async_sgd.rules import Configured, Led
from aedit.launch.config import RunConfig
from aedit.launch.hub.folder import make_hub
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

STANDBY, NODE = 7, 8


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
    position = ledger.commit(made.begin(0, (), is_new=True) or [Led(1)])
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


def test_a_hub_without_others_writes_no_configuration(tmp_path):
    made, ledger, _ = leading(tmp_path, num_others=0)
    ledger.durable(ledger.commit([Led(1)]))
    assert ledger.hub.state.configs == ()
    assert made.leads
    assert not (tmp_path / "votes.json").exists()


def test_a_promise_is_on_disk_before_the_answer(tmp_path):
    made = Leadership(tmp_path / "votes.json", 1)
    made.begin(0, (Configured(3, 1, 99, (99, made.identity), (NODE,)),), is_new=False)
    assert made.answer(Proposal(5, 0, 99, (3, 1))).granted
    again = Leadership(tmp_path / "votes.json", 1)
    assert again.identity == made.identity
    assert not again.answer(Proposal(5, 0, 98, (3, 1))).granted


def test_votes_survive_the_wire_and_the_disk(tmp_path):
    proposal = Proposal(5, 2, 2**62, (4, 9), (4, 7, 2**40))
    answer = VoteReply(2**61, 2**62, (5, 2), True, 5, 3, (4, 8))
    assert proposal_in(pb.Proposal.FromString(proposal_out(proposal).SerializeToString())) == proposal
    assert answer_in(pb.Answer.FromString(answer_out(answer).SerializeToString())) == answer
    file, voter = tmp_path / "a" / "votes.json", Voter(3, 4, 5, (6, 7), (8, 9, 10))
    voter.save(file)
    assert Voter.load(file) == voter
    (tmp_path / "a" / "votes.json").write_text("{}")
    with pytest.raises(UserError, match="register of a voter"):
        Voter.load(file)
