"""A rollout server of a fixed pace: `python -m benchmarks.rl_servers_parts.server JSON`, a `ServerPlan`.

The services, streams and versions are those of `aedit serve`; only the engine is another one, and there is no
hub: its trainer is told its address. Prints "ready" when it could serve, waits for a line with its address,
serves, and prints the address.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from aedit.proto.rpc import Server, SigningKey
from aedit.proto.versions import VersionLayout
from aedit.spec_rollout.engine import Engine
from aedit.spec_rollout.server import (
    EngineHost,
    EngineSpec,
    HostLimits,
    RolloutService,
    ServedVersions,
    ServerIdentity,
    StreamLimits,
    TrainerLines,
)
from aedit.types import Layout
from benchmarks.kit.hubs import layout_of
from benchmarks.rl_servers_parts.paced import make_paced
from benchmarks.rl_servers_parts.training import make_policy

RUN = "rl-servers"
RING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlan:
    """A server."""

    name: str
    engine: Mapping[str, Any]
    """Fields of `EngineSpec`."""


@dataclass(frozen=True, slots=True)
class PacedLine:
    """Engine of a line, which drafts nothing."""

    engine: Engine
    drafter_version: int = 0

    def between_steps(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def policy_layout() -> Layout:
    """Return the sync units of the policy, as a hub of a real run would tell them."""
    model: Any = make_policy()
    return layout_of(model.float())  # a hub's anchors are no float64


def serve(plan: ServerPlan, address: str, ending: threading.Event) -> None:
    """Serve at HOST:PORT until `ending` is set."""
    spec = EngineSpec(**{**plan.engine, "arms": tuple(plan.engine["arms"])})
    limits = StreamLimits()
    host = EngineHost(HostLimits(max_lines=limits.lines + 1))
    versions = ServedVersions(
        VersionLayout(policy_layout(), "fp64"), host, ring=RING, max_lines=limits.lines + 1
    )
    lines = TrainerLines(host, lambda name: PacedLine(make_paced(spec)), versions, limits)
    identity = ServerIdentity(RUN, plan.name, SigningKey())
    service = RolloutService(identity, host, lines, limits)
    server = Server([service.service(), versions.serve(lines)], address)
    print(server.address, flush=True)
    ending.wait()
    service.close()
    server.stop(0.0)
    host.close()


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ending.set())
    print("ready", flush=True)
    if address := sys.stdin.readline().strip():
        serve(ServerPlan(**json.loads(words[0])), address, ending)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # do not wait for threads of streams
