"""Tests gossip between real servers on loopback: TLS and tokens, restarts, strangers, broken discovery."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import replace

import grpc
import pytest
from kit.gossip import Peer, all_see, call, started
from kit.swarm import card_of, key_of
from kit.swarm import replica as part
from kit.waiting import until

from aedit.launch.cli.keys import make_keys
from aedit.proto.rpc import PROTOCOL, HubRefused, HubUnreachable, client_keys, server_keys
from aedit.proto.rpc import swarm_pb2 as pb
from aedit.proto.swarm import PeerCalls
from aedit.types import UserError


def test_peers_and_a_client_find_each_other_through_one_and_their_threads_end():
    before = threading.active_count()
    first = Peer(1)
    others = [Peer(2, first.gossip.address), Peer(3, first.gossip.address)]
    client = Peer(4, first.gossip.address, client=True)
    with started(first, *others, client) as peers:
        until(all_see(peers, {"p1", "p2", "p3", "p4"}), "four peers")
        assert client.gossip.address == ""
        assert client.known.live(time.monotonic())[client.key.public].address == ""
        assert first.discovery.announced
        assert all(peer.gossip.state == "" for peer in peers)
    assert all(peer.discovery.is_closed for peer in peers)
    until(lambda: threading.active_count() <= before + 4, "the end of the threads")  # gRPC keeps a few
    first.gossip.close()


def test_a_restart_without_discovery_finds_the_last_known_peers(tmp_path):
    file = tmp_path / "peers.json"
    first = Peer(1)
    second = Peer(2, first.gossip.address, peers_file=file)
    with started(first):
        with started(second):
            until(all_see((first, second), {"p1", "p2"}), "two peers")
            until(file.exists, "the file of last known peers")
        assert json.loads(file.read_text()) == {"peers": [first.gossip.address]}
        again = Peer(2, peers_file=file)
        with started(again):
            until(lambda: again.sees() == {"p1", "p2"}, "the first peer, from the file")


@pytest.mark.parametrize("content", ["{", '{"peers": 3}', "[]", '{"peers": ["x", 7, null]}'])
def test_a_broken_file_of_last_known_peers_is_no_obstacle(tmp_path, content):
    file = tmp_path / "peers.json"
    file.write_text(content)
    first = Peer(1)
    second = Peer(2, first.gossip.address, peers_file=file)
    with started(first, second):
        until(lambda: "p1" in second.sees(), "the first peer")


def test_a_peer_that_ends_is_gone_after_its_lease():
    first = Peer(1)
    second = Peer(2, first.gossip.address, lease_s=1.0)
    with started(first):
        with started(second):
            until(all_see((first, second), {"p1", "p2"}), "two peers")
        until(lambda: first.sees() == {"p1"}, "the end of the lease", limit_s=10.0)


class Broken:
    """A discovery that raises, and one that never returns."""

    state = ""

    def __init__(self, stops):
        self.stops, self.go_on = stops, threading.Event()

    def announce(self, card):
        if self.stops:
            self.go_on.wait(60)
        raise OSError("the table is gone")

    def found(self):
        raise AssertionError("not reached")

    def close(self):
        self.go_on.set()


@pytest.mark.parametrize("stops", [False, True], ids=["raises", "hangs"])
def test_a_broken_discovery_ends_nothing_and_is_named(stops):
    first = Peer(1, discovery=Broken(stops))
    second = Peer(2, first.gossip.address)
    with started(first, second) as peers:
        until(all_see(peers, {"p1", "p2"}), "two peers")
        if stops:
            first.discovery.go_on.set()
        until(lambda: "discovery: the table is gone" in first.gossip.state, "the error")


def test_an_own_card_that_fails_is_named_and_made_again():
    peer = Peer(1)
    good, peer.gossip._own_card = peer.gossip._own_card, lambda: b"nonsense"
    with started(peer):
        until(lambda: "gossip: the card has the version 110" in peer.gossip.state, "the error")
        peer.gossip._own_card = good
        until(lambda: peer.sees() == {"p1"} and not peer.gossip.state, "a good card")


def refusal(*args, **changes):
    with pytest.raises(HubRefused) as caught:
        call(*args, **changes)
    return caught.value


def test_calls_that_are_none_get_a_code_and_one_line():
    with started(Peer(1)) as (peer,):
        address = peer.gossip.address
        until(lambda: peer.known.own_card, "its card")
        assert call(address).protocol == PROTOCOL
        told = refusal(address, nonce=b"x" * 33)
        assert (told.code, "nonce has 33 bytes" in told.text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        assert refusal(address, card=b"\x01garbage").code is grpc.StatusCode.PERMISSION_DENIED
        assert "at most 131072 are allowed" in refusal(address, proof=bytes(2**17)).text
        assert peer.sees() == {"p1"}


def test_a_key_that_is_not_allowed_is_refused_and_not_called():
    allowed = key_of(2).public
    first = Peer(1, allow=[key_of(1).public, allowed])
    second, stranger = Peer(2, first.gossip.address), Peer(3, first.gossip.address)
    with started(first, second, stranger):
        until(lambda: {"p1", "p2"} <= first.sees(), "the allowed peer")
        until(lambda: "is not in swarm.allow" in stranger.gossip.state, "the refusal")
        card = stranger.card()
        told = refusal(first.gossip.address, card=card)
        assert f"key {stranger.key.public.hex()} of 'p3' is not in swarm.allow" in told.text
        assert first.sees() == {"p1", "p2"}


@contextmanager
def silent_listener():
    """Yield the address of something that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_addresses_that_hang_hold_up_nobody():
    with silent_listener() as silent:
        first = Peer(1, silent, call_timeout_s=0.5)
        second = Peer(2, first.gossip.address, silent, "127.0.0.1:1", call_timeout_s=0.5)
        with started(first, second) as peers:
            until(all_see(peers, {"p1", "p2"}), "two peers")
            began = time.monotonic()
        assert time.monotonic() - began < 5


