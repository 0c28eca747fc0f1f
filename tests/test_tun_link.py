"""Tests that the simulated long-distance link of the benchmarks delays and shapes packets as configured."""

import json
import random
import subprocess
import sys

import pytest
from benchmarks.kit import netns
from benchmarks.kit.tun_link import Lane, Wire, counted, link, why_not

PACKET = bytes(1250)  # 10,000 bits


def lane(seed=0, **wire):
    return Lane(Wire(**wire), random.Random(seed))


def arrivals(lane):
    """Return (time, packet) of all packets under way, in order."""
    found = []
    while lane.next_at < float("inf"):
        at = lane.next_at
        found += [(at, packet) for packet in lane.arrived(at)]
    return found


def test_a_packet_takes_its_delay_and_its_length():
    wire = lane(delay_s=0.04, rate_mbit=10.0)
    wire.send(PACKET, 5.0)
    assert list(wire.arrived(5.0409)) == []
    assert wire.next_at == pytest.approx(5.041)
    assert list(wire.arrived(5.0411)) == [PACKET]
    assert wire.next_at == float("inf")


def test_packets_come_at_the_rate_and_the_queue_has_an_end():
    wire = lane(rate_mbit=10.0, queue_s=0.02)
    for _ in range(100):
        wire.send(PACKET, 1.0)
    times = [at for at, _ in arrivals(wire)]
    assert times == pytest.approx([1.0 + 0.001 * (n + 1) for n in range(len(times))])
    assert len(times) in (20, 21)  # packets that wait up to 20 ms at 1 ms each
    assert wire.dropped == 100 - len(times)


def test_the_queue_empties_with_time():
    wire = lane(rate_mbit=10.0, queue_s=0.002)
    for now in (0.0, 0.001, 0.002, 0.003):
        wire.send(PACKET, now)
    assert wire.dropped == 0


def test_jitter_spreads_packets_and_keeps_their_order():
    wire = lane(delay_s=0.1, jitter_s=0.05, rate_mbit=1e6, queue_s=1.0)
    packets = [bytes([n]) for n in range(200)]
    for n, packet in enumerate(packets):
        wire.send(packet, n * 0.01)
    found = arrivals(wire)
    assert [packet for _, packet in found] == packets
    extra = [at - n * 0.01 - 0.1 for n, (at, _) in enumerate(found)]
    assert all(-1e-6 < x < 0.05 + 1e-6 for x in extra)
    assert max(extra) > 0.04
    assert min(extra) < 0.01


def test_the_share_that_is_lost_is_as_told():
    wire = lane(loss=0.005, rate_mbit=1e9)
    for n in range(100_000):
        wire.send(PACKET, float(n))
    assert 400 < wire.lost < 600
    assert len(arrivals(wire)) == 100_000 - wire.lost


ECHO = """
import socket, sys, time
if sys.argv[1] == "serve":
    server = socket.create_server((sys.argv[2], 7000))
    print("ready", flush=True)
    peer, _ = server.accept()
    while data := peer.recv(65536):
        peer.sendall(data)
else:
    peer = socket.create_connection((sys.argv[2], 7000), timeout=20)
    began = time.monotonic()
    peer.sendall(b"x")
    peer.recv(1)
    round_s = time.monotonic() - began
    left = 300_000
    peer.sendall(bytes(left))
    while left:
        left -= len(peer.recv(65536))
    print(round_s, time.monotonic() - began)
"""


@pytest.mark.net
def test_a_round_trip_over_a_real_link_takes_two_delays_and_bytes_are_counted():
    if reason := why_not():
        pytest.skip(reason)

    def at(place, *words):
        command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", ECHO, *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    with link(Wire(delay_s=0.04, rate_mbit=50.0, loss=0.002)) as (here, there):
        server = at(there, "serve", there.address)
        try:
            assert server.stdout.readline() == "ready\n"
            before, before_there = counted(here), counted(there)
            client = at(here, "ask", there.address)
            said, _ = client.communicate(timeout=60)
            after, after_there = counted(here), counted(there)
        finally:
            server.kill()
            server.communicate(timeout=10)
    round_s, all_s = map(float, said.split())
    assert round_s >= 0.08
    assert all_s >= 0.08 + 300_000 * 8 / 50e6
    for now, then in ((after, before), (after_there, before_there)):
        assert 300_000 < now.sent - then.sent < 420_000
        assert 300_000 < now.received - then.received < 420_000
    names = json.loads(netns.run_command("ip -j netns list") or "[]")
    assert not {here.namespace, there.namespace} & {name["name"] for name in names}
