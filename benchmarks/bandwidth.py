"""Measure how long nodes wait behind a slow link, and what codecs cost in held-out loss.

    python -m benchmarks.bandwidth [--only wires|codecs] [--quick]

Bar for landing on arrival: <= 2 % of the time whenever the link needs less than the interval. Nodes are
processes in network namespaces; between them is real Gloo, or a real hub. Their steps are of a fixed pace, so
that two cores are enough and every lost millisecond is due to the link. Bars for 4 bits: <= 0.53 bytes per
parameter each way, and held-out loss within 0.5 % of fp32 at equal tokens.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from aedit.async_sgd.inprocess import Tamper
from aedit.async_sgd.rules import ArrayValues, Codec, HubConfig, OuterConfig, PenaltyConfig, Push, Vector
from aedit.proto.codecs import Feedback, codec
from benchmarks.kit import netns, tun_link
from benchmarks.kit.netns import Place
from benchmarks.kit.paced import layout_of
from benchmarks.kit.processes import hub, in_parallel, run_jobs
from benchmarks.kit.small_llama import llama
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.kit.tun_link import Wire
from benchmarks.kit.virtual_hub import Method, Setting, train_apart, warm_up
from benchmarks.programs.bandwidth_node import RUN, HubJob, HubSeen, Traffic
from benchmarks.programs.gloo_node import Job, Seen

# -- measure what coarse codecs cost in held-out loss at equal tokens, in virtual time with a real hub


SHORT_RUN = Setting(steps=256, warmup_steps=128)
QUICK_RUN = Setting(steps=8, warmup_steps=2, every=2, hidden_size=32, num_layers=1, held_out=16)
OUTER = OuterConfig(kind="delayed-nesterov", lr=0.7, momentum=0.9)


Name = Literal["fp32", "bf16", "int8", "e3m0"]


@dataclass(slots=True)
class CoarsePushes:
    """Encode and decode the pushes of a node; what the codec leaves out is kept for the next push."""

    name: str
    residuals: dict[int, Vector] = field(default_factory=dict)

    def __call__(self, push: Push) -> Push:
        coder = codec(self.name)
        assert isinstance(push.values, ArrayValues)
        exact = push.values.array
        if coder.feedback:
            feedback = Feedback(coder, self.residuals.setdefault(push.unit, np.zeros_like(exact)))
            payload = feedback.encode(exact)
            feedback.taken(exact, payload)
        else:
            payload = coder.encode(exact)
        return replace(push, values=ArrayValues(coder.decode(payload, exact.size, 0, exact.size)))


def coarse(nodes: int, name: str) -> Mapping[int, Tamper]:
    """Return for every node a `CoarsePushes` with its own residuals."""
    return {} if name == "fp32" else {node: CoarsePushes(name) for node in range(nodes)}


def coarse_losses(names: Sequence[Name], setting: Setting, seeds: Sequence[int]) -> dict[str, list[float]]:
    """Return the held-out loss after equal tokens by codec, up and down, for each seed."""
    found = in_parallel(loss_of, list(product(names, [replace(setting, seed=seed) for seed in seeds])))
    return {name: found[i * len(seeds) : (i + 1) * len(seeds)] for i, name in enumerate(names)}


def loss_of(name: Name, setting: Setting) -> float:
    """Train nodes of unequal pace with a hub that merges every arrival; return the held-out loss."""
    hub = HubConfig(grace=0.0, weights="uniform", codec=name, codec_down=name)
    plain = PenaltyConfig(clip=None)
    method = Method(hub=hub, outer=OUTER, penalty=plain, tamper=coarse(setting.nodes, name))
    return train_apart(setting, warm_up(setting), method).loss


def cost_of(losses: Mapping[str, Sequence[float]], name: str) -> float:
    """Return the mean loss above that of fp32, as a share of it."""
    return fmean(losses[name]) / fmean(losses["fp32"]) - 1


# -- measure codec x held-out loss x bytes at equal tokens, in virtual time with a real hub


LONG_RUN = Setting(steps=1024, warmup_steps=128)
NESTEROV = OuterConfig(kind="nesterov", lr=0.7, momentum=0.9)
AVERAGE = OuterConfig(kind="average", lr=1.0)
"""Outer optimizer of SparseLoCo (arXiv:2508.15706): error feedback takes the place of its momentum."""
CLOSE_TOPK, MOST_TOPK_BYTES = 0.005, 0.05


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table."""

    up: Codec
    down: Codec
    outer: OuterConfig = AVERAGE


EXACT = Case("fp32", "fp32")
BOTH = Case("topk", "topk")
CASES = (
    Case("fp32", "fp32", NESTEROV),
    Case("topk", "topk", NESTEROV),
    EXACT,
    Case("int8", "int8"),
    Case("e3m0", "e3m0"),
    Case("topk", "fp32"),
    BOTH,
)


@dataclass(frozen=True, slots=True)
class Found:
    """Result of one run."""

    loss: float
    refused: int
    """Pushes that the hub did not take or did not count."""


