"""Tests that a vote, a proposal, a confirmation and a join count for the key that signed them alone.

The callers have valid keys of the role that may make the call, over real gRPC on loopback.
"""

import json
import shutil
from contextlib import contextmanager
from dataclasses import asdict, replace

import grpc
import pytest
from kit.hub_processes import HubRefused
from kit.leading_hub import keys_of, leading_hub
from kit.waiting import until

from aedit.launch.config import load
from aedit.launch.hub.endpoint import HubEndpoint, VoteRequests
from aedit.launch.hub.folder import of_standby
from aedit.launch.hub.main import _Process
from aedit.proto.agent.membership import Elector
from aedit.proto.rpc import (
    MOST_TERM,
    TERM_STEP,
    HubClient,
    Proposal,
    SigningKey,
    Voter,
    VoteReply,
    answer_out,
    client_keys,
    identity_of,
    proposal_in,
    proposal_out,
    sign,
)
from aedit.proto.rpc import hub_pb2 as pb

STANDBYS = 'standby = "127.0.0.1:0"\ncertificates = true'
STANDBY = 'standby = "127.0.0.1:1"\ncertificates = true'
HERE = ["127.0.0.1"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    return keys_of(folder, ["good", "liar"], standbys={"one": HERE, "two": HERE})


@contextmanager
def standby_hub(run, number, keys):
    """Yield the process of a standby of the run whose hub has its folder in `run`."""
    config, directory = load(run / "run.toml", []).config, run / of_standby(number)
    endpoint = HubEndpoint(config, directory, (0, 1), True, "127.0.0.1:0", keys, number)
    process = _Process(endpoint, insecure=False)
    try:
        process.start()
        yield process
    finally:
        process.close()


def forgeries(message):
    """Return the message as others than its voter can send it: unsigned, with another key, changed later."""
    unsigned, foreign, changed = type(message)(), type(message)(), type(message)()
    for copy in (unsigned, foreign, changed):
        copy.CopyFrom(message)
        copy.ClearField("signature")
    sign(foreign, SigningKey())
    sign(changed, SigningKey())
    changed.public_key = message.public_key
    return unsigned, foreign, changed


def is_refused(call):
    """Call, and return whether the answer is one line about the signature."""
    try:
        call()
    except HubRefused as refused:
        text, code = str(refused), refused.code
        return code is grpc.StatusCode.INVALID_ARGUMENT and "is not signed with its key" in text
    return False


class Follower:
    """A standby that confirms what the leader has, and answers what it is asked."""

    def __init__(self, hub, keys):
        self.key, self.hub, self.client = SigningKey(), hub, hub.client(keys)
        self.identity = identity_of(self.key.public)

    def confirmation(self, position=None):
        segment, offset = position or self.hub.leading.ledger.journal.complete
        request = pb.ConfirmRequest(term=1, segment=segment, offset=offset, replica=self.identity)
        sign(request, self.key)
        return request

    def confirm(self):
        self.client.confirm(self.confirmation())

    def asked(self):
        """Confirm until the leader asks for something; return that."""

        def asks():
            self.confirm()
            return self.hub.leading.leadership.asks()

        return until(asks, "a proposal of the leader")

    def yes(self):
        asks = self.asked()
        return VoteReply(self.identity, asks.proposer, asks.ballot, True, asks.term)

    def agrees(self):
        """Grant what the leader asks for; return how many standbys and electors the voters agreed on."""
        leadership = self.hub.leading.leadership
        self.confirm()
        if (asks := leadership.asks()) is not None:
            leadership.count(VoteReply(self.identity, asks.proposer, asks.ballot, True, asks.term))
        return leadership.in_sync()


def test_a_node_that_forges_the_votes_of_others_elects_no_hub(tmp_path, keys):
    """Found: one node with valid keys elected a standby beside a healthy leader in 0.3 s."""
    with leading_hub(tmp_path, STANDBYS, keys) as hub:
        good, liar = (hub.node(name, name) for name in ("good", "liar"))
        good.found()
        liar.join()
        follower = Follower(hub, "one")
        until(lambda: follower.agrees() == (1, 2), "the standby, and both nodes as electors")
    directory = tmp_path / of_standby(1)
    shutil.copytree(tmp_path / "hub", directory)
    leader = json.loads((directory / "votes.json").read_text())
    Voter(follower.identity, 1, leader["me"], key=follower.key.private.private_bytes_raw().hex()).save(
        directory / "votes.json"
    )
    with standby_hub(tmp_path, 1, keys / "one") as standby:
        other = HubClient(standby.address, client_keys(keys / "liar"), call_timeout_s=30.0)

        def offered(answer=None):
            return other.take_over(pb.TakeOverRequest(who=liar.who, answer=answer))

        def asks():
            reply = offered()
            return reply.asks if reply.HasField("asks") else None

        asked = until(asks, "a candidate")
        assert asked.proposer == follower.identity
        for register in (leader, asdict(good.elector._voter)):
            vote = pb.Answer(
                voter=register["me"], proposer=asked.proposer, ballot=asked.ballot, granted=True, term=2
            )
            vote.public_key = SigningKey(bytes.fromhex(register["key"])).public
            assert all(is_refused(lambda forged=forged: offered(forged)) for forged in forgeries(vote))
        no = VoteReply(liar.elector._voter.me, asked.proposer, (2, 0), False, 2**64 - 1)
        with pytest.raises(HubRefused, match="expected a number below"):
            offered(answer_out(no, liar.elector._key))
        offered(answer_out(replace(no, term=MOST_TERM - 1), liar.elector._key))
        assert offered().asks.ballot.term <= 2 + TERM_STEP + 1
        tries = [liar.elector.offer(other, liar.who, 30.0).leads for _ in range(3)]
        assert not any(tries), "one of two nodes is not more than half"
        assert standby._leading is None
        until(
            lambda: any(node.elector.offer(other, node.who, 30.0).leads for node in (liar, good)),
            "the election by the votes of the voters themselves",
        )
        other.close()


def test_a_node_that_forges_the_agreement_of_a_standby_is_refused_by_the_leader(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        hub.node("good", "good").found()
        liar = hub.node("liar", "liar")
        liar.join()
        follower = Follower(hub, "one")
        answer = answer_out(follower.yes(), follower.key)
        for forged in forgeries(answer):
            request = pb.TakeOverRequest(who=liar.who, answer=forged)
            assert is_refused(lambda request=request: liar.hub.take_over(request))
        assert hub.leading.leadership.in_sync()[0] == 0
        hub.leading.leadership.count(follower.yes())
        assert hub.leading.leadership.in_sync()[0] == 1


def test_no_number_of_a_voter_with_its_own_key_ends_the_leader(tmp_path, keys):
    """Found: an answer that named a term which its voter leads made the leader exit."""
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        good, liar = (hub.node(name, name) for name in ("good", "liar"))
        good.found()
        liar.join()
        leadership, follower = hub.leading.leadership, Follower(hub, "one")
        until(lambda: leadership.in_sync()[1] == 2, "the electors")
        asks = follower.asked()
        for term, number in ((2**64 - 1, 0), (1, 2**64 - 1), (MOST_TERM, 0)):
            reply = VoteReply(liar.elector._voter.me, asks.proposer, asks.ballot, False, term, (1, number))
            request = pb.TakeOverRequest(who=liar.who, answer=answer_out(reply, liar.elector._key))
            with pytest.raises(HubRefused, match="expected a number below") as refused:
                liar.hub.take_over(request)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        far = VoteReply(liar.elector._voter.me, asks.proposer, asks.ballot, False, MOST_TERM - 1)
        liar.hub.take_over(pb.TakeOverRequest(who=liar.who, answer=answer_out(far, liar.elector._key)))
        proposal = Proposal(2**64 - 1, 0, follower.identity, (1, 2), (1, 1, 100))
        request = pb.ProposeRequest(run="run", proposal=proposal_out(proposal, follower.key))
        with pytest.raises(HubRefused, match="expected a number below"):
            follower.client.propose(request)
        assert leadership.leads
        assert not hub.process.is_over
        assert not leadership._replica.is_overtaken
        until(lambda: follower.agrees() == (1, 2), "the agreement")
        assert good.heartbeat().term == 1


def test_the_leader_asks_only_nodes_that_break_ties(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        good, stranger = hub.node("good", "good").found(), Elector(None)
        Follower(hub, "one").asked()
        answers = [
            good.hub.take_over(pb.TakeOverRequest(who=good.who, answer=answer))
            for answer in (None, stranger.shown)
        ]
        assert [(one.leads, one.HasField("asks")) for one in answers] == [(True, False)] * 2


def test_one_standby_cannot_confirm_for_another(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        hub.node("good", "good").found()
        follower, liar = Follower(hub, "one"), hub.client("two")
        for forged in forgeries(follower.confirmation()):
            assert is_refused(lambda forged=forged: liar.confirm(forged))
        further = follower.confirmation((1, 1))
        further.offset += 1
        assert is_refused(lambda: liar.confirm(further)), "another position than was signed"
        assert not hub.followers
        follower.confirm()
        assert hub.followers == {follower.identity}


def test_a_hub_answers_no_proposal_in_the_name_of_another_hub(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        key, liar = SigningKey(), hub.client("two")
        proposal = proposal_out(Proposal(2, 0, identity_of(key.public), (1, 2), (1, 1, 100)), key)
        for forged in forgeries(proposal):
            request = pb.ProposeRequest(run="run", proposal=forged)
            assert is_refused(lambda request=request: liar.propose(request))
        assert not liar.propose(pb.ProposeRequest(run="run", proposal=proposal)).granted
        assert hub.leading.leadership.promised == 1


def test_a_node_cannot_join_as_the_voter_that_another_one_is(tmp_path, keys):
    with leading_hub(tmp_path, STANDBY, keys) as hub:
        good = hub.node("good", "good").found()
        for forged in forgeries(good.elector.shown):
            liar = hub.node("liar", "liar")
            request = liar.request()
            request.offer.CopyFrom(forged)
            assert is_refused(lambda request=request, liar=liar: liar.hub.join(request))
        assert good.heartbeat().nodes == 1


class Endpoint:
    """Another hub, at whose address somebody else answers."""

    others, num_others, part_asked = ("a:1",), 1, 0

    def __init__(self, answer):
        self.answer, self.config = answer, type("Config", (), {"name": "run"})

    def signing_key(self):
        return None

    def client(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def propose(self, request, timeout_s):
        return self.answer


class Asking:
    key = SigningKey()


def test_an_answer_of_one_hub_in_the_name_of_another_is_not_counted(caplog):
    key, counted = SigningKey(), []
    asks = Proposal(2, 0, identity_of(Asking.key.public), (1, 2))
    reply = VoteReply(identity_of(key.public), asks.proposer, asks.ballot, True, 2)
    answer = answer_out(reply, key)
    for one in (*forgeries(answer), answer):
        VoteRequests(Endpoint(one), Asking, counted.append)._ask("a:1", asks)
    assert counted == [reply]
    assert [record.message.count("\n") for record in caplog.records] == [0, 0, 0]
    assert all("is not signed with its key" in record.message for record in caplog.records)


def test_a_request_for_votes_is_signed_once_until_it_changes(monkeypatch):
    """A thread for each other hub sends it five times a second."""
    signed = []

    def sign_once(asks, key):
        signed.append(asks)
        return proposal_out(asks, key)

    monkeypatch.setattr("aedit.launch.hub.endpoint.proposal_out", sign_once)
    requests = VoteRequests(Endpoint(None), Asking, lambda answer: None)
    first, second = (Proposal(term, 0, identity_of(Asking.key.public), (1, 2)) for term in (2, 3))
    for asks in (first, second, first):
        for _ in range(3):
            assert proposal_in(requests.request(asks).proposal) == asks
    assert signed == [first, second, first]
