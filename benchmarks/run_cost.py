"""Measure what `aedit run` costs beyond the training: CPU time of all its processes over a plain loop.

Bars: at most 1.15 for one node of the tiny preset, hub and agent included, and at most 0.15 for the processes
beside the node: hub, agent, launcher and torchrun. Each program runs with few and with many steps; the
difference leaves out start-up, end and report. CPU time, as nothing here waits for the clock but the polls of
idle processes: on a busy machine the same steps take longer and hold more of those.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import tomli_w
import torch

from aedit.launch.data import batch
from aedit.launch.records import read_run
from benchmarks.kit.cpu_time import Spent, extra, spent
from benchmarks.kit.processes import ENDS_WITHIN_S, ROOT, start
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import median
from benchmarks.kit.tables import Bar, Report, main

MOST, MOST_BESIDE = 1.15, 0.15
"""Bars: all processes, and those beside the node, as shares of the plain loop."""
PRESET = ROOT / "configs" / "tiny.toml"


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds per step of one pair: CPU time, but for `wall_s`."""

    plain_s: float
    run_s: float
    """All processes of the run."""
    wall_s: float
    """Of the run."""
    by_role: dict[str, float]
    steps: int
    """Steps by which the longer run is longer."""


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="training steps that are compared")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each program")


def measure(args: argparse.Namespace) -> Report:
    few, pairs = (20, 1) if args.quick else (60, args.pairs)
    steps = 60 if args.quick else args.steps
    pairs_s = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(pairs):
            plain = [spent(_plain(n)) for n in (few, few + steps)]
            pairs_s.append((plain, [_run(n, Path(folder), i, quick=args.quick) for n in (few, few + steps)]))
    costs = [_per_step(plain, run, steps) for plain, run in pairs_s]
    whole = median([each.plain_s for each in costs])
    rows = [("plain loop", f"{1e3 * whole:.1f}", "")]
    for role in sorted({role for each in costs for role in each.by_role}):
        seconds = median([each.by_role.get(role, 0.0) for each in costs])
        rows.append((f"aedit run: {role}", f"{1e3 * seconds:.1f}", f"{seconds / whole:.2f}"))
    ratios = [each.run_s / each.plain_s for each in costs]
    found, everything = median(ratios), median([each.run_s for each in costs])
    beside = median([(sum(each.by_role.values()) - each.by_role["node"]) / each.plain_s for each in costs])
    rows.append(("aedit run, all", f"{1e3 * everything:.1f}", f"{found:.2f}"))
    return Report(
        "cost of a run, one node",
        (
            f"{PRESET.name} with one node: {steps} steps more than {few}, CPU time of all processes over that"
            f" of a plain loop, per step, median of {pairs} pairs. Not counted: evaluation.",
            f"A step of the run took {1e3 * median([each.wall_s for each in costs]):.0f} ms by the clock."
            f" Steps that the runs differ by: {', '.join(str(each.steps) for each in costs)}."
            f" Ratios of the pairs: {', '.join(f'{ratio:.2f}' for ratio in ratios)}.",
        ),
        ("program", "CPU ms per step", "share of the plain loop"),
        tuple(rows),
        (
            Bar(f"{found:.2f} times the plain loop, bar {MOST}", None if args.quick else found <= MOST),
            Bar(
                f"{beside:.2f} of the plain loop beside the node, bar {MOST_BESIDE}",
                None if args.quick else beside <= MOST_BESIDE,
            ),
        ),
        {"per_step": [asdict(each) for each in costs]},
    )


def _per_step(plain: list[Spent], run: list[tuple[Spent, int]], steps: int) -> Cost:
    (few, few_steps), (many, many_steps) = run
    done = many_steps - few_steps
    if 2 * done < steps:
        raise RuntimeError(f"only {done} steps lie between the runs, which end with a round: raise --steps")
    return Cost(
        extra(plain) / steps,
        extra([few, many]) / done,
        (many.wall_s - few.wall_s) / done,
        {role: (many.by_role[role] - few.by_role.get(role, 0.0)) / done for role in many.by_role},
        done,
    )


def _plain(steps: int) -> "subprocess.Popen[str]":
    return start("benchmarks.run_cost", "--plain-loop", str(steps), stdout=subprocess.DEVNULL)


def _run(steps: int, folder: Path, pair: int, *, quick: bool) -> tuple[Spent, int]:
    """Return what the run took, and the steps that its node has done."""
    preset = tomllib.loads(PRESET.read_text())
    preset["train"] |= {"steps": steps, "seconds": ENDS_WITHIN_S, "eval_every": 0}
    preset["local"] = {"slowdown": [1]}
    if quick:
        preset["edit"] |= {"every": 1}
    config = folder / f"{pair}-{steps}.toml"
    config.write_text(tomli_w.dumps(preset | {"name": config.stem, "dir": str(folder / "runs")}))
    with (folder / "output").open("w+") as output:
        process = start("aedit", "run", str(config), "--local", "1", stdout=output, stderr=output)
        try:
            found = spent(process)
        except RuntimeError as error:
            output.seek(0)
            raise RuntimeError(output.read()) from error
    (node,) = read_run(folder / "runs" / config.stem).nodes
    return found, int(node.metrics[-1].step)


def plain_loop(steps: int) -> None:
    """Train the preset's model as a loop without this project does."""
    torch.set_num_threads(1)
    preset = tomllib.loads(PRESET.read_text())
    size, seq_len = preset["train"]["batch_size"], preset["data"]["seq_len"]
    model = llama(
        preset["model"]["sizes"]["hidden_size"], preset["model"]["sizes"]["num_hidden_layers"], seq_len
    )
    inner = torch.optim.AdamW(model.parameters(), lr=preset["train"]["lr"])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, steps)
    train = corpus(seq_len).train
    for step in range(steps):
        inner_step(model, inner, batch(train, np.arange(size) + size * step))
        schedule.step()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain-loop"]:
        plain_loop(int(sys.argv[2]))
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        main("run_cost", "CPU time of a run's processes over a plain loop.", measure, options=options)
