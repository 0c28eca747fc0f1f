"""Process that generates rollouts: `python -m aedit.spec_rollout.server.worker PARENT FD`.

It reads the policy's weights from memory that it shares with its rank, and changes them between two decode
steps; samples, their tokens and figures travel as JSON. It ends with its rank.
"""

import os
import signal
import socket
import sys
import traceback
from typing import TYPE_CHECKING

from aedit.spec_rollout.server.channel import Channel, Message
from aedit.system import end_with_parent, no_collections

if TYPE_CHECKING:  # torch takes seconds to load, and this process must first be bound to its parent's life
    from aedit.spec_rollout.server.serving import Worker

BEAT_S = 0.5
"""Interval of the messages of a worker that has nothing else to say."""


def main(arguments: list[str]) -> int:
    """Generate until the rank has ended or closed the connection; return the exit code."""
    parent, fd = int(arguments[0]), int(arguments[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=fd))
    try:
        begin, *more = channel.first_messages()
        worker = _make(begin, channel)
        for message in more:
            worker.handle(message)
        while not channel.closed:
            worker.advance(BEAT_S)
    except BaseException as error:
        traceback.print_exc()
        channel.send_error(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _make(begin: Message, channel: Channel) -> "Worker":
    sys.path[:] = begin["path"]
    with no_collections():
        import torch

        from aedit.spec_rollout.server.serving import Worker

    torch.set_num_threads(begin["threads"])
    return Worker(begin, channel)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for threads that still compute.
    os._exit(code)
