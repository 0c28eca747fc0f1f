"""Tests that one peer cannot stop the others: open calls, idle streams, long messages, threads."""

import asyncio
import gc
import socket
import struct
import threading
import tracemalloc
from zlib import crc32

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.hub_machine import world
from kit.wire import MemoryCore, noise

from aedit.async_sgd.rules import Merged
from aedit.proto.rpc import (
    CallHandlers,
    FairPool,
    HubClient,
    Limits,
    Refusal,
    Server,
    Service,
    channel,
    frames,
    hub_pb2,
    serve,
)
from aedit.proto.rpc.limits import ReadPermits, WaitingCalls

DATA = noise(1000)
WITHIN_S = 20.0


@pytest.fixture
def served():
    """Return a hub with two threads per kind of call, its address, and an honest node's client."""
    core = MemoryCore([noise(100)])
    server = serve(core, "127.0.0.1:0", limits=Limits(stall_s=300.0, calls_per_s=1e9), threads=2)
    client = HubClient(server.address, call_timeout_s=WITHIN_S)
    yield core, server.address, client
    client.close()
    server.stop(0.0)


@pytest.fixture
def hold():
    """Return a function that opens calls of a method, and sends `messages` but never ends them."""
    stop, lines, opened = threading.Event(), [], []

    def held(address, method, count, messages=()):
        def sent():
            yield from messages
            stop.wait()

        for first in range(0, count, 200):  # no more fit on one connection
            lines.append(channel(address, None))
            call = lines[-1].stream_unary(f"/aedit.v1.{method}")
            opened.extend(call.future(sent()) for _ in range(first, min(count, first + 200)))
        return opened

    yield held
    stop.set()
    for line in lines:
        line.close()


def push(client, seq=1):
    head = hub_pb2.PushHead(unit=1, seq=seq, num_bytes=len(DATA))
    return client.push(head, memoryview(DATA)).accepted


def test_push_streams_that_send_nothing_keep_nobody_from_pushing(served, hold):
    _, address, client = served
    hold(address, "Exchange/Push", 40)
    client.heartbeat(hub_pb2.HeartbeatRequest())  # they have arrived by now, or will not hinder
    assert push(client)


def test_push_streams_that_stop_after_their_head_keep_nobody_from_pushing(served, hold):
    _, address, client = served
    head = hub_pb2.PushHead(unit=1, seq=1, num_bytes=2**20).SerializeToString()
    (first,) = frames.chunks(head, memoryview(noise(10)))
    hold(address, "Exchange/Push", 10, [frames.pack_chunk(first)])
    assert push(client)


def test_calls_without_a_request_keep_nobody_from_calling(served, hold):
    _, address, client = served
    hold(address, "Membership/Heartbeat", 40)
    assert client.heartbeat(hub_pb2.HeartbeatRequest(steps=7)).total_steps == 7


@pytest.mark.slow
def test_more_open_calls_than_a_server_keeps_are_ended_and_members_go_on(served, hold):
    """Found: 4,300 open calls made every beat fail."""
    _, address, client = served
    opened = hold(address, "Membership/Heartbeat", 4300)
    for step in range(20):
        assert client.heartbeat(hub_pb2.HeartbeatRequest(steps=step)).total_steps == step
    assert push(client)
    ended = [call for call in opened if call.done()]
    assert len(ended) >= 4300 - Limits().silent_calls
    # On a busy machine gRPC itself refuses some, when 1,000 or more wait for the server's loop.
    by_grpc = {grpc.StatusCode.CANCELLED}
    assert {call.code() for call in ended} - by_grpc == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def test_the_oldest_silent_call_of_the_peer_with_most_of_them_makes_room():
    calls, ended = WaitingCalls(3), []
    for peer, name in [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("b", 5)]:
        calls.enter(peer, name, lambda name=name: ended.append(name))
    assert ended == [1, 2]  # of two peers with two calls each, that of the first one
    calls.leave("b", 4)
    calls.leave("b", 4)
    calls.enter("c", 6, lambda: ended.append(6))
    assert ended == [1, 2]


