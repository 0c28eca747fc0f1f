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
from contextlib import suppress

from aedit.child import begin_child
from aedit.spec_rollout.remote.links import Event, Links, LinkSettings
from aedit.spec_rollout.server import Channel

TICK_S = 0.1
"""Longest wait of the loop."""
MAX_EVENTS = 4096
"""Messages of servers that wait to be handled; further ones wait in their connections."""


class Inbox:
    """Events of other threads for the loop, which they wake."""

    def __init__(self) -> None:
        self._events: queue.Queue[Event] = queue.Queue(MAX_EVENTS)
        self.socket, self._wake = socket.socketpair()
        self.socket.setblocking(False)
        self._wake.setblocking(False)

    def post(self, event: Event) -> None:
        """Add an event; wait while there are too many."""
        self._events.put(event)
        with suppress(BlockingIOError):  # it is awake
            self._wake.send(b"\0")

    def take(self) -> list[Event]:
        """Return the events so far."""
        with suppress(BlockingIOError):
            self.socket.recv(MAX_EVENTS)
        found: list[Event] = []
        with suppress(queue.Empty):
            while len(found) < MAX_EVENTS:
                found.append(self._events.get_nowait())
        return found


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
        links = Links(LinkSettings.of(begin["settings"]), channel, inbox.post, time.monotonic())
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
        for event in inbox.take():
            links.take(event, time.monotonic())
        now_s = time.monotonic()
        links.advance(now_s, now_s - seen_s)
        seen_s = now_s


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # do not wait for threads that still send or audit
