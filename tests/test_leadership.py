"""Tests the rules of leadership one by one: quorums, votes, configurations and what may be acknowledged."""

from itertools import chain, combinations

import pytest

from aedit.async_sgd.replication import Replica
from aedit.async_sgd.replication.replica import END, is_quorum
from aedit.async_sgd.rules import Agreed, Configured, Led
from aedit.proto.rpc import MOST_TERM, TERM_STEP, Proposal, Voter, VoteReply

A, B, C, X, Y, Z = 1, 2, 3, 11, 12, 13


def config(replicas, electors=(), number=1, term=1):
    return Configured(term, number, replicas[0], tuple(replicas), tuple(electors))


def subsets(items):
    return chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))


def replica(me, configs=(), voter=None):
    made = Replica(voter or Voter(me), promise_s=3.0, lease_s=2.0)
    made.configs = tuple(configs)
    return made


def leading(me, configs):
    """Return a hub that leads under the newest configuration, on which the voters are to agree."""
    made = replica(me, configs)
    made.term = configs[-1].term
    made._confirmed = dict.fromkeys(made._needed(), ((0, 0), 0.0))
    made._ask_for_agreement()
    return made


def yes(voter, proposal):
    return VoteReply(voter, proposal.proposer, proposal.ballot, True, proposal.term)


@pytest.mark.parametrize("num_replicas", range(1, 6))
@pytest.mark.parametrize("num_electors", range(5))
def test_any_two_quorums_share_a_voter(num_replicas, num_electors):
    made = config(range(1, 1 + num_replicas), range(11, 11 + num_electors))
    quorums = [set(s) for s in subsets((*made.replicas, *made.electors)) if is_quorum(made, s)]
    assert quorums
    assert all(one & other for one in quorums for other in quorums)


@pytest.mark.parametrize(
    ("replicas", "electors", "voters", "wanted"),
    [
        ((A,), (), {A}, True),
        ((A,), (X,), {X}, False),
        ((A, B), (), {A}, False),
        ((A, B), (), {A, B}, True),
        ((A, B), (X, Y), {B, X}, False),  # one of two is not more than half
        ((A, B), (X, Y), {B, X, Y}, True),
        ((A, B, C), (X, Y, Z), {B, X, Y, Z}, False),
        ((A, B, C), (X, Y, Z), {B, C}, True),
    ],
)
def test_the_electors_decide_between_equal_halves_of_the_replicas(replicas, electors, voters, wanted):
    assert is_quorum(config(replicas, electors), voters) == wanted


def test_a_voter_supports_one_proposer_per_term_and_no_older_term():
    voter, answer = Voter(X).answer(Proposal(5, 0, A, (1, 1)))
    assert answer.granted
    assert not voter.answer(Proposal(5, 0, B, (1, 1)))[1].granted
    assert not voter.answer(Proposal(5, 1, B, (1, 1)))[1].granted
    assert not voter.answer(Proposal(4, 0, A, (1, 1)))[1].granted
    assert voter.answer(Proposal(5, 0, A, (1, 1)))[1].granted  # asked again: its answer was lost
    assert voter.answer(Proposal(6, 0, B, (1, 1)))[1].granted


def test_a_voter_refuses_a_candidate_that_may_lack_what_was_acknowledged():
    voter, _ = Voter(X).answer(Proposal(1, 3, A, (1, 3)))
    assert not voter.answer(Proposal(2, 0, B, (1, 2)))[1].granted
    assert voter.answer(Proposal(2, 0, B, (1, 3)))[1].granted
    voter = voter.saw((1, 4, 700))
    assert not voter.answer(Proposal(2, 0, B, (1, 3), (1, 4, 699)))[1].granted
    assert voter.answer(Proposal(2, 0, B, (1, 3), (1, 4, 700)))[1].granted
    assert voter.answer(Proposal(2, 0, B, (1, 3), (2, 1, 0)))[1].granted


