"""Client of a hub, for a node, a standby or a reader.

Every call has a deadline and is retried while the error may pass by itself.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc.calls import MIB, Calls, channel
from aedit.proto.rpc.download import Download
from aedit.proto.rpc.retry import HubRefused, HubUnreachable, NobodyListens, Patience, Pauses, TransferBroken
from aedit.proto.rpc.security import ClientKeys
from aedit.proto.rpc.upload import Upload
from aedit.types import PositiveFloat, PositiveInt, checked

__all__ = ["Download", "HubClient", "HubRefused", "HubUnreachable", "NobodyListens", "Pauses", "channel"]


M = TypeVar("M", bound=Message)


@checked()
class HubClient:
    """Open connections to one address: one for small calls and `channels` for arrays.

    Any thread may call. `call_timeout_s` is the deadline of a small call with all its tries, and how long an
    array may stand still; as a whole it has that much time for each MiB. Every method raises HubUnreachable
    after its deadline, and HubRefused if the other side refuses. `until_it_listens`: whether a call waits for
    a program to listen at the address, which may be about to start; else it raises NobodyListens at once.
    pauses: for tests.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None = None,
        *,
        call_timeout_s: PositiveFloat = 30.0,
        channels: PositiveInt = 1,
        pauses: Pauses = Pauses(),  # noqa: B008 - it is immutable
        until_it_listens: bool = True,
    ) -> None:
        self.address = address
        self._calls = Calls(
            address,
            keys,
            call_timeout_s=call_timeout_s,
            channels=channels,
            pauses=pauses,
            until_it_listens=until_it_listens,
        )

    def hello(self, request: hub_pb2.HelloRequest, timeout_s: float | None = None) -> hub_pb2.HelloReply:
        """Ask for the run's configuration."""
        return self._calls.call("Membership/Hello", request, hub_pb2.HelloReply, timeout_s)

    def join(self, request: hub_pb2.JoinRequest, timeout_s: float | None = None) -> hub_pb2.JoinReply:
        """Become a member."""
        return self._calls.call("Membership/Join", request, hub_pb2.JoinReply, timeout_s)

    def heartbeat(self, request: hub_pb2.HeartbeatRequest, timeout_s: float | None = None) -> hub_pb2.News:
        """Send a report and return the news."""
        return self._calls.call("Membership/Heartbeat", request, hub_pb2.News, timeout_s)

    def lease(self, request: hub_pb2.LeaseRequest, timeout_s: float | None = None) -> hub_pb2.LeaseReply:
        """Ask for blocks of sample positions."""
        return self._calls.call("Membership/Lease", request, hub_pb2.LeaseReply, timeout_s)

    def leave(self, request: hub_pb2.LeaveRequest, timeout_s: float | None = None) -> hub_pb2.LeaveReply:
        """Leave the run."""
        return self._calls.call("Membership/Leave", request, hub_pb2.LeaveReply, timeout_s)

    def take_over(
        self, request: hub_pb2.TakeOverRequest, timeout_s: float | None = None
    ) -> hub_pb2.TakeOverReply:
        """Offer this node's vote to the hub, or answer what it asked for."""
        return self._calls.call("Membership/TakeOver", request, hub_pb2.TakeOverReply, timeout_s)

    def status(self, request: hub_pb2.StatusRequest, timeout_s: float | None = None) -> hub_pb2.StatusReply:
        """Ask for the hub's status."""
        return self._calls.call("State/Status", request, hub_pb2.StatusReply, timeout_s)

    def confirm(
        self, request: hub_pb2.ConfirmRequest, timeout_s: float | None = None
    ) -> hub_pb2.ConfirmReply:
        """Say what this standby has on disk."""
        return self._calls.call("State/Confirm", request, hub_pb2.ConfirmReply, timeout_s)

    def propose(self, request: hub_pb2.ProposeRequest, timeout_s: float | None = None) -> hub_pb2.Answer:
        """Ask another hub of the run for its vote."""
        return self._calls.call("State/Propose", request, hub_pb2.Answer, timeout_s)

    def push(self, head: hub_pb2.PushHead, data: memoryview, *, continues: bool = False) -> hub_pb2.PushReply:
        """Send `data`, which must not change meanwhile. The hub takes it once.

        When the connection breaks, the next try starts after the last whole chunk that the hub has.
        continues: whether an earlier call may have sent a part of the same push.
        """
        first, upload = head.SerializeToString(), Upload(data)

        def once(patience: Patience) -> hub_pb2.PushReply:
            nonlocal continues
            offset = upload.start(self._resumed(head, patience)) if continues else 0
            continues = True

            def messages() -> Iterator[bytes]:
                for chunk in frames.chunks(first, data, offset=offset):
                    yield frames.pack_chunk(chunk)
                    stream.moved(len(chunk.data))
                    patience.moved(len(chunk.data))

            with self._calls.watched() as (stream, calls):
                pushed: Any = self._calls.bulk.stream_unary("/aedit.v1.Exchange/Push")
                calls.append(pushed.future(messages(), timeout=patience.left_s))
                return hub_pb2.PushReply.FromString(calls[0].result())

        return self._calls.retried(f"push unit {head.unit}", once, self._calls.patience(data.nbytes))

    def _resumed(self, head: hub_pb2.PushHead, patience: Patience) -> hub_pb2.PartialPush:
        """Return what the hub has of a push; nothing for a hub of an older version, which keeps none."""
        try:
            return self._calls.call_once("Exchange/Resume", head, hub_pb2.PartialPush, patience)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            return hub_pb2.PartialPush()

    def pull(self, request: hub_pb2.PullRequest, into: memoryview) -> hub_pb2.PullHead:
        """Fetch the answer into the start of `into`, complete and equal to its SHA-256.

        Bytes that have arrived are not fetched again when the connection breaks. Raises HubRefused if `into`
        is too short.
        """
        return self.fetch(Download(request, into))

    def fetch(self, download: Download, *, again: bool = True) -> hub_pb2.PullHead:
        """Fetch like `pull`, continuing where another hub or node has left off.

        After HubUnreachable, `download` may continue at the next one. again: whether to retry here before
        that, where there is no next one.
        """

        def once(patience: Patience) -> hub_pb2.PullHead:
            def moved(num_bytes: int) -> None:
                stream.moved(num_bytes)
                patience.moved(num_bytes)

            with self._calls.watched() as (stream, calls):
                asked: Any = self._calls.bulk.unary_stream("/aedit.v1.Exchange/Pull")
                calls.append(asked(download.request.SerializeToString(), timeout=patience.left_s))
                return download.take(calls[0], moved)

        patience = self._calls.patience(download.room_bytes)
        if not again:
            patience = Patience(0.0, patience.left_s)
        return self._calls.retried(f"pull unit {download.request.unit}", once, patience)

    def tail(self, request: hub_pb2.TailRequest) -> Iterator[hub_pb2.TailChunk]:
        """Yield the hub's journal as it grows; ask again after an error.

        The hub, which has answered a Hello, sends something every second: a silence of `call_timeout_s` ends
        it too.
        """
        num_bytes = 0
        try:
            with self._calls.watched() as (stream, calls):
                asked: Any = self._calls.bulk.unary_stream("/aedit.v1.State/Tail")
                calls.append(asked(request.SerializeToString()))
                for message in calls[0]:
                    stream.moved(MIB)
                    num_bytes += len(message)
                    yield hub_pb2.TailChunk.FromString(message)
        except (grpc.RpcError, TransferBroken, DecodeError) as error:
            raise self._calls.error("tail", error, num_bytes, answered=True) from error

    def call(self, method: str, request: Message, kind: type[M], timeout_s: float | None = None) -> M:
        """Send a small message to `Service/Method` and return the answer, of type `kind`."""
        return self._calls.call(method, request, kind, timeout_s)

    def close(self) -> None:
        """Close all connections. Calls of other threads end with HubUnreachable."""
        self._calls.close()