def codecs_report(quick: bool, seeds: int) -> Report:
    """Train every case with every seed; return the table."""
    setting = QUICK_RUN if quick else LONG_RUN
    jobs = list(product(CASES, [replace(setting, seed=seed) for seed in range(seeds)]))
    found = in_parallel(train_with, jobs)
    rows = {case: found[i * seeds : (i + 1) * seeds] for i, case in enumerate(CASES)}
    sizes = {case: _payload_bytes(case, setting) for case in CASES}
    bars = _codec_bars(rows, sizes, quick)
    return Report(
        "codec, held-out loss and bytes at equal tokens",
        (
            f"{setting.nodes} unequal nodes in virtual time, a real hub, quorum of all, a Llama of width"
            f" {setting.hidden_size}, {setting.steps} steps per node, a round every {setting.every},"
            f" {seeds} seeds.",
            "Bytes: of the payloads, per parameter and round. Loss: nats per byte; beside it what it is above"
            " fp32's with the same outer optimizer, seed by seed, and the standard deviation of that.",
        ),
        ("outer", "up", "down", "bytes up", "bytes down", "loss", "above fp32", "+-", "refused"),
        tuple(_codec_cells(case, rows, sizes[case]) for case in CASES),
        bars,
        {f"{case.outer.kind}/{case.up}/{case.down}": [one.loss for one in rows[case]] for case in CASES},
    )


def train_with(case: Case, setting: Setting) -> Found:
    """Train nodes of unequal pace with a hub that waits for all of them."""
    hub = HubConfig(weights="uniform", quorum="all", codec=case.up, codec_down=case.down)
    tamper = coarse(setting.nodes, case.up)
    method = Method(hub=hub, outer=case.outer, penalty=PenaltyConfig(clip=None), tamper=tamper)
    outcome = train_apart(setting, warm_up(setting), method)
    return Found(outcome.loss, len(outcome.tally.refused) + len(outcome.tally.ignored))


def costs_above_fp32(rows: dict[Case, list[Found]], case: Case) -> list[float]:
    """Return the loss above fp32's under the same outer optimizer, as a share of it, for each seed."""
    exact = rows[replace(EXACT, outer=case.outer)]
    return [one.loss / other.loss - 1 for one, other in zip(rows[case], exact, strict=True)]


def _payload_bytes(case: Case, setting: Setting) -> tuple[float, float]:
    """Return the bytes per parameter of one push and of one anchor."""
    model = llama(setting.hidden_size, setting.num_layers, setting.seq_len)
    numels = [unit.numel for unit in layout_of(model).units]
    up, down = (sum(map(codec(name).num_bytes, numels)) / sum(numels) for name in (case.up, case.down))
    return up, down


def _codec_cells(case: Case, rows: dict[Case, list[Found]], sizes: tuple[float, float]) -> tuple[str, ...]:
    above = costs_above_fp32(rows, case)
    spread = f"{100 * stdev(above):.2f} %" if len(above) > 1 else ""
    return (
        case.outer.kind,
        case.up,
        case.down,
        f"{sizes[0]:.4f}",
        f"{sizes[1]:.4f}",
        f"{fmean(one.loss for one in rows[case]):.4f}",
        f"{100 * fmean(above):+.2f} %",
        spread,
        str(sum(one.refused for one in rows[case])),
    )


def _codec_bars(
    rows: dict[Case, list[Found]], sizes: dict[Case, tuple[float, float]], quick: bool
) -> tuple[Bar, ...]:
    most, cost = max(sizes[BOTH]), fmean(costs_above_fp32(rows, BOTH))
    return (
        Bar(
            f"topk sends {most:.4f} bytes per parameter and direction, bar {MOST_TOPK_BYTES}",
            most <= MOST_TOPK_BYTES,
        ),
        Bar(
            f"held-out loss with topk both ways is {100 * cost:+.2f} % of fp32's under the same outer"
            f" optimizer, bar {percent(CLOSE_TOPK)}",
            None if quick else cost <= CLOSE_TOPK,
        ),
    )


# -- nodes behind slow, long and lossy links that do not wait, with a hub


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
    told = run_jobs("benchmarks.programs.bandwidth_node", jobs, places=places)
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


# -- the benchmark


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
    loss=SHORT_RUN,
    seeds=SEEDS,
)
QUICK = Plan(
    gloo=Size(rates_mbit=(1000,), width=32, num_layers=4, step_s=0.02, every=8, intervals=2, ddp_steps=4),
    hub=HubSize(width=32, num_layers=4, step_s=0.02, every=8, steps=20),
    ways=(Way(1000), long_way(0.04)),
    codecs=("e3m0",),
    loss=QUICK_RUN,
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
        reports.append(codecs_report(args.quick, 1 if args.quick else SEEDS))
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
    losses = coarse_losses(("fp32", "e3m0"), plan.loss, range(plan.seeds))
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
    return [Seen(**told) for told in run_jobs("benchmarks.programs.gloo_node", jobs, places=places)]


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
    cost = cost_of(losses, "e3m0")
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
