"""What a meeting over gRPC does when nodes and places come late, leave, break or lie."""

import threading
from contextlib import contextmanager

import grpc
import pytest
import torch
from contract import numbers, until
from nodes import batches, in_threads, over_grpc, parameters, tower, train

from aedit.edit.config import EditConfig
from aedit.edit.exchange import MeanExchange
from aedit.launch.cli.keys import make_keys
from aedit.proto.transports import meeting
from aedit.proto.transports.grpc_transport import GrpcTransport
from aedit.proto.transports.meeting import Meeting, serve_meeting
from aedit.proto.transports.transport import PeersMissing
from aedit.proto.wire import hub_pb2
from aedit.proto.wire.frames import chunks, pack
from aedit.proto.wire.security import client_keys, server_keys


@contextmanager
def place(nodes, *, timeout_s=20.0, limit_bytes=2**31):
    """A server and a function that opens node n's transport; all are closed."""
    opened = []

    def enter(node, **other):
        opened.append(GrpcTransport(server.address, node, nodes, **{"timeout_s": timeout_s, **other}))
        return opened[-1]

    server = serve_meeting(Meeting(nodes, timeout_s=timeout_s, limit_bytes=limit_bytes), "127.0.0.1:0")
    try:
        yield server, enter
    finally:
        for transport in opened:
            transport.close()
        server.stop(0)


def vanish(transport):
    """As if its process had been killed: connections break, nothing is said."""
    transport._closing.set()
    transport._channel.close()


def test_the_answer_is_over_those_who_came_by_the_deadline():
    with place(3, timeout_s=0.4) as (_, enter):
        first, second = enter(0), enter(1)
        asked = [
            first.weighted_mean("k", torch.tensor([1.0]), 1.0),
            second.weighted_mean("k", torch.tensor([4.0]), 2.0),
        ]
        rows = [transport.gather("rows", torch.tensor([7.0])) for transport in (second, first)]
        assert [pending.result().value.item() for pending in asked] == [3.0, 3.0]
        assert [pending.result().rows.tolist() for pending in rows] == [[[7.0], [7.0]]] * 2
        assert [pending.result().mine for pending in rows] == [1, 0]
        late = enter(2)
        assert late.weighted_mean("k", torch.tensor([100.0]), 1.0).result().value.item() == 3.0
        assert late.gather("rows", torch.tensor([100.0])).result().mine is None


def test_nobody_waits_for_a_node_that_has_left():
    with place(3, timeout_s=60.0) as (_, enter):
        first, second, gone = (enter(n) for n in range(3))
        asked = first.weighted_mean("k", torch.tensor([1.0]), 1.0)
        second.weighted_mean("k", torch.tensor([3.0]), 1.0).done()
        gone.close()
        assert asked.result().value.item() == 2


