"""A hub in memory, for tests of the wire: it keeps what was pushed and returns what it was given."""

import hashlib
import socket
import threading
from contextlib import contextmanager, suppress

import grpc
import numpy as np

from aedit.proto.rpc import Refusal, hub_pb2


class MemoryCore:
    """Implements HubCore. `calls`: the calls received, in order. `anchors`: bytes by unit, as version 1."""

    def __init__(self, anchors=(), max_push_bytes=2**24):
        self.anchors = list(anchors)
        self.version = 1
        self.limit_bytes = max_push_bytes
        self.calls = []
        self.pushes = {}
        self.open = threading.Event()
        self.open.set()
        """While it is cleared, every complete push waits."""

    def hello(self, request):
        self.calls.append("hello")
        return hub_pb2.HelloReply(protocol=request.protocol, run="r", term=3)

    def join(self, request, caller):
        if request.name == "stranger":
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, "layouts differ: 4 units here, 3 there")
        if request.name == "bug":
            raise KeyError("secret path")
        return hub_pb2.JoinReply(term=3, node=len(request.name))

    def heartbeat(self, request):
        self.calls.append("heartbeat")
        return hub_pb2.News(term=3, total_steps=request.steps)

    def lease(self, request):
        return hub_pb2.LeaseReply(blocks=[hub_pb2.Block(start=0, end=request.samples)])

    def leave(self, request):
        self.calls.append("leave")
        return hub_pb2.LeaveReply()

    def take_over(self, request):
        return hub_pb2.TakeOverReply(term=4, leads=True)

    def propose(self, request):
        raise AssertionError("no other hub asks for votes")

    def max_push_bytes(self, head):
        if head.unit > 99:
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"there is no unit {head.unit}")
        return self.limit_bytes

    def garbled(self, head, reason):
        self.calls.append(("garbled", head.seq, reason.split(":")[0]))

    def push(self, head, data):
        self.calls.append("push")
        assert len(data) == head.num_bytes
        assert self.open.wait(30)
        self.pushes[head.unit, head.seq] = bytes(data)
        return hub_pb2.PushReply(accepted=True, news=hub_pb2.UnitNews(unit=head.unit, seq=head.seq))

    def pull(self, request):
        self.calls.append(("pull", request.version, request.offset))
        if request.unit >= len(self.anchors):
            raise Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"there is no unit {request.unit}")
        data = self.anchors[request.unit]
        digest = hashlib.sha256(data).digest()
        head = hub_pb2.PullHead(version=self.version, codec="fp32", num_bytes=len(data), sha256=digest)
        return head, memoryview(data)

    def status(self, request):
        return hub_pb2.StatusReply(json='{"nodes": 2}')

    def tail(self, request):
        for i in range(3):
            yield hub_pb2.TailChunk(segment=request.segment, offset=i, data=b"x")

    def confirm(self, request):
        self.calls.append(("confirm", request.segment))
        return hub_pb2.ConfirmReply()


@contextmanager
def cutting(address, cut_bytes=250_000):
    """Yield the address of a proxy that ends each connection after so many bytes either way, and a list.

    The list has the connections so far.
    """
    host, _, port = address.rpartition(":")
    connections = []

    def passed(source, target, left):
        with suppress(OSError):
            while left > 0 and (data := source.recv(min(left, 65_536))):
                target.sendall(data)
                left -= len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with suppress(OSError):
            while True:
                here, _ = listening.accept()
                connections.append(here)
                other = socket.create_connection((host, int(port)))
                for work in ((here, other, cut_bytes), (other, here, cut_bytes)):
                    threading.Thread(target=passed, args=work, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", connections


def noise(num_bytes, seed=0):
    return np.random.default_rng(seed).bytes(num_bytes)
