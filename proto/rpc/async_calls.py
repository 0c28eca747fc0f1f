"""Asynchronous gRPC handlers made of plain ones: a call that waits for its peer takes no thread.

A handler's work runs in the threads of its pool, one message at a time where it streams. Between two
messages, and before the first one, only the event loop knows of the call. A handler that streams may yield
`Quiet`, if it has nothing to send yet: it is asked again when there may be something.
"""

import asyncio
import inspect
import logging
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import grpc
from grpc import aio

from aedit.proto.rpc.call_context import Aborted, CallContext
from aedit.proto.rpc.connections import Connections
from aedit.proto.rpc.fair_pool import Crowded, FairPool
from aedit.proto.rpc.limits import Limits
from aedit.proto.rpc.notifier import Quiet
from aedit.proto.rpc.read_permits import ReadPermits
from aedit.proto.rpc.waiting_calls import WaitingCalls

log = logging.getLogger(__name__)

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_Write: TypeAlias = Callable[[Any], Any]
_Work: TypeAlias = Callable[[AsyncIterator[bytes], CallContext, _Write], Coroutine[Any, Any, Any]]
_LATER = grpc.StatusCode.RESOURCE_EXHAUSTED
_SILENT = "too many open calls that have sent nothing: this one was ended to make room"
_END = object()
_GATHER_S = 0.005
"""Pause before a handler that had nothing to send is asked again: what follows shortly is sent together."""


class AsyncCalls:
    """Makes the handlers of one server. `pool`: of handlers that name none of their own.

    A handler that streams both ways is called at once, and bounds its silent calls by itself.

    `connections` is told of every peer that sends a message.
    """

    def __init__(self, pool: FairPool, limits: Limits, connections: Connections) -> None:
        self._pool, self._connections = pool, connections
        self._waiting = WaitingCalls(limits.silent_calls)
        self._uploads = ReadPermits(limits.unread_uploads)

    def handler(self, plain: Handler) -> Handler:
        """Return `plain` for an asynchronous server. Its bytes on the wire are the same."""
        behaviour: Any = plain.unary_unary or plain.unary_stream or plain.stream_unary or plain.stream_stream
        pool = getattr(behaviour, "experimental_thread_pool", self._pool)
        if inspect.iscoroutinefunction(behaviour):
            work = _native(behaviour)
        else:
            work = _threaded(behaviour, pool, bool(plain.request_streaming), bool(plain.response_streaming))

        async def run(messages: AsyncIterator[bytes], context: "aio.ServicerContext[Any, Any]") -> Any:
            return await self._run(
                work,
                context,
                reads_more=bool(plain.request_streaming),
                replies_once=not plain.response_streaming,
            )

        # Both kinds read by themselves: gRPC would wait for a single request out of our sight.
        kind = (
            grpc.stream_stream_rpc_method_handler
            if plain.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return kind(run)

    async def _run(
        self, work: _Work, context: "aio.ServicerContext[Any, Any]", *, reads_more: bool, replies_once: bool
    ) -> Any:
        task = asyncio.current_task()
        assert task is not None
        seen = CallContext(context, task)
        peer, refusal = seen.peer(), None
        end = partial(seen.end, _LATER, _SILENT)
        messages = _Messages(context, partial(self._connections.heard, peer))
        try:
            if not reads_more:
                self._waiting.enter(peer, seen, end)
                messages.on_first = partial(self._waiting.leave, peer, seen)
            elif replies_once:
                permit = await self._uploads.enter(peer, end)
                messages.on_first = partial(setattr, permit, "has_sent", True)
                messages.after_first = partial(self._uploads.leave, permit)
            return await work(messages, seen, context.write)
        except (Aborted, Crowded, asyncio.CancelledError) as error:
            refusal = _refusal(error, seen)
            _forget(error)
            if refusal is None:
                raise
        finally:
            messages.on_first()
            messages.after_first()
            seen.finish()
        # Not `context.abort`: its exception and the call would hold each other, and what has not been read.
        context.set_code(refusal.code)
        context.set_details(refusal.text)
        return b"" if replies_once else None


class _Messages:
    """The messages of a call as they arrive. None of them is held here.

    gRPC's own iterator holds each one until the next one comes, which may be never.
    """

    def __init__(self, context: "aio.ServicerContext[Any, Any]", heard: Callable[[], object]) -> None:
        self._context, self._heard = context, heard
        self.on_first: Callable[[], object] = _nothing
        """Called when the first message has arrived."""
        self.after_first: Callable[[], object] = _nothing
        """Called when the first message has been dealt with."""
        self._begun = False

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> bytes:
        if self._begun:
            self.after_first()
        message = await self._context.read()
        if message is aio.EOF:
            raise StopAsyncIteration
        self.on_first()
        self._begun = True
        self._heard()
        return message  # type: ignore[no-any-return]


def _nothing() -> None:
    pass


def _refusal(error: BaseException, seen: CallContext) -> Aborted | None:
    """Return the status that ends the call; None if nobody here has ended it."""
    if isinstance(error, asyncio.CancelledError):
        return seen.ended
    return error if isinstance(error, Aborted) else Aborted(_LATER, str(error))


def _forget(error: BaseException | None) -> None:
    """Clear the frames of an error and of those that led to it: they hold what has arrived."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _native(behaviour: Callable[..., Coroutine[Any, Any, Any]]) -> _Work:
    async def work(messages: AsyncIterator[bytes], context: CallContext, write: _Write) -> Any:
        return await behaviour(messages, context)

    return work


def _threaded(
    behaviour: Callable[..., Any], pool: FairPool, request_streaming: bool, response_streaming: bool
) -> _Work:
    async def work(messages: AsyncIterator[bytes], context: CallContext, write: _Write) -> Any:
        is_dialogue = request_streaming and response_streaming
        first = None if is_dialogue else await anext(messages, None)
        if first is None and not request_streaming:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call ended without a request")
        request = _blocking([first], messages) if request_streaming else first
        first = None
        if not response_streaming:
            return await pool.run(context.peer(), lambda: behaviour(request, context))
        answers = behaviour(request, context)
        try:
            while (answer := await pool.run(context.peer(), lambda: next(answers, _END))) is not _END:
                if isinstance(answer, Quiet):
                    await answer.notifier.wait(answer.seen, answer.limit_s)
                    await asyncio.sleep(_GATHER_S)
                else:
                    await write(answer)
        finally:
            _close(answers)

    return work


def _blocking(begun: list[bytes | None], messages: AsyncIterator[bytes]) -> Iterator[bytes]:
    """Yield what is in `begun`, taken out of it, and then `messages`, for a thread that waits for each."""
    loop = asyncio.get_running_loop()

    def rest() -> Iterator[bytes]:
        while begun:
            if (first := begun.pop()) is not None:
                yield first
            del first
        while True:
            try:
                message = asyncio.run_coroutine_threadsafe(_next(messages), loop).result()
            except BaseException:
                raise grpc.RpcError("the call is over") from None
            if message is None:
                return
            yield message
            del message

    return rest()


async def _next(messages: AsyncIterator[bytes]) -> bytes | None:
    return await anext(messages, None)


def _close(answers: Any) -> None:
    """End a generator. One that a thread runs at this moment ends by itself, as its call is over."""
    with suppress(ValueError):
        answers.close()
