"""Client of a hub, for a node, a standby or a reader; and the first call, which says who may take part.

Every call has a deadline and is retried while the error may be temporary.
"""

import itertools
import logging
import random
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

import aedit
from aedit import traces
from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc.hub_pb2 import HelloReply, HelloRequest
from aedit.proto.rpc.keys import ClientKeys, client_keys, is_loopback
from aedit.proto.rpc.limits import StallWatch, Stream
from aedit.proto.rpc.retry import (
    HubRefused,
    HubUnreachable,
    Patience,
    PortClosed,
    TransferBroken,
    is_final,
    is_port_closed,
    why,
)
from aedit.proto.rpc.transfer import Download, PrefixHash
from aedit.types import NonNegativeInt, PositiveFloat, UserError, checked

T = TypeVar("T")
M = TypeVar("M", bound=Message)
C = TypeVar("C", bound="Calls")
Metadata: TypeAlias = tuple[tuple[str, str], ...]

MIB = 2**20
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


@checked()
class Calls:
    """Open connections to one address: one for small calls and `channels` for arrays.

    Any thread may call. `call_timeout_s` is the deadline of a small call with all its tries, and how long an
    array may stand still; as a whole it has that much time for each MiB. Every method raises HubUnreachable
    after its deadline, and HubRefused if the other side refuses. `until_it_listens`: whether a call waits for
    a program to listen at the address, which may be about to start; else it raises PortClosed at once.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys = None,
        *,
        call_timeout_s: PositiveFloat = 30.0,
        channels: NonNegativeInt = 1,
        until_it_listens: bool = True,
    ) -> None:
        self.address, self._until_it_listens = address, until_it_listens
        self._timeout_s = call_timeout_s
        self._closed = threading.Event()
        self._has_answered = False
        self._sleep: Callable[[float], object] = self._closed.wait
        self._watch = StallWatch(call_timeout_s)
        self._keys, self._encrypted = keys, keys is not None
        self._channels = [channel(address, keys, quick=i == 0) for i in range(1 + channels)]
        self._bulk = itertools.cycle(self._channels[1:])
        self._late: aio.Channel | None = None
        """Connection for `call_late`, which the event loop makes and uses."""
        self._has_late = False
        """True from the first `call_late` on."""

    def close(self) -> None:
        """Close all connections. Calls of other threads end with HubUnreachable."""
        self._closed.set()
        for channel in self._channels:
            channel.close()
        if self._has_late:
            _finish(self._end_late())

    def call(
        self,
        method: str,
        request: Message,
        kind: type[M],
        timeout_s: float | None = None,
        metadata: Metadata = (),
    ) -> M:
        """Return the reply, of type `kind`, to a small call such as "Membership/Hello"."""

        def once(patience: Patience) -> M:
            return self.call_once(method, request, kind, patience, metadata)

        total_s = self._timeout_s if timeout_s is None else timeout_s
        return self.retried(method.rpartition("/")[2], once, Patience(total_s, total_s))

    def call_late(self, method: str, request: Message, kind: type[M], timeout_s: float) -> M:
        """Return the reply to a small call that the other side answers when there is something to tell.

        A blocking call of gRPC looks for signals five times a second; in this one the thread sleeps.
        """

        async def ask(patience: Patience) -> bytes:
            if self._closed.is_set():
                raise TransferBroken("closed here")
            if self._late is None:
                self._late = _aio_channel(self.address, self._keys)
            call: Any = self._late.unary_unary(f"/aedit.v1.{method}")
            reply: bytes = await call(request.SerializeToString(), timeout=patience.call_s)
            return reply

        def once(patience: Patience) -> M:
            try:
                return kind.FromString(_finish(ask(patience)))
            except CancelledError as error:
                raise TransferBroken("closed here") from error

        self._has_late = True
        return self.retried(method.rpartition("/")[2], once, Patience(timeout_s, timeout_s))

    async def _end_late(self) -> None:
        if self._late is not None:
            await self._late.close()

    def call_once(
        self,
        method: str,
        request: Message,
        kind: type[M],
        patience: Patience,
        metadata: Metadata = (),
    ) -> M:
        """Return the reply to a small call that is not tried again. Raises RpcError."""
        call: Any = self._channels[0].unary_unary(f"/aedit.v1.{method}")
        return kind.FromString(call(request.SerializeToString(), timeout=patience.call_s, metadata=metadata))

    def patience(self, num_bytes: int) -> Patience:
        """Return the limits on retries of an array of this size."""
        return Patience(self._timeout_s, self._timeout_s * max(1.0, num_bytes / MIB))

    def send_array(
        self,
        method: str,
        head: bytes,
        data: memoryview,
        patience: Patience,
        *,
        offset: int = 0,
        metadata: Metadata = (),
    ) -> bytes:
        """Send `data` from a byte on in chunks, once, and return the reply. For `retried`.

        Raises RpcError, or TransferBroken if nothing moved for the timeout.
        """
        with self._watched() as (stream, calls):

            def messages() -> Iterator[bytes]:
                for chunk in frames.chunks(head, data, offset=offset):
                    yield frames.pack_chunk(chunk)
                    stream.moved(len(chunk.data))
                    patience.moved(len(chunk.data))

            call: Any = next(self._bulk).stream_unary(f"/aedit.v1.{method}")
            calls.append(call.future(messages(), timeout=patience.left_s, metadata=metadata))
            reply: bytes = calls[0].result()
            return reply

    @contextmanager
    def receive_array(
        self, method: str, request: Message, patience: Patience
    ) -> Iterator[tuple[Iterator[bytes], Callable[[int], None]]]:
        """Yield the chunks of an array, and what is to be called with the bytes that arrived. For `retried`.

        Raises what `send_array` raises, in the block.
        """
        with self._watched() as (stream, calls):

            def moved(num_bytes: int) -> None:
                stream.moved(num_bytes)
                patience.moved(num_bytes)

            call: Any = next(self._bulk).unary_stream(f"/aedit.v1.{method}")
            calls.append(call(request.SerializeToString(), timeout=patience.left_s))
            yield calls[0], moved

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

    def retried(self, what: str, once: Callable[[Patience], T], patience: Patience) -> T:
        """Return what `once` returns, called again while its errors may pass. `what`: for error messages."""
        try:
            while True:
                try:
                    answer = once(patience)
                    self._has_answered = True
                    return answer
                except HubRefused as refused:
                    raise HubRefused(refused.code, f"{self._asked(what)}: {refused.text}") from None
                except (grpc.RpcError, TransferBroken, DecodeError, ValueError) as error:
                    pause_s = patience.pause_s(random.random())
                    is_over = self._closed.is_set() or (is_port_closed(error) and not self._until_it_listens)
                    is_over = is_over or (isinstance(error, grpc.RpcError) and is_final(error))
                    if is_over or pause_s is None:
                        raise self.error(what, error, patience.num_bytes) from error
                self._sleep(pause_s)
        finally:
            if patience.left_s < -_LATE_S:
                log.warning("%s ended %.1f s past its deadline", self._asked(what), -patience.left_s)

    def error(
        self, what: str, error: Exception, num_bytes: int = 0, *, answered: bool = False
    ) -> HubUnreachable | HubRefused:
        """Return what a failed call raises in the end.

        Args:
            what: As in `retried`.
            error: What it raised.
            num_bytes: Of its array that moved, in all tries.
            answered: Whether the other side has answered another caller with these keys.
        """
        asked = f"{self._asked(what)}{f', after {num_bytes} bytes' if num_bytes else ''}"
        if self._closed.is_set():
            return HubUnreachable(f"{asked}: closed here")
        if not isinstance(error, grpc.RpcError):
            return HubUnreachable(f"{asked}: {error}")
        answered = answered or self._has_answered or num_bytes > 0
        text = f"{asked}: {why(error, self._encrypted, answered=answered)}"
        if is_final(error):
            return HubRefused(error.code(), text)
        return PortClosed(text) if is_port_closed(error) else HubUnreachable(text)

    def _asked(self, what: str) -> str:
        return f"{self.address}, asked to {what}"


def channel(address: str, keys: ClientKeys, *, quick: bool = False) -> grpc.Channel:
    """Return a new connection to HOST:PORT, made when it is needed and again when it breaks.

    `quick`: for small calls only; a peer that is stopped or cut off is noticed within 8 s instead of 40.
    """
    options = _OPTIONS + (_QUICK if quick else _PATIENT)
    if keys is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, keys, options)


def _aio_channel(address: str, keys: ClientKeys) -> aio.Channel:
    """Return a connection as `channel` does, for small calls in the event loop. Called there."""
    options = _OPTIONS + _QUICK
    if keys is None:
        return aio.insecure_channel(address, options)
    return aio.secure_channel(address, keys, options)


def _finish(work: Coroutine[Any, Any, T]) -> T:
    from aedit.proto.rpc.server import finish  # here: processes without a server start faster

    return finish(work)


class HubClient(Calls):
    """Calls of a hub, or of a node that gives its anchors."""

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
        """Offer this node's vote to the hub, or answer what it asked for."""
        return self.call("Membership/TakeOver", request, hub_pb2.TakeOverReply, timeout_s)

    def status(self, request: hub_pb2.StatusRequest, timeout_s: float | None = None) -> hub_pb2.StatusReply:
        """Ask for the hub's status."""
        return self.call("State/Status", request, hub_pb2.StatusReply, timeout_s)

    def confirm(
        self, request: hub_pb2.ConfirmRequest, timeout_s: float | None = None
    ) -> hub_pb2.ConfirmReply:
        """Say what this standby has on disk."""
        return self.call("State/Confirm", request, hub_pb2.ConfirmReply, timeout_s)

    def propose(self, request: hub_pb2.ProposeRequest, timeout_s: float | None = None) -> hub_pb2.Answer:
        """Ask another hub of the run for its vote."""
        return self.call("State/Propose", request, hub_pb2.Answer, timeout_s)

    def push(self, head: hub_pb2.PushHead, data: memoryview, *, continues: bool = False) -> hub_pb2.PushReply:
        """Send `data`, which must not change meanwhile. The hub takes it once.

        When the connection breaks, the next try starts after the last whole chunk that the hub has.
        continues: whether an earlier call may have sent a part of the same push.
        """
        first, prefix = head.SerializeToString(), PrefixHash()

        def once(patience: Patience) -> hub_pb2.PushReply:
            nonlocal continues
            offset = prefix.resume_at(data, self._resumed(head, patience)) if continues else 0
            continues = True
            reply = self.send_array(
                "Exchange/Push", first, data, patience, offset=offset, metadata=traces.sent()
            )
            return hub_pb2.PushReply.FromString(reply)

        return self.retried(f"push unit {head.unit}", once, self.patience(data.nbytes))

    def _resumed(self, head: hub_pb2.PushHead, patience: Patience) -> hub_pb2.PartialPush:
        """Return what the hub has of a push; nothing for a hub of an older version, which keeps none."""
        try:
            return self.call_once("Exchange/Resume", head, hub_pb2.PartialPush, patience)
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
            with self.receive_array("Exchange/Pull", download.request, patience) as (messages, moved):
                return download.take(messages, moved)

        patience = self.patience(download.room_bytes)
        if not again:
            patience = Patience(0.0, patience.left_s)
        return self.retried(f"pull unit {download.request.unit}", once, patience)

    def tail(self, request: hub_pb2.TailRequest) -> Iterator[hub_pb2.TailChunk]:
        """Yield the hub's journal as it grows; ask again after an error.

        The hub, which has answered a Hello, sends something every second: a silence of `call_timeout_s` ends
        it too.
        """
        num_bytes = 0
        try:
            with self._watched() as (stream, calls):
                asked: Any = next(self._bulk).unary_stream("/aedit.v1.State/Tail")
                calls.append(asked(request.SerializeToString()))
                for message in calls[0]:
                    stream.moved(MIB)
                    num_bytes += len(message)
                    yield hub_pb2.TailChunk.FromString(message)
        except (grpc.RpcError, TransferBroken, DecodeError) as error:
            raise self.error("tail", error, num_bytes, answered=True) from error


