"""Tests that an older copy of a folder, put back on a machine of a swarm, costs no acknowledged push."""

import json
import shutil
from contextlib import ExitStack, suppress

import numpy as np
import pytest
from kit.agents import plan
from kit.hub_processes import Client, HubRefused, HubUnreachable, status
from kit.swarm import key_of
from kit.swarm_processes import swarm
from kit.waiting import until

from aedit.async_sgd.rules import Ticked
from aedit.launch.config import parse_config
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.folder import pushes_of
from aedit.launch.hub.main import _Process
from aedit.proto.agent.membership import Membership
from aedit.proto.rpc import Proposal, identity_of, proposal_out
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import PartPlaces, ReplicasFile

LIMIT_S = 90.0
CONFIG = parse_config(
    'name = "run"\n[swarm]\ndiscovery = "file"\nparts = 1\ncopies = 3\n'
    '[hub]\ncodec = "fp32"\nexpire_s = 1000.0\n',
    "here",
)
"""A replica without an owner asks for votes of its own accord after 500 s at the earliest."""


class Part:
    """Three replicas of the only part, in this process; the first one begins it and owns it."""

    def __init__(self, folder):
        self.folder, self.running, self.addresses = folder, {}, {}
        self.held = ExitStack()

    def folder_of(self, number):
        return self.folder / f"peer-{number}" / "part"

    def start(self, number, *, founds=False):
        folder = self.folder_of(number)
        folder.mkdir(parents=True, exist_ok=True)
        self.write()
        file = ReplicasFile(folder.parent / "replicas.json")
        made = HubEndpoint(CONFIG, folder, (0, 1), not founds, "127.0.0.1:0", None, replicas=file, copies=3)
        self.running[number] = process = _Process(made, insecure=False)
        process.start()
        self.addresses[number] = process._server.address
        self.write()

    def write(self):
        """Write the addresses for all, as their peers do."""
        known = tuple(self.addresses.values())
        for number in range(3):
            folder = self.folder / f"peer-{number}"
            folder.mkdir(exist_ok=True)
            ReplicasFile(folder / "replicas.json").write([PartPlaces(known, known[0] if known else "")])

    def end(self, number):
        process = self.running.pop(number)
        process._server.stop(0)
        process.close(0.0)

    def end_all(self):
        for number in list(self.running):
            self.end(number)

    def events(self, number, name):
        """Return the events of a replica with this name."""
        lines = (self.folder_of(number) / "events.jsonl").read_text().splitlines()
        return [one for one in map(json.loads, lines) if one["event"] == name]

    def leader(self):
        """Return the number, in a list, of the replica that leads and can acknowledge."""
        leads = [n for n, one in self.running.items() if one._leading is not None and not one.is_over]
        return [n for n in leads if self.running[n]._leadership.in_sync()[0] == 2]


@pytest.fixture
def part(tmp_path):
    made = Part(tmp_path)
    made.start(0, founds=True)
    yield made
    made.end_all()


def with_followers(part):
    """Start the two other replicas, and return a node, once both are in sync."""
    node = Client(part.addresses[0]).found()
    for number in (1, 2):
        part.start(number)
    until(lambda: part.running[0]._leadership.in_sync() == (2, 1), "two followers in sync", LIMIT_S)
    return node


def put_back(part, number, older):
    shutil.rmtree(part.folder_of(number))
    shutil.copytree(older, part.folder_of(number))


def kept(folder):
    return {(push.node, push.unit, push.seq) for push in pushes_of(folder)}


def has_all(part, node):
    """Wait until every replica has every acknowledged push, and check that the owner has them too."""
    (owner,) = until(part.leader, "an owner with two followers in sync", LIMIT_S)
    node.go_to(part.addresses[owner])
    node.merged(0)
    return all(kept(part.folder_of(number)) >= set(node.accepted) for number in range(3))


@pytest.mark.parametrize("is_complete_first", [False, True])
def test_an_older_folder_of_the_owner_is_not_led_with_after_all_machines_were_ended(
    part, tmp_path, is_complete_first
):
    """Found: it led its old term with fewer records, and what the others had was gone at all three."""
    node = with_followers(part)
    shutil.copytree(part.folder_of(0), tmp_path / "older")
    for _ in range(3):
        node.merged(1)
    before = node.anchor(1)
    part.end_all()
    put_back(part, 0, tmp_path / "older")
    for number in (2, 0, 1) if is_complete_first else (0, 1, 2):
        part.start(number)
    (owner,) = until(part.leader, "an owner with two followers in sync", LIMIT_S)
    assert owner != 0
    assert part.running[owner]._leading.ledger.hub.state.term > 1
    node.go_to(part.addresses[owner])
    again = node.anchor(1)
    assert before[0] == again[0]
    assert np.array_equal(before[1], again[1])
    assert has_all(part, node)
    assert not [one for number in (1, 2) for one in part.folder_of(number).glob("set_aside/*")]


