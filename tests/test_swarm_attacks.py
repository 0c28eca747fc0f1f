"""Tests what a card that lies can do: to followers, nodes, votes and placement. Real servers on loopback."""

import dataclasses
import json
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from kit.full_disk import full_disk
from kit.hub_processes import CALL_S, Client, HubRefused, HubUnreachable, confirmation
from kit.swarm import key_of
from kit.waiting import until

from aedit.launch.config import parse_config
from aedit.launch.hub.endpoint import HubEndpoint, VoteRequests
from aedit.launch.hub.main import _Process
from aedit.launch.swarm import peer_service
from aedit.proto.rpc import (
    MOST_TERM,
    PROTOCOL,
    HubClient,
    Proposal,
    SigningKey,
    VoteReply,
    answer_out,
    identity_of,
    is_signed_statement,
    parsed_statement,
    proposal_out,
    sign,
)
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import KEY, PartPlaces, ReplicasFile

CONFIG = parse_config(
    'name = "run"\n[swarm]\ndiscovery = "file"\nparts = 2\ncopies = 3\n[hub]\ncodec = "fp32"\n', "here"
)


@contextmanager
def replica(folder, part, *owner, standby=True):
    """Yield the process of a replica of `part`, and the file that its peer writes."""
    folder.mkdir(parents=True, exist_ok=True)
    file = ReplicasFile(folder / "replicas.json")
    places = [PartPlaces(), PartPlaces()]
    places[part] = PartPlaces(owner, *owner[:1])
    file.write(places)
    made = HubEndpoint(CONFIG, folder, (part, 2), standby, "127.0.0.1:0", None, replicas=file, copies=3)
    process = _Process(made, insecure=False)
    try:
        process.start()
        yield process, file
    finally:
        process.close()


def address(process):
    return process._server.address


def kept(process):
    """Return the mirrored journal of a follower."""
    return {path.name: path.read_bytes() for path in process.endpoint.directory.glob("journal*")}


# -- the journal, not cards, says how many replicas there are


def test_a_follower_tells_its_peer_how_many_others_its_journal_has(tmp_path):
    with ExitStack() as held:
        owner, file = held.enter_context(replica(tmp_path / "owner", 0, standby=False))
        names = ("second", "third")
        followers = [held.enter_context(replica(tmp_path / one, 0, address(owner)))[0] for one in names]
        file.write([PartPlaces(tuple(map(address, followers)), address(owner)), PartPlaces()])
        client = Client(address(followers[0])).hub

        def told():
            return json.loads(client.status(pb.StatusRequest()).json)

        until(lambda: told()["is_replica"], "the follower in sync")
        assert told()["other_replicas"] == 2


# -- more addresses than replicas


class Endpoint:
    """A part whose cards name more replicas than are wanted."""

    num_others, part_asked, config = 2, 1, CONFIG
    others = tuple(f"127.0.0.1:{port}" for port in range(9001, 9006))


class Asking:
    """A candidate."""

    def asks(self):
        return Proposal(2, 0, 1, (1, 2), (1, 1, 100))


def test_votes_are_asked_of_all_addresses_in_turn(monkeypatch):
    """Found: false replicas that were listed first were asked again and again, and the true ones never."""
    asked = set()
    requests = VoteRequests(Endpoint(), Asking(), lambda answer: None)
    monkeypatch.setattr(requests, "_ask", lambda one, asks: asked.add(one))
    requests.start()
    try:
        until(lambda: asked == set(Endpoint.others), "a question to each")
    finally:
        requests.stop()


# -- a status that is none


@pytest.mark.parametrize("text", ["{", "[1]", "3", "[" * 100_000, "null"])
def test_an_owner_that_answers_nonsense_does_not_spoil_the_view_of_the_run(tmp_path, monkeypatch, text):
    """Found: the peer's whole status failed."""
    file = ReplicasFile(tmp_path / "replicas.json")
    file.write([PartPlaces(("h:1",), "h:1")])

    class Lying:
        def __init__(self, *where, **settings):
            pass

        def status(self, request, limit_s):
            return pb.StatusReply(json=text)

        def close(self):
            pass

    monkeypatch.setattr(peer_service, "HubClient", Lying)
    service = peer_service.PeerService(CONFIG, file, None, list, list)
    assert json.loads(service.status(pb.StatusRequest()).json)["parts"] == [None]