class ClientPool(Generic[C]):
    """Clients by address, each made when it is first used. Any thread may call.

    connect: makes the client of an address.
    """

    def __init__(self, connect: Callable[[str], C]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._open: dict[str, C] = {}

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self._open)

    def get(self, address: str) -> C:
        """Return the client of an address."""
        with self._lock:
            if address not in self._open:
                self._open[address] = self._connect(address)
            return self._open[address]

    def drop(self, address: str) -> None:
        """Close the client of an address, if there is one."""
        with self._lock:
            client = self._open.pop(address, None)
        if client is not None:
            client.close()

    def close(self) -> None:
        """Close all clients."""
        for address in list(self._open):
            self.drop(address)


PROTOCOL = 7
"""Equal for all that take part in one run. It changes with whatever an older build would misunderstand
or compute otherwise: messages, journal records, arithmetic, defaults of settings that decide the result."""

HELLO_LIMIT_S = 10.0


def caller_keys(addresses: str, keys: Path | None, insecure: bool) -> ClientKeys:
    """Return what a node shows to the hubs at `addresses`.

    Args:
        addresses: HOST:PORT, or several separated by commas.
        keys: Folder with the node's token and certificates; None connects without TLS.
        insecure: Allow a connection without TLS to another machine.

    Raises:
        UserError: A file is missing, or the connection would be readable by others.
    """
    for place in addresses.split(","):
        check_address(place)
    if keys is not None:
        return client_keys(keys)
    open_to_others = [place for place in addresses.split(",") if not is_loopback(place)]
    if open_to_others and not insecure:
        raise UserError(
            f"{open_to_others[0]} is another machine: name what `aedit keys` made for this node with --keys,"
            " or say --insecure if the network is closed"
        )
    return None


def check_address(place: str) -> None:
    """Raise UserError unless `place` is HOST:PORT with a port from 1 to 65535."""
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(
            f"{place}: expected the hub's HOST:PORT, as in 10.0.0.1:7000, with a port below 65536"
        )


def greet(addresses: str, keys: ClientKeys) -> HelloReply:
    """Return what the first hub of `addresses` says about its run.

    Args:
        addresses: HOST:PORT, or several separated by commas.
        keys: What this node shows, as `caller_keys` returns it.

    Raises:
        UserError: No hub answers there within 10 seconds, or it refuses this node.
    """
    client = HubClient(addresses.split(",")[0], keys, call_timeout_s=HELLO_LIMIT_S)
    try:
        return client.hello(HelloRequest(protocol=PROTOCOL, version=aedit.__version__))
    except (HubUnreachable, HubRefused) as error:
        raise UserError(str(error)) from None
    finally:
        client.close()
