"""Tests that connections that send what is in no message are ended, and those of honest nodes are not."""

import random
import socket
import struct
import sys
import time
from contextlib import ExitStack, suppress
from ipaddress import ip_address

import pytest
from benchmarks.programs.flooder import HOST, KINDS, Flooder
from kit.waiting import until
from kit.wire import MemoryCore, noise

from aedit.proto.rpc import HubClient, connections, hub_pb2, serve
from aedit.proto.rpc.connections import (
    MOST_SILENT,
    MOST_UNREAD,
    AcceptedSocket,
    ConnectionLimit,
    source_filter,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
MIB = 2**20
LIMIT_S = 120.0


class Wires:
    """Connections whose bytes the kernel counts; the server looks at them when a test says so."""

    def __init__(self):
        self.now, self.received, self.sent = 1000.0, {}, {}
        self.limit = ConnectionLimit(1000)

    def send(self, peer, num_bytes):
        """Let bytes arrive at the kernel."""
        self.received[peer] = self.received.get(peer, 0) + int(num_bytes)

    def message(self, peer, num_bytes):
        """Let a message arrive whole; on the wire it has more bytes."""
        self.send(peer, 1.01 * num_bytes + 300)
        self.limit.received(peer, num_bytes)

    def download(self, peer, num_bytes):
        """Let the server send; for each 32 KiB two frames come back that give it room for more."""
        self.sent[peer] = self.sent.get(peer, 0) + num_bytes
        self.send(peer, 26 * num_bytes / 2**15)

    def look(self, seconds=0.1):
        """Return the connections that are to be ended, as a sorted list of peers."""
        self.now += seconds
        found = [
            AcceptedSocket(i, peer.partition(":")[0], peer, count, self.sent.get(peer, 0))
            for i, (peer, count) in enumerate(self.received.items())
        ]
        return sorted(one.peer for one in self.limit.flooding(found, self.now))


def test_a_connection_that_sends_no_message_is_ended_above_the_bound():
    wires = Wires()
    wires.send("a:1", MOST_SILENT)
    assert wires.look() == []
    wires.send("a:1", 1)
    assert wires.look() == ["a:1"]


def test_a_host_that_has_flooded_is_shut_out_for_a_while_and_its_silent_connections_may_send_little():
    wires = Wires()
    wires.message("a:1", 100)
    wires.send("a:2", MIB)
    wires.send("b:1", MIB)
    wires.send("a:3", 2 * MOST_SILENT)
    assert wires.look() == ["a:2", "a:3"], "a:1 has sent messages, and b is another host"
    assert list(wires.limit._shut_out) == ["a"]
    del wires.received["a:2"], wires.received["a:3"]
    wires.send("a:4", MIB)
    wires.send("a:5", 10_000)  # what a node sends before its first message is read
    assert wires.look(20.0) == ["a:4"]
    del wires.received["a:4"]
    wires.send("a:6", MIB)
    assert wires.look(11.0) == []
    assert list(wires.limit._shut_out) == []


def test_silent_connections_of_one_host_have_a_bound_together():
    wires = Wires()
    for i in range(81):
        wires.send(f"a:{i:02}", MIB // 10)
        wires.send(f"b{i}:1", MIB)
    assert wires.look() == [f"a:{i:02}" for i in range(81)]


def test_a_flood_behind_messages_is_found_and_each_message_accounts_for_little():
    wires = Wires()
    for _ in range(1000):  # what is left of them is bounded
        wires.message("a:1", 100)
        assert wires.look() == []
    for _ in range(80):
        wires.message("a:1", 100)
        wires.send("a:1", 4 * MIB)
        if found := wires.look():
            break
    assert found == ["a:1"]


def test_the_window_updates_of_a_long_download_are_no_flood():
    wires = Wires()
    wires.message("a:1", 200)
    for _ in range(100):
        wires.download("a:1", 2**29)
        assert wires.look(1.0) == []
    assert wires.received["a:1"] > 2 * MOST_UNREAD


def test_pushes_that_are_refused_while_bytes_of_them_are_on_their_way_are_no_flood():
    wires = Wires()
    for _ in range(40):
        wires.message("a:1", 16_384)
        wires.send("a:1", 2 * MIB - 4096)  # a window and most of a chunk
        assert wires.look() == []


@pytest.mark.parametrize("seed", range(5))
def test_an_honest_node_is_never_ended(seed):
    """It pushes, has pushes refused, waits for its turn, downloads, reports, and is idle for hours."""
    rng, wires = random.Random(seed), Wires()
    for _ in range(400):
        peer = f"a:{rng.randrange(4)}"
        match rng.choice(["push", "beat", "refused", "idle", "wait", "download"]):
            case "push":
                for _ in range(rng.randrange(1, 40)):
                    wires.message(peer, MIB)
                    assert rng.random() < 0.5 or wires.look(0.001) == []
            case "beat":
                wires.message(peer, 200)
            case "refused":  # a window and most of a chunk are on their way
                wires.message(peer, 16_384)
                wires.send(peer, rng.randrange(2 * MIB - 4096))
            case "idle":
                for other in wires.received:
                    wires.send(other, 17 * 720)
                assert wires.look(3600.0) == []
            case "wait":
                wires.send(peer, MIB)
                assert wires.look(0.5) == []
                wires.limit.received(peer, MIB)
            case "download":
                wires.message(peer, 200)
                for _ in range(20):
                    wires.download(peer, 2**29)
                    assert wires.look(1.0) == []
        assert wires.look() == []


def test_a_server_looks_often_while_it_is_busy_and_else_once_a_second():
    limit = ConnectionLimit(1000)
    assert sum(limit.is_due(100.0 + i / 8, 1.0) for i in range(1, 81)) == 10
    assert all(limit.is_due(110.0 + i / 8, 1.0 + i / 20) for i in range(1, 81))


def test_a_server_without_connections_sleeps_until_the_first_message():
    limit = ConnectionLimit(1000)
    alone_s = limit.pause_s
    assert limit.flooding([], 1.0) == []
    assert limit.pause_s == alone_s >= 1.0
    assert not limit.awake.is_set()
    limit.received("ipv4:10.0.0.1:5", 100)
    assert limit.awake.is_set()
    assert limit.pause_s <= 0.1


# --- the filter of a listening socket


def drops(program, source):
    """Run a filter on a packet of this source, as the manual of classic BPF says."""
    address = ip_address(source)
    packet = bytearray(40)
    packet[0] = address.version << 4
    at = 12 if address.version == 4 else 8
    packet[at : at + len(address.packed)] = address.packed
    code = list(struct.iter_unpack("HBBI", program))
    word = pc = 0
    while True:
        op, yes, no, k = code[pc]
        pc += 1
        if op == 0x20:
            place = k - (2**32 - 0x100000)  # from the start of IP's header
            word = int.from_bytes(packet[place : place + 4], "big")
        elif op == 0x15:
            pc += yes if word == k else no
        else:
            assert op == 0x06
            return k == 0


def test_the_filter_drops_packets_of_the_hosts_that_are_shut_out_and_no_others():
    v4, v6 = [f"10.0.{i}.9" for i in range(256)], [f"2001:db8:{i:x}:7::1" for i in range(256)]
    others = ["10.0.0.8", "11.0.0.9", "2001:db8:0:8::1", "2001:db9:0:7::1", "127.0.0.9", "0.0.0.0"]
    for hosts in ([], v4, v6, [*v4, *v6], v4[:1], v6[:1]):
        program = source_filter(hosts)
        assert len(program) <= 8 * 4096, "the kernel takes no more instructions"
        assert [drops(program, host) for host in others] == [False] * len(others)
        assert all(drops(program, host) is (host in hosts) for host in (*v4, *v6))
    assert drops(source_filter(["2001:db8:5:7::1"]), "2001:db8:5:7:ffff::2"), "a host has its whole network"
    assert not drops(source_filter(["127.0.0.1", "::1"]), "127.0.0.1"), "tunnels come from there"
    assert not drops(source_filter(["127.0.0.1", "::1"]), "::1")


# --- a real server


@pytest.fixture
def ended(monkeypatch):
    """Return the list of connections that servers of this process end from now on."""
    found, shut = [], connections._shut
    monkeypatch.setattr(connections, "_shut", lambda one: (found.append(one), shut(one))[1])
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_header_block_without_an_end_ends_its_connection_and_no_other_one(ended, kind):
    server = serve(MemoryCore([noise(9)]), "127.0.0.1:0")
    with ExitStack() as held:
        held.callback(server.stop, 0.0)
        member = HubClient(server.address, call_timeout_s=LIMIT_S)
        held.callback(member.close)
        assert member.status(hub_pb2.StatusRequest()).json
        flooder = Flooder(server.address, kind)
        held.callback(flooder.socket.close)

        def is_ended():
            with suppress(OSError):
                flooder.send()
                return False
            return True

        until(is_ended, "the flood is ended", LIMIT_S, 0.0)
        assert member.status(hub_pb2.StatusRequest()).json, "others go on"
        assert {one.host for one in ended} <= {HOST}
        assert ended or kind == "empty", "gRPC ends that one"


def test_a_host_that_floods_makes_no_new_connection_until_its_time_is_over(monkeypatch):
    monkeypatch.setattr(connections, "_SHUT_OUT_S", 1e6)
    server = serve(MemoryCore([noise(9)]), "127.0.0.1:0")
    address = ("127.0.0.1", server.port)

    def is_let_in(host=HOST):
        with suppress(OSError):
            socket.create_connection(address, 1.0, (host, 0)).close()
            return True
        return False

    def is_let_in_again():
        server.connections._shut_out |= dict.fromkeys(server.connections._shut_out, 0.0)
        return is_let_in()

    with ExitStack() as held:
        held.callback(server.stop, 0.0)
        assert is_let_in()
        flooder = Flooder(server.address, "literal")
        held.callback(flooder.socket.close)

        def is_shut_out():
            with suppress(OSError):
                for _ in range(100):
                    flooder.send()
            return HOST in server.connections._shut_out and not is_let_in()

        until(is_shut_out, "the host is shut out", LIMIT_S)
        assert is_let_in("127.0.0.8"), "others are not"
        until(is_let_in_again, "it is let in again", LIMIT_S)


def test_pushes_and_pulls_of_members_are_no_flood(ended):
    server = serve(MemoryCore([noise(64 * MIB)], 2**30), "127.0.0.1:0")
    with ExitStack() as held:
        held.callback(server.stop, 0.0)
        member = HubClient(server.address, call_timeout_s=LIMIT_S)
        held.callback(member.close)
        pushed, pulled = memoryview(bytes(24 * MIB)), memoryview(bytearray(64 * MIB))
        looks_until = time.monotonic() + 2.5
        for seq in range(1, 4):
            member.push(
                hub_pb2.PushHead(unit=0, seq=seq, base=1, codec="fp32", num_bytes=len(pushed)), pushed
            )
            member.pull(hub_pb2.PullRequest(unit=0), pulled)
        until(lambda: time.monotonic() > looks_until, "some looks")
        assert ended == []
