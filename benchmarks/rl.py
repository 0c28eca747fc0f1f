"""Measure what reinforcement learning gains on unequal nodes, beside one node with as many samples.

    python -m benchmarks.rl [--seeds 0,1,2] [--only two one trl] [--keep DIRECTORY] [--quick]

Each row is `aedit run configs/tiny-rl.toml`, as `make run-rl` starts it: a hub and two trainers of which one
takes twice as long, and one trainer with a hub that takes as many steps as both together. `--only trl`
compares the CPU time of one trainer and all its processes with that of `trl.GRPOTrainer`, which trains the
same policy on the same rows with the same reward and as many samples.
"""

import argparse
import json
import subprocess
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import tomli_w
from rich.console import Console

from aedit.launch.config import load
from aedit.launch.records import read_run
from benchmarks.kit.cpu_time import Spent, extra, spent
from benchmarks.kit.processes import ENDS_WITHIN_S, start
from benchmarks.kit.rl_runs import CONFIG, RLRun, run_rl, seconds, solved, states
from benchmarks.kit.statistics import median, plus_minus
from benchmarks.kit.tables import Bar, Report, main

ABOUT = "Held-out problems solved by reinforcement learning on unequal nodes, and on one node."
GAIN, WORSE, LONGEST_S = 0.20, 0.03, 360.0
TOGETHER, ALONE = "2 unequal nodes and a hub", "1 node, as many rollouts"
WAYS = {"two": TOGETHER, "one": ALONE}
BESIDE_TRL = "trl"
MOST_OF_TRL = 1.2
"""CPU time of a run over that of TRL's trainer."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    before: float
    """Share of held-out problems that are solved after the warm-up."""
    after: float
    rollouts: float
    tokens: float
    """Generated tokens."""
    seconds: float

    @property
    def gain(self) -> float:
        return self.after - self.before


def outcome(wanted: RLRun, directory: Path) -> Outcome:
    """Run it and return what it reached."""
    run = run_rl(wanted, directory)
    nodes = states(run)
    tokens = sum(node.rollout_tokens for node in nodes)
    return Outcome(*solved(run), sum(node.rollouts for node in nodes), tokens, seconds(run))


def ways(seed: int, quick: bool) -> dict[str, RLRun]:
    """Return both runs of a seed.

    `train.steps` is per node on average, the warm-up is a part of it: two nodes take twice as many in all.
    """
    config = load(CONFIG, []).config
    steps, warm_up = (6, 2) if quick else (config.train.steps, config.rl.supervised_steps)
    shared = (f"--seed={seed}", "--rl.groups=2", "--rl.eval_problems=8") if quick else (f"--seed={seed}",)

    def run(nodes: int, times: int) -> RLRun:
        lengths = f"--train.steps={times * steps}", f"--rl.supervised_steps={times * warm_up}"
        return RLRun(nodes=nodes, flags=(*shared, *lengths, *(("--local.slowdown=1",) if nodes == 1 else ())))

    return {TOGETHER: run(2, 1), ALONE: run(1, 2)}


def measure(
    seeds: Sequence[int],
    quick: bool,
    keep: Path,
    say: Callable[[str], None],
    only: Sequence[str] = tuple(WAYS),
) -> Report:
    """Run with each seed, in one way or both, in directories below `keep`."""
    found: dict[str, list[Outcome]] = {WAYS[name]: [] for name in only}
    for seed in seeds:
        for name, wanted in ((name, each) for name, each in ways(seed, quick).items() if name in found):
            found[name].append(outcome(wanted, keep / f"{wanted.nodes}-nodes-seed-{seed}"))
            one = found[name][-1]
            say(f"seed {seed}, {name}: {one.before:.3f} -> {one.after:.3f} in {one.seconds:.0f} s")
    return report(found, quick)


def report(found: dict[str, list[Outcome]], quick: bool) -> Report:
    bars = list(_bars(found.get(TOGETHER, ()), found.get(ALONE, ())))
    return Report(
        name=f"Held-out problems solved, mean +- 95 % over {len(next(iter(found.values())))} seeds",
        method=(
            "`aedit run configs/tiny-rl.toml`: a policy of 0.6 M parameters, warm-up on right answers, then"
            " reinforcement learning with verified rewards.",
            "Held-out problems are answered greedily, after the warm-up and at the end.",
        ),
        columns=("run", "after warm-up", "at the end", "points", "rollouts", "tokens", "seconds"),
        rows=tuple(_row(name, outcomes) for name, outcomes in found.items()),
        bars=tuple(replace(bar, passed=None) for bar in bars) if quick else tuple(bars),
        figures={name: [asdict(one) for one in outcomes] for name, outcomes in found.items()},
    )


@dataclass(frozen=True, slots=True)
class Beside:
    """CPU seconds per step of one pair."""

    trl_s: float
    run_s: float
    """All processes of the run."""
    by_role: dict[str, float]
    rewards: tuple[float, float]
    """Mean reward at the end: in the last ten steps of TRL's trainer, and in the last lines of the run."""


