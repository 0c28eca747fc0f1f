"""The gRPC service `Rollouts`: one stream for each rank of a trainer."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from aedit.proto.rpc import CallContext, CallHandlers, FairPool, Limits, Refusal, Service, secret_of
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.sampling import ROLLOUT_PROTOCOL
from aedit.spec_rollout.server.host import EngineHost
from aedit.spec_rollout.server.trainer_lines import StreamLimits, TrainerLines
from aedit.spec_rollout.server.trainer_stream import ServerIdentity, TrainerStream

NAME = "aedit.v1.Rollouts"
WATCH_S, IDLE_WATCH_S = 0.5, 10.0
"""Interval at which calls are looked at, and unused lines while there is no call."""
SPARE_THREADS = 8
"""Threads for streams beyond the limit, which are refused."""
ON_NEW_VERSION = ("recompute", "finish")

_FAILED = "Generate failed here: the log of this server says why"

log = logging.getLogger(__name__)


class RolloutService:
    """Streams of trainers over the lines of a host. Close it before the host."""

    def __init__(
        self,
        identity: ServerIdentity,
        host: EngineHost,
        lines: TrainerLines,
        limits: StreamLimits,
        *,
        status: Callable[[], Mapping[str, Any]] = dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start to watch streams.

        Args:
            identity: Names and key of the server.
            host: Runs the engines of the lines.
            lines: Lines of policy versions.
            limits: Of streams.
            status: Further figures for `ServerStatus`.
            clock: Monotonic seconds.
        """
        self._identity, self._host, self._lines = identity, host, lines
        self._limits, self._status, self._clock = limits, status, clock
        self._lock = threading.Lock()
        self._calls: set[_Call] = set()
        self._is_ending = False
        self._is_closed = threading.Event()
        self._has_begun = threading.Event()
        """A call has begun, or the service is closed."""
        self._watcher = threading.Thread(target=self._watch, name="watch streams", daemon=True)
        self._watcher.start()

    def service(self) -> Service:
        """Return the service, to be passed to a `Server`."""
        small = FairPool(2, "status")
        streams = FairPool(self._limits.streams + SPARE_THREADS, "stream")
        handler: Any = grpc.stream_stream_rpc_method_handler(_in(streams, self._generate))
        asked = CallHandlers(Limits()).call(pb.ServerStatusRequest, self._server_status, small)
        return Service(NAME, {"Generate": handler, "ServerStatus": asked}, (small, streams))

    @property
    def num_streams(self) -> int:
        """Return the number of open streams."""
        with self._lock:
            return sum(call.stream is not None for call in self._calls)

    @property
    def num_calls(self) -> int:
        """Return the number of calls under way, also those that have not opened a stream."""
        with self._lock:
            return len(self._calls)

    def end(self) -> None:
        """Take no further streams, and tell the trainers to take their samples back."""
        with self._lock:
            self._is_ending = True
            streams = [call.stream for call in self._calls if call.stream is not None]
        for stream in streams:
            stream.is_ending = True

    def close(self) -> None:
        """End all streams."""
        self.end()
        self._is_closed.set()
        self._has_begun.set()
        with self._lock:
            calls = list(self._calls)
        for call in calls:
            call.end(_ending())
        self._watcher.join(10.0)

    def status(self) -> dict[str, Any]:
        """Return streams and lines, by name."""
        with self._lock:
            streams = [call.stream for call in self._calls if call.stream is not None]
        lines = {
            line.name: {"streams": line.num_streams, "version": line.engine.version}
            for line in self._lines.all()
        }
        return {
            "streams": len(streams),
            "stream_samples": sum(stream.num_samples for stream in streams),
            "trainer_lines": lines,
        }

    def _server_status(self, request: pb.ServerStatusRequest) -> pb.ServerStatusReply:
        figures = {
            "server": self._identity.name,
            "run": self._identity.run,
            **self.status(),
            **self._status(),
        }
        return pb.ServerStatusReply(json=json.dumps(figures, default=str))

    def _generate(self, messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        call = _Call(context, self._clock)
        refusal = self._admit(call)
        if refusal is None:
            try:
                if context.add_callback(call.end):
                    read = threading.Thread(
                        target=self._read, args=(call, messages), name="read stream", daemon=True
                    )
                    read.start()
                    yield from call.messages(self._limits.open_s)
            except Exception:
                log.exception("a stream failed")
                call.end(Refusal(grpc.StatusCode.INTERNAL, _FAILED))
            finally:
                call.end()
                with self._lock:
                    self._calls.discard(call)
            refusal = call.reason
        if refusal is not None:
            context.abort(refusal.code, refusal.text)

    def _admit(self, call: "_Call") -> Refusal | None:
        """Count a new call. In place of one too many, the oldest one that has not sent Open ends."""
        most, oldest = self._limits.streams, None
        with self._lock:
            if self._is_ending:
                return _ending()
            there = [each for each in self._calls if not each.is_over]
            same = [each for each in there if each.host == call.host]
            for calls, limit in ((same, self._limits.streams_per_host), (there, most)):
                if len(calls) >= limit:
                    unopened = [each for each in calls if each.stream is None]
                    if not unopened:
                        who = "this server has" if calls is there else "your host has"
                        text = f"{who} {limit} streams, which is the limit"
                        return Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
                    oldest = min(unopened, key=lambda each: each.began_s)
                    break
            self._calls.add(call)
        self._has_begun.set()
        if oldest is not None:
            text = "another stream has taken the place of this one, which had not sent open"
            oldest.end(Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, text))
        return None

    # --- the reader's thread of each stream

    def _read(self, call: "_Call", messages: Iterator[bytes]) -> None:
        """Handle the messages of a stream until it ends."""
        try:
            with ExitStack() as used:
                received = call.received(messages)
                stream = self._open(call, next(received, b""), used)
                for message in received:
                    stream.handle(pb.ToServer.FromString(message))
            call.end()
        except grpc.RpcError:
            call.end()
        except Refusal as refusal:
            call.end(refusal)
        except (DecodeError, ValueError) as error:
            call.end(Refusal(grpc.StatusCode.INVALID_ARGUMENT, f"Generate: {str(error)[:300]}"))
        except Exception:
            if call.is_over:
                return
            log.exception("a stream failed")
            call.end(Refusal(grpc.StatusCode.INTERNAL, _FAILED))

    def _open(self, call: "_Call", first: bytes, used: ExitStack) -> TrainerStream:
        message = pb.ToServer.FromString(first)
        if message.WhichOneof("message") != "open":
            raise ValueError("a stream begins with open")
        self._check(message.open)
        line = used.enter_context(
            self._lines.used(
                message.open.line,
                secret_of(call.context.invocation_metadata()),
                "finish" if message.open.on_new_version == "finish" else "recompute",
                lambda: call.end(
                    Refusal(
                        grpc.StatusCode.FAILED_PRECONDITION,
                        "a newer stream of this line has replaced this one",
                    )
                ),
            )
        )
        stream = TrainerStream(self._identity, self._host, line, self._limits, self._clock)
        used.callback(stream.close)
        with self._lock:
            stream.is_ending = self._is_ending
            call.begin(stream)
        return stream

    def _check(self, opening: pb.Open) -> None:
        if opening.protocol != ROLLOUT_PROTOCOL:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"protocol {opening.protocol} was asked for, and this server speaks {ROLLOUT_PROTOCOL}: use"
                " the same release of aedit",
            )
        if opening.run != self._identity.run:
            raise Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"this server serves the run {self._identity.run!r}, not {opening.run[:64]!r}",
            )
        if opening.on_new_version not in ("", *ON_NEW_VERSION):
            raise ValueError(
                f"on_new_version {opening.on_new_version[:20]!r}: expected {' or '.join(ON_NEW_VERSION)}"
            )

    # --- the watching thread

    def _watch(self) -> None:
        """End streams that are silent or do not read, and close unused lines."""
        limits = self._limits
        while not self._is_closed.wait(WATCH_S if self.num_calls else 0.0):
            if not self.num_calls:
                self._has_begun.wait(IDLE_WATCH_S)
            self._has_begun.clear()
            with self._lock:
                calls = [call for call in self._calls if call.stream is not None]
            for call in calls:
                assert call.stream is not None
                call.stream.expire()
                if call.stream.outbox.is_full:
                    call.cut(f"{limits.unsent_bytes} bytes wait to be sent: the trainer does not read")
                elif call.unread_for_s > limits.stall_s:
                    call.cut(f"the trainer has read nothing for {limits.stall_s:g} s")
                elif call.silent_for_s > limits.silent_s:
                    text = f"nothing came from the trainer for {limits.silent_s:g} s: send beat every 2 s"
                    call.end(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, text))
            try:
                self._lines.close_idle()
            except Exception:
                log.exception("an unused line could not be closed")


