"""The gRPC services of a hub over `HubCore`, and a call as its handler sees it.

Limits are applied, and messages are checked, before the core sees them. Errors are logged here, and the peer
gets one line.
"""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from grpc import aio

from aedit import traces
from aedit.proto.rpc import frames, hub_pb2
from aedit.proto.rpc.identity import secret_of, shown_identity
from aedit.proto.rpc.limits import ByteBudget, CallCost, FairPool, Limits, Rates, StallWatch
from aedit.proto.rpc.retry import Refusal
from aedit.proto.rpc.transfer import KEPT_S, Arrival, PartialPushes

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Pull = Callable[[hub_pb2.PullRequest], tuple[hub_pb2.PullHead, memoryview]]


SMALL_BYTES = 2**16
"""Most bytes of a call that lists neither parameters nor an array."""


class CallContext:
    """The part of `grpc.ServicerContext` that handlers use, over an asynchronous call."""

    def __init__(self, context: "aio.ServicerContext[Any, Any]", task: "asyncio.Task[Any]") -> None:
        self._context, self._task = context, task
        self._loop = task.get_loop()
        self._callbacks: list[Callable[[], object]] = []
        self._is_over, self._lock = False, threading.Lock()
        self.ended: Refusal | None = None
        """Error with which `end` has ended the call; None while it runs."""
        # Read here: the call's own object belongs to the loop's thread.
        self._peer, self._metadata = context.peer(), tuple(context.invocation_metadata() or ())
        self._auth: Mapping[str, Iterable[bytes]] = context.auth_context() or {}

    def peer(self) -> str:
        """Return the caller's address, as gRPC writes it."""
        return self._peer

    def invocation_metadata(self) -> tuple[Any, ...]:
        """Return the call's metadata as (key, value) pairs."""
        return self._metadata

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """Return what the caller's certificate says; empty without one."""
        return self._auth

    def abort(self, code: grpc.StatusCode, text: str) -> NoReturn:
        """End the call with this status."""
        raise Refusal(code, text)

    def add_callback(self, callback: Callable[[], object]) -> bool:
        """Call `callback` when the call is over. Returns False, and does not, if it is over already."""
        with self._lock:
            if not self._is_over:
                self._callbacks.append(callback)
            return not self._is_over

    def cancel(self) -> None:
        """End the call at once."""
        self.end(grpc.StatusCode.CANCELLED, "ended by this server")

    def end(self, code: grpc.StatusCode, text: str) -> None:
        """End the call at once, whatever its handler does, with this status."""
        if not self._is_over and self.ended is None:
            self.ended = Refusal(code, text)
            self._loop.call_soon_threadsafe(self._task.cancel)

    def finish(self) -> None:
        """Note that the call is over, and run the callbacks."""
        with self._lock:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class Notifier:
    """Counts what happens, and wakes what waits for the next time. Any thread may call `notify`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        self.count = 0

    def notify(self) -> None:
        """Count another time, and wake what waits."""
        with self._lock:
            self.count += 1
            waiting, self._waiting = self._waiting, []
        for loop, event in waiting:
            with contextlib.suppress(RuntimeError):  # its loop has ended
                loop.call_soon_threadsafe(event.set)

    async def wait(self, seen: int, limit_s: float) -> None:
        """Return when it has notified more often than `seen` times, or after `limit_s`."""
        entry = asyncio.get_running_loop(), asyncio.Event()
        with self._lock:
            if self.count != seen:
                return
            self._waiting.append(entry)
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(entry[1].wait(), limit_s)
        finally:
            with self._lock, contextlib.suppress(ValueError):  # it was notified
                self._waiting.remove(entry)


@dataclass(frozen=True, slots=True)
class NoNews:
    """Yielded by a handler that streams and has nothing to send: it is asked again after a notification."""

    notifier: Notifier
    seen: int
    """Notifications before there was nothing."""
    limit_s: float
    """Time after which the handler is asked again in any case."""


class HubCore(Protocol):
    """The interface of a hub for gRPC. Called by many threads at once; every method may raise `Refusal`."""

    def hello(self, request: hub_pb2.HelloRequest) -> hub_pb2.HelloReply:
        """Return the run's configuration."""

    def join(self, request: hub_pb2.JoinRequest, caller: "Caller") -> hub_pb2.JoinReply:
        """Make the caller a member."""

    def heartbeat(self, request: hub_pb2.HeartbeatRequest) -> hub_pb2.News:
        """Take a report and return the news."""

    def lease(self, request: hub_pb2.LeaseRequest) -> hub_pb2.LeaseReply:
        """Return new blocks of sample positions."""

    def leave(self, request: hub_pb2.LeaveRequest) -> hub_pb2.LeaveReply:
        """Take the caller out of the run."""

    def take_over(self, request: hub_pb2.TakeOverRequest) -> hub_pb2.TakeOverReply:
        """Take a node's answer, and return what this hub asks of its voters."""

    def max_push_bytes(self, head: hub_pb2.PushHead) -> int:
        """Return the largest size of this push; asked before anything is allocated for it.

        Raises Refusal unless the session in `head.who` is that of its node: what arrives is kept under it.
        """

    def push(self, head: hub_pb2.PushHead, data: memoryview) -> hub_pb2.PushReply:
        """Take a push. `data`: `head.num_bytes` bytes, complete and undamaged; the core owns them."""

    def garbled(self, head: hub_pb2.PushHead, reason: str) -> None:
        """Note that what came after `head` was damaged, or not what it says; `head` itself may be."""

    def pull(self, request: hub_pb2.PullRequest) -> tuple[hub_pb2.PullHead, memoryview]:
        """Return the whole answer, of which bytes from request.offset on are sent.

        If it is of another version than request.version, all of it is. The bytes must not change while the
        view is held.
        """

    def status(self, request: hub_pb2.StatusRequest) -> hub_pb2.StatusReply:
        """Return the hub's status."""

    def tail(self, request: hub_pb2.TailRequest) -> Iterator[hub_pb2.TailChunk | NoNews]:
        """Yield the journal as it grows, and None while there is nothing new; it is asked again soon.

        At least once a second a chunk, without data if need be: only then is it noticed that the standby has
        gone.
        """

    def confirm(self, request: hub_pb2.ConfirmRequest) -> hub_pb2.ConfirmReply:
        """Note what the standby has on disk."""

    def propose(self, request: hub_pb2.ProposeRequest) -> hub_pb2.Answer:
        """Answer another hub that asks for a vote."""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller, as far as its connection and metadata show it."""

    host: str
    """Address without the port, as gRPC writes it."""
    name: str | None = None
    """Name in the caller's certificate or token; None without keys, or with a token that many share."""
    role: str | None = None
    """Role in the caller's certificate or token; None without keys."""
    secret: str = ""
    """Secret of the author of a line, see identity.py; empty: the caller has given none."""


