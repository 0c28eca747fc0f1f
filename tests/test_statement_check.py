"""Tests what a node of a swarm takes from an owner: only anchors that the owner has signed, as they are."""

import hashlib
import json
import logging
import re

import numpy as np
import pytest
from kit.agents import MemoryHub, exchange, node, order, plan
from kit.statements import statement
from kit.swarm import key_of
from kit.waiting import until

from aedit.proto.agent import unit_transfers
from aedit.proto.rpc import Download, frames, parsed_statement
from aedit.proto.rpc import hub_pb2 as pb
from aedit.proto.swarm import STATEMENTS, PartPlaces, ReplicasFile

HOST, STRANGER = key_of(5), key_of(6)


class SigningHub(MemoryHub):
    """A hub in memory that is the owner of part 0. changes: of what it signs; key: with which it does."""

    key, changes, signs, forges = HOST, (), True, False

    def pull(self, request):
        with self.lock:
            head, data = super().pull(request)
            digest = hashlib.sha256(self.anchors[request.unit].tobytes()).digest()
            place = {
                "run": "test",
                "part": 0,
                "term": self.term,
                "unit": request.unit,
                "version": head.version,
            }
            made = {**place, "sha256": digest, **dict(self.changes)}
            signed = statement(key=self.key, **made) if self.signs else b""
            head.statement = signed[:1] + bytes(64) + signed[65:] if self.forges else signed
            return head, data


@pytest.fixture
def file(tmp_path):
    return ReplicasFile(tmp_path / "replicas.json")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(unit_transfers, "PAUSE_S", 0.02)


def places(address, *keys, others=()):
    named = [address] * len(keys)
    return PartPlaces((*named, *others), address, "", 1, tuple(key.public.hex() for key in keys))


FAULTS = {
    "nothing": ({"signs": False}, "the owner has not signed it: not a statement"),
    "another value": ({"changes": {"sha256": bytes(32)}}, "has signed another value than it has given"),
    "another version": ({"changes": {"version": 99}}, r"has signed \(run, part, unit, version\) .*99\), not"),
    "another unit": ({"changes": {"unit": 1}}, "has signed"),
    "another part": ({"changes": {"part": 1}}, "has signed"),
    "another run": ({"changes": {"run": "other"}}, "has signed"),
    "a forged signature": ({"forges": True}, "the signature is not of the key that it names"),
    "a stranger's key": ({"key": STRANGER}, "which no live peer has there that is not shut out"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_an_anchor_without_a_valid_statement_is_refused_and_asked_for_again(file, caplog, fault, codec):
    settings, named = FAULTS[fault]
    hub = SigningHub(codec_down=codec)
    file.write([places(hub.serve(), HOST)])
    with (
        node(plan([hub.server.address], replicas=str(file.path), codec_down=codec)) as link,
        caplog.at_level(logging.WARNING),
    ):
        link.join(10.0)
        assert exchange(link, 0, 1, 0.5, 1).version == 2
        for name, value in settings.items():
            setattr(hub, name, value)
        order(link, 0, 2, 0.25, 2)
        until(lambda: sum("refused: unit 0" in line for line in caplog.messages) > 1, "two refusals")
        assert link.answer(0, 2) is None
        hub.signs, hub.changes, hub.key, hub.forges = True, (), HOST, False
        found = until(lambda: link.answer(0, 2), "the answer")
        assert found.version == 3
        assert np.array_equal(link.anchors[0], hub.anchors[0])
    assert np.array_equal(hub.anchors[0], np.arange(22, dtype=np.float32) - np.float32(0.75))
    assert any(re.search(named, line) for line in caplog.messages)
    hub.kill()


def test_a_node_that_joins_takes_no_anchor_that_is_not_signed(file):
    hub = SigningHub()
    file.write([places(hub.serve(), HOST)])
    with node(plan([hub.server.address], replicas=str(file.path))) as first:
        first.join(10.0)
        hub.signs = False
        with node(plan([hub.server.address], replicas=str(file.path), name="b")) as second:
            with pytest.raises(TimeoutError):
                second.join(0.3)
            hub.signs = True
            second.join(10.0)
            assert np.array_equal(second.anchors[1], hub.anchors[1])
    hub.kill()


def test_the_peer_is_told_the_newest_statements_of_each_unit(file, tmp_path):
    hub = SigningHub()
    file.write([places(hub.serve(), HOST)])
    with node(plan([hub.server.address], replicas=str(file.path))) as link:
        link.join(10.0)
        for seq in range(1, 7):
            exchange(link, 0, seq, 0.5, seq)
        exchange(link, 1, 1, 0.5, 1)

        def told():
            if not (tmp_path / STATEMENTS).exists():
                return []
            found = json.loads((tmp_path / STATEMENTS).read_text())["statements"]
            return [(one.unit, one.version) for one in map(parsed_statement, map(bytes.fromhex, found))]

        until(lambda: told() == [(0, 4), (0, 5), (0, 6), (0, 7), (1, 2)], "the statements")
    hub.kill()


def test_a_node_leaves_an_owner_whose_key_is_shut_out_for_the_one_that_is_elected(file):
    old, new = SigningHub(), SigningHub()
    new.leads, new.key = False, STRANGER
    file.write([places(old.serve(), HOST)])
    with node(plan([old.server.address], replicas=str(file.path), expire_s=60.0)) as link:
        link.join(10.0)
        new.anchors, new.versions = [values.copy() for values in old.anchors], list(old.versions)
        new.seqs = dict(old.seqs)
        file.write([places(new.serve(), STRANGER)], [HOST.public.hex()])
        until(lambda: new.votes and new.sessions, "the vote for the other replica", 10.0)
        assert exchange(link, 1, 1, 0.5, 1).version == 2
        assert new.pushed != []
        assert old.pushed == []
    old.kill()
    new.kill()


def test_outside_a_swarm_nothing_is_checked():
    hub = MemoryHub()
    with node(plan([hub.serve()])) as link:
        link.join(10.0)
        assert exchange(link, 0, 1, 0.5, 1).version == 2
    hub.kill()


def test_what_another_node_has_sent_is_not_fetched_again_because_the_owner_signs_and_nodes_do_not():
    data, taken = memoryview(bytes(range(100))), []
    plain = pb.PullHead(version=3, codec="fp32", num_bytes=100, sha256=hashlib.sha256(data).digest())

    def answer(head, offset):
        chunks = frames.chunks(head.SerializeToString(), data, offset=offset)
        return (frames.pack_chunk(chunk) for chunk in chunks)

    download = Download(pb.PullRequest(unit=0), memoryview(bytearray(100)))
    download.take(answer(plain, 0), taken.append)
    assert download.request.offset == 100
    signed = pb.PullHead(statement=b"of the owner")
    signed.MergeFrom(plain)
    assert download.take(answer(signed, 100), taken.append).statement == b"of the owner"
    assert sum(taken) < 400