def test_a_vote_is_for_one_of_two_processes_of_one_identity():
    """Found in simulation: two of them were elected for one term, each with the votes for both."""
    one, other = (Replica(Voter(A), promise_s=3.0, lease_s=2.0, process=number) for number in (1, 2))
    voter, elector = replica(B, [config((A, B, C), (X,))]), Voter(X)
    one.configs = other.configs = voter.configs
    first, second = one.stand((1, 1, 100), 9.0), other.stand((1, 1, 100), 9.0)
    assert (first.term, first.proposer) == (second.term, second.proposer)
    said = voter.answer(first, 9.0)
    assert said.granted
    assert not voter.answer(second, 9.0).granted
    assert other.count_vote(said, 9.0) == [], "the vote is for the first"
    assert one.count_vote(said, 9.0)[0] == Led(2)
    elector, said = elector.answer(one._agreement.proposal, 2)
    assert said.granted, "a configuration of the one that was elected"
    assert not elector.answer(second, 2)[1].granted
    again = Replica(one.voter, promise_s=3.0, lease_s=2.0, process=3)
    again.configs = one.configs
    asked = again.stand((2, 1, 150), 10.0)
    assert (asked.term, asked.process) == (3, 3), "a process that starts leads no term of another one"


def test_a_voter_or_a_register_of_an_older_build_names_no_process_and_counts():
    upgraded, answer = Voter(X, term=5, voted_for=A).answer(Proposal(5, 1, A, (1, 1), process=9))
    assert answer.granted
    assert not upgraded.answer(Proposal(5, 1, A, (1, 1), process=8))[1].granted
    hub = Replica(Voter(A), promise_s=3.0, lease_s=2.0, process=5)
    hub.configs = (config((A, B, C), (X,)),)
    asked = hub.stand((1, 1, 100), 9.0)
    assert hub.count_vote(yes(B, asked), 9.0)[0] == Led(2)


def test_a_hub_that_starts_leads_a_new_term_and_only_if_it_needs_no_other_voter():
    """The process that led may run on: that folder, or this one, is a copy."""
    alone = replica(A, [config((A,), (X,), term=3)], Voter(A, term=3, voted_for=A, process=9))
    assert alone.begin_alone((3, 1, 90), 0.0)[:2] == [Led(4), config((A,), (X,), term=4)]
    assert (alone.voter.term, alone.voter.voted_for) == (4, A)
    two = [config((A, B), (X,), term=3)]
    for configs in (two, [*two, config((A,), (X,), 2, 3)], []):
        assert replica(A, configs).begin_alone((3, 1, 90), 0.0) == []
    promised = replica(A, [config((A,), (X,), term=3)], Voter(A, term=7))
    assert promised.begin_alone((3, 1, 90), 0.0)[0] == Led(8)


@pytest.mark.parametrize("voter", [Voter(A, accepted=(3, 2)), Voter(A, seen=(3, 1, 91))])
def test_a_hub_that_starts_with_less_than_its_register_says_does_not_lead(voter):
    assert replica(A, [config((A,), (X,), term=3)], voter).begin_alone((3, 1, 90), 0.0) == []


def test_a_copy_of_a_followers_folder_does_not_lead():
    """Found in simulation: it had mirrored the term for which the hub of its identity was elected then."""
    assert replica(B, [config((A,), (X,), term=3)]).begin_alone((3, 1, 90), 0.0) == []


def test_nothing_is_acknowledged_that_a_replica_in_sync_lacks():
    hub = replica(A)
    assert hub.found(0) == [Led(1), config((A,)), Agreed(1, 1)]
    assert hub.acknowledged() == END
    assert hub.propose({A, B}, (X, Y, Z)) == [config((A, B), (X, Y, Z), 2)]
    assert hub.acknowledged() == (0, 0), "B counts from now on"
    hub.confirm(B, (1, 50), 0.0)
    assert hub.acknowledged() == (1, 50)
    hub.placed((1, 60))
    assert hub.asks is None, "B does not have the configuration yet"
    hub.confirm(B, (1, 60), 0.0)
    assert hub.count_acceptance(yes(B, hub.asks), 0.0) == [Agreed(1, 2)]

    assert hub.silent(9.0, 2.0) == {B}
    assert hub.propose({A}, (X, Y, Z)) == [config((A,), (X, Y, Z), 3)]
    hub.placed((1, 80))
    assert hub.count_acceptance(yes(X, hub.asks), 9.0) == []
    assert hub.acknowledged() == (1, 60), "one of three nodes does not decide"
    assert hub.count_acceptance(yes(Y, hub.asks), 9.0) == [Agreed(1, 3)]
    assert hub.acknowledged() == END


