"""Part of `benchmarks.bandwidth` with a hub: nodes behind slow, long and lossy links that do not wait."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bandwidth_parts.hub_node import RUN, HubJob, HubSeen, Traffic
from benchmarks.kit import netns, tun_link
from benchmarks.kit.netns import Place
from benchmarks.kit.processes import hub, run_jobs
from benchmarks.kit.tun_link import Wire

PORT = 7000

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
    """Duration and size of the measurement."""

    nodes: int = 2
    width: int = 256
    num_layers: int = 16
    step_s: float = 0.05
    every: int = 128
    steps: int = 3 * 128 + 64


@dataclass(frozen=True, slots=True)
class Way:
    """Network between nodes and hub: a shaped uplink per node to a switch, or one long link for all."""

    rate_mbit: int
    wire: Wire | None = None

    @property
    def name(self) -> str:
        if self.wire is None:
            return f"{self.rate_mbit}"
        lost = f", {100 * self.wire.loss:g} % lost" if self.wire.loss else ""
        return f"{self.rate_mbit}, {1e3 * self.wire.delay_s:.0f} ms{lost}"


def long_way(delay_s: float, *, loss: float = 0.0, rate_mbit: int = 100) -> Way:
    """Return a long link; delay_s: one way."""
    wire = Wire(delay_s=delay_s, jitter_s=delay_s / 20, loss=loss, rate_mbit=rate_mbit)
    return Way(rate_mbit, wire)


@dataclass(frozen=True, slots=True)
class HubRow:
    """Results of one run behind one network."""

    way: Way
    codec: str
    seen: HubSeen
    """Results of the node that waited longest."""
    interval_s: float
    wire_s: float
    """Seconds that one round needs in the direction that all nodes share."""
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
    with _laid(way, size.nodes) as (there, places), TemporaryDirectory(prefix="aedit-") as name:
        settings = {"run": RUN, "directory": name, "every": size.every, "codec": codec}
        toml = TOML.format(address=f"{there.address}:{PORT}", **settings)
        with hub(Path(name), toml, there) as process:
            seen = _nodes(places, process.address, codec, size)
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
    """Yield the hub's place and the nodes'."""
    if way.wire is None:
        with netns.network(nodes + 1, way.rate_mbit) as places:
            yield places[0], places[1:]
    else:
        with tun_link.link(way.wire) as (here, there):
            yield here, [there] * nodes


def _nodes(places: Sequence[Place], hub: str, codec: str, size: HubSize) -> list[HubSeen]:
    """Run one process per place; return the results."""
    jobs = [
        HubJob(
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
        for n, place in enumerate(places)
    ]
    told = run_jobs("benchmarks.bandwidth_parts.hub_node", jobs, places=places)
    return [HubSeen(**one | {name: Traffic(**one[name]) for name in ("before", "after")}) for one in told]


def _per_param(places: Sequence[Place], seen: Sequence[HubSeen]) -> tuple[float, float]:
    """Return the bytes up and down per parameter pushed; nodes at one place share its interface."""
    up = down = 0
    for place in set(places):
        here = [s for at, s in zip(places, seen, strict=True) if at == place]
        up += max(s.after.sent for s in here) - min(s.before.sent for s in here)
        down += max(s.after.received for s in here) - min(s.before.received for s in here)
    pushed = sum(s.params_pushed for s in seen)
    return up / pushed, down / pushed