# -- a card that names the hub of another part


def test_a_follower_does_not_take_the_journal_of_another_part(tmp_path):
    """Found: it gave up its own copy for that of whatever hub of the run a card named as the owner."""
    with ExitStack() as until_then, ExitStack() as held:
        other, _ = held.enter_context(replica(tmp_path / "other", 1, standby=False))
        owner, _ = until_then.enter_context(replica(tmp_path / "owner", 0, standby=False))
        follower, file = held.enter_context(replica(tmp_path / "follower", 0, address(owner)))
        until(lambda: follower._standby._leader == address(owner), "the owner's journal")
        until(lambda: follower._standby._mirror.position[1] > 0, "some of it")
        true = kept(follower)
        assert true
        file.write([PartPlaces((address(other),), address(other)), PartPlaces()])
        until_then.close()
        asked = []
        others = follower._standby._others
        hello = others._hello

        def noted(one, limit_s):
            asked.append(one)
            return hello(one, limit_s)

        others._hello = noted
        until(lambda: asked.count(address(other)) > 1, "questions to the false owner", 10.0)
        assert follower._standby._term in (0, 1)
        assert follower._standby._leader != address(other)
        assert not other._leading.leadership._replica.followers(float("-inf")), "nor does it confirm there"
        assert all(kept(follower)[name][: len(data)] == data for name, data in true.items())


def test_a_hub_of_another_part_answers_neither_node_nor_candidate(tmp_path):
    with replica(tmp_path / "other", 1, standby=False) as (other, _):
        node = Client(address(other))
        with pytest.raises(HubRefused, match="part 1, and part 0 is asked for") as caught:
            node.hub.hello(pb.HelloRequest(protocol=PROTOCOL, part=1))
        assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION, "the node goes on to the next one"
        node.who.part = 1
        with pytest.raises(HubRefused, match="part 0 is asked for"):
            node.vote(address(other))
        voter = key_of(9)
        proposal = Proposal(7, 0, identity_of(voter.public), (1, 2), (1, 1, 100))
        asked = proposal_out(proposal, voter)
        with pytest.raises(HubRefused, match="part 0 is asked for"):
            node.hub.propose(pb.ProposeRequest(run="run", proposal=asked, part=1))
        assert node.hub.hello(pb.HelloRequest(protocol=PROTOCOL, part=2)).leads


def test_a_replica_starts_although_its_file_names_the_hub_of_another_part(tmp_path):
    with (
        replica(tmp_path / "other", 1, standby=False) as (other, _),
        replica(tmp_path / "founder", 0, address(other), standby=False) as (founder, _),
    ):
        assert json.loads(Client(address(founder)).hub.status(pb.StatusRequest()).json)["term"] == 1


# -- an owner of which there is proof that it gives nodes different anchors


LIAR, HONEST = "aa" * 32, "bb" * 32


def test_a_follower_leaves_an_owner_whose_key_is_shut_out_and_gives_it_no_more_time(tmp_path):
    with ExitStack() as held:
        owner, _ = held.enter_context(replica(tmp_path / "owner", 0, standby=False))
        follower, seen = held.enter_context(replica(tmp_path / "follower", 0, address(owner)))
        standby, at = follower._standby, address(owner)
        until(lambda: standby._leader == at, "the owner's journal")
        votes = standby._leadership._replica

        seen.write([PartPlaces((at, at), at, keys=(LIAR, HONEST)), PartPlaces()], [LIAR])
        arrivals = standby.confirmer.num_arrived
        until(lambda: standby.confirmer.num_arrived > arrivals + 2, "chunks after somebody else's fault")
        assert standby._leader == at, (
            "a liar that names the address of an honest owner does not take it along"
        )
        assert votes._leader_at_s > 0

        seen.write([PartPlaces(), PartPlaces()], [LIAR, HONEST])
        until(lambda: not standby._leader, "the end of the journal")
        assert votes._leader_at_s == float("-inf"), "it may vote for another one at once"
        events = (follower.endpoint.directory / "events.jsonl").read_text().splitlines()
        assert [one["owner"] for one in map(json.loads, events) if one["event"] == "owner_shut_out"] == [at]


