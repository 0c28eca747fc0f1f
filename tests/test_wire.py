"""Tests a hub over real sockets: calls, pushes and pulls arrive as sent, and invalid ones are refused."""

import threading
from contextlib import ExitStack, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from kit.waiting import until
from kit.wire import MemoryCore, noise

from aedit.proto.rpc import HubClient, HubRefused, Limits, channel, frames, hub_pb2, serve
from aedit.proto.rpc.connections import accepted_sockets
from aedit.types import UserError

MIB = 2**20


@contextmanager
def hub(core, limits=None, **options):
    server = serve(core, "127.0.0.1:0", limits=limits, **options)
    try:
        yield server
    finally:
        server.stop(0.0)


@contextmanager
def node(server, timeout_s=10.0, **options):
    client = HubClient(server.address, call_timeout_s=timeout_s, **options)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def core():
    return MemoryCore([noise(3 * MIB + 5), b""])


@pytest.fixture
def server(core):
    with hub(core) as server:
        yield server


@pytest.fixture
def client(server):
    with node(server) as client:
        yield client


def head(num_bytes, unit=1, seq=1, **fields):
    return hub_pb2.PushHead(unit=unit, seq=seq, num_bytes=num_bytes, **fields)


def raw_push(server, messages, timeout_s=10.0):
    """Return the answer to a peer that sends these bytes."""
    with channel(server.address, None) as line:
        try:
            return line.stream_unary("/aedit.v1.Exchange/Push")(iter(messages), timeout=timeout_s)
        except grpc.RpcError as error:
            return error.code(), error.details()


def pushed(data, **fields):
    start = head(len(data), **fields).SerializeToString()
    return list(frames.chunks(start, memoryview(data)))


def packed(chunks):
    return [frames.pack_chunk(chunk) for chunk in chunks]


# --- what is right arrives


def test_every_small_call_reaches_the_hub_and_its_answer_the_node(core, client):
    assert client.hello(hub_pb2.HelloRequest(protocol=7)).protocol == 7
    assert client.join(hub_pb2.JoinRequest(name="four")).node == 4
    assert client.heartbeat(hub_pb2.HeartbeatRequest(steps=12)).total_steps == 12
    assert client.lease(hub_pb2.LeaseRequest(samples=9)).blocks[0].end == 9
    assert client.take_over(hub_pb2.TakeOverRequest()).leads
    assert client.status(hub_pb2.StatusRequest()).json == '{"nodes": 2}'
    client.confirm(hub_pb2.ConfirmRequest(segment=5))
    client.leave(hub_pb2.LeaveRequest())
    assert core.calls == ["hello", "heartbeat", ("confirm", 5), "leave"]


@pytest.mark.parametrize("num_bytes", [0, 1, MIB, 3 * MIB + 5])
def test_a_push_arrives_as_it_was_sent(core, client, num_bytes):
    data = noise(num_bytes)
    assert client.push(head(num_bytes), memoryview(data)).accepted
    assert core.pushes[1, 1] == data


@pytest.mark.parametrize("unit", [0, 1])
def test_a_pull_brings_the_anchor(core, client, unit):
    into = bytearray(4 * MIB)
    answer = client.pull(hub_pb2.PullRequest(unit=unit), memoryview(into))
    assert (answer.version, answer.num_bytes) == (1, len(core.anchors[unit]))
    assert into == core.anchors[unit] + bytes(4 * MIB - answer.num_bytes)


def test_a_pull_goes_on_at_the_byte_that_it_is_asked_for(core, client):
    into = bytearray(core.anchors[0][:MIB] + bytes(3 * MIB))
    client.pull(hub_pb2.PullRequest(unit=0, version=1, offset=MIB), memoryview(into))
    assert into[: 3 * MIB + 5] == core.anchors[0]
    assert core.calls == [("pull", 1, MIB)]


def test_a_pull_starts_anew_if_the_hub_has_another_version_by_now(core, client):
    core.version = 2
    into = bytearray(noise(MIB, seed=1) + bytes(3 * MIB))
    assert client.pull(hub_pb2.PullRequest(unit=0, version=1, offset=MIB), memoryview(into)).version == 2
    assert into[: 3 * MIB + 5] == core.anchors[0]
    assert core.calls == [("pull", 1, MIB)]


def test_the_journal_is_followed(client):
    chunks = list(client.tail(hub_pb2.TailRequest(segment=8)))
    assert [(chunk.segment, chunk.offset, chunk.data) for chunk in chunks] == [(8, i, b"x") for i in range(3)]