def test_nobody_waits_for_a_node_whose_connection_broke(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_S", 0.05)
    with place(2, timeout_s=60.0) as (_, enter):
        stays, breaks = enter(0), enter(1)
        breaks.post("here", "")
        until(lambda: breaks.read("here") is not None, "the notes being followed")
        vanish(breaks)
        assert stays.weighted_mean("k", torch.tensor([1.0]), 1.0).result().value.item() == 1


def test_a_node_that_came_back_is_waited_for_again(monkeypatch):
    monkeypatch.setattr(meeting, "GRACE_S", 0.05)
    with place(2, timeout_s=60.0) as (_, enter):
        stays, breaks = enter(0), enter(1)
        breaks.post("here", "")
        until(lambda: breaks.read("here") is not None, "the notes being followed")
        vanish(breaks)
        stays.gather("alone", torch.zeros(1)).result()
        back = enter(1)
        until(lambda: back.read("here") is not None, "the notes being followed")
        asked = stays.weighted_mean("k", torch.tensor([1.0]), 1.0)
        until(lambda: not stays._to_bring, "the first value's arrival")
        back.weighted_mean("k", torch.tensor([3.0]), 1.0)
        assert asked.result().value.item() == 2


def test_what_was_given_before_leaving_counts():
    with place(2, timeout_s=60.0) as (_, enter):
        stays, leaves = enter(0), enter(1)
        leaves.weighted_mean("k", torch.full((2**20,), 3.0), 1.0)
        leaves.post("last", "words")
        leaves.close()
        mean = stays.weighted_mean("k", torch.full((2**20,), 1.0), 1.0).result()
        assert torch.equal(mean.value, torch.full((2**20,), 2.0))
        until(lambda: stays.read("last") == "words", "the note")


def test_who_comes_later_reads_the_note_that_stayed():
    with place(2) as (_, enter):
        first = enter(0)
        for text in ("one", "two"):
            first.post("a", text)
        first.post("b", "")
        until(lambda: first.read("b") is not None, "the notes")
        second = enter(1)
        until(lambda: second.read("b") is not None, "the notes")
        assert (first.read("a"), second.read("a")) == ("one", "one")


def test_more_values_than_threads_are_answered():
    count = 3 * meeting.GIVES

    def job(transport, node):
        asked = [transport.weighted_mean(f"{i}", torch.tensor([float(node + i)]), 1.0) for i in range(count)]
        return torch.cat([pending.result().value for pending in asked])

    for answer in over_grpc(2, job):
        assert answer.tolist() == [i + 0.5 for i in range(count)]


def test_a_place_that_is_not_there_is_named():
    with pytest.raises(PeersMissing, match=r"entering: 127\.0\.0\.1:9: .*refused"):
        GrpcTransport("127.0.0.1:9", 0, 1, timeout_s=0.2)


def test_a_place_may_open_after_its_nodes():
    with place(1) as (server, _):
        address = server.address
    came = []
    waits = threading.Thread(target=lambda: came.append(GrpcTransport(address, 0, 1, timeout_s=20.0)))
    waits.start()
    server = serve_meeting(Meeting(1, timeout_s=20.0), address)
    waits.join(20.0)
    came[0].close()
    server.stop(0)


def test_nodes_that_expect_another_meeting_are_told_the_difference():
    with place(2) as (server, enter):
        with pytest.raises(ValueError, match="nodes is 3 there and 2 here"):
            GrpcTransport(server.address, 0, 3, timeout_s=20.0)
        with pytest.raises(ValueError, match="timeout_s is 5"):
            enter(0, timeout_s=5.0)
        with pytest.raises(ValueError, match="no node 2 among 2"):
            enter(2)


def test_shapes_that_differ_are_named_and_harm_only_the_second():
    with place(2, timeout_s=60.0) as (_, enter):
        first, second = enter(0), enter(1)
        asked = first.weighted_mean("k", torch.zeros(5), 1.0)
        until(lambda: not first._to_bring, "the first value's arrival")
        with pytest.raises(ValueError, match=r"k: .*shape \(1,\), where node 0 has brought \(5,\)"):
            second.weighted_mean("k", torch.zeros(1), 1.0).result()
        second.weighted_mean("k", torch.full((5,), 2.0), 1.0)
        assert torch.equal(asked.result().value, torch.ones(5))


@pytest.mark.parametrize(
    "head",
    [
        hub_pb2.GiveHead(key="k", shape=[2**40], weight=0.0),
        hub_pb2.GiveHead(key="k", shape=[2**40], weight=1.0, num_bytes=2**42),
        hub_pb2.GiveHead(key="k", shape=[2**63, 2**63], weight=1.0, num_bytes=8),
        hub_pb2.GiveHead(key="k", shape=[2], weight=1.0, num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], weight=0.0, num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], weight=-1.0, num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], weight=float("nan"), num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], weight=float("inf"), num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], row=True, num_bytes=4),
        hub_pb2.GiveHead(key="k", shape=[1], weight=1.0, num_bytes=4, node=7),
        hub_pb2.GiveHead(key="k", shape=[2], weight=1.0, num_bytes=8),  # and 4 bytes come
        b"\xff\xff",
        b"",
    ],
    ids=lambda head: str(head).replace("\n", " "),
)
def test_what_is_not_as_declared_is_refused_and_nobody_is_harmed(head):
    sent = bytes(4) if isinstance(head, bytes) else bytes(min(4, head.num_bytes))
    head = head if isinstance(head, bytes) else head.SerializeToString()
    with place(1, limit_bytes=2**20) as (server, enter), grpc.insecure_channel(server.address) as channel:
        give = channel.stream_stream("/aedit.v1.Meeting/Give")
        with pytest.raises(grpc.RpcError) as caught:
            list(give(map(pack, chunks(head, memoryview(sent))), timeout=10))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "Traceback" not in caught.value.details()
        assert enter(0).weighted_mean("k", torch.tensor([2.0]), 1.0).result().value.item() == 2


