"""Tests that an owner that gives all nodes the same wrong anchors is found by its followers and replaced."""

import hashlib
import json
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from kit.hub_processes import status
from kit.peers_in_process import peers_here
from kit.statements import statement
from kit.swarm import key_of
from kit.swarm_processes import on_disk
from kit.waiting import until
from test_equivocation import CONFIG, begun, equal, in_step, in_sync, lie_to, rounds

from aedit.proto.rpc import parsed_statement, signed
from aedit.proto.swarm import read_proof

LIMIT_S = 90.0


def digests(trainer):
    return [hashlib.sha256(values.tobytes()).hexdigest() for values in trainer.anchors()]


def test_an_owner_that_lies_to_all_alike_is_replaced_and_the_anchors_are_put_right(tmp_path):
    """Found: its lies were equal, so that nobody who compared them saw a contradiction."""
    with ExitStack() as held:
        peers, trainers = begun(held, tmp_path)
        assert in_step(trainers)
        until(in_sync(peers, 0), "both followers in sync", LIMIT_S)
        liar, key = peers.address(0), peers.peers[0]._key.public
        lies = lie_to(peers, 0, victim=None)
        before = trainers[0].versions[0]
        rounds(trainers, 1)
        assert equal([trainer.anchors() for trainer in trainers]), "the lie is the same for all"
        assert digests(trainers[0])[0] != on_disk(tmp_path / "peer-1" / "part_0")[0][1]
        for number in (1, 2):
            until(lambda n=number: key in peers.peers[n]._known.faults, "the fault", LIMIT_S)
        assert max(lies) <= before + 2, "found before two more versions were made"
        for number in (1, 2):
            until(lambda n=number: peers.places(n).owner not in ("", liar), "another owner", LIMIT_S)

        def is_right():
            """Train a round; return whether all have what the journal of the new owner gives."""
            rounds(trainers, 1)
            number = next(n for n in (1, 2) if peers.places(n).owner == peers.address(n))
            found = on_disk(tmp_path / f"peer-{number}" / "part_0")
            return all(digests(one) == [found[unit][1] for unit in (0, 1)] for one in trainers)

        until(is_right, "the anchors of the new owner's journal at all nodes", LIMIT_S)
        fault = peers.peers[1]._known.faults[key]
        assert "than its journal gives" in fault.reason
        rows = [one for one in status(peers.peers[2].address)["peers"] if one["key"] == key.hex()]
        assert "than its journal gives" in rows[0]["state"]
        proof = tmp_path / "peer-1" / "proofs" / f"{key.hex()[:16]}.json"
        assert read_proof(proof, of_this_machine=True).public_key == key
        with pytest.raises(ValueError, match="no proof by itself"):
            read_proof(proof)
        events = (tmp_path / "peer-1" / "part_0" / "events.jsonl").read_text().splitlines()
        assert "false_anchor" in [json.loads(line)["event"] for line in events]


def test_no_statement_of_another_makes_an_honest_owner_look_false(tmp_path):
    """A peer passes on what it likes: of another key, changed, of another term or another journal."""
    with ExitStack() as held:
        peers, trainers = begun(held, tmp_path)
        assert in_step(trainers)
        until(in_sync(peers, 0), "both followers in sync", LIMIT_S)
        owner, liar = peers.peers[0]._key, key_of(77)
        true = parsed_statement(until(lambda: peers.peers[1]._gossip.about(0), "a statement", LIMIT_S)[-1])
        assert true.public_key == owner.public
        wrong = replace(true, sha256=hashlib.sha256(b"wrong").digest())
        changed = bytearray(signed(true, owner))
        changed[-32:] = wrong.sha256
        false = [
            signed(replace(wrong, public_key=liar.public), liar),
            bytes(changed),
            signed(replace(wrong, term=true.term + 1), owner),
            signed(replace(wrong, lineage="0" * 16), owner),
        ]
        for number in (1, 2):
            peers.peers[number]._gossip.about = lambda part: false
        found = [peers.hub(number)._standby._check for number in (1, 2)]
        until(lambda: all(check._compared == set(false) for check in found), "a look at each", LIMIT_S)
        for number, check in zip((1, 2), found, strict=True):
            assert check.found == []
            assert not peers.peers[number]._known.faults
        assert peers.hub(0)._leading.leadership.leads
        assert in_step(trainers)


def test_what_one_peer_has_recomputed_is_no_proof_for_another(tmp_path):
    """Any peer could say so of an honest owner."""
    with peers_here(tmp_path, CONFIG, 2) as peers:
        until(lambda: len(peers.places(1).replicas) == 2, "two replicas", LIMIT_S)
        owner = peers.peers[0]
        true = statement(key=owner._key, run=CONFIG.name)
        replayed = hashlib.sha256(b"replayed").digest()
        known = peers.peers[1]._known
        assert not known.contradict(true, replayed, time.monotonic())
        assert owner._key.public not in known.faults
