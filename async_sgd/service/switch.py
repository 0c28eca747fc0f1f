"""The object that gRPC calls while a hub changes from standby to leader."""

from collections.abc import Iterator

from aedit.proto.rpc import Caller, HubCore, Quiet
from aedit.proto.rpc import hub_pb2 as pb


class Switch:
    """`HubCore` that passes every call to `core`, which may be replaced."""

    def __init__(self, core: HubCore) -> None:
        self.core = core

    def hello(self, request: pb.HelloRequest) -> pb.HelloReply:
        """Call `core.hello`."""
        return self.core.hello(request)

    def join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        """Call `core.join`."""
        return self.core.join(request, caller)

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        """Call `core.heartbeat`."""
        return self.core.heartbeat(request)

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        """Call `core.lease`."""
        return self.core.lease(request)

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Call `core.leave`."""
        return self.core.leave(request)

    def take_over(self, request: pb.TakeOverRequest) -> pb.TakeOverReply:
        """Call `core.take_over`."""
        return self.core.take_over(request)

    def max_push_bytes(self, head: pb.PushHead) -> int:
        """Call `core.max_push_bytes`."""
        return self.core.max_push_bytes(head)

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        """Call `core.push`."""
        return self.core.push(head, data)

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        """Call `core.garbled`."""
        self.core.garbled(head, reason)

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        """Call `core.pull`."""
        return self.core.pull(request)

    def status(self, request: pb.StatusRequest) -> pb.StatusReply:
        """Call `core.status`."""
        return self.core.status(request)

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk | Quiet]:
        """Call `core.tail`."""
        return self.core.tail(request)

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        """Call `core.confirm`."""
        return self.core.confirm(request)

    def propose(self, request: pb.ProposeRequest) -> pb.Answer:
        """Call `core.propose`."""
        return self.core.propose(request)