def test_a_hub_without_electors_waits_for_nobody():
    """Two halves that nobody can decide between would both stand still."""
    hub = replica(A)
    hub.found(0)
    assert hub.propose({A, B}, ()) == []


def test_a_candidate_is_elected_by_a_quorum_and_acknowledges_after_another_one():
    hub = replica(B, [config((A, B), (X, Y, Z))])
    assert hub.why_not((1, 1, 90)) == ""
    proposal = hub.stand((1, 1, 90), 0.0)
    assert (proposal.term, proposal.number, hub.voter.term) == (2, 0, 0), "nothing is promised yet"
    assert hub.count_vote(yes(X, proposal), 0.0) == []
    assert hub.count_vote(yes(Y, proposal), 0.0) == [Led(2), config((B,), (X, Y, Z), term=2)]
    assert (hub.term, hub.voter.voted_for, hub.acknowledged()) == (2, B, (0, 0))
    hub.placed((1, 100))
    assert hub.count_acceptance(yes(X, hub.asks), 0.0) == []
    assert hub.count_acceptance(yes(Z, hub.asks), 0.0) == [Agreed(2, 1)]
    assert hub.acknowledged() == END


def test_replicas_that_have_voted_are_waited_for_from_the_first_record_on():
    """A disk that is lost after an election is not the only one with what was acknowledged since."""
    hub = replica(B, [config((A, B, C), (X,))])
    proposal = hub.stand((1, 1, 90), 0.0)
    assert hub.count_vote(yes(C, proposal), 5.0) == [Led(2), Configured(2, 1, B, (B, C), (X,))]
    hub.placed((1, 100))
    assert (hub.silent(6.0, 2.0), hub.asks) == ({A}, None), "C has a moment to catch up"
    hub.confirm(C, (1, 100), 6.5)
    assert hub.count_acceptance(yes(C, hub.asks), 6.5) == [Agreed(2, 1)]
    assert hub.acknowledged() == (1, 100)


def test_with_a_least_number_of_replicas_none_is_taken_out_before_another_is_there():
    hub = replica(A)
    hub.least = 2
    hub.found(0)
    hub.propose({A, B}, (X,))
    hub.placed((1, 10))
    hub.confirm(B, (1, 10), 0.0)
    assert hub.count_acceptance(yes(B, hub.asks), 0.0) == [Agreed(1, 2)]
    assert hub.propose({A}, (X,)) == [], "B is silent"
    assert hub.acknowledged() == (1, 10)
    hub.confirm(C, (1, 30), 9.0)
    assert hub.propose({A, C}, (X,)) == [config((A, C), (X,), 3)]
    hub.placed((1, 40))
    hub.confirm(C, (1, 40), 9.1)
    assert hub.count_acceptance(yes(X, hub.asks), 9.1) == [Agreed(1, 3)]
    assert hub.acknowledged() == (1, 40), "B is waited for no more"
    hub.least = 1
    assert hub.propose({A}, (X,)) == [config((A,), (X,), 4)], "only this machine is left"


