"""Process that connects a rank with rollout servers: `python -m aedit.spec_rollout.remote.link PARENT FD`.

It speaks rollouts.proto: towards the rank over a local socket, one lane per connection, towards the servers
over gRPC. What servers send is checked, and held until it may be released. Without an audit it does not load
torch: it reads policy versions from the memory that the rank shares with its workers. It ends with its rank.
"""

import json
import logging
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from aedit.child import begin_child, from_json
from aedit.spec_rollout.remote.links import Links, LinkSettings
from aedit.spec_rollout.server import Channel

TICK_S = 0.1
"""Longest wait of the loop."""
MAX_EVENTS = 4096
"""Messages of servers that wait to be handled; further ones wait in their connections."""


class Inbox:
    """Calls that other threads want the loop to make, which they wake."""

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue(MAX_EVENTS)
        self.socket, self._wake = socket.socketpair()
        self.socket.setblocking(False)
        self._wake.setblocking(False)

    def post(self, call: Callable[[], None]) -> None:
        """Add a call; wait while there are too many."""
        self._calls.put(call)
        with suppress(BlockingIOError):  # it is awake
            self._wake.send(b"\0")

    def run(self) -> None:
        """Make the calls so far."""
        with suppress(BlockingIOError):
            self.socket.recv(MAX_EVENTS)
        for _ in range(min(self._calls.qsize(), MAX_EVENTS)):  # the loop alone takes calls
            self._calls.get_nowait()()


def main(arguments: list[str]) -> int:
    """Connect until the rank has ended or closed the connection; return the exit code."""
    fd = int(begin_child(arguments)[0])
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    channel = Channel(socket.socket(fileno=fd))
    try:
        _serve(channel)
    except BaseException as error:
        traceback.print_exc()
        channel.send_error(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _serve(channel: Channel) -> None:
    (_, data), *more = channel.first_frames()
    begin = json.loads(data)
    sys.path[:] = begin["path"]
    inbox = Inbox()
    try:
        links = Links(from_json(LinkSettings, begin["settings"]), channel, inbox.post)
    except ValueError as error:  # of settings or their auditor: another start would not help
        channel.send("refused", message=str(error))
        raise
    for frame in more:
        links.handle(*frame)
    seen_s = time.monotonic()
    while not channel.closed:
        channel.flush()
        Channel.wait([channel], TICK_S, [inbox.socket])
        for frame in channel.receive():
            links.handle(*frame)
        inbox.run()
        now_s = time.monotonic()
        links.advance(now_s, now_s - seen_s)
        seen_s = now_s


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for threads that still send or audit
