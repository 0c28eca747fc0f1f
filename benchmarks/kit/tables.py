"""What every benchmark prints: its method in two lines, the machine in one, a table, and its bars."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Bar:
    """Something a benchmark must reach. passed: None when this run was too short to tell."""

    text: str
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Report:
    """One table and how it was made."""

    name: str
    method: tuple[str, str]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...]
    figures: dict[str, Any]
    """The numbers behind the cells, for `--json`."""


def main(name: str, about: str, measure: Callable[[bool], Report | str]) -> None:
    """The command line that all benchmarks share.

    measure(quick) returns the report, or one line that says why nothing could be measured here. A missed bar
    is printed and is no error: the exit code stays 0.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean little"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args()
    console = Console(width=WIDTH, soft_wrap=True, highlight=False)
    load_before = os.getloadavg()[0]
    report = measure(args.quick)
    if isinstance(report, str):
        console.print(f"{name}: {report}")
        return
    where = machine(load_before)
    show(report, where, console)
    if args.json:
        args.json.write_text(json.dumps(asdict(report) | {"machine": where, "quick": args.quick}, indent=1))


def show(report: Report, where: str, console: Console) -> None:
    """Print `report`."""
    for line in report.method:
        console.print(line)
    console.print(where)
    print_table(report, console)
    print_bars(report.bars, console)


def print_table(report: Report, console: Console) -> None:
    """Its table alone."""
    table = Table(title=report.name)
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*row)
    # No figure is cut, however narrow the window.
    everything = console.options.update(max_width=10 * WIDTH)
    console.width = max(console.width, Measurement.get(console, everything, table).maximum)
    console.print(table)


def print_bars(bars: Sequence[Bar], console: Console) -> None:
    """Each in a line, with whether it was reached."""
    for bar in bars:
        verdict = {True: "PASS", False: "MISS", None: "too short to tell"}[bar.passed]
        console.print(f"{verdict}: {bar.text}")


def machine(load_before: float) -> str:
    """The machine in one line. load_before: the load average when the benchmark began; ours comes on top."""
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{_cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def percent(share: float, digits: int = 1) -> str:
    """`0.0123` as `1.2 %`."""
    return f"{100 * share:.{digits}f} %"


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(0.5))
