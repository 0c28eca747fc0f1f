"""Measure how soon a busy hub answers and how much memory it takes. Part of `benchmarks.hub`."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.hub_parts.member import Crew, Seen
from benchmarks.hub_parts.process import hub_process, memory_bytes
from benchmarks.kit.processes import HubProcess, run_jobs

ASYNC = """
weights = "uniform"
[hub.staleness]
cutoff = 100_000
[edit.penalty]
clip = "none"
[outer]
kind = "delayed-nesterov"
lr = 0.7
momentum = 0.9
"""
"""The preset `async`, made for any number of nodes."""

QUORUM = """
quorum = {nodes}
[outer]
kind = "nesterov"
lr = 0.8
momentum = 0.85
"""

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Number of nodes, their speed and what they send."""

    nodes: int
    processes: int
    units: int
    numel: int
    interval_s: float
    """Between two rounds of a node of middling speed; the others take half to one and a half times it."""
    seconds: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Results of all nodes together."""

    heartbeat_s: list[float]
    merged: int
    refused: int
    late: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of a hub, in bytes."""

    idle: int
    """Before anybody has joined."""
    peak: int
    """The most it has ever had, pages of its journal's file that it had mapped included."""
    own: int
    """The most without those, as far as looking at it every 20 ms has shown."""
    params: int
    """Parameters of the model, in fp32."""
    merged: int

    @property
    def allowed(self) -> int:
        return 3 * self.params + 150 * MIB


def crowd(size: Size) -> Crowd:
    """Run many nodes at one hub."""
    with hub_process(ASYNC) as hub:
        return _together(run_jobs("benchmarks.hub_parts.member", _crews(size, hub.address)))


def memory(size: Size, settings: str) -> Memory:
    """Run a hub that receives pushes as fast as it can take them; return its memory."""
    with hub_process(settings) as hub:
        idle = memory_bytes(hub.pid, "VmRSS")
        with _watched(hub) as own:
            seen = _together(run_jobs("benchmarks.hub_parts.member", _crews(size, hub.address)))
        peak = memory_bytes(hub.pid, "VmHWM")
    params = 4 * size.units * size.numel
    return Memory(idle=idle, peak=peak, own=max(own), params=params, merged=seen.merged)


@contextmanager
def _watched(hub: HubProcess) -> Iterator[list[int]]:
    """Yield a list that fills with the bytes of the hub's own memory."""
    own, over = [memory_bytes(hub.pid, "RssAnon")], threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            own.append(memory_bytes(hub.pid, "RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield own
    finally:
        over.set()
        thread.join()


def _crews(size: Size, address: str) -> list[Crew]:
    """Return the nodes, divided among the processes."""
    every = 64
    share = [0.5 + node / max(1, size.nodes - 1) for node in range(size.nodes)]
    return [
        Crew(
            hub=address,
            names=[f"node-{node}" for node in range(process, size.nodes, size.processes)],
            step_s=[size.interval_s / every * share[n] for n in range(process, size.nodes, size.processes)],
            every=every,
            units=size.units,
            numel=size.numel,
            codec="bf16",
            seconds=size.seconds,
        )
        for process in range(size.processes)
    ]


def _together(told: list[dict[str, Any]]) -> Crowd:
    seen = [Seen(**one) for one in told]
    return Crowd(
        sorted(heartbeat_s for one in seen for heartbeat_s in one.heartbeat_s),
        sum(one.merged for one in seen),
        sum(one.refused for one in seen),
        sum(one.late for one in seen),
    )
