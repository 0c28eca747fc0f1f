"""Nodes that meet over gRPC: a `Transport` for machines that share no `torch.distributed` world."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

import grpc
import numpy as np
import torch
from torch import Tensor

from aedit.proto.transports.meeting import GIVES, SERVICE, raw, tensor
from aedit.proto.transports.transport import Mean, PeersMissing, Rows
from aedit.proto.wire import hub_pb2
from aedit.proto.wire.client import channel
from aedit.proto.wire.frames import Assembly, Chunk, chunks, pack, receive
from aedit.proto.wire.hub_pb2_grpc import MeetingStub
from aedit.proto.wire.retry import is_final, why
from aedit.proto.wire.security import ClientKeys

T = TypeVar("T")

_CALL_S = 10.0
"""Deadline of the calls that carry no values."""
_FOLLOW_S = 3600.0
_CLOSE_S = 5.0
_BYTES_PER_S = 2**20
"""A wire slower than this is taken for a broken one."""
_RETRY_S = (0.02, 0.5)
_LIMIT_BYTES = 2**31


class _Answer(Generic[T]):
    def __init__(self, key: str, future: "Future[T]", limit_s: float) -> None:
        self._key, self._future = key, future
        self._deadline = time.monotonic() + limit_s

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        try:
            return self._future.result(max(0.0, self._deadline - time.monotonic()))
        except PeersMissing:
            raise
        except TimeoutError as error:
            raise PeersMissing(f"{self._key}: no answer from the meeting place by the deadline") from error


class GrpcTransport:
    """Node `node` of `nodes` at the meeting place `address` (proto/transports/meeting.py).

    A set is closed when every node that is there has brought its part, or `timeout_s` after the first did;
    its answer is over those who came. Raises PeersMissing if there is no such place within `timeout_s`, and
    ValueError if it does not take this node in.
    """

    def __init__(
        self, address: str, node: int, nodes: int, *, keys: ClientKeys | None = None, timeout_s: float = 60.0
    ) -> None:
        self.address, self.node, self.timeout_s = address, node, timeout_s
        self.bytes_sent = 0
        self._encrypted = keys is not None and keys.credentials is not None
        self._closing = threading.Event()
        self._channel = channel(address, keys)
        self._stub = MeetingStub(self._channel)
        self._give: Callable[..., Any] = self._channel.stream_stream(f"/{SERVICE}/Give")
        request = hub_pb2.EnterRequest(node=node, nodes=nodes, timeout_s=timeout_s)
        try:
            self._retried("entering", lambda: self._stub.Enter(request, timeout=_CALL_S))
        except BaseException:
            self._channel.close()
            raise
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(GIVES, "aedit-give")
        self._poster = ThreadPoolExecutor(1, "aedit-post")
        self._waiting: set[Future[Any]] = set()
        self._to_bring: set[Future[Any]] = set()
        self._fault: BaseException | None = None
        self._notes: dict[str, str] = {}
        self._follower = threading.Thread(target=self._follow, name="aedit-notes", daemon=True)
        self._follower.start()

    def gather(self, key: str, row: Tensor) -> _Answer[Rows]:
        sent = row.detach().to("cpu", torch.float64, copy=True).contiguous()

        def rows(given: hub_pb2.Given, data: memoryview) -> Rows:
            mine = None if given.mine < 0 else given.mine
            return Rows(tensor(data, given.shape, np.float64), mine)

        head = hub_pb2.GiveHead(node=self.node, key=key, row=True, weight=1.0, shape=sent.shape)
        return self._ask(head, sent.nbytes, lambda: sent, rows)

    def weighted_mean(self, key: str, value: Tensor, weight: float | Tensor) -> _Answer[Mean]:
        sent = value.detach().clone(memory_format=torch.contiguous_format)
        weight = weight.detach().clone() if isinstance(weight, Tensor) else weight
        head = hub_pb2.GiveHead(node=self.node, key=key, shape=sent.shape)
        copied = torch.cuda.current_stream(sent.device).record_event() if sent.is_cuda else None

        def load() -> Tensor:
            if copied is not None:
                copied.synchronize()
            head.weight = float(weight)
            return sent.cpu() if head.weight > 0 else torch.empty(0)  # what counts nothing stays here

        def mean(given: hub_pb2.Given, data: memoryview) -> Mean:
            total = torch.tensor(given.total_weight, dtype=torch.float32)
            return Mean(tensor(data, given.shape, np.float32).to(sent.device), total.to(sent.device))

        return self._ask(head, sent.nbytes, load, mean)

    def post(self, key: str, text: str) -> None:
        self._check()
        note = hub_pb2.Note(key=key, text=text)
        post = lambda: self._stub.Post(note, timeout=_CALL_S)  # noqa: E731
        posted = self._poster.submit(self._retried, f"note {key}", post)
        self._until_done(self._to_bring, posted)
        posted.add_done_callback(self._blame)

    def read(self, key: str) -> str | None:
        self._check()
        return self._notes.get(key)

    def close(self) -> None:
        """Bring what has been given, leave, and end the threads. Takes some seconds if the place is gone."""
        if self._closing.is_set():
            return
        with self._lock:
            to_bring = set(self._to_bring)
        wait(to_bring, _CLOSE_S)
        self._closing.set()
        with suppress(grpc.RpcError):
            self._stub.Exit(hub_pb2.ExitRequest(node=self.node), timeout=_CLOSE_S)
        self._channel.close()  # ends all calls under way, and with them what the threads do
        self._workers.shutdown(cancel_futures=True)
        self._poster.shutdown(cancel_futures=True)
        self._follower.join(_CLOSE_S)

    def _ask(
        self,
        head: hub_pb2.GiveHead,
        num_bytes: int,
        load: Callable[[], Tensor],
        read: Callable[[hub_pb2.Given, memoryview], T],
    ) -> _Answer[T]:
        self._check()
        limit_s = self.timeout_s + _CALL_S + 2 * num_bytes / _BYTES_PER_S
        brought: Future[None] = Future()
        self._until_done(self._to_bring, brought)
        turns = 1 + len(self._waiting) // GIVES  # what came before and holds the threads
        future = self._workers.submit(self._bring, head, load, read, limit_s, brought)
        self._until_done(self._waiting, future)
        return _Answer(head.key, future, turns * limit_s)

    def _bring(
        self,
        head: hub_pb2.GiveHead,
        load: Callable[[], Tensor],
        read: Callable[[hub_pb2.Given, memoryview], T],
        limit_s: float,
        brought: "Future[None]",
    ) -> T:
        """Runs in a thread of its own: send one value, and wait for the answer."""
        found = hub_pb2.Given()

        def begin(answer: bytes) -> Assembly:
            found.ParseFromString(answer)
            return Assembly(found.num_bytes, limit_bytes=_LIMIT_BYTES)

        try:
            data = raw(load())
            head.num_bytes = data.nbytes
            sent = self._counted(chunks(head.SerializeToString(), data))
            call = self._give(sent, timeout=limit_s)
            call.initial_metadata()  # comes once all of it is there
            brought.set_result(None)
            return read(found, receive(call, begin))
        except grpc.RpcError as error:
            raise self._trouble(head.key, error) from error
        finally:
            if not brought.done():
                brought.set_result(None)

    def _counted(self, pieces: Iterator[Chunk]) -> Iterator[bytes]:
        for piece in pieces:
            with self._lock:
                self.bytes_sent += len(piece.data)
            yield pack(piece)

    def _follow(self) -> None:
        """Runs in a thread: keep `_notes` as they are at the meeting place."""
        last_there = time.monotonic()
        while not self._closing.is_set() and self._fault is None:
            request = hub_pb2.FollowRequest(node=self.node, have=len(self._notes))
            call = self._stub.Follow(request, timeout=_FOLLOW_S)
            try:
                call.initial_metadata()
                last_there = time.monotonic() if call.is_active() else last_there
                for note in call:
                    self._notes[note.key] = note.text
                    last_there = time.monotonic()
            except grpc.RpcError as error:
                if is_final(error) or time.monotonic() - last_there > self.timeout_s:
                    self._fault = self._trouble("following the notes", error)
            self._closing.wait(random.uniform(*_RETRY_S))

    def _retried(self, what: str, call: Callable[[], T]) -> T:
        """For calls that may be made twice. Gives up after `timeout_s`."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                late = time.monotonic() > deadline
                if late or is_final(error) or self._closing.is_set():
                    raise self._trouble(what, error) from error
            self._closing.wait(random.uniform(*_RETRY_S))

    def _until_done(self, futures: "set[Future[Any]]", future: "Future[Any]") -> None:
        def forget(done: "Future[Any]") -> None:
            with self._lock:
                futures.discard(done)

        with self._lock:
            futures.add(future)
        future.add_done_callback(forget)

    def _blame(self, done: "Future[Any]") -> None:
        if not done.cancelled() and (error := done.exception()) and not self._closing.is_set():
            self._fault = error

    def _check(self) -> None:
        """Raise what went wrong in the background."""
        if self._fault is not None:
            raise self._fault

    def _trouble(self, what: str, error: grpc.RpcError) -> Exception:
        text = f"{what}: {self.address}: {why(error, self._encrypted)}"
        return ValueError(text) if is_final(error) else PeersMissing(text)
