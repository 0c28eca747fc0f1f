"""Calls to one address: connections, deadlines, and retries while an error may pass by itself."""

import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from aedit.proto.rpc import frames
from aedit.proto.rpc.retry import (
    HubRefused,
    HubUnreachable,
    NobodyListens,
    Patience,
    Pauses,
    TransferBroken,
    is_final,
    nobody_listens,
    why,
)
from aedit.proto.rpc.security import ClientKeys
from aedit.proto.rpc.watch import Stream, Watch

T = TypeVar("T")
M = TypeVar("M", bound=Message)
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


class Calls:
    """Open connections to one address: one for small calls and `channels` for arrays.

    Any thread may call. See `HubClient` for the arguments.
    """

    def __init__(
        self,
        address: str,
        keys: ClientKeys | None = None,
        *,
        call_timeout_s: float = 30.0,
        channels: int = 1,
        pauses: Pauses = Pauses(),  # noqa: B008 - it is immutable
        until_it_listens: bool = True,
    ) -> None:
        self.address, self._until_it_listens = address, until_it_listens
        self._timeout_s = call_timeout_s
        self._closed = threading.Event()
        self._has_answered = False
        self._sleep = pauses.sleep or self._closed.wait
        self._random = pauses.random
        self._watch = Watch(call_timeout_s)
        self._encrypted = keys is not None and keys.credentials is not None
        self._channels = [channel(address, keys, quick=i == 0) for i in range(1 + channels)]
        self._bulk = itertools.cycle(self._channels[1:])

    @property
    def bulk(self) -> grpc.Channel:
        """Return the next connection for an array."""
        return next(self._bulk)

    def close(self) -> None:
        """Close all connections. Calls of other threads end with HubUnreachable."""
        self._closed.set()
        for channel in self._channels:
            channel.close()

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

    @contextmanager
    def watched(self) -> Iterator[tuple[Stream, list[Any]]]:
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
        """Return what `once` returns, called again while its errors may pass. `what`: for people."""
        try:
            return self._tried(what, once, patience)
        finally:
            if patience.left_s < -_LATE_S:
                log.warning("%s ended %.1f s past its deadline", self._asked(what), -patience.left_s)

    def _tried(self, what: str, once: Callable[[Patience], T], patience: Patience) -> T:
        while True:
            try:
                answer = once(patience)
                self._has_answered = True
                return answer
            except HubRefused as refused:
                raise HubRefused(refused.code, f"{self._asked(what)}: {refused.text}") from None
            except (grpc.RpcError, TransferBroken, DecodeError, ValueError) as error:
                pause_s = patience.pause_s(self._random())
                if self._is_over(error) or pause_s is None:
                    raise self.error(what, error, patience.num_bytes) from error
            self._sleep(pause_s)

    def _is_over(self, error: Exception) -> bool:
        if self._closed.is_set() or (nobody_listens(error) and not self._until_it_listens):
            return True
        return isinstance(error, grpc.RpcError) and is_final(error)

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
        return NobodyListens(text) if nobody_listens(error) else HubUnreachable(text)

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
