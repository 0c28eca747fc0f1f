"""How long do nodes stand still behind a thin wire? Bar for landing on arrival: <= 2 % of the time whenever
the wire needs less than the interval.

Nodes are processes in network namespaces with a shaped uplink each; between them is real Gloo. Their steps
are of a fixed pace, so that two cores are enough and every lost millisecond is the wire's.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import netns
from benchmarks.bandwidth_node import Job, Seen
from benchmarks.netns import Place
from benchmarks.table import Bar, Report, main, percent

ROOT = Path(__file__).parent.parent
MOST = 0.02
METHODS = ("ddp", "edit", "streaming")
DEADLINE_S = 240.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How long and how large everything is."""

    nodes: int = 2
    rates_mbit: tuple[int, ...] = (10, 100, 1000)
    width: int = 256
    num_layers: int = 16
    step_s: float = 0.05
    every: int = 128
    intervals: int = 3
    ddp_steps: int = 12


QUICK = Size(rates_mbit=(1000,), width=32, num_layers=4, step_s=0.02, every=8, intervals=2, ddp_steps=4)


@dataclass(frozen=True, slots=True)
class Row:
    """What one method did behind one wire."""

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
    def stall(self) -> float:
        return self.seen.waited_s / self.seen.wall_s

    @property
    def fits(self) -> bool:
        return self.wire_s < self.interval_s


def measure(quick: bool) -> Report | str:
    if reason := netns.why_not():
        return reason
    size = QUICK if quick else Size()
    rows = []
    for rate_mbit in size.rates_mbit:
        with netns.network(size.nodes, rate_mbit) as places:
            rows += [_row(rate_mbit, method, size, places) for method in METHODS]
    params = rows[0].seen.params
    return Report(
        f"a thin wire between {size.nodes} nodes",
        (
            f"{params:,} parameters, Gloo between network namespaces, uplinks shaped by tbf, steps of"
            f" {1e3 * size.step_s:.0f} ms, a layer moves every {size.every} steps.",
            "Stall: waiting for others / wall, up to the last step. Lost: all time beyond the steps' pace."
            " Bytes: counted on the first interface.",
        ),
        (
            "Mbit/s",
            "method",
            "wall s",
            "stall",
            "lost",
            "MB sent",
            "wire s/round",
            "interval s",
            "wire is enough",
        ),
        tuple(_cells(row) for row in rows),
        tuple(_bar(row, quick) for row in rows if row.method == "streaming" and row.fits),
        {f"{row.rate_mbit}/{row.method}": asdict(row) for row in rows},
    )


def _row(rate_mbit: int, method: str, size: Size, places: Sequence[Place]) -> Row:
    # Behind a fast wire the baseline is quick, and a few steps would be noise.
    ddp_steps = min(size.ddp_steps * rate_mbit // min(size.rates_mbit), size.every)
    steps = ddp_steps if method == "ddp" else size.intervals * size.every + 1
    seen = _run(method, steps, size, places)
    slowest = max(seen, key=lambda s: s.waited_s)
    fragments = 4 if method == "streaming" else 1
    interval_s = size.step_s * (1 if method == "ddp" else size.every // fragments)
    ring = 2 * (size.nodes - 1) / size.nodes
    wire_s = ring * slowest.payload_bytes / slowest.rounds * 8 / (rate_mbit * 1e6)
    return Row(rate_mbit, method, slowest, interval_s, wire_s, 1 - steps * size.step_s / slowest.wall_s)


def _run(method: str, steps: int, size: Size, places: Sequence[Place]) -> list[Seen]:
    """One process per place. None is left, whatever happens."""
    started: list[subprocess.Popen[str]] = []
    try:
        for rank, place in enumerate(places):
            job = Job(
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
            started.append(_start(job, place, places[0]))
        return [_seen(process) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait(10)


def _start(job: Job, place: Place, first: Place) -> "subprocess.Popen[str]":
    settings = [f"GLOO_SOCKET_IFNAME={place.interface}", f"MASTER_ADDR={first.address}", "OMP_NUM_THREADS=1"]
    python = [sys.executable, "-m", "benchmarks.bandwidth_node", json.dumps(asdict(job))]
    command = ["ip", "netns", "exec", place.namespace, "env", *settings, *python]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _seen(process: "subprocess.Popen[str]") -> Seen:
    out, err = process.communicate(timeout=DEADLINE_S)
    if process.returncode:
        raise RuntimeError(f"a node failed:\n{err[-4000:]}")
    return Seen(**json.loads(out.splitlines()[-1]))


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.rate_mbit),
        row.method,
        f"{row.seen.wall_s:.1f}",
        percent(row.stall),
        percent(row.lost),
        f"{row.seen.wire_bytes / 1e6:.1f}",
        f"{row.wire_s:.3f}",
        f"{row.interval_s:.2f}",
        "yes" if row.fits else "no",
    )


def _bar(row: Row, quick: bool) -> Bar:
    text = (
        f"{row.rate_mbit} Mbit/s: streaming stalls {percent(row.stall)} of the time, bar {percent(MOST, 0)}"
    )
    return Bar(text, None if quick else row.stall <= MOST)


if __name__ == "__main__":
    main("bandwidth", "Stall behind a thin wire: real Gloo between network namespaces. Needs root.", measure)
