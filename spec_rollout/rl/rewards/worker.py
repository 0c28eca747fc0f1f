"""A process that computes rewards: `python -m aedit.spec_rollout.rl.rewards.worker PARENT FD`.

Users' functions are imported here and nowhere else. They may print, raise, fork, hang or end the process.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from aedit.spec_rollout.rl.rewards.calling import (
    BadReturn,
    EventLoop,
    Late,
    check_arguments,
    culprit,
    find,
    is_async,
    own_line,
    scores,
)
from aedit.spec_rollout.rl.rewards.wire import encoded
from aedit.system import end_with_parent


def main(parent: int, fd: int) -> None:
    """Answer the pool's requests until it closes the connection.

    Functions are called one after the other in this thread, asynchronous ones beside them on one event loop.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    with socket.socket(fileno=fd) as end, end.makefile("rb") as requests:
        os.set_inheritable(fd, False)
        worker = _Worker(end, _found(requests, end))
        for line in requests:
            worker.take(json.loads(line))


def _found(requests: IO[bytes], end: socket.socket) -> list[Callable[..., Any]]:
    """Import the functions that the first message names, and tell the pool whether that worked."""
    hello = json.loads(requests.readline())
    sys.path[:] = hello["path"]
    problem, rewards = "", []
    try:
        rewards = [find(spec["function"], spec["options"]) for spec in hello["functions"]]
        if hello["columns"] is not None:
            for spec, reward in zip(hello["functions"], rewards, strict=True):
                check_arguments(spec["function"], reward, hello["columns"])
    except ValueError as error:
        problem = str(error)
    except BaseException as error:  # the module of a user may raise anything
        problem = f"reward.functions cannot be imported: {_described(error)}"
    end.sendall(encoded({"problem": problem, "awaits": [is_async(reward) for reward in rewards]}))
    return rewards


class _Worker:
    """Calls the functions, and sends an answer for each request."""

    def __init__(self, end: socket.socket, rewards: list[Callable[..., Any]]) -> None:
        self._end, self._rewards, self._loop = end, rewards, EventLoop()
        self._process, self._sending = os.getpid(), threading.Lock()

    def take(self, request: dict[str, Any]) -> None:
        """Answer a request; one for an asynchronous function later."""
        if is_async(self._rewards[request["function"]]):
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()
        else:
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        answer = self._made(request)
        if os.getpid() != self._process:
            os._exit(0)  # a function has forked, and this is the copy
        with self._sending:
            try:
                self._end.sendall(encoded(answer | {"call": request["call"]}))
            except OSError:  # the pool has ended, or a function has closed the connection
                os._exit(1)

    def _made(self, request: dict[str, Any]) -> dict[str, Any]:
        reward = self._rewards[request["function"]]
        until: float = time.monotonic() + request["limit_s"]

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        def called(request: Mapping[str, Any]) -> list[float | None]:
            return scores(reward, request, self._loop, left_s())

        try:
            return {"values": called(request)}
        except BadReturn as error:
            return {"error": str(error), "line": "", "sample": None}
        except Late:
            return {"late": True}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt of the function
            line = own_line(reward, error)
            sample = culprit(called, request, error, left_s())
            return {"error": _described(error), "line": line, "sample": sample}


def _described(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
