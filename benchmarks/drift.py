"""Measure whether a drafter that trains in idle time keeps up with a moving policy.

A policy trained to write Python is moved by reinforcement learning, at a rate that follows a schedule of its
KL to its start. (The policy of scratchpad arithmetic is too certain to be moved by its own samples.) A step
is: rollouts by the speculating engine, whose features go into the ring; a wait; an update of the policy; a
wait. The waits together are a fifth of the step. The trainer's process runs in them only, and the engine
adopts what its gate publishes.

Waits are counted in processor seconds: the rest of the step took so many of one core, the trainer gets a
quarter of that, times 0.85, the share that `benchmarks.idle` requires of a wait. So a busy machine makes the
run longer and changes nothing else.
"""

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.drift_parts.judge import Checkpoint
from benchmarks.drift_parts.report import depths, report
from benchmarks.drift_parts.run import FULL, QUICK, Drift, Size
from benchmarks.kit.tables import Report, main
from benchmarks.policies import ROOT


def checkpoints(size: Size, root: Path, minutes: float) -> list[Checkpoint]:
    """Return the results at each checkpoint, in order; no further step begins after `minutes`."""
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


def measure(args: argparse.Namespace) -> list[Report]:
    """Return both tables."""
    size = QUICK if args.quick else FULL
    size = replace(size, steps=args.steps or size.steps)
    seen = checkpoints(size, args.root, args.minutes)
    return [report(seen, size), depths(seen)]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, help=f"of the policy, {FULL.steps} unless told")
    parser.add_argument("--minutes", type=float, default=60.0, help="no step begins after so many")
    parser.add_argument("--root", type=Path, default=ROOT, help="where policies are kept")


def _line(seen: Checkpoint, seconds: float) -> str:
    values = ", ".join(f"{name} {one.tokens_per_step:.2f}" for name, one in seen.drafters.items())
    return f"{seconds:5.0f} s: step {seen.step}, KL {seen.kl_nats:.3f}, {values}"


if __name__ == "__main__":
    main("drift", "A drafter that learns in idle time while its policy moves.", measure, options=_options)
