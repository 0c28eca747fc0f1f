"""The part of `benchmarks.bandwidth` with a hub: nodes that nobody waits for, behind thin, long and lossy
wires."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bandwidth_parts.hub_node import RUN, HubJob, HubSeen, Traffic
from benchmarks.kit import netns, tun_link
from benchmarks.kit.netns import Place
from benchmarks.kit.tun_link import Wire

ROOT = Path(__file__).parents[2]
PORT = 7000
START_S, DEADLINE_S = 60.0, 240.0

TOML = """
name = "{run}"
dir = "{directory}"
[train]
steps = 1000000000
[edit]
every = {every}
landing = "arrival"
penalty = {{ clip = "none" }}
[hub]
address = "{address}"
quorum = "all"
weights = "uniform"
codec = "{codec}"
codec_down = "{codec}"
[hub.push_filter]
threshold = 1e9
clip = "none"
cosine = false
"""
"""One new anchor per round, so that as much comes down as goes up; and no screens, which have no business
with a model that learns nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSize:
    """How long and how large everything is."""

    nodes: int = 2
    width: int = 256
    num_layers: int = 16
    step_s: float = 0.05
    every: int = 128
    steps: int = 3 * 128 + 64


@dataclass(frozen=True, slots=True)
class Way:
    """How nodes reach the hub: each through a shaped uplink of its own to a switch, or all through one long
    wire."""

    rate_mbit: int
    wire: Wire | None = None

    @property
    def name(self) -> str:
        if self.wire is None:
            return f"{self.rate_mbit}"
        lost = f", {100 * self.wire.loss:g} % lost" if self.wire.loss else ""
        return f"{self.rate_mbit}, {1e3 * self.wire.delay_s:.0f} ms{lost}"


def long_way(delay_s: float, *, loss: float = 0.0, rate_mbit: int = 100) -> Way:
    """delay_s: one way."""
    wire = Wire(delay_s=delay_s, jitter_s=delay_s / 20, loss=loss, rate_mbit=rate_mbit)
    return Way(rate_mbit, wire)


@dataclass(frozen=True, slots=True)
class HubRow:
    """What the nodes of one run did behind one wire."""

    way: Way
    codec: str
    seen: HubSeen
    """Of the node that waited longest."""
    interval_s: float
    wire_s: float
    """What the wire needs for one round in the direction that all nodes share."""
    lost: float
    """Share of the time beyond the steps' fixed pace."""
    up: float
    """Bytes counted on the nodes' interfaces per parameter pushed."""
    down: float
    refused: int

    @property
    def stall(self) -> float:
        return self.seen.waited_s / self.seen.wall_s

    @property
    def fits(self) -> bool:
        return self.wire_s < self.interval_s


def hub_row(way: Way, codec: str, size: HubSize) -> HubRow:
    """Train behind `way`. Needs root."""
    with (
        _laid(way, size.nodes) as (hub, places),
        TemporaryDirectory(prefix="aedit-") as directory,
        _hub(hub, codec, size, Path(directory)),
    ):
        seen = _nodes(places, f"{hub.address}:{PORT}", codec, size)
    slowest = max(seen, key=lambda s: s.waited_s)
    up, down = _per_param(places, seen)
    payload_bits = 8 * up * slowest.params
    return HubRow(
        way,
        codec,
        slowest,
        interval_s=size.step_s * size.every,
        wire_s=size.nodes * payload_bits / (1e6 * way.rate_mbit),
        lost=1 - size.steps * size.step_s / slowest.wall_s,
        up=up,
        down=down,
        refused=sum(s.refused for s in seen),
    )


@contextmanager
def _laid(way: Way, nodes: int) -> Iterator[tuple[Place, list[Place]]]:
    """The hub's place and the nodes'."""
    if way.wire is None:
        with netns.network(nodes + 1, way.rate_mbit) as places:
            yield places[0], places[1:]
    else:
        with tun_link.link(way.wire) as (here, there):
            yield here, [there] * nodes


@contextmanager
def _hub(place: Place, codec: str, size: HubSize, directory: Path) -> Iterator[None]:
    address = f"{place.address}:{PORT}"
    toml = directory / "run.toml"
    toml.write_text(TOML.format(run=RUN, directory=directory, every=size.every, address=address, codec=codec))
    words = ["aedit.launch.cli", "hub", str(toml), f"--directory={directory}/hub", "--insecure"]
    with (directory / "hub.log").open("wb") as log:
        process = subprocess.Popen(_at(place, words), cwd=ROOT, stdout=log, stderr=log)
        try:
            _wait_for_hub(place, address, process, directory / "hub.log")
            yield
        finally:
            process.kill()
            process.wait(10)


def _wait_for_hub(place: Place, address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + START_S
    ask = _at(place, ["benchmarks.kit.cluster", address])
    while subprocess.run(ask, cwd=ROOT, capture_output=True, timeout=START_S).returncode:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the hub does not answer:\n{log.read_text()[-4000:]}")


def _nodes(places: Sequence[Place], hub: str, codec: str, size: HubSize) -> list[HubSeen]:
    """One process per place. None is left, whatever happens."""
    started: list[subprocess.Popen[str]] = []
    try:
        for n, place in enumerate(places):
            job = HubJob(
                hub=hub,
                name=f"node-{n}",
                interface=place.interface,
                codec=codec,
                steps=size.steps,
                every=size.every,
                step_s=size.step_s,
                width=size.width,
                num_layers=size.num_layers,
            )
            started.append(_start(job, place))
        for process in started:
            _expect_ready(process)
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        return [_seen(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate(timeout=10)


def _start(job: HubJob, place: Place) -> "subprocess.Popen[str]":
    command = _at(place, ["benchmarks.bandwidth_parts.hub_node", json.dumps(asdict(job))])
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _expect_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        _, err = process.communicate(timeout=DEADLINE_S)
        raise RuntimeError(f"a node did not become a member:\n{err[-4000:]}")


def _seen(process: "subprocess.Popen[str]") -> HubSeen:
    out, err = process.communicate(timeout=DEADLINE_S)
    if process.returncode:
        raise RuntimeError(f"a node failed:\n{err[-4000:]}")
    fields = json.loads(out.splitlines()[-1])
    return HubSeen(**fields | {name: Traffic(**fields[name]) for name in ("before", "after")})


def _per_param(places: Sequence[Place], seen: Sequence[HubSeen]) -> tuple[float, float]:
    """Bytes up and down per parameter pushed; nodes at one place share its interface."""
    up = down = 0
    for place in set(places):
        here = [s for at, s in zip(places, seen, strict=True) if at == place]
        up += max(s.after.sent for s in here) - min(s.before.sent for s in here)
        down += max(s.after.received for s in here) - min(s.before.received for s in here)
    pushed = sum(s.params_pushed for s in seen)
    return up / pushed, down / pushed


def _at(place: Place, words: Sequence[str]) -> list[str]:
    settings = ["env", "OMP_NUM_THREADS=1"]
    return ["ip", "netns", "exec", place.namespace, *settings, sys.executable, "-m", *words]
