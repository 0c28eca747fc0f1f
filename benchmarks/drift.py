"""Does a drafter that learns in idle time keep up with a policy that moves?

A policy that was trained to write Python is moved by reinforcement learning, at a rate
that follows a schedule of its KL to where it began. (That of scratchpad arithmetic is too sure of itself to
be moved by what it says.) A step is: rollouts by the speculating engine, whose features go into the ring; a
wait; an update of the policy; a wait. The waits together are a fifth of the step. In them, and at no other
time, the trainer's process learns, and the engine takes what its gate lets through.

Waits are counted in processor seconds: the rest of the step took so many of one core, the trainer gets a
quarter of that, times 0.85, which is what `benchmarks.idle` asks of a wait. So a busy machine makes the run
longer and changes nothing else.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from benchmarks.drift_parts.judge import Checkpoint
from benchmarks.drift_parts.report import depths, report
from benchmarks.drift_parts.run import FULL, QUICK, Drift, Size
from benchmarks.kit.tables import WIDTH, machine, show
from benchmarks.policies import ROOT


def checkpoints(size: Size, root: Path, minutes: float) -> list[Checkpoint]:
    """What was seen at each, in order; no further step begins after so many minutes."""
    began_s = time.monotonic()
    seen: list[Checkpoint] = []
    with Drift.of(size, root) as drift:
        for step in range(size.steps + 1):
            if step in size.checkpoint_steps:
                seen.append(drift.look())
                print(_line(seen[-1], time.monotonic() - began_s), file=sys.stderr)
            if step == size.steps or time.monotonic() - began_s > 60 * minutes:
                break
            drift.step()
    return seen


def main(words: Sequence[str] | None = None) -> None:
    """The command line. A missed bar is printed and is no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drift", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="under a minute; figures mean little")
    parser.add_argument("--steps", type=int, help=f"of the policy, {FULL.steps} unless told")
    parser.add_argument("--minutes", type=float, default=60.0, help="no step begins after so many")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args(words)
    size = QUICK if args.quick else FULL
    size = replace(size, steps=args.steps or size.steps)
    console, load_before = Console(width=WIDTH, soft_wrap=True, highlight=False), os.getloadavg()[0]
    seen = checkpoints(size, args.root, args.minutes)
    made, where = [report(seen, size), depths(seen)], machine(load_before)
    for one in made:
        show(one, where, console)
    if args.json:
        figures = {"reports": [asdict(one) for one in made], "machine": where, "quick": args.quick}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


def _line(seen: Checkpoint, seconds: float) -> str:
    values = ", ".join(f"{name} {one.tokens_per_step:.2f}" for name, one in seen.drafters.items())
    return f"{seconds:5.0f} s: step {seen.step}, KL {seen.kl_nats:.3f}, {values}"


if __name__ == "__main__":
    main()
