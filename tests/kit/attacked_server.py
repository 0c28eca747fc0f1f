"""A rollout server in a process of its own, so that its memory can be measured: prints its address."""

import sys

from aedit.proto.rpc import Limits
from kit.rollout_servers import TinyServer
from kit.rollouts import tiny_policy


def main():
    server = TinyServer("server", wire_limits=Limits(calls_per_s=1e9))
    server.lines.open_own("run")
    server.publish("run", tiny_policy(1), 1)
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
