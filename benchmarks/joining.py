"""Measure how soon a new node trains: a large model over a long link, a killed donor, and ten at once.

The link has 200 Mbit/s and 80 ms round-trip time; hub and donor are at one end, the new node at the other.
The ten join over a network in which every node, and the hub, has an uplink of its own.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kit import netns, tun_link
from benchmarks.kit.cluster import Field
from benchmarks.kit.netns import Place
from benchmarks.kit.paced_node import PacedNode
from benchmarks.kit.processes import until
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.tun_link import Wire

OVER_LINE_RATE, EXTRA_S = 1.25, 5.0
AGAIN = 0.10
HUB_SHARE = 0.25
PORT = 7100
LIMIT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes. num_bytes: of the model's anchors. crowd_*: of the ten who join at once, and existing nodes."""

    num_bytes: int
    rate_mbit: int
    units: int
    crowd_bytes: int
    crowd_mbit: int
    crowd: int
    donors: int

    def plan(self, num_bytes: int) -> PacedNode:
        """Return the plan of nodes that never push, because only transfers are measured."""
        return PacedNode(
            hub="",
            name="",
            ledger="",
            units=self.units,
            numel=num_bytes // 4 // self.units,
            step_s=0.5,
            every=10**9,
            num_samples=10**6,
            expire_s=10.0,
        )


FULL = Size(
    num_bytes=400_000_000,
    rate_mbit=200,
    units=24,
    crowd_bytes=32_000_000,
    crowd_mbit=50,
    crowd=10,
    donors=4,
)
QUICK = replace(FULL, num_bytes=24_000_000, crowd_bytes=6_000_000, crowd=3, donors=2)
DELAY_S = 0.04


@dataclass(frozen=True, slots=True)
class Arrival:
    """seconds: from the start of the process to all anchors. received: bytes on the interface."""

    seconds: float
    received: int


@dataclass(frozen=True, slots=True)
class Crowd:
    """seconds: of each node that joined at once. hub_share: of the bytes they got."""

    alone_s: float
    seconds: tuple[float, ...]
    hub_share: float


def measure(quick: bool) -> Report | str:
    if why := tun_link.why_not():
        return why
    size = QUICK if quick else FULL
    calm, killed = over_a_wire(size)
    crowd = at_once(size)
    line_s = 8 * size.num_bytes / (1e6 * size.rate_mbit)
    hub_s = size.crowd * 8 * size.crowd_bytes / (1e6 * size.crowd_mbit)
    again = killed.received / calm.received - 1
    limit_s = OVER_LINE_RATE * line_s + EXTRA_S
    last_s = max(crowd.seconds)
    bars = (
        Bar(f"active after {calm.seconds:.1f} s, wanted <= {limit_s:.1f} s", calm.seconds <= limit_s),
        Bar(f"donor killed: {killed.seconds - calm.seconds:+.1f} s, wanted <= 5 s",
            killed.seconds - calm.seconds <= 5),
        Bar(f"donor killed: {percent(again)} sent again, wanted <= {percent(AGAIN, 0)}", again <= AGAIN),
        Bar(f"the last of {size.crowd} is active after {last_s:.1f} s; the hub's uplink alone would need "
            f"{hub_s:.1f} s, wanted <= half", None if quick else last_s <= hub_s / 2),
        Bar(f"the hub sent {percent(crowd.hub_share)} of what they got, wanted <= {percent(HUB_SHARE, 0)}",
            None if quick else crowd.hub_share <= HUB_SHARE),
    )  # fmt: skip
    return Report(
        "joining",
        (
            f"{size.num_bytes / 1e6:.0f} MB over {size.rate_mbit} Mbit/s, {2e3 * DELAY_S:.0f} ms there and "
            f"back; then {size.crowd_bytes / 1e6:.0f} MB for {size.crowd} at once,",
            f"{size.donors} donors and the hub, each with {size.crowd_mbit} Mbit/s. From the start of the "
            "process to the last unit's anchor.",
        ),
        ("who joins", "s", "line rate s", "MB received"),
        (
            _row("one, from a donor", calm.seconds, line_s, calm.received),
            _row("one, donor killed at 50 %", killed.seconds, line_s, killed.received),
            _row("one, from several donors", crowd.alone_s, None, None),
            _row(f"the first of {size.crowd} at once", min(crowd.seconds), None, None),
            _row(f"the last of {size.crowd} at once", last_s, hub_s / (size.donors + 1), None),
        ),
        bars,
        {"calm": asdict(calm), "killed": asdict(killed), "crowd": asdict(crowd), "size": asdict(size)},
    )


