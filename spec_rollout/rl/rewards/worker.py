"""A process that computes rewards: `python -m aedit.spec_rollout.rl.rewards.worker PARENT FD`.

Users' functions are imported here and nowhere else. They may print, raise, fork, hang or end the process.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import IO, Any

from aedit.spec_rollout.rl.rewards.calling import BadReturn, culprit, find, own_line, scores
from aedit.spec_rollout.rl.rewards.wire import encoded
from aedit.system import end_with_parent


def main(parent: int, fd: int) -> None:
    """Answer the pool's requests until it closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    with socket.socket(fileno=fd) as end, end.makefile("rb") as requests:
        os.set_inheritable(fd, False)
        process = os.getpid()
        rewards = _found(requests, end)
        for line in requests:
            answer = _answer(rewards, json.loads(line))
            if os.getpid() != process:
                os._exit(0)  # a function has forked, and this is the copy
            end.sendall(encoded(answer))


def _found(requests: IO[bytes], end: socket.socket) -> list[Callable[..., Any]]:
    """Import the functions that the first message names, and tell the pool whether that worked."""
    hello = json.loads(requests.readline())
    sys.path[:] = hello["path"]
    problem, rewards = "", []
    try:
        rewards = [find(spec["function"], spec["options"]) for spec in hello["functions"]]
    except ValueError as error:
        problem = str(error)
    except BaseException as error:  # the module of a user may raise anything
        problem = f"reward.functions cannot be imported: {_described(error)}"
    end.sendall(encoded({"problem": problem}))
    return rewards


def _answer(rewards: list[Callable[..., Any]], request: dict[str, Any]) -> dict[str, Any]:
    reward, start = rewards[request["function"]], time.perf_counter()
    answer: dict[str, Any]
    try:
        answer = {"values": scores(reward, request)}
    except BadReturn as error:
        answer = {"error": str(error), "line": "", "sample": None}
    except BaseException as error:  # also SystemExit and KeyboardInterrupt of the function
        line, sample = own_line(reward, error), culprit(reward, request, error)
        answer = {"error": _described(error), "line": line, "sample": sample}
    return answer | {"seconds": time.perf_counter() - start}


def _described(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