def test_an_owner_waits_for_no_replica_whose_key_is_shut_out(tmp_path):
    with replica(tmp_path / "owner", 0, standby=False) as (owner, file):
        leadership, hub = owner._leading.leadership, Client(address(owner)).hub

        def confirms(number, address="10.0.0.9:1"):
            key = key_of(number)
            hub.confirm(confirmation(key, address=address))
            return leadership._replica.has_confirmed(identity_of(key.public), 0.0)

        file.write([PartPlaces(("10.0.0.9:1",), "", keys=(LIAR,)), PartPlaces()])
        assert confirms(77)
        file.write([PartPlaces(), PartPlaces()], [LIAR])
        assert not confirms(78)
        assert not confirms(79, ""), "it gives no address any more"
        assert not confirms(80, "10.0.0.7:1"), "no card names that"
        file.write([PartPlaces(("10.0.0.8:1",), "", keys=(HONEST,)), PartPlaces()], [LIAR])
        assert confirms(81, "10.0.0.8:1")
        assert not confirms(82, "10.0.0.8:1"), "that is the address of another replica"


def test_the_owner_of_a_part_signs_with_the_key_in_the_folder_of_its_peer(tmp_path):
    with replica(tmp_path / "owner", 0, standby=False) as (owner, file):
        node = Client(address(owner))
        node.join()
        assert node.push(0, base=0).accepted
        path = file.path.parent / KEY
        for _ in range(2):
            head = node.hub.pull(pb.PullRequest(who=node.who, unit=0), memoryview(bytearray(20_000)))
            found = parsed_statement(head.statement)
            assert found.public_key == SigningKey.kept(path).public
            assert path.stat().st_mode & 0o777 == 0o600
            told = (found.run, found.part, found.unit, found.version, found.sha256, found.term)
            assert told == ("run", 0, 0, 1, head.sha256, 1)
            assert found.lineage == owner._leading.ledger.journal.epoch
            assert is_signed_statement(head.statement)


def test_an_owner_that_starts_again_signs_the_same_values_under_its_new_term(tmp_path):
    found, signed = [], []
    for life in range(2):
        with replica(tmp_path / "owner", 0, standby=False) as (owner, _):
            node = Client(address(owner))
            node.join()
            if life == 0:
                assert node.push(0, base=0).accepted
                assert node.push(0, scale=0.5).accepted
            until(lambda: node.version(0) == 2, "the second version")  # noqa: B023
            head = node.hub.pull(pb.PullRequest(who=node.who, unit=0), memoryview(bytearray(20_000)))
            statement = parsed_statement(head.statement)
            found.append((statement.term, statement.version))
            signed.append(statement.sha256)
    assert found == [(1, 2), (2, 2)]
    assert signed[0] == signed[1]


# -- votes


def asked(process, key=None, part=1, forged=False, call_s=CALL_S):
    """Return the answer of a replica of part 0 to a candidate with this key, or the status of its refusal."""
    voter = key_of(9)
    proposal = proposal_out(Proposal(7, 0, identity_of(voter.public), (1, 2), (1, 1, 100)), voter)
    request = pb.ProposeRequest(run="run", proposal=proposal, part=part)
    if key is not None:
        sign(request, key)
    request.part -= forged
    try:
        return HubClient(address(process), call_timeout_s=call_s).propose(request)
    except HubRefused as error:
        return error.code


