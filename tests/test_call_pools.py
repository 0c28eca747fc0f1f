"""Tests that calls which wait for replicas take no thread from those by which the replicas come."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import pytest

from aedit.proto.rpc import HubClient, serve
from aedit.proto.rpc import hub_pb2 as pb

WITHIN_S, NODES = 30.0, 20


@pytest.fixture
def crowd():
    """Yield the address of a hub at which many joins wait, and how many have come."""
    over, come = threading.Event(), threading.Semaphore(0)

    def join(request, caller):
        come.release()
        over.wait(WITHIN_S)
        return pb.JoinReply()

    def answers(name, reply):
        answer = MagicMock(return_value=reply)
        answer.__name__ = name
        return answer

    core = MagicMock(join=join)
    replies = {
        "hello": pb.HelloReply(term=3),
        "status": pb.StatusReply(json="{}"),
        "heartbeat": pb.News(term=3),
        "take_over": pb.TakeOverReply(term=3),
        "confirm": pb.ConfirmReply(),
        "propose": pb.Answer(term=3),
        "lease": pb.LeaseReply(),
        "leave": pb.LeaveReply(),
    }
    for name, reply in replies.items():
        setattr(core, name, answers(name, reply))
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