@dataclass(frozen=True, slots=True)
class Service:
    """One gRPC service, ready to be served. `pools`: threads of its own, which end with the server."""

    name: str
    handlers: Mapping[str, Handler]
    pools: tuple[FairPool, ...] = ()


def hub_services(
    core: HubCore, limits: Limits, threads: int, cost: CallCost | None = None
) -> tuple[Service, ...]:
    """Return Membership, Exchange and State. `threads`: pushes, and as many pulls, at a time.

    cost: measures the small calls.

    Calls that wait for one of them do not hold up the small calls.
    """
    handlers = CallHandlers(limits)
    small, joins, pushes = FairPool(8, "call", cost=cost), FairPool(8, "join"), FairPool(threads, "push")
    # Other calls wait for what these bring; none of these waits.
    votes, looks = FairPool(4, "vote"), FairPool(2, "status")
    pulls, tails = FairPool(threads, "pull"), FairPool(4, "tail")
    membership = {
        "Hello": handlers.call(hub_pb2.HelloRequest, core.hello, votes, SMALL_BYTES),
        "Join": handlers.call_as(hub_pb2.JoinRequest, core.join, joins),
        "Heartbeat": handlers.call(hub_pb2.HeartbeatRequest, core.heartbeat, small, SMALL_BYTES),
        "Lease": handlers.call(hub_pb2.LeaseRequest, core.lease, small, SMALL_BYTES),
        "Leave": handlers.call(hub_pb2.LeaveRequest, core.leave, small, SMALL_BYTES),
        "TakeOver": handlers.call(hub_pb2.TakeOverRequest, core.take_over, votes, SMALL_BYTES),
    }
    exchange = {
        "Push": handlers.push(core, pushes),
        "Resume": handlers.resume(core, pushes),
        "Pull": handlers.pull(core.pull, pulls),
    }
    state = {
        "Status": handlers.call(hub_pb2.StatusRequest, core.status, looks, SMALL_BYTES),
        "Tail": handlers.tail(core, tails),
        "Confirm": handlers.call(hub_pb2.ConfirmRequest, core.confirm, votes, SMALL_BYTES),
        "Propose": handlers.call(hub_pb2.ProposeRequest, core.propose, votes, SMALL_BYTES),
    }
    return (
        Service("aedit.v1.Membership", membership, (small, joins, votes)),
        Service("aedit.v1.Exchange", exchange, (pushes, pulls)),
        Service("aedit.v1.State", state, (tails, looks)),
    )