def _row(name: str, seconds: float, line_s: float | None, received: int | None) -> tuple[str, ...]:
    return (
        name,
        f"{seconds:.1f}",
        "" if line_s is None else f"{line_s:.1f}",
        "" if received is None else f"{received / 1e6:.1f}",
    )


def over_a_wire(size: Size) -> tuple[Arrival, Arrival]:
    """Let one node join from a donor, and another one whose donor is killed after half of the bytes."""
    wire = Wire(delay_s=DELAY_S, rate_mbit=size.rate_mbit, mtu=9000)
    with (
        tempfile.TemporaryDirectory(prefix="aedit-") as name,
        tun_link.link(wire) as (here, there),
        Field(Path(name), size.plan(size.num_bytes), places=[here, here, here, there, there]) as ground,
    ):
        _found(ground, [None, here])
        calm = _join(ground, "node-2", there)
        ground.kill_node("node-2")
        killed = _join(ground, "node-3", there, at_bytes=size.num_bytes // 2)
    return calm, killed


def at_once(size: Size) -> Crowd:
    """Let one node join alone, and then many together."""
    with (
        tempfile.TemporaryDirectory(prefix="aedit-") as name,
        netns.network(2 + size.donors + size.crowd, size.crowd_mbit) as places,
        Field(Path(name), size.plan(size.crowd_bytes), places=places) as ground,
    ):
        _found(ground, places[1 : 1 + size.donors])
        alone, *crowd = [f"node-{size.donors + i}" for i in range(1 + size.crowd)]
        alone_s = _join(ground, alone, places[1 + size.donors]).seconds
        ground.kill_node(alone)
        before, began_s = tun_link.counted(places[0]).sent, time.monotonic()
        for joiner in crowd:
            ground.start_node(joiner)
        until(lambda: all(ground.lines(joiner) for joiner in crowd), "everybody to join", LIMIT_S)
        sent = tun_link.counted(places[0]).sent - before
        seconds = tuple(_joined(ground, joiner)["t"] - began_s for joiner in crowd)
    return Crowd(alone_s, seconds, sent / (size.crowd * size.crowd_bytes))


def _found(ground: Field, places: Sequence[Place | None]) -> None:
    """Start the hub and the existing nodes; each at a place gives its anchors to others."""
    ground.start_hub()
    for index, place in enumerate(places):
        donor = f"{place.address}:{PORT + index}" if place else ""
        ground.start_node(f"node-{index}", donor=donor)
        until(lambda index=index: bool(ground.lines(f"node-{index}")), "a node to join", LIMIT_S)  # type: ignore[misc]


def _join(ground: Field, name: str, place: Place, at_bytes: int = 0) -> Arrival:
    """Let a node join. at_bytes: kill the donor when so many have arrived."""
    before, began_s = tun_link.counted(place).received, time.monotonic()
    ground.start_node(name)
    if at_bytes:
        until(lambda: tun_link.counted(place).received - before >= at_bytes, "the transfer", LIMIT_S)
        ground.kill_node("node-1")
    until(lambda: bool(ground.lines(name)), f"{name} to join", LIMIT_S)
    received = tun_link.counted(place).received - before
    return Arrival(_joined(ground, name)["t"] - began_s, received)


def _joined(ground: Field, name: str) -> dict[str, Any]:
    return next(line for line in ground.lines(name) if line["event"] == "joined")


if __name__ == "__main__":
    main("joining", "How soon a newcomer trains.", measure)
