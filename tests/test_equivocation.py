"""Tests that an owner that gives nodes different anchors is found, named, shut out and replaced."""

import hashlib
from contextlib import ExitStack

import numpy as np
import pytest
from kit.agents import node, order, plan
from kit.hub_processes import status
from kit.peers_in_process import peers_here
from kit.waiting import until

from aedit.launch.config import parse_config
from aedit.proto.rpc import parsed_statement
from aedit.proto.rpc import statement as wire
from aedit.proto.swarm import read_proof
from aedit.types import Verdict

CONFIG = parse_config(
    """
name = "test"
[train]
steps = 100000
[edit]
every = 10
landing = "arrival"
penalty = { clip = "none" }
[outer]
kind = "average"
lr = 1.0
[hub]
quorum = "all"
codec = "fp32"
expire_s = 2.0
heartbeat_s = 0.05
[hub.push_filter]
threshold = 1e9
cosine = false
[swarm]
discovery = "file"
parts = 1
copies = 3
""",
    "here",
)


def lie_to(peers, number, victim):
    """Let the owner hosted by a peer give a node, or all for None, wrong anchors with valid signatures.

    Returns the versions that it has lied about, as a list that grows.
    """
    hub, key = peers.hub(number), peers.peers[number]._key
    driver, true, lies = hub._leading.driver, hub._leading.driver.pull, []

    def pull(request):
        head, data = true(request)
        if victim is None or request.who.node == victim:
            lies.append(head.version)
            values = np.frombuffer(data, dtype=np.float32) + np.float32(0.5)
            data = memoryview(values.tobytes())
            head.sha256 = hashlib.sha256(data).digest()
            told = wire.parsed_statement(head.statement)
            head.statement = wire.signed(wire.replace(told, sha256=head.sha256), key)
        return head, data

    driver.pull = pull
    return lies


class Trainer:
    """A node that pushes a number in each round."""

    def __init__(self, held, peers, number):
        made = plan(
            [peers.places(number).owner],
            name=f"node-{number}",
            replicas=str(peers.replicas(number)),
            expire_s=2.0,
            call_timeout_s=5.0,
        )
        self.link, self.seq = held.enter_context(node(made)), 0
        self.versions = [0, 0]

    def join(self):
        self.versions = list(self.link.join(30.0))

    def push(self, value):
        self.seq += 1
        for unit in (0, 1):
            order(self.link, unit, self.seq, value, self.versions[unit])

    def answers(self):
        for unit in (0, 1):
            found = until(lambda u=unit: self.link.answer(u, self.seq), f"answer {self.seq}", 60.0)
            assert found.verdict == Verdict.MERGED
            self.versions[unit] = found.version

    def anchors(self):
        return [values.copy() for values in self.link.anchors]


def rounds(trainers, count):
    """Let all push and wait for all answers, round by round; return the anchors of each at the end."""
    for number in range(count):
        for trainer in trainers:
            trainer.push(0.25 * (1 + number))
        for trainer in trainers:
            trainer.answers()
    return [trainer.anchors() for trainer in trainers]


def equal(anchors):
    return all(
        np.array_equal(one, other) for each in anchors for one, other in zip(each, anchors[0], strict=True)
    )


def in_step(trainers, most=10):
    """Train until all have the same anchors; a node that found the new owner late may have missed a merge."""
    return any(equal(rounds(trainers, 1)) for _ in range(most))


def begun(held, folder):
    """Return three peers, of which the first owns the part and the others follow and train."""
    peers = held.enter_context(peers_here(folder, CONFIG, 3))
    until(lambda: all(len(peers.places(n).replicas) == 3 for n in range(3)), "three replicas", 30.0)
    assert {peers.places(n).owner for n in range(3)} == {peers.address(0)}
    trainers = [Trainer(held, peers, number) for number in (1, 2)]
    for trainer in trainers:
        trainer.join()
    return peers, trainers


def in_sync(peers, number):
    """Return a function that tells whether the owner at a peer has two followers."""
    return lambda: peers.hub(number)._leading.leadership.in_sync()[0] == 2


def test_an_owner_that_gives_two_nodes_different_anchors_is_replaced_and_training_goes_on(tmp_path):
    with ExitStack() as held:
        peers, (one, other) = begun(held, tmp_path)
        assert in_step([one, other])
        until(in_sync(peers, 0), "both followers in sync", 30.0)
        liar, key = peers.address(0), peers.peers[0]._key.public
        lies = lie_to(peers, 0, victim=other.link.node)

        def is_found():
            rounds([one, other], 1)
            return all(key in peers.peers[number]._known.faults for number in (1, 2))

        until(is_found, "the proof", 60.0)
        assert lies, "lies were told, and taken until somebody compared"
        for number in (1, 2):
            until(lambda n=number: peers.places(n).owner not in ("", liar), "another owner", 30.0)
            assert liar not in peers.places(number).replicas
        assert in_step([one, other]), "the next answers bring the deceived node back"
        assert np.isfinite(one.link.anchors[0]).all()

        reason = peers.peers[1]._known.faults[key].reason
        assert reason.startswith("'peer-0': it has signed two values of version ")
        proof = tmp_path / "peer-1" / "proofs" / f"{key.hex()[:16]}.json"
        assert read_proof(proof).public_key == key
        told = [line for line in status(peers.peers[2].address)["peers"] if line["key"] == key.hex()]
        assert [line["state"] for line in told] == [f"shut out: {peers.peers[2]._known.faults[key].reason}"]
        events = (tmp_path / "peer-1" / "part_0" / "events.jsonl").read_text()
        assert "owner_shut_out" in events + (tmp_path / "peer-2" / "part_0" / "events.jsonl").read_text()


def owner_of(peers):
    """Return the hub that leads now; None between two."""
    found = [peers.hub(number)._leading for number in range(3)]
    return next((one for one in found if one is not None and one.leadership.leads and not one.is_over), None)


def changed(peers, term):
    """Ask the owner to hand over, at every call; return whether another term than `term` has begun."""
    owner = owner_of(peers)
    if owner is None:
        return False
    now = owner.ledger.hub.state.term
    if now == term:
        owner.leadership.hand_over()
    return now > term


@pytest.mark.slow
def test_honest_owners_that_change_twice_give_no_proof_and_equal_anchors(tmp_path):
    with ExitStack() as held:
        peers, trainers = begun(held, tmp_path)
        rounds(trainers, 1)
        for _ in range(2):
            term = until(lambda: owner_of(peers), "an owner", 30.0).ledger.hub.state.term
            until(lambda now=term: changed(peers, now), "another owner", 60.0)
            assert in_step(trainers)
        assert len(set().union(*map(terms_told, peers.peers))) > 1, (
            "statements of several terms were compared"
        )
        assert [dict(peer._known.faults) for peer in peers.peers] == [{}, {}, {}]


def terms_told(peer):
    """Return the terms of the statements that a peer has heard of and of its own node's."""
    kept = peer._gossip._exchanges._statements
    return {
        parsed_statement(each.data).term
        for one in (kept._own, *kept._of_peers.values())
        for each in one.kept.values()
    }
