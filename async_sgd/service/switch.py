"""What gRPC holds while a hub changes from a standby to the one that leads."""

from collections.abc import Iterator

from aedit.proto.wire import hub_pb2 as pb
from aedit.proto.wire.service import HubCore


class Switch:
    """`HubCore` that hands every call to `core`, whichever that is by now."""

    def __init__(self, core: HubCore) -> None:
        self.core = core

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        return self.core.hello(request)

    def join(self, request: pb.JoinRequest) -> pb.JoinReply:
        return self.core.join(request)

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        return self.core.heartbeat(request)

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        return self.core.lease(request)

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        return self.core.leave(request)

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        return self.core.take_over(request)

    def max_push_bytes(self, unit: int) -> int:
        return self.core.max_push_bytes(unit)

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        return self.core.push(head, data)

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        self.core.garbled(head, reason)

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        return self.core.pull(request)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        return self.core.status(request)

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk]:
        return self.core.tail(request)

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        return self.core.confirm(request)