def test_uploads_wait_to_be_read_and_one_that_sends_nothing_makes_room_after_its_time():
    async def order():
        now, ended = [0.0], []
        permits = ReadPermits(2, hold_s=0.01, clock=lambda: now[0])
        await permits.enter("a", lambda: ended.append("a1"))
        permit = await permits.enter("b", lambda: ended.append("b1"))
        third = asyncio.ensure_future(permits.enter("a", lambda: ended.append("a2")))
        fourth = asyncio.ensure_future(permits.enter("c", lambda: ended.append("c1")))
        await asyncio.sleep(0)
        permits.end_oldest()
        assert (ended, third.done()) == ([], False), "both have time left"
        permits.leave(permit)
        permits.leave(permit)
        await third
        assert not fourth.done()
        now[0] = 1.0
        await fourth
        return ended

    assert asyncio.run(order()) == ["a1"]


def test_a_beat_that_is_longer_than_any_honest_one_is_refused_before_the_hub_reads_it(served):
    core, address, _ = served
    block = hub_pb2.Consumed(start=2**60, upto=2**61)
    long = hub_pb2.HeartbeatRequest(consumed=[block] * 50_000).SerializeToString()
    assert len(long) > 1_000_000
    with channel(address, None) as line, pytest.raises(grpc.RpcError) as refused:
        line.unary_unary("/aedit.v1.Membership/Heartbeat")(long, timeout=WITHIN_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert core.calls == []


def test_peers_take_turns_however_many_calls_each_has():
    """One thread, 20 calls of one peer first: the first call of another one is second in line."""

    async def order():
        pool, done = FairPool(1, "test", most_waiting=20), []
        begun = threading.Event()
        first = asyncio.ensure_future(pool.run("busy", begun.wait))
        await asyncio.sleep(0)
        rest = [asyncio.ensure_future(pool.run("busy", lambda i=i: done.append(i))) for i in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(Refusal):
            await pool.run("busy", lambda: None)
        rest.append(asyncio.ensure_future(pool.run("other", lambda: done.append("other"))))
        rest[3].cancel()
        await asyncio.sleep(0)
        begun.set()
        await asyncio.gather(first, *rest, return_exceptions=True)
        pool.shutdown()
        return done

    assert asyncio.run(order()) == [0, "other", 1, 2, *range(4, 20)]


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), max_size=8),
)
def test_what_a_beat_says_of_leases_is_found_in_one_pass(sizes, consumed):
    made = world()
    for size in sizes:
        made.lease(0, size)
    leases = dict(made.hub.state.pool.leases[0])
    found = {(r.start, r.upto) for r in made.hub.use(0, consumed)}
    expected = {}
    for start, upto in consumed:  # block by block, lease by lease
        for lease, (used, end) in leases.items():
            if start <= used < upto:
                expected[lease] = max(expected.get(lease, 0), min(upto, end))
    assert found == set(expected.items())


def waits(made, rounds, pushes):
    """Return how long each merge came after its first push; `pushes`: by round, who pushes."""
    found = []
    for turn in range(rounds):
        made.tick(1.0)
        for node in range(len(made.hub.state.members)):
            made.heartbeat(node)
        for node in pushes(turn):
            made.push(node, 1.0)
        began = made.now
        while not any(isinstance(record, Merged) for record in made.tick(0.25)):
            for node in range(len(made.hub.state.members)):
                made.heartbeat(node)
            assert made.now - began < 1000
        found.append(made.now - began)
    return found


def test_a_live_member_that_never_pushes_is_waited_for_twice_and_not_longer_each_time():
    made = world(3, quorum="all", expire_s=5.0)
    found = waits(made, 12, lambda turn: [0, 1])
    assert all(wait <= 5.5 for wait in found[:2])
    assert all(wait <= 0.25 for wait in found[2:])
    made.push(2, 1.0)  # it pushes again, and is awaited again
    assert waits(made, 3, lambda turn: [0, 1, 2] if turn < 2 else [0, 1])[2] > 1.0


def test_a_member_that_pushes_every_third_time_makes_no_wait_longer_than_the_one_before():
    made = world(3, quorum="all", expire_s=5.0)
    found = waits(made, 60, lambda turn: [0, 1] if turn % 3 else [0, 1, 2])
    assert max(found[30:]) <= max(found[:30]) <= 5.5


def test_who_is_not_awaited_is_the_same_after_a_restart():
    made = world(3, quorum="all", expire_s=5.0)
    waits(made, 5, lambda turn: [0, 1])
    assert made.replayed().state.units[0].missed == made.hub.state.units[0].missed == {2: 2}


