"""Share of a thin wire that one push fills. Part of `benchmarks.hub`. Needs root for network namespaces.

As a program, the hub's end of the wire: `python -m benchmarks.programs.thin_wire ADDRESS BYTES`, or a node's
with the repetitions as a third argument.
"""

import sys
from subprocess import PIPE
from time import perf_counter
from typing import cast

import numpy as np

from aedit.proto.rpc import CallHandlers, FairPool, HubClient, HubCore, Limits, Server, Service
from benchmarks.kit import tun_link
from benchmarks.kit.processes import Dialogue, end, start
from benchmarks.kit.statistics import median
from benchmarks.kit.tun_link import Wire
from benchmarks.programs.push_rates import MOVES_WITHIN_S, Sink, push_over_grpc

DELAY_S, PORT, REPEATS = 0.04, 7100, 3


def filled(rate_mbit: float, num_bytes: int) -> float:
    """Return how fast pushes of `num_bytes` are as a share of the wire's rate, headers not counted.

    One push at a time; a round trip takes 80 ms. The first push, which makes the connection, does not count.
    """
    with tun_link.link(Wire(delay_s=DELAY_S, rate_mbit=rate_mbit)) as (here, there):
        words = (f"{there.address}:{PORT}", str(num_bytes))
        hub = Dialogue.start(__name__, *words, place=there)
        try:
            hub.await_ready()
            node = start(__name__, *words, str(REPEATS), place=here, stdout=PIPE)
            said, _ = node.communicate(timeout=MOVES_WITHIN_S)
        finally:
            end([hub.process])
    return 8e-6 * num_bytes / rate_mbit / median([float(line) for line in said.split()])


# -- in the processes


def _serve(address: str, num_bytes: int) -> None:
    pool, limits = FairPool(4, "push"), Limits()
    push = CallHandlers(limits).push(cast(HubCore, Sink(num_bytes)), pool)
    Server([Service("aedit.v1.Exchange", {"Push": push}, (pool,))], address, limits=limits)
    print("ready", flush=True)
    sys.stdin.read()


def _push(address: str, num_bytes: int, repeats: int) -> None:
    data = memoryview(np.random.default_rng(0).bytes(num_bytes))
    client = HubClient(address, call_timeout_s=MOVES_WITHIN_S)
    for number in range(1 + repeats):
        began = perf_counter()
        push_over_grpc(client, data)
        if number:
            print(perf_counter() - began, flush=True)
    client.close()


if __name__ == "__main__":
    (_push if len(sys.argv) > 3 else _serve)(sys.argv[1], *map(int, sys.argv[2:]))