def test_a_replica_that_ends_before_it_is_agreed_on_is_replaced():
    """Else a leader that may not be alone would wait for it for ever."""
    hub = replica(B, [config((A, B), (X,))])
    hub.least = 2
    proposal = hub.stand((1, 1, 90), 0.0)
    assert hub.count_vote(yes(X, proposal), 0.0) == [Led(2), Configured(2, 1, B, (A, B), (X,))], "A is gone"
    hub.placed((1, 100))
    assert hub.asks is None
    assert hub.propose({B}, (X,)) == []
    hub.confirm(C, (1, 100), 1.0)
    assert hub.propose({B, C}, (X,)) == [Configured(2, 2, B, (B, C), (X,))]
    hub.placed((1, 110))
    hub.confirm(C, (1, 110), 1.0)
    assert hub.count_acceptance(yes(C, hub.asks), 1.0) == []
    assert hub.count_acceptance(yes(X, hub.asks), 1.0) == [Agreed(2, 2)], "half of the first one and X"


def test_a_leader_whose_replica_has_promised_a_higher_term_is_elected_again():
    """The other candidate is gone, and the replica confirms nothing to a leader of a lower term."""
    hub = leading(A, [config((A, B, C), (X,))])
    hub.note_promise(B, 1)
    assert not hub.is_overtaken
    hub.note_promise(B, 4)
    assert hub.is_overtaken
    assert hub.stand((1, 1, 9), 0.0).term == 5


@pytest.mark.parametrize("by_address", [False, True])
def test_a_replica_that_was_taken_out_can_be_counted_again_after_it_promised_a_higher_term(by_address):
    """Found in simulation: it confirmed nothing to that leader, which never stood again for its sake."""
    hub = leading(A, [config((A, B, C), (X,))])
    if not by_address:
        assert hub.propose((B,), (X,))
        hub.configs = hub.configs[-1:]
    else:
        hub.configs = (config((A, B), (X,)),)
        hub.note_promise(C, 4)
        assert not hub.is_overtaken, "any member of a swarm could say so"
    hub.note_promise(C, 4, is_hub=by_address)
    assert hub.is_overtaken
    assert hub.stand((1, 1, 9), 0.0).term == 5


def test_no_message_raises_a_term_by_more_than_a_step():
    """Found: one answer with the term 2^64-1 made every later vote fail."""
    far, nearest = MOST_TERM - 1, 1 + TERM_STEP
    candidate = replica(B, [config((A, B), (X,))])
    asked = candidate.stand((1, 1, 90), 0.0)
    for voter, ballot in ((7, asked.ballot), (X, (9, 0))):
        candidate.count_vote(VoteReply(voter, B, ballot, False, far), 0.0)
        assert candidate.stand((1, 1, 90), 0.0).term == 2, "of no voter, or to another question"
    candidate.count_vote(VoteReply(X, B, asked.ballot, False, far), 0.0)
    assert candidate.stand((1, 1, 90), 0.0).term == 2, "the others may still answer"
    assert candidate.stand((1, 1, 90), 100.0).term == asked.term + TERM_STEP + 1

    leader = leading(A, [config((A, B), (X,))])
    leader.note_promise(X, far)
    assert not leader.is_overtaken, "no replica"
    leader.note_promise(B, far)
    assert leader.stand((1, 1, 9), 0.0).term == nearest + 1

    voter, answer = Voter(X).answer(Proposal(far, 0, B, (1, 1)), 1)
    assert (voter.term, voter.voted_for, answer.granted, answer.term) == (nearest, 0, False, nearest)
    follower = replica(C, [config((A, B, C), ())])
    assert not follower.answer(Proposal(far, 1, 7, (1, 1)), 0.0).granted, "no replica"
    assert follower.voter.term == 0
    assert not follower.answer(Proposal(far, 1, B, (1, 1)), 0.0).granted
    assert follower.voter.term == nearest


def test_a_voter_that_is_far_behind_votes_after_some_questions():
    asked, voter, answers = Proposal(5000, 0, B, (1, 1)), Voter(X, term=1), []
    for _ in range(6):
        voter, answer = voter.answer(asked)
        answers.append(answer.granted)
    assert answers == [False] * 4 + [True] * 2


def test_a_forced_term_may_be_far_above_all_others():
    hub = replica(B, [config((A, B), (X,))])
    assert hub.force(3, 2 * TERM_STEP)[0] == Led(3 + 2 * TERM_STEP)
    hub.placed((1, 9))
    assert hub.voter.accepted == hub.configs[-1].ballot


