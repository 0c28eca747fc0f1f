"""Client of a hub, for a node, a standby or a reader.

Every call has a deadline and is retried while the error may pass by itself.
"""

import itertools
import logging
import random as randomness
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from aedit.proto.wire import frames, hub_pb2
from aedit.proto.wire.download import Download
from aedit.proto.wire.retry import HubRefused, HubUnreachable, Patience, TransferBroken, is_final, why
from aedit.proto.wire.security import ClientKeys
from aedit.proto.wire.watch import Stream, Watch

__all__ = ["Download", "HubClient", "HubRefused", "HubUnreachable"]

T = TypeVar("T")
M = TypeVar("M", bound=Message)

_MIB = 2**20
_LATE_S = 1.0
"""A call that ends so long after its deadline shows a defect, of ours or of the machine's load."""
log = logging.getLogger(__name__)
_OPTIONS = (
    ("grpc.max_receive_message_length", frames.MESSAGE_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A hub that is back is found within 2 s; gRPC's own pauses grow to 2 minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A connection per channel: a heartbeat does not queue behind an array, and lost packets hold up only one.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # The environment decides nothing.
    ("grpc.enable_http_proxy", 0),
)
# keepalive_timeout is also the kernel's: how long sent bytes may stay unacknowledged. What ends a connection
# to a peer that is stopped, whose kernel goes on acknowledging, is ping_timeout.
_QUICK = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
)
# On a slow line a ping waits behind seconds of an array: an early end would have it start anew for ever.
_PATIENT = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 30_000),
)