def test_uploads_of_peers_take_turns_and_one_is_counted_until_its_first_message_is_dealt_with():
    async def order():
        permits, entered = ReadPermits(1, hold_s=60.0), []
        first = await permits.enter("busy", lambda: None)
        first.has_sent = True

        async def enter(peer):
            permit = await permits.enter(peer, lambda: None)
            entered.append(peer)
            permits.leave(permit)

        waiting = [asyncio.ensure_future(enter(peer)) for peer in ["busy", "busy", "gone", "other"]]
        await asyncio.sleep(0)
        waiting[2].cancel()
        permits.end_oldest()
        await asyncio.sleep(0)
        assert entered == [], "the first one is not late: it has sent something"
        permits.leave(first)
        await asyncio.gather(*waiting, return_exceptions=True)
        return entered

    assert asyncio.run(order()) == ["busy", "other", "busy"]


class CountingPool(FairPool):
    """Counts what it runs."""

    runs = 0

    async def run(self, peer, work):
        self.runs += 1
        return await super().run(peer, work)


def push_server(pool, limits):
    handlers = CallHandlers(limits)
    service = Service("aedit.v1.Exchange", {"Push": handlers.push(MemoryCore([]), pool)}, (pool,))
    return Server([service], "127.0.0.1:0", limits=limits)


def test_only_the_first_chunk_of_a_push_and_its_end_are_handed_to_a_thread():
    pool = CountingPool(2, "push")
    server = push_server(pool, Limits())
    client = HubClient(server.address, call_timeout_s=WITHIN_S)
    try:
        data = noise(6 * frames.CHUNK_BYTES)
        assert client.push(hub_pb2.PushHead(unit=1, seq=1, num_bytes=len(data)), memoryview(data)).accepted
    finally:
        client.close()
        server.stop(0.0)
    assert pool.runs == 2


def test_pushes_that_are_refused_leave_nothing_in_memory():
    """Found: 1,000 halves of pushes with 64 MiB under way took 250 MiB; errors held the chunks of 150."""
    server = push_server(FairPool(2, "push"), Limits())
    data, held = memoryview(noise(frames.CHUNK_BYTES)), threading.Event()
    head = hub_pb2.PushHead(unit=1, seq=1, num_bytes=2**40).SerializeToString()
    message = frames.pack_chunk(frames.Chunk(0, crc32(head, crc32(data)), data, head))

    def half():
        yield message
        held.wait(WITHIN_S)

    gc.disable()
    try:
        with channel(server.address, None) as line:
            call = line.stream_unary("/aedit.v1.Exchange/Push")
            tracemalloc.start()
            for _ in range(40):
                with pytest.raises(grpc.RpcError) as refused:
                    call(half(), timeout=WITHIN_S)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            after, _ = tracemalloc.get_traced_memory()
            held.set()
    finally:
        tracemalloc.stop()
        gc.enable()
        server.stop(0.0)
    assert after < 8 * 2**20


def test_a_chunk_of_a_million_fields_is_refused_before_they_are_read():
    with pytest.raises(ValueError, match="more than 64 fields"):
        frames.unpack_chunk(b"\x30\x01" * 2**20)


def test_connections_of_one_host_hold_no_more_unread_than_all_pushes_may():
    for in_flight, connections, window in [
        (2**30, 1024, 2**20),
        (2**28, 1024, 2**18),
        (2**26, 1024, 2**16),
        (2**25, 1024, 2**16 - 1),
    ]:
        assert Limits(in_flight_bytes=in_flight, connections=connections).window_bytes == window
    assert Limits(in_flight_bytes=2**40).window_bytes == frames.CHUNK_BYTES


def test_a_wire_with_a_long_round_trip_is_filled_by_windows_and_frames_that_the_server_announces():
    """Found: one chunk of 1 MiB per round trip."""
    server = push_server(FairPool(2, "push"), Limits())
    try:
        with socket.create_connection(("127.0.0.1", server.port), WITHIN_S) as line:
            line.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            head = line.recv(9, socket.MSG_WAITALL)
            body = line.recv(int.from_bytes(head[:3]), socket.MSG_WAITALL)
    finally:
        server.stop(0.0)
    assert head[3] == 4, "its settings come first"
    announced = dict(struct.iter_unpack(">HI", body))
    assert announced[4] == Limits().window_bytes == 2**20  # RFC 9113, 6.5.2: SETTINGS_INITIAL_WINDOW_SIZE
    assert announced[5] >= 2**18  # SETTINGS_MAX_FRAME_SIZE
