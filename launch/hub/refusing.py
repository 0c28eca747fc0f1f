"""The calls of a hub's service that only the leading hub answers, as a follower refuses them."""

from collections.abc import Iterator

import grpc

from aedit.proto.rpc import Caller, Refusal
from aedit.proto.rpc import hub_pb2 as pb


class Refusing:
    """Refusals of the calls that only the leading hub may answer."""

    def _refusal(self) -> Refusal:
        return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this hub is a standby: call the leading hub")

    def join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        """Refuse the call."""
        raise self._refusal()

    def heartbeat(self, request: pb.HeartbeatRequest) -> pb.News:
        """Refuse the call."""
        raise self._refusal()

    def lease(self, request: pb.LeaseRequest) -> pb.LeaseReply:
        """Refuse the call."""
        raise self._refusal()

    def leave(self, request: pb.LeaveRequest) -> pb.LeaveReply:
        """Refuse the call."""
        raise self._refusal()

    def max_push_bytes(self, head: pb.PushHead) -> int:
        """Refuse the call."""
        raise self._refusal()

    def push(self, head: pb.PushHead, data: memoryview) -> pb.PushReply:
        """Refuse the call."""
        raise self._refusal()

    def garbled(self, head: pb.PushHead, reason: str) -> None:
        """Refuse the call."""
        raise self._refusal()

    def pull(self, request: pb.PullRequest) -> tuple[pb.PullHead, memoryview]:
        """Refuse the call."""
        raise self._refusal()

    def tail(self, request: pb.TailRequest) -> Iterator[pb.TailChunk]:
        """Refuse the call."""
        raise self._refusal()

    def confirm(self, request: pb.ConfirmRequest) -> pb.ConfirmReply:
        """Refuse the call."""
        raise self._refusal()
