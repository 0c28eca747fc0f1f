"""The event loop of all gRPC servers of a process.

gRPC's asynchronous stack has one completion queue per process: with a loop per server they would wake each
other for every event.
"""

import asyncio
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop, which runs in a thread of its own from the first call on."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpc", daemon=True).start()
    return loop


def finish(work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
    """Run `work` in the loop and return its result. Must not be called by the loop's own thread."""
    return asyncio.run_coroutine_threadsafe(work, event_loop()).result(timeout_s)
