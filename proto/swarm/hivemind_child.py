"""Helpers of processes that run hivemind: messages to the parent, and the end of all that hivemind starts."""

import asyncio
import json
import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from aedit.system import end_with_parent

Say = Callable[..., None]
_LISTENS = "-listen=/unix"
"""Beginning of the word on p2pd's command line that names its socket."""
_SOCKET = re.compile(r"/tmp/hivemind-p2pd-[\w-]+\.sock")


def begin(parent: int) -> Say:
    """Bind this process and those that it starts to the process `parent`; return the function that writes.

    The function writes its keyword arguments as a JSON line to standard output, between which nothing comes
    that hivemind prints.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    bind_children(say)
    return say


def bind_children(say: Say) -> None:
    """Let processes that hivemind forks, and p2pd, end with their parents; tell p2pd's id and its socket."""
    parents = [os.getpid()]
    os.register_at_fork(
        before=lambda: parents.append(os.getpid()),
        after_in_child=lambda: end_with_parent(parents[-1], signal.SIGKILL),
    )
    start = asyncio.subprocess.create_subprocess_exec

    async def started(*words: Any, **options: Any) -> Any:
        ends = partial(end_with_parent, os.getpid(), signal.SIGKILL)
        process = await start(*words, **options, preexec_fn=ends)
        listens = [str(word) for word in words if str(word).startswith(_LISTENS)]
        say(p2pd=process.pid, socket=listens[0].removeprefix(_LISTENS) if listens else "")
        return process

    asyncio.subprocess.create_subprocess_exec = started


def remove_socket(path: str) -> None:
    """Remove the socket of p2pd, which stays when it is killed; do nothing if `path` is none."""
    if _SOCKET.fullmatch(path):
        Path(path).unlink(missing_ok=True)
