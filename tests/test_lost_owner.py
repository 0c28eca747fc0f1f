"""Tests that the replicas of a part elect another owner once theirs has ended. Real servers on loopback."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest
from kit.hub_processes import Client
from kit.waiting import until

from aedit.async_sgd.replication import leadership
from aedit.launch.config import parse_config
from aedit.launch.hub import standby as standby_module
from aedit.launch.hub.endpoint import HubEndpoint
from aedit.launch.hub.main import _Process
from aedit.proto.rpc import HubUnreachable
from aedit.proto.swarm import PartPlaces, ReplicasFile

CONFIG = parse_config(
    'name = "run"\n[swarm]\ndiscovery = "file"\nparts = 1\ncopies = 3\n'
    '[hub]\ncodec = "fp32"\nexpire_s = 1000.0\n',
    "here",
)
"""Of an owner that is only silent, replicas would wait for the end longer than the test."""


class Replica:
    """A hub of the only part, in this process, and the file that its peer writes."""

    def __init__(self, folder, owner=""):
        folder.mkdir()
        self.file = ReplicasFile(folder / "replicas.json")
        self.file.write([PartPlaces((owner,) if owner else (), owner)])
        made = HubEndpoint(
            CONFIG, folder, (0, 1), bool(owner), "127.0.0.1:0", None, replicas=self.file, copies=3
        )
        self.process = _Process(made, insecure=False)
        self.process.start()

    @property
    def address(self):
        return self.process._server.address

    @property
    def leads(self):
        return self.process._leading is not None


@pytest.fixture
def part(tmp_path, monkeypatch):
    """Yield an owner, two followers in sync, and a function that ends one; the ranking is b, a, the owner."""
    monkeypatch.setattr(leadership, "_PROMISE_S", 1000.0)
    with ExitStack() as held:
        ended = set()

        def end(replica):
            if replica not in ended:
                ended.add(replica)
                replica.process._server.stop(0)
                replica.process.close()

        owner = Replica(tmp_path / "owner")
        held.callback(end, owner)
        followers = []
        for name in ("a", "b"):
            followers.append(Replica(tmp_path / name, owner.address))
            held.callback(end, followers[-1])
        a, b = followers
        for one in (owner, a, b):
            one.file.write([PartPlaces((b.address, a.address, owner.address), owner.address)])
        owner.node = Client(owner.address).found()
        until(lambda: owner.process._leadership.in_sync() == (2, 1), "two followers in sync")
        yield owner, a, b, end


def test_replicas_whose_owner_has_ended_elect_the_first_of_those_left_without_waiting(part, monkeypatch):
    """Their promise to support it, its time to answer, and the turn of the second would last for 1000 s."""
    monkeypatch.setattr(standby_module, "_APART_S", 1000.0)
    owner, a, b, end = part
    end(owner)
    until(lambda: b.leads, "the election of the first in the ranking")
    assert not a.leads
    until(lambda: a.process._standby._leader == b.address, "the other one to follow")


def test_the_place_of_a_replica_is_that_among_those_which_are_left(part):
    owner, a, b, _ = part
    for lost, left in ((owner, [b, a]), (b, [a])):
        places = [one.process.endpoint.place_without(lost.address) for one in left]
        assert places == list(range(len(left)))
    a.file.write([PartPlaces((b.address,), b.address)])
    assert a.process.endpoint.place_without(b.address) is None


def test_only_a_machine_that_refuses_the_connection_says_that_a_hub_has_ended(part):
    owner, a, _, end = part
    others = a.process._others
    assert not others.has_ended(owner.address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not others.has_ended(f"127.0.0.1:{silent.getsockname()[1]}")
    end(owner)
    assert others.has_ended(owner.address)


def test_an_owner_that_was_silent_is_not_waited_for_once_more(part):
    """Found: it was asked whether it had ended, and then whether it led, for 1.5 s, before anybody stood."""
    owner, a, _, _ = part
    others, stopping = a.process._others, threading.Event()
    assert others.leader(0, stopping) == (owner.address, 1)
    assert others.leader(0, stopping, without=owner.address) is None
    standby, asked = a.process._standby, []
    standby.stop()
    others.has_ended = lambda address: asked.append(address)
    standby._leader, standby._heard_s = owner.address, time.monotonic() - standby_module._SILENT_S
    standby._note_end(HubUnreachable("nothing moved"))
    assert not asked
    assert standby._away == owner.address


def test_an_owner_whose_connection_broke_is_asked_whether_it_has_ended(part):
    owner, a, _, end = part
    standby = a.process._standby
    standby.stop()
    standby._leader, standby._heard_s = owner.address, time.monotonic()
    standby._note_end(HubUnreachable("it hung up"))
    assert standby._away == "", "it answers"
    end(owner)
    standby._leader, standby._heard_s = owner.address, time.monotonic()
    standby._note_end(HubUnreachable("it hung up"))
    assert standby._away == owner.address


def test_replicas_keep_the_support_of_an_owner_whose_connection_was_cut(part):
    """It is alive: whoever cannot reach it for a moment must not vote for another one."""
    owner, a, b, _ = part
    given_up = []
    for one in (a, b):
        standby = one.process._standby
        standby._leadership.leader_ended = lambda: given_up.append(1)
        cut = standby._client
        cut.close()
        until(lambda: standby._client is not cut and standby._leader == owner.address, "the owner again")  # noqa: B023
    assert not given_up
    assert not a.leads
    assert not b.leads


def test_a_node_that_asks_all_replicas_makes_none_of_them_ask_for_votes(part):
    """Found: each of them asked at once, and one that followed an owner by then deposed it a little later."""
    owner, a, b, _ = part
    for one in (a, b):
        one.process._leadership.drop_leader()  # it had no leader a moment ago
        reply = owner.node.vote(one.address)
        assert not reply.HasField("asks")
        assert one.process._leadership.asks() is None


def test_a_replica_that_follows_an_owner_again_asks_for_votes_no_more(part):
    owner, a, _, _ = part
    standby = a.process._standby
    standby.ask_for_votes(invited=True)
    assert a.process._leadership.asks() is not None
    cut = standby._client
    cut.close()
    until(lambda: standby._client is not cut and standby._leader == owner.address, "the owner again")
    assert a.process._leadership.asks() is None
    assert owner.leads
