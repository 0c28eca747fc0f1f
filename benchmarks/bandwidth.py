"""Measure how long nodes wait behind a slow link, and what codecs cost in held-out loss.

    python -m benchmarks.bandwidth [--only wires|codecs] [--quick]

Bar for landing on arrival: <= 2 % of the time whenever the link needs less than the interval. Nodes are
processes in network namespaces; between them is real Gloo, or a real hub. Their steps are of a fixed pace, so
that two cores are enough and every lost millisecond is due to the link. Bars for 4 bits: <= 0.53 bytes per
parameter each way, and held-out loss within 0.5 % of fp32 at equal tokens.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.bandwidth_parts import coarse, codecs
from benchmarks.bandwidth_parts.hub import HubRow, HubSize, Way, hub_row, long_way
from benchmarks.bandwidth_parts.node import Job, Seen
from benchmarks.kit import netns, tun_link
from benchmarks.kit.netns import Place
from benchmarks.kit.processes import run_jobs
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.virtual_hub import Setting

MOST = 0.02
MOST_BYTES = 0.53
CLOSE = 0.005
METHODS = ("ddp", "edit", "streaming")
FRAGMENTS = {"streaming": 4}
"""Groups of layers that move one after the other."""
SEEDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Duration and size of the measurement."""

    nodes: int = 2
    rates_mbit: tuple[int, ...] = (10, 100, 1000)
    width: int = 256
    num_layers: int = 16
    step_s: float = 0.05
    every: int = 128
    intervals: int = 3
    ddp_steps: int = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of one run of this benchmark."""

    gloo: Size
    hub: HubSize
    ways: tuple[Way, ...]
    codecs: tuple[str, ...]
    loss: Setting
    seeds: int


FULL = Plan(
    gloo=Size(),
    hub=HubSize(),
    ways=(
        *(Way(rate_mbit) for rate_mbit in Size().rates_mbit),
        *(long_way(0.04), long_way(0.08), long_way(0.04, loss=0.005)),
    ),
    codecs=("fp32", "e3m0"),
    loss=coarse.FULL,
    seeds=SEEDS,
)
QUICK = Plan(
    gloo=Size(rates_mbit=(1000,), width=32, num_layers=4, step_s=0.02, every=8, intervals=2, ddp_steps=4),
    hub=HubSize(width=32, num_layers=4, step_s=0.02, every=8, steps=20),
    ways=(Way(1000), long_way(0.04)),
    codecs=("e3m0",),
    loss=coarse.QUICK,
    seeds=1,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one method behind one link."""

    rate_mbit: int
    method: str
    seen: Seen
    """Of the node that waited longest."""
    interval_s: float
    """From one round to the next."""
    wire_s: float
    """What the wire needs for one round: a ring all-reduce of the payload at the full rate."""
    lost: float
    """Share of the time beyond the steps' fixed pace, whatever the reason."""

    @property
    def per_param(self) -> float:
        """Return the bytes sent per parameter that has moved."""
        rounds = self.seen.rounds / FRAGMENTS.get(self.method, 1)
        return self.seen.wire_bytes / rounds / self.seen.params

    @property
    def stall(self) -> float:
        return self.seen.waited_s / self.seen.wall_s

    @property
    def fits(self) -> bool:
        return self.wire_s < self.interval_s


def measure(args: argparse.Namespace) -> Sequence[Report] | str:
    reports = []
    if args.only != "codecs":
        found = wires(args.quick)
        if isinstance(found, str):
            return found
        reports.append(found)
    if args.only != "wires":
        reports.append(codecs.report(args.quick, 1 if args.quick else SEEDS))
    return reports


def wires(quick: bool) -> Report | str:
    if reason := netns.why_not() or tun_link.why_not():
        return reason
    plan = QUICK if quick else FULL
    size = plan.gloo
    rows = []
    for rate_mbit in size.rates_mbit:
        with netns.network(size.nodes, rate_mbit) as places:
            rows += [_row(rate_mbit, method, size, places) for method in METHODS]
    hub_rows = [hub_row(way, codec, plan.hub) for way in plan.ways for codec in plan.codecs]
    losses = coarse.losses(("fp32", "e3m0"), plan.loss, range(plan.seeds))
    bars = [_bar(row, quick) for row in rows if row.method == "streaming" and row.fits]
    return Report(
        f"a thin wire between {size.nodes} nodes",
        (
            f"{rows[0].seen.params:,} parameters, Gloo or a hub between network namespaces, steps of"
            f" {1e3 * size.step_s:.0f} ms, a layer moves every {size.every} steps; uplinks shaped by tbf, or"
            " with ms: one user-space wire so long one way.",
            "Stall: waiting for others / wall, up to the last step. Lost: all time beyond the steps' pace."
            " Bytes: counted on the nodes' interfaces, per parameter of a round, up / down; the long wire's"
            " packets have 1500 bytes, and their headers 5 %.",
        ),
        (
            "Mbit/s",
            "method",
            "wall s",
            "stall",
            "lost",
            "bytes/param",
            "wire s/round",
            "interval s",
            "enough",
        ),
        (*map(_cells, rows), *map(_hub_cells, hub_rows)),
        (*bars, *_hub_bars(hub_rows, quick), _loss_bar(losses, quick)),
        {
            **{f"{row.rate_mbit}/{row.method}": asdict(row) for row in rows},
            **{f"{row.way.name}/hub {row.codec}": asdict(row) for row in hub_rows},
            "loss": losses,
        },
    )