def test_a_voter_that_is_not_needed_overtakes_no_leader():
    """Found: a node that named a higher term at each question kept a leader from leading."""
    hub = leading(A, [config((A, B), (X, Y, Z))])
    hub.placed((1, 9))
    hub.confirm(B, (1, 9), 0.0)
    hub.count_acceptance(VoteReply(X, A, hub.asks.ballot, False, 4), 0.0)
    assert not hub.is_overtaken, "one of three nodes"
    hub.count_acceptance(VoteReply(Y, A, hub.asks.ballot, False, 4), 0.0)
    assert hub.is_overtaken, "without the two it may wait for ever"


def test_a_candidate_asks_with_what_its_journal_has_now():
    """Found: it asked with an older journal than it had by then, and was refused for ever."""
    hub = replica(B, [config((A, B), (X,))])
    first = hub.stand((1, 1, 90), 0.0)
    hub.configs = (config((A, B), (X,), 2),)
    second = hub.stand((1, 1, 120), 0.0)
    assert (second.term, second.basis, second.extent) == (first.term, (1, 2), (1, 1, 120))
    voter = Voter(X, 1, A, accepted=(1, 2))
    assert not voter.answer(first)[1].granted
    assert hub.count_vote(voter.answer(second)[1], 0.0)[0] == Led(2)


@pytest.mark.parametrize("number", [1, 6, 100])
def test_invented_voters_do_not_elect_anybody_however_many_they_are(number):
    """Only the identities in the configurations of the journal count."""
    made = replica(B, [config((A, B), (X, Y, Z))])
    proposal = made.stand((1, 1, 100), 0.0)
    for invented in range(1000, 1000 + number):
        assert made.count_vote(yes(invented, proposal), 0.0) == []
    assert made.term == 0
    assert made.count_vote(yes(X, proposal), 0.0) == []
    assert made.count_vote(yes(Y, proposal), 0.0) != [], "two of three electors are enough"


def test_a_vote_of_long_ago_does_not_count():
    hub = replica(B, [config((A, B), (X, Y, Z))])
    proposal = hub.stand((1, 1, 90), 0.0)
    hub.count_vote(yes(X, proposal), 0.0)
    assert hub.count_vote(yes(Y, proposal), 9.0, since_s=5.0) == []
    assert hub.count_vote(yes(X, proposal), 9.5, since_s=5.0) != []


@pytest.mark.parametrize(
    ("configs", "voter", "reason"),
    [
        ([], Voter(B), "did not wait for it"),
        ([config((A,), (X,))], Voter(B), "did not wait for it"),
        ([config((A, B), (X,))], Voter(B, accepted=(1, 2)), "ends before configuration"),
        ([config((A, B), (X,))], Voter(B, seen=(1, 1, 91)), "which was acknowledged"),
    ],
)
def test_a_hub_that_lacks_something_says_so(configs, voter, reason):
    hub = Replica(voter, promise_s=3.0, lease_s=2.0)
    hub.configs = tuple(configs)
    assert reason in hub.why_not((1, 1, 90))


def test_a_follower_supports_the_leader_that_it_hears():
    hub = replica(B, [config((A, B, C))])
    hub.note_leader(10.0)
    assert not hub.answer(Proposal(2, 0, C, (1, 1)), 12.0).granted
    assert hub.answer(Proposal(2, 0, A, (1, 1)), 12.0).granted, "its leader is elected again"
    assert not hub.answer(Proposal(3, 0, C, (1, 1)), 13.5).granted, "A uses the vote"
    assert hub.answer(Proposal(3, 0, C, (1, 1)), 15.5).granted
    assert not hub.may_confirm(2)


