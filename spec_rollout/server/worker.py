"""Process that generates rollouts: `python -m aedit.spec_rollout.server.worker PARENT FD`.

It is a rollout server for one rank, on a socket that only the two have, and reads the policy's weights from
memory that it shares with its rank. It ends with its rank.
"""

import json
import os
import socket
import sys
import traceback

from aedit.child import begin_child
from aedit.spec_rollout.server.channel import Channel, Message
from aedit.system import no_collections


def main(arguments: list[str]) -> int:
    """Generate until the rank has ended or closed the connection; return the exit code."""
    fd = int(begin_child(arguments)[0])
    channel = Channel(socket.socket(fileno=fd))
    try:
        (_, begin), *more = channel.first_frames()
        _serve(json.loads(begin), channel, more)
    except BaseException as error:
        traceback.print_exc()
        channel.send_error(f"{type(error).__name__}: {error}")
        return 1
    return 0


def _serve(begin: Message, channel: Channel, more: list[tuple[int, bytes]]) -> None:
    if begin["path"] is not None:  # None: this process has an environment of its own
        sys.path[:] = begin["path"]
    with no_collections():  # torch takes seconds to load: this process is bound to its parent's life by now
        import torch

        from aedit.spec_rollout.server.worker_engine import Worker

    torch.set_num_threads(begin["threads"])
    Worker(begin, channel).serve(more)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for threads that still compute.
    os._exit(code)
