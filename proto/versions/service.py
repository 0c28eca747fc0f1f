"""The gRPC service `Versions` over a `VersionStore`."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain

import grpc

from aedit.proto.rpc import Caller, CallHandlers, FairPool, Limits, Refusal, Service, frames
from aedit.proto.rpc import versions_pb2 as pb
from aedit.proto.versions.manifest import Manifest, check_line
from aedit.proto.versions.receiving import Receiving, TransferRefused
from aedit.proto.versions.store import LinesFull, LineUnknown, VersionStore

MAX_WAIT_S = 30.0
"""Longest wait of `Newest`."""

_WAITERS = 64
"""Calls of `Newest` that may wait at a time; further ones are answered at once."""

_Code = grpc.StatusCode


class VersionsCore:
    """Answers the calls of `Versions`. Called by many threads at once."""

    def __init__(
        self,
        store: VersionStore,
        may_author: Callable[[str, Caller], bool],
        arrived: Callable[[Manifest], None] = lambda _: None,
    ) -> None:
        """Serve a store.

        Args:
            store: Versions that `Newest` and `Get` serve; offered ones are added.
            may_author: Whether a caller may offer versions of a line. Called before anything is kept of it.
            arrived: Called when an offered version is complete, by a thread of the service: must not block.
        """
        self._store, self._may_author, self._arrived = store, may_author, arrived
        self._lock = threading.Lock()
        self._receiving: dict[str, Receiving] = {}
        self._waiters = threading.BoundedSemaphore(_WAITERS)

    def newest(self, request: pb.NewestRequest) -> pb.Manifest:
        """Return the newest manifest of a line."""
        wait_s = request.wait_s if 0 < request.wait_s < MAX_WAIT_S else MAX_WAIT_S * (request.wait_s > 0)
        waits = wait_s > 0 and self._waiters.acquire(blocking=False)
        try:
            with _refusals():
                found = self._store.newest(request.line, after=request.after, wait_s=wait_s if waits else 0.0)
        finally:
            if waits:
                self._waiters.release()
        if found is None:
            raise Refusal(_Code.NOT_FOUND, f"line {request.line} has no version yet")
        return found.message

    def get(self, request: pb.GetRequest) -> tuple[bytes, memoryview, int]:
        """Return head and data of a transfer, and the byte from which on it is sent."""
        with _refusals():
            head, data = self._store.transfer(request.line, request.unit, request.base, request.serial)
        goes_on = request.transfer == head.sha256 and request.offset <= len(data)
        return head.SerializeToString(), memoryview(data), request.offset if goes_on else 0

    def offer(self, request: pb.OfferRequest, caller: Caller) -> pb.OfferReply:
        """Take a manifest from its author and return the units that are missing."""
        manifest = Manifest.from_message(request.manifest)
        self._check_author(manifest.line, caller)
        with _refusals():
            missing = self._begin(manifest)
        return pb.OfferReply(missing=missing)

    def put(self, messages: Iterator[bytes], caller: Caller) -> pb.PutReply:
        """Take one unit of an offered version."""
        first = next(messages, b"")
        head = pb.TransferHead.FromString(bytes(frames.unpack_chunk(first).head))
        self._check_author(head.line, caller)
        with self._lock:
            receiving = self._receiving.get(head.line)
        if receiving is None:
            raise Refusal(_Code.FAILED_PRECONDITION, "no version of this line is being received: offer it")
        with _refusals():
            receiving.take(chain([first], messages))
            if not receiving.missing:
                self._finish(receiving)
        return pb.PutReply()

    def close_line(self, line: str) -> None:
        """Forget a line, its versions, and the one that is being received."""
        with self._lock:
            receiving = self._receiving.pop(line, None)
            self._store.close(line)
        if receiving is not None:
            receiving.abandon()

    def _check_author(self, line: str, caller: Caller) -> None:
        try:
            check_line(line)
        except ValueError as error:
            raise Refusal(_Code.INVALID_ARGUMENT, str(error)) from None
        if not self._may_author(line, caller):
            raise Refusal(_Code.PERMISSION_DENIED, f"{caller.name or 'you'} may not author line {line}")

    def _begin(self, manifest: Manifest) -> tuple[pb.Missing, ...]:
        """Return what is missing of a version; begin to receive it if it is a new one."""
        self._store.layout.check(manifest)
        with self._lock:
            known = manifest.line in self._store.lines
            newest = self._store.newest(manifest.line) if known else None
            if newest is not None and newest.serial == manifest.serial:
                if newest.units != manifest.units:
                    raise ValueError(f"version {manifest.serial} is here with other values")
                return ()
            current = self._receiving.get(manifest.line)
            if current is None or current.manifest != manifest:
                if current is not None and manifest.serial <= current.manifest.serial:
                    raise ValueError(
                        f"version {manifest.serial} is not above {current.manifest.serial}, which was offered"
                    )
                self._store.open(manifest.line)
                receiving = Receiving(self._store, manifest)
                self._receiving[manifest.line] = receiving
                if current is not None:
                    current.abandon()
                current = receiving
        missing = current.missing
        if not missing:
            self._finish(current)
        return missing

    def _finish(self, receiving: Receiving) -> None:
        """Make a complete version visible, once."""
        with self._lock:
            if self._receiving.get(receiving.manifest.line) is not receiving:
                return
            del self._receiving[receiving.manifest.line]
            receiving.finish()
        self._arrived(receiving.manifest)


def versions_service(core: VersionsCore, limits: Limits | None = None, threads: int = 4) -> Service:
    """Return the service `Versions`. `threads`: transfers out, and as many in, at a time."""
    handlers = CallHandlers(limits or Limits())
    # As many more than may wait as answer those that may not.
    newest, offers = FairPool(_WAITERS + 4, "newest"), FairPool(4, "offer")
    gets, puts = FairPool(threads, "get"), FairPool(threads, "put")
    calls = {
        "Newest": handlers.call(pb.NewestRequest, core.newest, newest),
        "Get": handlers.download(pb.GetRequest, core.get, gets),
        "Offer": handlers.call_as(pb.OfferRequest, core.offer, offers),
        "Put": handlers.upload(core.put, puts),
    }
    return Service("aedit.v1.Versions", calls, (newest, offers, gets, puts))


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of the store into answers."""
    try:
        yield
    except LineUnknown as error:
        raise Refusal(_Code.NOT_FOUND, str(error)) from None
    except LinesFull as error:
        raise Refusal(_Code.RESOURCE_EXHAUSTED, str(error)) from None
    except TransferRefused as error:
        raise Refusal(error.code, str(error)) from None
    except frames.ArrayIncomplete as error:
        raise Refusal(_Code.DATA_LOSS, str(error)) from None