@pytest.mark.parametrize(
    ("configs", "votes"),
    [
        ([config((A, B, C))], False),
        ([], False),
        ([config((A, B, C)), config((A, B), number=2)], False),
        ([config((A, B), number=2)], True),
    ],
    ids=["of the configuration", "just started", "on its way out", "not of the configuration"],
)
def test_a_follower_votes_for_none_that_lacks_what_it_has_confirmed(configs, votes):
    """Found: one that had just started, or was on its way out, elected a hub with an older folder."""
    hub = replica(C, configs)
    assert (
        hub.answer(
            Proposal(3, 0, A, configs[-1].ballot if configs else (1, 1), (1, 1, 80)), 9.0, (1, 1, 90)
        ).granted
        is votes
    )
    assert hub.answer(Proposal(4, 0, A, (1, 2), (1, 1, 90)), 19.0, (1, 1, 90)).granted


def test_a_leader_gives_way_only_without_its_replicas():
    hub = replica(A)
    hub.found(0)
    assert not hub.answer(Proposal(9, 0, B, (1, 1)), 0.0).granted, "it is alone, and has everything"
    hub.propose({A, B}, (X,))
    hub.confirm(B, (1, 9), 0.0)
    assert not hub.answer(Proposal(9, 0, B, (1, 2), (1, 1, 9)), 1.0).granted
    assert not hub.answer(Proposal(9, 0, B, (1, 2), (1, 1, 8)), 5.0).granted, "it lacks what was acknowledged"
    assert hub.answer(Proposal(9, 0, B, (1, 2), (1, 1, 9)), 5.0).granted
    assert hub.term == 0


def test_a_leader_whose_voters_know_a_higher_term_is_elected_again():
    hub = leading(A, [config((A, B), (X,))])
    hub.placed((1, 9))
    hub.confirm(B, (1, 9), 0.0)
    hub.count_acceptance(VoteReply(X, A, hub.asks.ballot, False, 4), 0.0)
    assert hub.is_overtaken
    proposal = hub.stand((1, 1, 9), 0.0)
    assert proposal.term == 5
    assert hub.count_vote(yes(X, proposal), 0.0)[0] == Led(5)


def test_a_leader_whose_voters_have_voted_for_another_hub_in_its_term_is_elected_again():
    """Found by simulation: nodes that it needed could accept nothing in its term, and it waited for ever."""
    hub = leading(A, [config((A, B), (X, Y, Z))])
    hub.placed((1, 9))
    hub.confirm(B, (1, 9), 0.0)
    for voter in (X, Y):
        assert not hub.is_overtaken
        hub.count_acceptance(VoteReply(voter, A, hub.asks.ballot, False, 1), 0.0)
    assert hub.is_overtaken
    assert hub.stand((1, 1, 9), 9.0).term == 2


def test_an_agreement_that_the_leader_could_not_write_down_is_found_by_the_answers():
    """Else a replica that was just added would need the vote of the leader that is gone."""
    added = [config((A,), (X,)), config((A, B), (X,), 2)]
    lacking = replica(B, added)
    proposal = lacking.stand((1, 1, 90), 0.0)
    assert lacking.count_vote(yes(X, proposal), 0.0) == [], "nobody but A is known to have accepted it"

    hub = replica(B, added)
    hub.answer(Proposal(1, 2, A, (1, 2)), 0.0)
    proposal = hub.stand((1, 1, 90), 0.0)
    assert hub.count_vote(yes(X, proposal), 0.0)[:2] == [Agreed(1, 2), Led(2)]

    proposal = lacking.stand((1, 1, 90), 0.0)
    told = VoteReply(X, B, proposal.ballot, True, 2, accepted=(1, 2))
    assert lacking.count_vote(told, 0.0)[:2] == [Agreed(1, 2), Led(2)]


def test_a_forced_leader_has_a_term_of_its_own_and_needs_nobody():
    hub = replica(B, [config((A, B), (X,))])
    assert hub.force(3, 1234) == [Led(1237), config((B,), (X,), term=1237), Agreed(1237, 1)]
    assert hub.acknowledged() == END


def test_a_lease_is_shorter_than_a_promise():
    with pytest.raises(ValueError, match="below promise_s"):
        Replica(Voter(A), promise_s=1.0, lease_s=1.0)