def test_an_address_where_nobody_listens_costs_one_attempt():
    with silent_listener() as gone:
        pass
    calls = PeerCalls(None, 30.0, 4)
    began = time.monotonic()
    with pytest.raises(HubUnreachable):
        calls.call(gone, pb.ExchangeRequest())
    calls.close()
    assert time.monotonic() - began < 15, "it was tried until the deadline"


def test_live_peers_are_called_at_the_given_pace_and_at_once_when_the_own_card_says_something_new():
    gossip = Peer(1, calls_every_s=3.0).gossip
    card = card_of(key_of(1))
    assert gossip._calls_live_peers(0.0, card)
    assert not gossip._calls_live_peers(2.9, replace(card, serial=2, steps_per_s=7.0)), (
        "a card that is renewed is no news"
    )
    assert gossip._calls_live_peers(3.0, card)
    assert gossip._calls_live_peers(3.5, replace(card, serial=3, parts={1: part()}))
    assert not gossip._calls_live_peers(4.5, replace(card, serial=4, parts={1: part()}))
    assert gossip._calls_live_peers(5.0, replace(card, serial=5, parts={1: part()}, leaving=True))
    assert gossip._calls_live_peers(8.0, replace(card, serial=6, leaving=True))
    gossip.close()


def test_keys_of_the_run_are_asked_for_on_both_sides(tmp_path):
    keys, other = tmp_path / "keys", tmp_path / "other"
    for folder in (keys, other):
        make_keys(folder, ["127.0.0.1"], ["alpha"])
    node = client_keys(keys / "alpha")
    tls = {"server_keys": server_keys(keys / "hub"), "client_keys": node}
    first = Peer(1, **tls)
    address = first.gossip.address
    second = Peer(2, address, **tls)
    plain, foreign = Peer(3, address), Peer(4, address, client_keys=client_keys(other / "alpha"))
    with started(first, second, plain, foreign):
        until(all_see((first, second), {"p1", "p2"}), "two peers with the run's keys")
        assert call(address, node, card=second.card()).protocol == PROTOCOL
        for strange in (None, client_keys(other / "alpha")):
            with pytest.raises(Exception, match="asked to Exchange"):
                call(address, strange, timeout_s=0.5)
        assert plain.sees() == {"p3"}
        assert foreign.sees() == {"p4"}


def test_an_address_that_is_taken_is_named():
    with silent_listener() as address, pytest.raises(UserError, match=f"cannot listen on {address}"):
        Peer(1, listen=address)