def test_an_older_folder_of_a_follower_does_not_win_an_election(part, tmp_path):
    """It may be the first to ask for votes, and has a place in the configuration."""
    node = with_followers(part)
    part.end(1)
    shutil.copytree(part.folder_of(1), tmp_path / "older")
    part.start(1)
    until(lambda: part.running[0]._leadership.in_sync() == (2, 1), "it to be in sync again", LIMIT_S)
    node.merged(1)
    part.end_all()
    put_back(part, 1, tmp_path / "older")
    for number in (1, 2):
        part.start(number)
    older = part.running[1]._standby
    for _ in range(20):
        older.ask_for_votes()
        answer = part.running[2]._leadership.answer(
            older._leadership.asks(), part.running[2]._standby._extent
        )
        assert not answer.granted
    part.start(0)
    assert has_all(part, node)


@pytest.mark.parametrize("is_longer", [False, True])
def test_an_owner_that_comes_back_with_the_folder_of_the_time_when_it_was_alone_is_not_followed(
    part, tmp_path, is_longer
):
    """It needs no other vote to lead, as far as its own journal goes; the others have what it has sent.

    Found: they followed once its journal had become longer than theirs, and set that aside; and it took the
    one that was elected for older than itself.
    """
    Client(part.addresses[0]).found()
    part.end(0)
    shutil.copytree(part.folder_of(0), tmp_path / "older")
    part.start(0)
    node = with_followers(part)
    for _ in range(3):
        node.merged(1)
    ended = part.running[0]._leading.ledger.journal.position
    part.end_all()
    put_back(part, 0, tmp_path / "older")
    part.start(0)
    ledger = part.running[0]._leading.ledger
    while is_longer and ledger.journal.position < ended:
        with ledger.lock:
            ledger.commit([Ticked(0.0)])
    for number in (1, 2):
        part.start(number)
        part.running[number]._standby._turn.lost_owner(None)  # it compares itself with the owner first

    def older():
        return [one["reason"] for number in (1, 2) for one in part.events(number, "owner_is_older")]

    reasons = until(older, "a replica to see that the owner lacks records", LIMIT_S)
    assert all("its folder is older" in reason for reason in reasons)

    def replaced():
        """Let the one with most records ask again: where both ask at once, each may vote for the other."""
        standby = max((part.running[number]._standby for number in (1, 2)), key=lambda one: one._extent)
        standby.ask_for_votes()
        return part.running[0]._leading.guard.replaced.is_set()

    until(replaced, "the owner to be replaced", LIMIT_S)
    part.end(0)
    part.start(0)
    assert has_all(part, node)
    assert not [one for number in (1, 2) for one in part.folder_of(number).glob("set_aside/*")]
    assert not part.events(0, "owner_is_older")


# -- peers as real processes, killed


def owner_of(made):
    """Return the number of the peer that owns the only part, and the address of its hub; None between two."""
    for number in range(made.peers):
        with suppress(OSError, HubRefused, HubUnreachable):
            address = (made.folder_of(number) / "part_0" / "address").read_text()
            if "follows" not in status(address):
                return number, address
    return None


def in_sync(made, count):
    """Return the number of the owner and its address once that many followers are in sync."""

    def found():
        owner = owner_of(made)
        return owner if owner is not None and status(owner[1])["in_sync"] == count else None

    return until(found, f"an owner with {count} followers in sync", LIMIT_S, 0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_peers_are_killed_and_an_older_folder_of_the_owner_is_put_back(tmp_path):
    with swarm(tmp_path, peers=3, parts=1, copies=3) as made:
        number, address = in_sync(made, 2)
        folder = made.folder_of(number) / "part_0"
        node = Client(address).found()
        node.merged(0)
        in_sync(made, 2)
        shutil.copytree(folder, tmp_path / "older")
        for _ in range(3):
            node.merged(1)
        before = node.anchor(1)
        for one in range(3):
            made.kill(one)
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "older", folder)
        for one in (number, *{0, 1, 2} - {number}):
            made.again(one)
        made.introduce()
        new, address = in_sync(made, 2)
        assert new != number
        node.go_to(address)
        again = node.anchor(1)
        assert before[0] == again[0]
        assert np.array_equal(before[1], again[1])
        node.merged(0)
        until(
            lambda: all(kept(one) >= set(node.accepted) for one in made.replicas(0)),
            "all pushes",
            LIMIT_S,
            0.5,
        )


# -- nodes that break ties


class Candidate:
    """A hub that asks for the vote of a node, with a journal that ends at `extent`."""

    def __init__(self, extent):
        self.key, self.extent, self.answers = key_of(5), extent, []

    def take_over(self, request, timeout_s):
        self.answers.append(request.answer)
        reply = pb.TakeOverReply(term=1)
        asked = Proposal(2, 0, identity_of(self.key.public), (1, 1), self.extent)
        reply.asks.CopyFrom(proposal_out(asked, self.key))
        return reply


def test_a_node_votes_for_no_hub_that_lacks_what_was_acknowledged_to_it():
    """Of two replicas the one with the older folder needs but the votes of nodes to lead."""
    member = Membership(0, plan(["h:1"]), Candidate)
    member.acknowledged(pb.Receipt(segment=1, offset=500), 1)
    for extent, granted in (((1, 1, 499), False), ((1, 1, 500), True), ((1, 2, 0), True)):
        candidate = Candidate(extent)
        member._offer(candidate, 1.0)
        assert candidate.answers[-1].granted == granted