class HubClient:
    """Open connections to one address: one for small calls and `channels` for arrays.

    Any thread may call. `call_timeout_s` is the deadline of a small call with all its tries, and how long an
    array may stand still; as a whole it has that much time for each MiB. Every method raises HubUnreachable
    after its deadline, and HubRefused if the other side refuses. sleep(seconds), random() in [0, 1): for
    tests.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None = None,
        *,
        call_timeout_s: float = 30.0,
        channels: int = 1,
        sleep: Callable[[float], object] | None = None,
        random: Callable[[], float] = randomness.random,
    ) -> None:
        self.address = address
        self._timeout_s = call_timeout_s
        self._closed = threading.Event()
        self._sleep = sleep or self._closed.wait
        self._random = random
        self._watch = Watch(call_timeout_s)
        self._encrypted = keys is not None and keys.credentials is not None
        self._channels = [channel(address, keys, quick=i == 0) for i in range(1 + channels)]
        self._bulk = itertools.cycle(self._channels[1:])

    def hello(self, request: hub_pb2.HelloRequest, timeout_s: float | None = None) -> hub_pb2.HelloReply:
        """Ask for the run's configuration."""
        return self.call("Membership/Hello", request, hub_pb2.HelloReply, timeout_s)

    def join(self, request: hub_pb2.JoinRequest, timeout_s: float | None = None) -> hub_pb2.JoinReply:
        """Become a member."""
        return self.call("Membership/Join", request, hub_pb2.JoinReply, timeout_s)

    def heartbeat(self, request: hub_pb2.HeartbeatRequest, timeout_s: float | None = None) -> hub_pb2.News:
        """Send a report and return the news."""
        return self.call("Membership/Heartbeat", request, hub_pb2.News, timeout_s)

    def lease(self, request: hub_pb2.LeaseRequest, timeout_s: float | None = None) -> hub_pb2.LeaseReply:
        """Ask for blocks of sample positions."""
        return self.call("Membership/Lease", request, hub_pb2.LeaseReply, timeout_s)

    def leave(self, request: hub_pb2.LeaveRequest, timeout_s: float | None = None) -> hub_pb2.LeaveReply:
        """Leave the run."""
        return self.call("Membership/Leave", request, hub_pb2.LeaveReply, timeout_s)

    def take_over(
        self, request: hub_pb2.TakeOverRequest, timeout_s: float | None = None
    ) -> hub_pb2.TakeOverReply:
        """Vote for the standby at this address."""
        return self.call("Membership/TakeOver", request, hub_pb2.TakeOverReply, timeout_s)

    def status(self, request: hub_pb2.StatusRequest, timeout_s: float | None = None) -> hub_pb2.StatusReply:
        """Ask for the hub's status."""
        return self.call("State/Status", request, hub_pb2.StatusReply, timeout_s)

    def confirm(
        self, request: hub_pb2.ConfirmRequest, timeout_s: float | None = None
    ) -> hub_pb2.ConfirmReply:
        """Say what this standby has on disk."""
        return self.call("State/Confirm", request, hub_pb2.ConfirmReply, timeout_s)

    def push(self, head: hub_pb2.PushHead, data: memoryview) -> hub_pb2.PushReply:
        """Send `data`, from its start at every try: the hub takes it once. It must not change meanwhile."""
        first = head.SerializeToString()

        def once(patience: Patience) -> hub_pb2.PushReply:
            def messages() -> Iterator[bytes]:
                for chunk in frames.chunks(first, data):
                    yield frames.pack_chunk(chunk)
                    stream.moved(len(chunk.data))
                    patience.moved()

            with self._watched() as (stream, calls):
                pushed: Any = next(self._bulk).stream_unary("/aedit.v1.Exchange/Push")
                calls.append(pushed.future(messages(), timeout=patience.left_s))
                return hub_pb2.PushReply.FromString(calls[0].result())

        return self._try(f"push unit {head.unit}", once, self._patience(data.nbytes))

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
                patience.moved()

            with self._watched() as (stream, calls):
                asked: Any = next(self._bulk).unary_stream("/aedit.v1.Exchange/Pull")
                calls.append(asked(download.request.SerializeToString(), timeout=patience.left_s))
                return download.take(calls[0], moved)

        patience = self._patience(download.room_bytes)
        if not again:
            patience = Patience(0.0, patience.left_s)
        return self._try(f"pull unit {download.request.unit}", once, patience)

    def tail(self, request: hub_pb2.TailRequest) -> Iterator[hub_pb2.TailChunk]:
        """Yield the hub's journal as it grows; ask again after an error.

        The hub sends something every second, so a silence of `call_timeout_s` ends it too.
        """
        try:
            with self._watched() as (stream, calls):
                asked: Any = next(self._bulk).unary_stream("/aedit.v1.State/Tail")
                calls.append(asked(request.SerializeToString()))
                for message in calls[0]:
                    stream.moved(_MIB)
                    yield hub_pb2.TailChunk.FromString(message)
        except (grpc.RpcError, TransferBroken, DecodeError) as error:
            raise self._error("tail", error) from error

    def close(self) -> None:
        """Close all connections. Calls of other threads end with HubUnreachable."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

    def call(self, method: str, request: Message, kind: type[M], timeout_s: float | None = None) -> M:
        """Send a small message to `Service/Method` and return the answer, of type `kind`."""

        def once(patience: Patience) -> M:
            call: Any = self._channels[0].unary_unary(f"/aedit.v1.{method}")
            return kind.FromString(call(body, timeout=patience.left_s))

        body = request.SerializeToString()
        total_s = self._timeout_s if timeout_s is None else timeout_s
        return self._try(method.rpartition("/")[2], once, Patience(total_s, total_s))

    def _patience(self, num_bytes: int) -> Patience:
        return Patience(self._timeout_s, self._timeout_s * max(1.0, num_bytes / _MIB))

    @contextmanager
    def _watched(self) -> Iterator[tuple[Stream, list[Any]]]:
        """Yield a stream that is ended when it stands still, and the list for its call."""
        calls: list[Any] = []
        with self._watch.over(lambda: [call.cancel() for call in calls]) as stream:
            try:
                yield stream, calls
            except (grpc.RpcError, grpc.FutureCancelledError) as error:
                if stream.stalled:
                    raise TransferBroken(f"nothing moved for {self._timeout_s:g} s") from error
                if isinstance(error, grpc.FutureCancelledError):
                    raise TransferBroken("closed here") from error
                raise
            finally:
                for call in calls:
                    call.cancel()

    def _try(self, what: str, once: Callable[[Patience], T], patience: Patience) -> T:
        try:
            return self._tried(what, once, patience)
        finally:
            if patience.left_s < -_LATE_S:
                log.warning("%s ended %.1f s past its deadline", self._asked(what), -patience.left_s)

    def _tried(self, what: str, once: Callable[[Patience], T], patience: Patience) -> T:
        while True:
            try:
                return once(patience)
            except HubRefused as refused:
                raise HubRefused(refused.code, f"{self._asked(what)}: {refused.text}") from None
            except (grpc.RpcError, TransferBroken, DecodeError, ValueError) as error:
                pause_s = patience.pause_s(self._random())
                if self._is_over(error) or pause_s is None:
                    raise self._error(what, error) from error
            self._sleep(pause_s)

    def _is_over(self, error: Exception) -> bool:
        return self._closed.is_set() or (isinstance(error, grpc.RpcError) and is_final(error))

    def _error(self, what: str, error: Exception) -> HubUnreachable | HubRefused:
        """Return what a failed call raises in the end."""
        if self._closed.is_set():
            return HubUnreachable(f"{self._asked(what)}: closed here")
        if not isinstance(error, grpc.RpcError):
            return HubUnreachable(f"{self._asked(what)}: {error}")
        text = f"{self._asked(what)}: {why(error, self._encrypted)}"
        return HubRefused(error.code(), text) if is_final(error) else HubUnreachable(text)

    def _asked(self, what: str) -> str:
        return f"{self.address}, asked to {what}"


def channel(address: str, keys: ClientKeys | None, *, quick: bool = False) -> grpc.Channel:
    """Return a new connection to HOST:PORT, made when it is needed and again when it breaks.

    `quick`: for small calls only; a peer that is stopped or cut off is noticed within 8 s instead of 40.
    """
    options = _OPTIONS + (_QUICK if quick else _PATIENT)
    if keys is None or keys.credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, keys.credentials, options)