class _Call:
    """One call of Generate: its stream once it is open, and its end."""

    def __init__(self, context: CallContext, clock: Callable[[], float]) -> None:
        self.context, self._clock = context, clock
        self.host, self.began_s = context.peer().rpartition(":")[0], clock()
        self.stream: TrainerStream | None = None
        self.reason: Refusal | None = None
        """Why the server has ended it."""
        self.is_over = False
        self._lock = threading.Lock()
        self._changed = threading.Event()
        """It has a stream, or is over."""
        self._waiting_s: float | None = clock()
        """Since when the reader waits for a message; None while it handles one."""

    def begin(self, stream: TrainerStream) -> None:
        """Note that the stream is open."""
        with self._lock:
            if not self.is_over:
                self.stream = stream
                self._changed.set()

    def end(self, reason: Refusal | None = None) -> None:
        """End the stream and cancel its samples; `reason`: why the server ends it. Idempotent."""
        with self._lock:
            if self.is_over:
                return
            self.is_over, self.reason = True, reason
        if self.stream is not None:
            self.stream.close()
        self._changed.set()

    def cut(self, reason: str) -> None:
        """End the stream of a trainer that does not read, and its connection."""
        log.warning("%s is cut off: %s", self.context.peer(), reason)
        self.end(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, reason))
        self.context.cancel()

    def messages(self, open_s: float) -> Iterator[bytes]:
        """Yield what is sent, until the end."""
        while not self._changed.wait(WATCH_S):
            if self.silent_for_s > open_s:
                self.end(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED, f"no open came within {open_s:g} s"))
        if self.stream is not None:
            yield self.stream.opened()
            yield from self.stream.messages()

    def received(self, messages: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the trainer's messages, and note since when the next one is waited for."""
        self._waiting_s = self._clock()
        for message in messages:
            self._waiting_s = None
            if self.is_over:
                return
            yield message
            self._waiting_s = self._clock()

    @property
    def silent_for_s(self) -> float:
        """Return the seconds for which the reader has waited for a message."""
        since_s = self._waiting_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def unread_for_s(self) -> float:
        """Return the seconds for which the connection has not taken the message that is being sent."""
        since_s = None if self.stream is None else self.stream.handed_s
        return 0.0 if since_s is None else self._clock() - since_s


def _ending() -> Refusal:
    return Refusal(grpc.StatusCode.FAILED_PRECONDITION, "this server is ending: use another one")


def _in(pool: FairPool, behaviour: Any) -> Any:
    """Let gRPC run `behaviour` in the threads of `pool`. Methods take no attributes: a function does."""

    def run(messages: Iterator[bytes], context: CallContext) -> Iterator[bytes]:
        yield from behaviour(messages, context)

    untyped: Any = run
    untyped.experimental_thread_pool = pool
    return untyped