def _row(rate_mbit: int, method: str, size: Size, places: Sequence[Place]) -> Row:
    # Behind a fast wire the baseline is quick, and a few steps would be noise.
    ddp_steps = min(size.ddp_steps * rate_mbit // min(size.rates_mbit), size.every)
    steps = ddp_steps if method == "ddp" else size.intervals * size.every + 1
    seen = _run(method, steps, size, places)
    slowest = max(seen, key=lambda s: s.waited_s)
    fragments = FRAGMENTS.get(method, 1)
    interval_s = size.step_s * (1 if method == "ddp" else size.every // fragments)
    ring = 2 * (size.nodes - 1) / size.nodes
    wire_s = ring * slowest.payload_bytes / slowest.rounds * 8 / (rate_mbit * 1e6)
    return Row(rate_mbit, method, slowest, interval_s, wire_s, 1 - steps * size.step_s / slowest.wall_s)


def _run(method: str, steps: int, size: Size, places: Sequence[Place]) -> list[Seen]:
    """Run one process per place."""
    jobs = [
        Job(
            method=method,
            steps=steps,
            every=size.every,
            step_s=size.step_s,
            width=size.width,
            num_layers=size.num_layers,
            rank=rank,
            nodes=len(places),
            interface=place.interface,
            store=places[0].address,
        )
        for rank, place in enumerate(places)
    ]
    return [Seen(**told) for told in run_jobs("benchmarks.bandwidth_parts.node", jobs, places=places)]


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.rate_mbit),
        row.method,
        f"{row.seen.wall_s:.1f}",
        percent(row.stall),
        percent(row.lost),
        f"{row.per_param:.2f}",
        f"{row.wire_s:.3f}",
        f"{row.interval_s:.2f}",
        "yes" if row.fits else "no",
    )


def _hub_cells(row: HubRow) -> tuple[str, ...]:
    return (
        row.way.name,
        f"hub {row.codec}",
        f"{row.seen.wall_s:.1f}",
        percent(row.stall),
        percent(row.lost),
        f"{row.up:.3f} / {row.down:.3f}",
        f"{row.wire_s:.3f}",
        f"{row.interval_s:.2f}",
        "yes" if row.fits else "no",
    )


def _bar(row: Row, quick: bool) -> Bar:
    text = (
        f"{row.rate_mbit} Mbit/s: streaming stalls {percent(row.stall)} of the time, bar {percent(MOST, 0)}"
    )
    return Bar(text, None if quick else row.stall <= MOST)


def _hub_bars(rows: Sequence[HubRow], quick: bool) -> list[Bar]:
    bars = []
    for row in rows:
        who = f"{row.way.name}: hub {row.codec}"
        if row.fits:
            text = f"{who} stalls {percent(row.stall)} of the time, bar {percent(MOST, 0)}"
            bars.append(Bar(text, None if quick else row.stall <= MOST))
        if row.codec == "e3m0":
            most = max(row.up, row.down)
            text = f"{who} sends {most:.3f} bytes per parameter and direction, bar {MOST_BYTES}"
            bars.append(Bar(text, None if quick else most <= MOST_BYTES))
    return bars


def _loss_bar(losses: dict[str, list[float]], quick: bool) -> Bar:
    cost = coarse.cost(losses, "e3m0")
    text = (
        f"held-out loss with e3m0 up and down is {100 * cost:+.2f} % of fp32's at equal tokens, 4 unequal"
        f" nodes in virtual time, {len(losses['fp32'])} seeds, bar {percent(CLOSE)}"
    )
    return Bar(text, None if quick else cost <= CLOSE)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("wires", "codecs"), help="one of two tables; codecs needs no root")


if __name__ == "__main__":
    about = "Stall behind a thin wire between network namespaces (needs root); codecs by loss and bytes."
    main("bandwidth", about, measure, options=_options)
