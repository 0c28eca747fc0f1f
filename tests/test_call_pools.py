"""Tests that calls which wait for replicas take no thread from those by which the replicas come."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest

from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.client import HubClient
from aedit.proto.wire.server import serve

WITHIN_S, NODES = 30.0, 20


@pytest.fixture
def crowd():
    """Yield the address of a hub at which many joins wait, and how many have come."""
    over, come = threading.Event(), threading.Semaphore(0)

    def join(request, caller):
        come.release()
        over.wait(WITHIN_S)
        return pb.JoinReply()

    core = MagicMock(join=join)
    core.hello.return_value, core.status.return_value = pb.HelloReply(term=3), pb.StatusReply(json="{}")
    core.heartbeat.return_value, core.take_over.return_value = pb.News(term=3), pb.TakeOverReply(term=3)
    core.confirm.return_value, core.propose.return_value = pb.ConfirmReply(), pb.Answer(term=3)
    server = serve(core, "127.0.0.1:0")
    clients = [HubClient(server.address, call_timeout_s=WITHIN_S) for _ in range(NODES)]
    try:
        with ThreadPoolExecutor(NODES) as threads:
            waiting = [threads.submit(client.join, pb.JoinRequest(name="n")) for client in clients]
            yield server.address, come
            over.set()
            assert all(one.result(WITHIN_S) == pb.JoinReply() for one in waiting)
    finally:
        over.set()
        for client in clients:
            client.close()
        server.stop(0.0)


def test_a_crowd_that_joins_holds_up_no_other_small_call(crowd):
    """Found: a peer could not ask its hub for its state, told nobody of the part, and no replica came."""
    address, come = crowd
    for _ in range(8):
        assert come.acquire(timeout=WITHIN_S)
    client = HubClient(address, call_timeout_s=WITHIN_S / 3)
    try:
        assert client.status(pb.StatusRequest()).json == "{}"
        assert client.heartbeat(pb.HeartbeatRequest()).term == 3
        assert client.hello(pb.HelloRequest()).term == 3
        assert client.take_over(pb.TakeOverRequest()).term == 3
        client.confirm(pb.ConfirmRequest())
        assert client.propose(pb.ProposeRequest()).term == 3
    finally:
        client.close()
