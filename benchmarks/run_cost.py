"""Measure what `aedit run` costs beyond the training: CPU time of all its processes over the training's.

Bar: at most 0.15 for one node of the tiny preset: hub, agent, launcher, torchrun, and all of the node but
forward, backward and optimizer. Everything is counted in one run, over the same steps after the start, which
has a column of its own: what slows the machine down slows both sides of the ratio. What is beside the node
works by the clock (heartbeats, rounds, polls), so that it does more per step on a busy machine: the bar is
for a node that has a core, and the table shows both.
"""

import argparse
import json
import os
import subprocess
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from benchmarks.kit.cpu_time import Descendants
from benchmarks.kit.processes import ENDS_WITHIN_S, ROOT, start
from benchmarks.kit.statistics import median
from benchmarks.kit.tables import Bar, Report, main
from benchmarks.programs.metered_node import MODULE, TRAINING, Line

MOST = 0.15
"""Bar: everything beyond the training, as a share of it."""
PRESET = ROOT / "configs" / "tiny.toml"
FEW = 60
"""Steps before the first window, at least."""
EVERY = 20
"""Steps between two lines of the node."""
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds up to a step: of the node by part, and of the other processes by role."""

    line: Line
    others_s: dict[str, float]


@dataclass(frozen=True, slots=True)
class Window:
    """CPU seconds per step between two readings."""

    training_s: float
    by_clock_s: dict[str, float]
    """Of the processes beside the node, by role."""
    by_step_s: dict[str, float]
    """Of the node without the training, by part."""
    core_share: float
    """CPU time of the node per second of the clock."""

    def beyond(self, *, with_a_core: bool = True) -> float:
        """Return what the run costs beyond the training, as a share of it.

        with_a_core: for a node that has a core, during whose steps the others have less time to work.
        """
        by_clock = sum(self.by_clock_s.values()) * (self.core_share if with_a_core else 1.0)
        return (sum(self.by_step_s.values()) + by_clock) / self.training_s


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="training steps per pair of readings")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of readings in the one run")


def measure(args: argparse.Namespace) -> Report:
    steps, pairs = (FEW, 1) if args.quick else (args.steps, args.pairs)
    with TemporaryDirectory() as folder:
        readings = _run(Path(folder), steps, pairs, quick=args.quick)
    windows = [window(*pair) for pair in pairwise(readings)]
    training_s = median([each.training_s for each in windows])
    core_share = median([each.core_share for each in windows])
    rows = [("node: training", f"{1e3 * training_s:.2f}", "", "", "")]
    first = readings[0]
    node_start_s = first.line.process_s - first.line.parts_s[TRAINING]
    start_s = {"node": node_start_s} | first.others_s

    def add(role: str, seconds: float, scale: float, start_s: float | None) -> None:
        share = seconds / training_s
        begun = "" if start_s is None else f"{start_s:.1f}"
        rows.append((role, f"{1e3 * seconds:.2f}", f"{share:.3f}", f"{share * scale:.3f}", begun))

    for part in windows[0].by_step_s:
        add(f"node: {part}", median([each.by_step_s[part] for each in windows]), 1.0, None)
    for role in windows[0].by_clock_s:
        add(role, median([each.by_clock_s[role] for each in windows]), core_share, start_s[role])
    found = median([each.beyond() for each in windows])
    as_run = median([each.beyond(with_a_core=False) for each in windows])
    rows.append(
        (
            "beyond the training",
            f"{1e3 * as_run * training_s:.2f}",
            f"{as_run:.3f}",
            f"{found:.3f}",
            f"{sum(start_s.values()):.1f}",
        )
    )
    return Report(
        "cost of a run, one node",
        (
            f"{PRESET.name} with one node: CPU time of all processes over {steps} steps of one run, after"
            f" {first.line.step}, median of {pairs}; shares of the training's.",
            f"The node had {core_share:.2f} of a core; last but one column: with all of one. Start: until"
            f" step {first.line.step}, without its training ({node_start_s:.1f} s of the node). Not counted:"
            " evaluation.",
        ),
        ("process", "CPU ms per step", "share", "share with a core", "start, CPU s"),
        tuple(rows),
        (
            Bar(
                f"{found:.3f} of the training's CPU time beyond it, bar {MOST}",
                None if args.quick else found <= MOST,
            ),
        ),
        {"windows": [asdict(each) for each in windows], "start_s": start_s},
    )


def window(before: Reading, after: Reading) -> Window:
    """Return what lies between two readings, per step."""
    steps = after.line.step - before.line.step
    parts_s = _between(before.line.parts_s, after.line.parts_s, steps)
    process_s = (after.line.process_s - before.line.process_s) / steps
    training_s = parts_s.pop(TRAINING)
    parts_s["other threads"] = process_s - training_s - sum(parts_s.values())
    return Window(
        training_s,
        _between(before.others_s, after.others_s, steps),
        parts_s,
        process_s * steps / (after.line.at_s - before.line.at_s),
    )


def _between(before: Mapping[str, float], after: Mapping[str, float], steps: int) -> dict[str, float]:
    return {name: (seconds - before.get(name, 0.0)) / steps for name, seconds in sorted(after.items())}


def _run(folder: Path, steps: int, pairs: int, *, quick: bool) -> Sequence[Reading]:
    """Run the preset and return the readings at the ends of the windows."""
    preset = tomllib.loads(PRESET.read_text())
    endless = 10 * (FEW + pairs * steps)
    preset["train"] |= {"steps": endless, "seconds": endless, "eval_every": 0}
    preset["local"] = {"slowdown": [1]}
    if quick:
        preset["edit"] |= {"every": 1}
    config, lines = folder / "cost.toml", folder / "lines"
    config.write_text(tomli_w.dumps(preset | {"name": "cost", "dir": str(folder / "runs")}))
    lines.touch()
    ends = [FEW + i * steps for i in range(pairs + 1)]
    found = list[Reading]()
    with (folder / "output").open("w+") as output:
        words = (str(lines), str(EVERY), "run", str(config), "--local", "1")
        process = start(MODULE, *words, stdout=output, stderr=output)
        others = Descendants(process.pid)
        try:
            deadline_s = time.monotonic() + (1 + pairs) * ENDS_WITHIN_S
            while len(found) < len(ends):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    output.seek(0)
                    raise RuntimeError(f"the run has ended early:\n{output.read()[-4000:]}")
                time.sleep(LOOK_S)
                read = [Line(**json.loads(text)) for text in lines.read_text().splitlines()]
                if read and read[-1].step >= ends[len(found)]:
                    by_role = others.look()
                    by_role.pop("node")
                    found.append(Reading(read[-1], by_role))
        finally:
            _end(process)
    return found


def _end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    try:
        process.wait(ENDS_WITHIN_S)
    finally:
        process.kill()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main("run_cost", "CPU time of a run's processes over its training.", measure, options=options)
