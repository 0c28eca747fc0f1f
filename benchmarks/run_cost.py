"""Measure what `aedit run` costs beyond the training: CPU time of all its processes over a plain loop.

Bar: at most 1.15 for one node of the tiny preset, hub and agent included. Each program runs with few and with
many steps; the difference leaves out start-up, end and report. CPU time, as nothing here waits for the clock
but the polls of idle processes: on a busy machine the same steps take longer and hold more of those.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import defaultdict
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import tomli_w
import torch

from aedit.launch.data import batch
from benchmarks.kit.processes import ENDS_WITHIN_S, ROOT, start
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import median
from benchmarks.kit.tables import Bar, Report, main

MOST = 1.15
PRESET = ROOT / "configs" / "tiny.toml"
POLL_S = 0.2
ROLES = {
    "torch.distributed.run": "torchrun",
    "agent_main": "agent",
    "aedit.launch.node": "node",
    "aedit.launch.hub": "hub",
}
"""Part of a command line, the first that fits: torchrun's holds that of the node."""


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of a program and of the processes that it started."""

    total_s: float
    wall_s: float
    by_role: dict[str, float]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=400, help="training steps that are compared")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each program")


def measure(args: argparse.Namespace) -> Report:
    few, pairs = (20, 1) if args.quick else (60, args.pairs)
    steps = 60 if args.quick else args.steps
    pairs_s = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(pairs):
            plain = [_spent(_plain(n)) for n in (few, few + steps)]
            pairs_s.append((plain, [_run(n, Path(folder), i) for n in (few, few + steps)]))
    ratios = [_extra(run) / _extra(plain) for plain, run in pairs_s]
    per_step = 1e3 / steps
    roles = sorted({role for _, (_, run) in pairs_s for role in run.by_role})
    whole = median([_extra(plain) for plain, _ in pairs_s])
    rows = [("plain loop", f"{per_step * whole:.1f}", "")]
    for role in roles:
        seconds = median([b.by_role.get(role, 0) - a.by_role.get(role, 0) for _, (a, b) in pairs_s])
        rows.append((f"aedit run: {role}", f"{per_step * seconds:.1f}", f"{seconds / whole:.2f}"))
    found, everything = median(ratios), median([_extra(run) for _, run in pairs_s])
    rows.append(("aedit run, all", f"{per_step * everything:.1f}", f"{found:.2f}"))
    wall = median([run[1].wall_s - run[0].wall_s for _, run in pairs_s]) * per_step
    return Report(
        "cost of a run, one node",
        (
            f"{PRESET.name} with one node: {steps} steps more than {few}, CPU time of all processes over that"
            f" of a plain loop with equal steps, median of {pairs} pairs.",
            f"A step of the run took {wall:.0f} ms by the clock. Ratios of the pairs:"
            f" {', '.join(f'{ratio:.2f}' for ratio in ratios)}. Not counted: evaluation.",
        ),
        ("program", "CPU ms per step", "share of the plain loop"),
        tuple(rows),
        (Bar(f"{found:.2f} times the plain loop, bar {MOST}", None if args.quick else found <= MOST),),
        {"pairs": [[[asdict(spent) for spent in each] for each in pair] for pair in pairs_s]},
    )


def _extra(few_and_many: "list[Spent]") -> float:
    few, many = few_and_many
    return many.total_s - few.total_s


def _plain(steps: int) -> "subprocess.Popen[str]":
    return start("benchmarks.run_cost", "--plain-loop", str(steps), stdout=subprocess.DEVNULL)


def _run(steps: int, folder: Path, pair: int) -> Spent:
    preset = tomllib.loads(PRESET.read_text())
    preset["train"] |= {"steps": steps, "seconds": ENDS_WITHIN_S, "eval_every": 0}
    preset["local"] = {"slowdown": [1]}
    config = folder / f"{pair}-{steps}.toml"
    config.write_text(tomli_w.dumps(preset | {"name": config.stem, "dir": str(folder / "runs")}))
    with (folder / "output").open("w+") as output:
        process = start("aedit", "run", str(config), "--local", "1", stdout=output, stderr=output)
        try:
            return _spent(process)
        except RuntimeError as error:
            output.seek(0)
            raise RuntimeError(output.read()) from error


def _spent(process: "subprocess.Popen[str]") -> Spent:
    """Wait for the end of a program and return what it took, its waited-for descendants included."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    seen: dict[psutil.Process, tuple[str, float]] = {}
    top = psutil.Process(process.pid)
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            below = []
            with suppress(psutil.Error):
                below = top.children(recursive=True)
            for one in (top, *below):
                with suppress(psutil.Error):  # one that has ended hides none of the others
                    times = one.cpu_times()
                    seen[one] = (_role(one, top), times.user + times.system)

    watcher = threading.Thread(target=watch, name="cpu times")
    watcher.start()
    try:
        code = process.wait(timeout=ENDS_WITHIN_S)
    finally:
        over.set()
        watcher.join()
        process.kill()
    if code:
        raise RuntimeError(f"exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    by_role: defaultdict[str, float] = defaultdict(float)
    for role, seconds in seen.values():
        by_role[role] += seconds
    total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Spent(total, time.monotonic() - began, dict(by_role))


def _role(process: psutil.Process, top: psutil.Process) -> str:
    if process == top:
        return "launcher"
    words = " ".join(process.cmdline())
    return next(
        (role for part, role in ROLES.items() if part in words and "distributed.run" not in words), "torchrun"
    )


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