def test_many_nodes_push_at_a_time_and_none_gets_the_others_bytes(core, server):
    data = [noise(MIB + 7, seed=i) for i in range(6)]

    def push(unit):
        with node(server, channels=2) as client:
            for seq in range(3):
                client.push(head(MIB + 7, unit=unit, seq=seq), memoryview(data[unit]))

    threads = [threading.Thread(target=push, args=(unit,)) for unit in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert core.pushes == {(unit, seq): data[unit] for unit in range(6) for seq in range(3)}


def test_pushes_that_wait_do_not_hold_up_a_beat(core):
    core.open.clear()
    with hub(core, threads=2) as server, node(server) as client:
        threads = [
            threading.Thread(target=client.push, args=(head(4, seq=seq), memoryview(b"1234")))
            for seq in range(20)
        ]
        for thread in threads:
            thread.start()
        try:
            until(lambda: core.calls == ["push", "push"], "both pushes")
            assert client.heartbeat(hub_pb2.HeartbeatRequest(steps=1), timeout_s=5).total_steps == 1
            assert core.pushes == {}
        finally:
            core.open.set()
        for thread in threads:
            thread.join(30)
    assert len(core.pushes) == 20


# --- what is wrong is refused


def test_a_refusal_arrives_with_its_code_and_text(client):
    with pytest.raises(HubRefused, match="asked to Join: layouts differ: 4 units here") as refused:
        client.join(hub_pb2.JoinRequest(name="stranger"))
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert client.address in str(refused.value)


def test_a_fault_of_the_hub_is_logged_there_and_does_not_leak(client, caplog):
    with pytest.raises(HubRefused, match="join failed here: the log") as refused:
        client.join(hub_pb2.JoinRequest(name="bug"))
    assert refused.value.code is grpc.StatusCode.INTERNAL
    assert "secret" not in str(refused.value)
    assert [record.exc_info[0] for record in caplog.records] == [KeyError]


def test_what_is_no_message_is_refused_without_a_traceback(server, caplog):
    with channel(server.address, None) as line, pytest.raises(grpc.RpcError) as refused:
        line.unary_unary("/aedit.v1.Membership/Join")(b"\xff\xff\xff", timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [record.exc_info for record in caplog.records] == [None]


def without(chunks, i):
    return chunks[:i] + chunks[i + 1 :]


def flipped(chunks, i):
    """Return the chunks with one bit of chunk i flipped."""
    data = bytearray(chunks[i].data)
    data[len(data) // 2] ^= 4
    return [
        *chunks[:i],
        frames.Chunk(chunks[i].offset, chunks[i].crc, bytes(data), chunks[i].head),
        *chunks[i + 1 :],
    ]


DATA = noise(3 * MIB)


@pytest.mark.parametrize(
    ("messages", "code", "text"),
    [
        (packed(flipped(pushed(DATA), 0)), "DATA_LOSS", "at byte 0: the checksum does not match"),
        (packed(flipped(pushed(DATA), 2)), "DATA_LOSS", "at byte 49152: the checksum does not match"),
        (packed(without(pushed(DATA), 1)), "INVALID_ARGUMENT", "at byte 49152, where 16384 is next"),
        (packed(pushed(DATA)[:1] + pushed(DATA)[:0:-1]), "INVALID_ARGUMENT", "where 16384 is next"),
        (packed(pushed(DATA)[:2]), "DATA_LOSS", "ended after 49152 of 3145728"),
        (packed(pushed(DATA)[1:]), "INVALID_ARGUMENT", "no head"),
        (packed([*pushed(DATA), pushed(DATA)[0]]), "INVALID_ARGUMENT", "where 3145728 is next"),
        ([], "INVALID_ARGUMENT", "no head"),
        ([packed(pushed(DATA))[0][:-1]], "INVALID_ARGUMENT", "ends within a field"),
        (packed(pushed(DATA, unit=100)), "INVALID_ARGUMENT", "there is no unit 100"),
        ([bytes(3 * MIB)], "RESOURCE_EXHAUSTED", "larger than max"),
    ],
)
def test_a_push_that_cannot_be_never_reaches_the_hub(core, server, messages, code, text):
    got, said = raw_push(server, messages)
    assert got.name == code
    assert "push" not in core.calls
    assert text in said


def test_whose_push_was_damaged_or_malformed_is_told_to_the_hub(core, server):
    for bad in (flipped(pushed(DATA), 0), flipped(pushed(DATA), 2), without(pushed(DATA), 1)):
        raw_push(server, packed(bad))
    raw_push(server, packed(pushed(DATA)[:2]))  # as on a cut link: no violation
    seq = head(len(DATA)).seq
    assert core.calls == [("garbled", seq, why) for why in ("damaged", "damaged", "malformed")]


def test_a_push_above_the_units_size_is_refused_before_it_is_sent(server, core):
    core.limit_bytes = 1000
    huge = frames.pack_chunk(next(frames.chunks(head(2**60).SerializeToString(), memoryview(b"1234"))))
    assert raw_push(server, [huge]) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"push: {2**60} bytes declared, at most 1000 are allowed",
    )


def test_pushes_above_the_bytes_in_flight_come_again(core):
    core.open.clear()
    with hub(core, Limits(in_flight_bytes=MIB)) as server, node(server) as first, node(server) as second:
        inside = threading.Thread(target=first.push, args=(head(MIB, unit=1), memoryview(bytes(MIB))))
        inside.start()
        until(lambda: core.calls == ["push"], "the push")
        code, said = raw_push(server, packed(pushed(b"12345678", unit=2)))
        assert (code.name, said) == (
            "RESOURCE_EXHAUSTED",
            "1048576 bytes are on their way, at most 1048576 may be",
        )
        pauses = []
        second._sleep = lambda seconds: (pauses.append(seconds), core.open.set(), inside.join(30))
        assert second.push(head(8, unit=2), memoryview(b"12345678")).accepted
        assert len(pauses) == 1


def test_one_push_above_the_bytes_in_flight_may_come_alone(core):
    with hub(core, Limits(in_flight_bytes=MIB)) as server, node(server) as client:
        for seq in range(2):
            assert client.push(head(2 * MIB, seq=seq), memoryview(bytes(2 * MIB))).accepted


def test_a_node_that_calls_too_often_is_asked_to_wait_and_others_are_not(core):
    def called(node):
        heartbeat = hub_pb2.HeartbeatRequest(who=hub_pb2.Who(node=node, session=1)).SerializeToString()
        try:
            line.unary_unary("/aedit.v1.Membership/Heartbeat")(heartbeat, timeout=10)
        except grpc.RpcError as error:
            return error.code(), error.details()

    with hub(core, Limits(calls_per_s=0.001)) as server, channel(server.address, None) as line:
        assert called(1) is None
        assert called(1) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "more than 0.001 calls a second")
        assert called(2) is None


def test_a_peer_that_stops_sending_is_ended(core):
    stop = threading.Event()

    def messages():
        yield packed(pushed(DATA))[0]
        stop.wait(30)

    with hub(core, Limits(stall_s=0.3)) as server:
        try:
            code, _ = raw_push(server, messages(), timeout_s=20)
            assert code is grpc.StatusCode.CANCELLED
            assert core.calls == []
        finally:
            stop.set()
        with node(server) as client:  # and its bytes are free again
            assert client.push(head(3 * MIB), memoryview(DATA)).accepted


def test_a_peer_that_stops_reading_is_ended(core):
    core.anchors = [noise(16 * MIB)]
    with hub(core, Limits(stall_s=0.3), threads=1) as server, channel(server.address, None) as line:
        call = line.unary_stream("/aedit.v1.Exchange/Pull")(
            hub_pb2.PullRequest().SerializeToString(), timeout=20
        )
        next(call)
        with node(server) as client:  # has to wait for the only thread
            into = memoryview(bytearray(16 * MIB))
            assert client.pull(hub_pb2.PullRequest(), into).num_bytes == 16 * MIB


def test_answers_that_nobody_reads_take_no_more_than_their_share_of_the_bytes(core):
    """As found: gRPC held two chunks of each of 700 pulls that nobody read, beside every limit."""
    core.anchors = [noise(16 * MIB)]
    limits = Limits(in_flight_bytes=16 * MIB, stall_s=600.0)
    # A client whose window grows with the speed of the line may take all of the answer.
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0)]
    request = hub_pb2.PullRequest().SerializeToString()
    with hub(core, limits) as server, ExitStack() as held:
        calls = []
        for _ in range(3 * limits.unread_answers):
            line = held.enter_context(grpc.insecure_channel(server.address, own))
            calls.append(line.unary_stream("/aedit.v1.Exchange/Pull")(request, timeout=60))
            next(calls[-1])
        until(
            lambda: sum(call.is_active() for call in calls) <= limits.unread_answers,
            "the oldest are ended",
        )
        assert calls[-1].is_active()
        with node(server) as client:
            into = memoryview(bytearray(16 * MIB))
            assert client.pull(hub_pb2.PullRequest(), into).num_bytes == 16 * MIB


def test_a_connection_whose_answer_was_not_read_in_time_is_ended(core):
    """Otherwise gRPC would hold the answer for as long as the peer is connected."""
    core.anchors = [noise(16 * MIB)]
    with hub(core, Limits(stall_s=0.3)) as server, channel(server.address, None) as line:
        call = line.unary_stream("/aedit.v1.Exchange/Pull")(
            hub_pb2.PullRequest().SerializeToString(), timeout=60
        )
        next(call)
        until(lambda: not call.is_active(), "the call is ended")
        until(lambda: not list(accepted_sockets(server.port)), "its connection is ended")


# --- what others expect of a server


def test_health_and_reflection_answer(server):
    with channel(server.address, None) as line:
        health = health_pb2_grpc.HealthStub(line)
        for name in ("", "aedit.v1.Exchange"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stub = reflection_pb2_grpc.ServerReflectionStub(line)
        (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {"aedit.v1.Membership", "aedit.v1.Exchange", "aedit.v1.State", "grpc.health.v1.Health"} <= names


def test_a_port_that_another_hub_has_is_an_error(core, server):
    with pytest.raises(UserError, match=f"cannot listen on {server.address}"):
        serve(core, server.address)