def beside_trl(args: argparse.Namespace, directory: Path) -> Report:
    """Run both trainers in turn, with few and with many steps, and compare what lies between."""
    few, steps, warm_up, pairs = (2, 10, 2, 1) if args.quick else (10, args.steps, 350, args.pairs)
    config = _config(directory, _warm_model(directory, warm_up))
    found = []
    for pair in range(pairs):
        trl = [_trl(config, directory, n) for n in (few, few + steps)]
        run = [_run(config, directory, f"{pair}-{n}", n) for n in (few, few + steps)]
        found.append(_beside(trl, run, steps))
    whole = median([each.trl_s for each in found])
    rows = [("`GRPOTrainer`", f"{1e3 * whole:.0f}", "", f"{mean([each.rewards[0] for each in found]):.2f}")]
    for role in sorted({role for each in found for role in each.by_role}):
        seconds = median([each.by_role.get(role, 0.0) for each in found])
        rows.append((f"aedit run: {role}", f"{1e3 * seconds:.0f}", f"{seconds / whole:.2f}", ""))
    everything = median([each.run_s for each in found])
    ratio = median([each.run_s / each.trl_s for each in found])
    reward = f"{mean([each.rewards[1] for each in found]):.2f}"
    rows.append(("aedit run, all", f"{1e3 * everything:.0f}", f"{ratio:.2f}", reward))
    return Report(
        "one trainer beside TRL's",
        (
            f"{CONFIG.name} with one node and no evaluation, after {warm_up} supervised steps: {steps} steps"
            f" more than {few}, CPU time of all processes per step, median of {pairs} pairs.",
            "TRL's trainer has the same policy, rows, reward, rate and number of samples; one thread each.",
        ),
        ("trainer", "CPU ms per step", "share of TRL's", "reward at the end"),
        tuple(rows),
        (
            Bar(
                f"{ratio:.2f} times TRL's trainer, bar {MOST_OF_TRL}",
                None if args.quick else ratio <= MOST_OF_TRL,
            ),
        ),
        {"pairs": [asdict(each) for each in found]},
    )


def _beside(
    trl: Sequence[tuple[Spent, float]], run: Sequence[tuple[Spent, int, float]], steps: int
) -> Beside:
    (few, first, _), (many, last, reward) = run
    if last <= first:
        raise RuntimeError(f"the longer run has taken {last} steps, the shorter one {first}: raise --steps")
    return Beside(
        extra([each for each, _ in trl]) / steps,
        extra([few, many]) / (last - first),
        {role: (many.by_role[role] - few.by_role.get(role, 0.0)) / (last - first) for role in many.by_role},
        (trl[-1][1], reward),
    )


def _warm_model(directory: Path, steps: int) -> Path:
    """Return the directory of a policy after so many supervised steps."""
    model = directory / "model"
    if not model.exists():
        flags = (f"--train.steps={steps}", f"--rl.supervised_steps={steps}", "--rl.eval_problems=8")
        run_rl(RLRun(nodes=1, flags=(*flags, "--local.slowdown=1")), directory / "warm-up")
        words = ("export", str(directory / "warm-up" / "run"), str(model))
        if start("aedit.launch.cli", *words, stdout=subprocess.DEVNULL).wait(ENDS_WITHIN_S):
            raise RuntimeError("`aedit export` failed: its error is above")
    return model


