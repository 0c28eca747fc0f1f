"""Measure where the nodes of a reinforcement learning run wait, by role and mode.

    python -m benchmarks.rl_idle [--steps 120] [--only NAME] [--keep DIRECTORY] [--quick]

Each row is one node of a short `aedit run configs/tiny-rl.toml`, changed in the ways that `MODES` says. The
times are those that the node has written to its metrics, from the end of the supervised warm-up on.
"""

import argparse
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console

from aedit.launch.records import NodeRecords, RLMetric
from benchmarks.kit.rl_runs import CONFIG, RLRun, run_rl
from benchmarks.kit.statistics import percent
from benchmarks.kit.tables import Report, main

ABOUT = "Where the nodes of a reinforcement learning run wait: seconds per step by cause, role and mode."
CAUSES = ("hub", "round", "longest sample", "rollouts", "rank", "rewards")
STEPS = "--edit.schedule=steps"
"""Rounds by steps: all nodes wait for the slowest."""
THIRD = ("--local.slowdown", "1", "3", "--drafter.kind=off")
"""The second node's steps take three times as long; without a drafter, which would train in waits."""


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to run."""

    name: str
    nodes: int = 2
    flags: tuple[str, ...] = ()
    hub: bool = True


MODES = (
    Mode("hub, quorum 1"),
    Mode("hub, quorum all", flags=("--hub.quorum=all", STEPS)),
    Mode("one world, no hub", hub=False),
    Mode("hub, quorum 1, 2 ranks", 1, ("--local.ranks=2", "--local.slowdown=1")),
    Mode("hub, quorum 1, 1 worker", flags=("--rl.workers=1",)),
    Mode("one world 1:3, no pool", flags=THIRD, hub=False),
    Mode("one world 1:3", flags=(*THIRD, "--rl.pool=true"), hub=False),
)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Seconds per step of one node."""

    mode: str
    node: int
    slowdown: float
    steps: int
    step_s: float
    rollout_s: float
    train_s: float
    idle_s: dict[str, float]
    used_s: float
    """Processor time of idle work."""


def waiting(mode: str, node: NodeRecords, slowdown: float) -> Waiting:
    """Return what the lines of a node's metrics say, from the first batch of rollouts on."""
    lines = [(line, line.rl) for line in node.metrics if line.rl is not None and line.rl.rollouts > 0]
    if len(lines) < 2:
        raise RuntimeError(f"{mode}: node {node.index} has {len(lines)} lines of rollouts; run it for longer")
    (before, first), (after, last) = lines[0], lines[-1]
    steps = after.step - before.step

    def per_step(value: Callable[[RLMetric], float]) -> float:
        return (value(last) - value(first)) / steps

    idle_s = {c: (last.idle_s.get(c, 0.0) - first.idle_s.get(c, 0.0)) / steps for c in CAUSES}
    return Waiting(
        mode,
        node.index,
        slowdown,
        steps,
        (after.t - before.t) / steps,
        per_step(lambda rl: rl.rollout_s),
        per_step(lambda rl: rl.train_s),
        idle_s,
        per_step(lambda rl: rl.idle_used_s),
    )


def without_hub(directory: Path) -> Path:
    """Write the preset without its hub, and return the file."""
    tables = tomllib.loads(CONFIG.read_text())
    del tables["hub"]
    tables["edit"] |= {"schedule": "steps", "landing": "forward"}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "without-hub.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


def measure(modes: Sequence[Mode], flags: Sequence[str], keep: Path, say: Callable[[str], None]) -> Report:
    """Run all modes, in directories below `keep`."""
    found: list[Waiting] = []
    for mode in modes:
        place = keep / mode.name.replace(",", "").replace(" ", "-")
        config = CONFIG if mode.hub else without_hub(place)
        run = run_rl(RLRun(nodes=mode.nodes, flags=(*flags, *mode.flags), config=config), place)
        slowdown = run.config["local"]["slowdown"]
        found += [waiting(mode.name, node, slowdown[node.index]) for node in run.nodes]
        say(f"{mode.name}: {len(run.nodes)} nodes")
    return report(found)


def report(found: Sequence[Waiting]) -> Report:
    return Report(
        name="Milliseconds per step of each node, after the warm-up",
        method=(
            "`aedit run configs/tiny-rl.toml` on this machine, changed as the first column says; a node with"
            " a slowdown of 2 takes twice as long for each step.",
            "Waits by cause; rollouts include the wait for the longest sample. Used: processor time of the"
            " drafter's training.",
        ),
        columns=("mode", "node", "slowdown", "step", "rollouts", "training", *CAUSES, "all waits", "used"),
        rows=tuple(_row(one) for one in found),
        bars=(),
        figures={"nodes": [asdict(one) for one in found]},
    )


def _row(one: Waiting) -> tuple[str, ...]:
    waits_s = sum(one.idle_s.values())
    times = (one.step_s, one.rollout_s, one.train_s, *one.idle_s.values())
    return (
        one.mode,
        str(one.node),
        f"{one.slowdown:g}",
        *(f"{1e3 * seconds:.0f}" for seconds in times),
        percent(waits_s / one.step_s),
        f"{1e3 * one.used_s:.0f}",
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=120, help="of each run, per node on average")
    parser.add_argument("--only", choices=[mode.name for mode in MODES])
    parser.add_argument(
        "--keep", type=Path, help="keep the runs here; those that have ended are not run again"
    )


def _asked(args: argparse.Namespace) -> Report:
    say: Callable[[str], Any] = Console(stderr=True).print
    modes = [mode for mode in MODES if args.only in (None, mode.name)]
    flags = [f"--train.steps={args.steps}", "--rl.supervised_steps=20", "--rl.eval_every=0"]
    if args.quick:
        modes = modes[:1]
        flags = ["--train.steps=8", "--rl.supervised_steps=2", "--rl.eval_every=0", "--rl.groups=2"]
    with tempfile.TemporaryDirectory() as made:
        return measure(modes, flags, args.keep or Path(made), say)


if __name__ == "__main__":
    main("rl_idle", ABOUT, _asked, options=_options)
