"""A call as its handler sees it, from any thread."""

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
from grpc import aio


class Aborted(Exception):
    """The call ends with this status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code, self.text = code, text


class CallContext:
    """The part of `grpc.ServicerContext` that handlers use, over an asynchronous call."""

    def __init__(self, context: "aio.ServicerContext[Any, Any]", task: "asyncio.Task[Any]") -> None:
        self._context, self._task = context, task
        self._loop = task.get_loop()
        self._callbacks: list[Callable[[], object]] = []
        self._is_over, self._lock = False, threading.Lock()
        self.ended: Aborted | None = None
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
        raise Aborted(code, text)

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
            self.ended = Aborted(code, text)
            self._loop.call_soon_threadsafe(self._task.cancel)

    def finish(self) -> None:
        """Note that the call is over, and run the callbacks."""
        with self._lock:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