def _config(directory: Path, model: Path) -> Path:
    """Return the preset that begins with this model."""
    preset = tomllib.loads(CONFIG.read_text())
    preset["model"] = {"pretrained": str(model)}
    preset["rl"] |= {"supervised_steps": 0, "eval_every": 0, "eval_problems": 8}
    del preset["rl"]["supervised_batch"], preset["rl"]["supervised_lr"]
    preset["local"] = {"slowdown": [1]}
    file = directory / "config.toml"
    file.write_text(tomli_w.dumps(preset | {"dir": str(directory / "runs")}))
    return file


def _trl(config: Path, directory: Path, steps: int) -> tuple[Spent, float]:
    """Return what TRL's trainer took, and the mean reward of its last ten steps."""
    job = {"config": str(config), "flags": [], "model": str(directory / "model"), "steps": steps}
    with (directory / "trl.log").open("w+") as log:
        process = start("benchmarks.programs.trl_trainer", json.dumps(job), stdout=log)
        found = spent(process, LONGEST_S * 10)
        log.seek(0)
        return found, mean(json.loads(log.read().splitlines()[-1])[-10:])


def _run(config: Path, directory: Path, name: str, steps: int) -> tuple[Spent, int, float]:
    """Return what the run took, the steps that its node has done, and its newest mean reward."""
    words = ("run", str(config), "--local=1", f"--name={name}", f"--train.steps={steps}")
    with (directory / "run.log").open("w+") as log:
        process = start("aedit.launch.cli", *words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            found = spent(process, LONGEST_S * 10)
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"`aedit run` failed:\n{log.read()[-3000:]}") from error
    run = read_run(directory / "runs" / name)
    (node,), rewards = (
        run.nodes,
        [line.rl.reward for line in run.nodes[0].metrics[-5:] if line.rl is not None],
    )
    return found, int(node.metrics[-1].step), mean(rewards)


def _row(name: str, found: Sequence[Outcome]) -> tuple[str, ...]:
    return (
        name,
        f"{plus_minus([one.before for one in found], 100, 1)} %",
        f"{plus_minus([one.after for one in found], 100, 1)} %",
        plus_minus([one.gain for one in found], 100, 1, "+"),
        f"{mean([one.rollouts for one in found]):,.0f}",
        f"{mean([one.tokens for one in found]):,.0f}",
        plus_minus([one.seconds for one in found], 1, 0),
    )


def _bars(together: Sequence[Outcome], alone: Sequence[Outcome]) -> Iterator[Bar]:
    if together:
        least = min(one.gain for one in together)
        text = f"held-out solved rises by {100 * least:.1f} points or more in each seed, bar {100 * GAIN:.0f}"
        yield Bar(text, least >= GAIN)
    if together and alone:
        worse = mean([one.after for one in alone]) - mean([one.after for one in together])
        text = f"{100 * worse:.1f} points below one node with as many rollouts, bar {100 * WORSE:.0f}"
        yield Bar(text, worse <= WORSE)
    if together:
        longest_s = max(one.seconds for one in together)
        yield Bar(f"longest run {longest_s:.0f} s, bar {LONGEST_S:.0f}", longest_s <= LONGEST_S)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    does = "two: two nodes; one: one node; trl: one node beside TRL's trainer (default: the first two)"
    every = (*WAYS, BESIDE_TRL)
    parser.add_argument("--only", nargs="+", choices=every, default=tuple(WAYS), metavar="WAY", help=does)
    parser.add_argument("--steps", type=int, default=60, help="steps that are compared with TRL's")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each trainer beside TRL's")
    parser.add_argument(
        "--keep", type=Path, help="keep the runs here; those that have ended are not run again"
    )


def _asked(args: argparse.Namespace) -> Sequence[Report]:
    say: Callable[[str], Any] = Console(stderr=True).print
    seeds = [0] if args.quick else [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as made:
        keep = args.keep or Path(made)
        only = [name for name in args.only if name in WAYS]
        reports = [measure(seeds, args.quick, keep, say, only)] if only else []
        return reports + ([beside_trl(args, keep)] if BESIDE_TRL in args.only else [])


if __name__ == "__main__":
    main("rl", ABOUT, _asked, options=_options)