@pytest.mark.parametrize("leads", [True, False])
def test_a_replica_gives_no_vote_to_a_peer_that_is_shut_out_or_does_not_sign(tmp_path, leads):
    denied, liar, honest = grpc.StatusCode.PERMISSION_DENIED, key_of(11), key_of(12)
    with replica(tmp_path / "one", 0, standby=not leads) as (process, file):
        assert asked(process) is denied
        assert asked(process, liar).voter
        assert asked(process, liar, forged=True) is denied
        file.write([PartPlaces(), PartPlaces()], [liar.public.hex()])
        assert asked(process, liar) is denied
        assert asked(process, honest).voter


def test_with_a_list_of_peers_only_those_are_voted_for(tmp_path, monkeypatch):
    honest, other = key_of(11), key_of(12)
    swarm = dataclasses.replace(CONFIG.swarm, allow=(honest.public.hex(),))
    monkeypatch.setitem(globals(), "CONFIG", dataclasses.replace(CONFIG, swarm=swarm))
    with replica(tmp_path / "one", 0) as (process, _):
        assert asked(process, honest).voter
        assert asked(process, other) is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("leads", [True, False])
def test_no_answer_of_a_node_deposes_an_owner_or_stops_an_election(tmp_path, leads):
    """Found: one word of a node deposed an owner; terms of 2^64-1 left a part without one until restarts."""
    with ExitStack() as held:
        owner, _ = held.enter_context(replica(tmp_path / "owner", 0, standby=False))
        follower, _ = held.enter_context(replica(tmp_path / "follower", 0, address(owner)))
        until(lambda: follower._standby._leader == address(owner), "the owner's journal")
        node = Client(address(owner))
        node.join()
        until(lambda: follower._standby._mirror.hub.state.members, "the node in the journal")
        process = owner if leads else follower
        hub, me = Client(address(process)).hub, node.elector._voter.me
        leadership = owner._leadership
        ballot, proposer = (1, 1), leadership.identity

        def answered(reply, key=node.elector._key, voter=None):
            message = answer_out(reply, key)
            if voter is not None:
                message.voter = voter
                sign(message, key)
            with pytest.raises(HubRefused) as refused:
                hub.take_over(pb.TakeOverRequest(who=node.who, answer=message))
            return refused.value

        for term in (2**64 - 1, MOST_TERM):
            told = answered(VoteReply(me, proposer, ballot, False, term))
            assert "expected a number below" in str(told)
        for voter in (owner._leadership.identity, follower._leadership.identity):
            told = answered(VoteReply(me, proposer, ballot, True, 2), voter=voter)
            assert "is not signed with its key" in str(told)
        far = answer_out(VoteReply(me, proposer, ballot, False, MOST_TERM - 1), node.elector._key)
        hub.take_over(pb.TakeOverRequest(who=node.who, answer=far))
        voter = key_of(9)
        proposal = proposal_out(Proposal(2**64 - 1, 0, identity_of(voter.public), (1, 2), (1, 1, 9)), voter)
        request = pb.ProposeRequest(run="run", proposal=proposal, part=1)
        sign(request, key_of(12))
        with pytest.raises(HubRefused, match="expected a number below"):
            hub.propose(request)
        assert leadership.leads
        assert not leadership._replica.is_overtaken
        assert (leadership.promised, follower._leadership.promised <= 1) == (1, True)
        assert not owner._leading.guard.replaced.is_set()


def test_a_vote_that_could_not_be_written_is_not_given_at_the_second_ask(tmp_path):
    """Found: it was given with nothing on disk, and after a restart another candidate of the term got it."""
    with replica(tmp_path / "one", 0) as (process, _):
        with full_disk(tmp_path / "one"):
            for _ in range(2):
                with pytest.raises(HubUnreachable, match="no space"):
                    asked(process, key_of(12), call_s=5.0)
            assert process._leadership.promised == 0
        assert asked(process, key_of(12)).granted
        assert json.loads((tmp_path / "one" / "votes.json").read_text())["term"] == 7