def test_a_place_that_goes_away_fails_the_wait_by_name_and_later_calls_too():
    with place(2, timeout_s=0.3) as (server, enter):
        transport = enter(0)
        asked = transport.weighted_mean("7/block.3", numbers(0), 1.0)
        transport.gather("warm", torch.zeros(1))
        server.stop(0)
        with pytest.raises(PeersMissing, match=r"7/block\.3: 127\.0\.0\.1:"):
            asked.result()

        def is_known():
            try:
                transport.read("note")
            except PeersMissing:
                return True
            return False

        until(is_known, "the loss of the meeting place")
        with pytest.raises(PeersMissing):
            transport.gather("later", torch.zeros(1))


def test_closing_leaves_no_thread():
    def ours():
        return {thread for thread in threading.enumerate() if thread.name.startswith("aedit-")}

    before = ours()
    with place(2) as (_, enter):
        first, second = enter(0), enter(1)
        first.post("a", "b")
        asked = first.gather("k", torch.zeros(1))
        second.gather("k", torch.zeros(1)).result()
        asked.result()
        first.gather("never answered", torch.zeros(1))
        mine = {thread for thread in ours() - before if not thread.name.startswith("serve")}
        assert len(mine) >= 4
        first.close()
        second.close()
        first.close()  # twice is once
        assert not [thread for thread in mine if thread.is_alive()]


def test_values_travel_over_tls_for_those_with_the_token(tmp_path):
    make_keys(tmp_path, ["127.0.0.1"], ["alpha"])
    keys = {
        "server_keys": server_keys(tmp_path / "hub", require_client_certificates=True),
        "client_keys": client_keys(tmp_path / "alpha"),
    }
    job = lambda transport, node: transport.weighted_mean("k", numbers(node), 1.0).result().value  # noqa: E731
    first, second = over_grpc(2, job, **keys)
    assert torch.equal(first, second)
    make_keys(tmp_path / "other", ["127.0.0.1"], ["alpha"])
    (tmp_path / "alpha" / "token").write_bytes((tmp_path / "other" / "token").read_bytes())
    with pytest.raises(ValueError, match="wrong token"):
        over_grpc(1, job, **keys | {"client_keys": client_keys(tmp_path / "alpha")})


@pytest.mark.parametrize("fragments", [1, 2])
def test_training_over_grpc_has_the_bits_of_training_in_memory(fragments):
    config = EditConfig(every=4, warmup_steps=2, fragments=fragments)
    models = [[tower(3) for _ in range(2)] for _ in range(2)]
    start = parameters(models[0][0])

    def job(models):
        def trained(transport, node):
            inner = torch.optim.AdamW(models[node].parameters(), lr=0.05)
            train(models[node], inner, MeanExchange(transport), batches(node, 18), config)
            return parameters(models[node])

        return trained

    in_memory, by_wire = in_threads(2, job(models[0])), over_grpc(2, job(models[1]))
    for ours, theirs in zip(by_wire, in_memory, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(by_wire[0][name], start[name]) for name in start)
