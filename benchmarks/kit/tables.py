"""Output of every benchmark: its method in two lines, the machine in one, a table, and its bars."""

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

WIDTH = 110


@dataclass(frozen=True, slots=True)
class Bar:
    """Value that a benchmark must reach. passed: None when this run was too short to decide."""

    text: str
    passed: bool | None


@dataclass(frozen=True, slots=True)
class Report:
    """One table and its method."""

    name: str
    method: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: tuple[Bar, ...]
    figures: dict[str, Any]
    """The numbers behind the cells, for `--json`."""


def main(
    name: str,
    about: str,
    measure: Callable[[Any], "Report | Sequence[Report] | str"],
    *,
    options: Callable[[argparse.ArgumentParser], object] | None = None,
    words: Sequence[str] | None = None,
) -> None:
    """Run the command line that all benchmarks share.

    measure: given `--quick`, or with `options` all parsed options, returns the reports, or one line that says
    why nothing could be measured here. A missed bar is printed and is no error: the exit code stays 0.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument(
        "--quick", action="store_true", help="seconds instead of minutes; figures mean little"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    if options:
        options(parser)
    args = parser.parse_args(words)
    console = Console(width=WIDTH, soft_wrap=True, highlight=False)
    load_before = os.getloadavg()[0]
    found = measure(args if options else args.quick)
    if isinstance(found, str):
        console.print(f"{name}: {found}")
        return
    where = machine(load_before)
    reports = [found] if isinstance(found, Report) else list(found)
    for report in reports:
        show(report, where, console)
    if args.json:
        told: dict[str, Any] = {"machine": where, "quick": args.quick}
        one = len(reports) == 1
        told |= asdict(reports[0]) if one else {"reports": [asdict(report) for report in reports]}
        args.json.write_text(json.dumps(told, indent=1))


def show(report: Report, where: str, console: Console) -> None:
    """Print `report`: its method and the machine, if it has a method, then its table and bars."""
    for line in (*report.method, where) if report.method else ():
        console.print(line)
    if report.columns:
        print_table(report, console)
    for bar in report.bars:
        verdict = {True: "PASS", False: "MISS", None: "too short to tell"}[bar.passed]
        console.print(f"{verdict}: {bar.text}")


def print_table(report: Report, console: Console) -> None:
    """Print the table without method, machine and bars."""
    table = Table(title=report.name)
    for i, column in enumerate(report.columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in report.rows:
        table.add_row(*row)
    # No figure is cut, however narrow the window.
    everything = console.options.update(max_width=10 * WIDTH)
    console.width = max(console.width, Measurement.get(console, everything, table).maximum)
    console.print(table)


def machine(load_before: float) -> str:
    """Return the machine in one line.

    load_before: the load average when the benchmark began, without its own load.
    """
    memory_gib = psutil.virtual_memory().total / 2**30
    return (
        f"{_cpu()}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, torch {version('torch')}, "
        f"load {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    )


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