def donor_service(pull: Pull, limits: Limits, threads: int) -> Service:
    """Return Exchange with Pull only, for a node that serves its anchors, `threads` at a time."""
    pulls = FairPool(threads, "pull")
    return Service("aedit.v1.Exchange", {"Pull": CallHandlers(limits).pull(pull, pulls)}, (pulls,))


class CallHandlers:
    """Makes gRPC handlers of plain functions: raw bytes are read here, under the limits."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._calls = Rates(limits.calls_per_s)
        self._lines = Rates(1.0)
        self._pushes = PartialPushes(ByteBudget(limits.in_flight_bytes))
        self._watch = StallWatch(limits.stall_s, limits.bytes_per_s)

    def call(
        self,
        kind: type[M],
        answer: Callable[[M], Message],
        pool: FairPool,
        most_bytes: int = frames.MESSAGE_BYTES,
    ) -> Handler:
        """Return a handler with one message in and one out; `most_bytes`: of the one in."""

        def behaviour(message: bytes, context: CallContext) -> bytes:
            with self._answering(context, answer.__name__):
                if len(message) > most_bytes:
                    raise ValueError(f"a message of {len(message)} bytes, at most {most_bytes} are allowed")
                request = kind.FromString(message)
                self._admit(request, context)
                return answer(request).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(_in(pool, behaviour))

    def call_as(self, kind: type[M], answer: Callable[[M, Caller], Message], pool: FairPool) -> Handler:
        """Return a handler like `call` whose `answer` gets the caller too."""

        def behaviour(message: bytes, context: CallContext) -> bytes:
            with self._answering(context, answer.__name__):
                request = kind.FromString(message)
                self._admit(request, context)
                return answer(request, caller(context)).SerializeToString()

        return grpc.unary_unary_rpc_method_handler(_in(pool, behaviour))

    def upload(self, take: Callable[[Iterator[bytes], Caller], Message], pool: FairPool) -> Handler:
        """Return a handler for a stream of chunks in, which `take` reads; one that stands still is ended."""

        def behaviour(messages: Iterator[bytes], context: CallContext) -> bytes:
            with self._answering(context, take.__name__), self._watch.over(context.cancel) as stream:
                self._admit(None, context)

                def counted() -> Iterator[bytes]:
                    for message in messages:
                        stream.moved(len(message))
                        yield message

                return take(counted(), caller(context)).SerializeToString()

        return grpc.stream_unary_rpc_method_handler(_in(pool, behaviour))

    def download(
        self, kind: type[M], answer: Callable[[M], tuple[bytes, memoryview, int]], pool: FairPool
    ) -> Handler:
        """Return a handler that sends chunks: `answer` returns head, data, and the byte to begin with."""

        def behaviour(message: bytes, context: CallContext) -> Iterator[bytes]:
            with self._answering(context, answer.__name__):
                request = kind.FromString(message)
                self._admit(request, context)
                head, data, offset = answer(request)
                with self._watch.over(context.cancel) as stream:
                    for chunk in frames.chunks(head, data, offset=offset):
                        yield frames.pack_chunk(chunk)
                        stream.moved(len(chunk.data))

        return grpc.unary_stream_rpc_method_handler(_in(pool, behaviour))

    def push(self, core: HubCore, pool: FairPool) -> Handler:
        """Return a handler for chunks in; the core sees them when they are complete."""

        async def behaviour(messages: AsyncIterator[bytes], context: CallContext) -> bytes:
            with self._answering(context, "push"):
                began_ns = time.time_ns()
                heads: list[hub_pb2.PushHead] = []
                arrivals: list[Arrival] = []
                loop, spoiled = asyncio.get_running_loop(), False

                def begin(head: bytes, offset: int) -> frames.Assembly:
                    if len(head) > SMALL_BYTES:
                        raise ValueError(f"a head of {len(head)} bytes, at most {SMALL_BYTES} are allowed")
                    heads.append(hub_pb2.PushHead.FromString(head))
                    self._admit(heads[0], context)
                    limit_bytes = core.max_push_bytes(heads[0])
                    arrivals.append(self._pushes.begin(heads[0], offset, limit_bytes))
                    if not context.add_callback(end):
                        end()
                    return arrivals[0]

                def end() -> None:
                    if self._pushes.end(arrivals[0], keeps=not spoiled):
                        loop.call_soon_threadsafe(loop.call_later, KEPT_S, self._pushes.expire)

                peer, receiver = context.peer(), frames.Receiver(begin)
                try:
                    with self._watch.over(context.cancel) as stream:
                        async for message in messages:
                            stream.moved(len(message))
                            if heads:  # a copy of one chunk costs less than to hand it over to a thread
                                receiver.add(message)
                            else:
                                await pool.run(peer, partial(receiver.add, message))
                            del message  # the next one may never come
                    data = receiver.data
                except frames.ArrayIncomplete:
                    raise  # Not a violation: gRPC may report a cut link as if the peer had ended the stream.
                except ValueError as error:
                    spoiled = not isinstance(error, frames.ChunkDamaged)
                    await pool.run(peer, partial(_name, core, heads, error))
                    raise
                del receiver
                self._pushes.complete(arrivals[0])
                parent = traces.received(context.invocation_metadata())
                reply = await pool.run(peer, partial(_push, core, heads[0], data, (parent, began_ns)))
                return reply.SerializeToString()

        return grpc.stream_unary_rpc_method_handler(behaviour)

    def resume(self, core: HubCore, pool: FairPool) -> Handler:
        """Return a handler that says how much of a push is here, to the node whose push it is."""

        def resume(head: hub_pb2.PushHead) -> hub_pb2.PartialPush:
            core.max_push_bytes(head)
            return self._pushes.find(head)

        return self.call(hub_pb2.PushHead, resume, pool, SMALL_BYTES)

    def pull(self, pull: Pull, pool: FairPool) -> Handler:
        """Return a handler that sends the answer in chunks, from the requested byte on."""

        def answer(request: hub_pb2.PullRequest) -> tuple[bytes, memoryview, int]:
            head, data = pull(request)
            offset = request.offset if request.version == head.version else 0
            if offset > head.num_bytes:
                raise Refusal(
                    grpc.StatusCode.OUT_OF_RANGE, f"byte {offset} of {head.num_bytes} was asked for"
                )
            return head.SerializeToString(), data, offset

        answer.__name__ = "pull"
        return self.download(hub_pb2.PullRequest, answer, pool)

    def tail(self, core: HubCore, pool: FairPool) -> Handler:
        """Return a handler that streams messages for as long as the peer is there."""

        def behaviour(message: bytes, context: CallContext) -> Iterator[bytes | NoNews]:
            with self._answering(context, "tail"):
                request = hub_pb2.TailRequest.FromString(message)
                self._admit(request, context)
                for chunk in core.tail(request):
                    yield chunk if isinstance(chunk, NoNews) else chunk.SerializeToString()

        return grpc.unary_stream_rpc_method_handler(_in(pool, behaviour))

    def _admit(self, request: Message | None, context: CallContext) -> None:
        """Refuse a caller that calls too often, or whose token and certificate have different holders.

        A node is identified by its host and by the index that it claims, so that a liar takes only from those
        of its own host.
        """
        caller(context)
        who = getattr(request, "who", None)
        node = who.node if who is not None and who.session and who.node < self._limits.nodes else None
        if not self._calls.allow((_host(context), node)):
            raise Refusal(
                grpc.StatusCode.RESOURCE_EXHAUSTED, f"more than {self._limits.calls_per_s:g} calls a second"
            )

    @contextmanager
    def _answering(self, context: CallContext, what: str) -> Iterator[None]:
        """End the call with a code and one line if anything fails inside the block."""
        try:
            yield
        except (grpc.RpcError, Refusal):
            raise  # grpc.RpcError: the peer has gone, or was ended for standing still
        except (frames.ChunkDamaged, frames.ArrayIncomplete) as error:
            self._say(context, what, error)
            context.abort(grpc.StatusCode.DATA_LOSS, str(error))
        except (DecodeError, ValueError) as error:
            self._say(context, what, error)
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{what}: {error}")
        except Exception:
            log.exception("%s failed", what)
            context.abort(grpc.StatusCode.INTERNAL, f"{what} failed here: the log of this server says why")

    def _say(self, context: CallContext, what: str, error: Exception) -> None:
        """Log an invalid message, at a bounded rate, so that no peer can fill the disk."""
        if self._lines.allow(_host(context)):
            log.warning("%s from %s: %s", what, context.peer(), str(error))


def _push(
    core: HubCore, head: hub_pb2.PushHead, data: memoryview, sent: tuple[traces.TraceContext | None, int]
) -> hub_pb2.PushReply:
    """Return the reply to a push. sent: span of its sender, and Unix time in ns at which its call began."""
    parent, began_ns = sent
    with traces.spanning("hub: push", parent, begun_ns=began_ns, unit=head.unit, seq=head.seq):
        traces.opened("hub: receive", begun_ns=began_ns, bytes=data.nbytes).end()
        return core.push(head, data)


def _name(core: HubCore, heads: list[hub_pb2.PushHead], error: ValueError) -> None:
    """Tell the core whose push was invalid.

    A head that is damaged too does no harm: it would have to name another node and that node's secret.
    """
    kind, claimed = ("damaged", error.head) if isinstance(error, frames.ChunkDamaged) else ("malformed", b"")
    with suppress(DecodeError, Refusal):
        core.garbled(heads[0] if heads else hub_pb2.PushHead.FromString(claimed), f"{kind}: {error}")


def caller(context: CallContext) -> Caller:
    """Return who makes this call. Raises Refusal if token and certificate are of different holders."""
    auth: Any = context.auth_context()
    shown = shown_identity(context.invocation_metadata() or (), auth)
    name, role = (shown.own_name, shown.role) if shown else (None, None)
    return Caller(_host(context), name, role, secret_of(context.invocation_metadata()))


def _host(context: CallContext) -> str:
    return context.peer().rpartition(":")[0]


def _in(pool: FairPool, behaviour: Callable[..., Any]) -> Callable[..., Any]:
    """Let gRPC run `behaviour` in the threads of `pool`."""
    behaviour.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return behaviour


def run_services(
    hello: Callable[[hub_pb2.HelloRequest], hub_pb2.HelloReply],
    status: Callable[[hub_pb2.StatusRequest], hub_pb2.StatusReply],
    limits: Limits,
) -> tuple[Service, ...]:
    """Return Membership with Hello alone, and State with Status alone."""
    handlers, small = CallHandlers(limits), FairPool(4, "call")
    membership = {"Hello": handlers.call(hub_pb2.HelloRequest, hello, small, SMALL_BYTES)}
    state = {"Status": handlers.call(hub_pb2.StatusRequest, status, small, SMALL_BYTES)}
    return Service("aedit.v1.Membership", membership, (small,)), Service("aedit.v1.State", state)
