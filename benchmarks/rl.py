"""Measure what reinforcement learning gains on unequal nodes, beside one node with as many samples.

    python -m benchmarks.rl [--seeds 0,1,2] [--only two one] [--keep DIRECTORY] [--quick]

Each row is `aedit run configs/tiny-rl.toml`, as `make run-rl` starts it: a hub and two trainers of which one
takes twice as long, and one trainer with a hub that takes as many steps as both together.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean as mean
from typing import Any

from rich.console import Console

from aedit.launch.config import load
from benchmarks.kit.rl_runs import CONFIG, RLRun, run_rl, seconds, solved, states
from benchmarks.kit.statistics import plus_minus
from benchmarks.kit.tables import Bar, Report, main

ABOUT = "Held-out problems solved by reinforcement learning on unequal nodes, and on one node."
GAIN, WORSE, LONGEST_S = 0.20, 0.03, 360.0
TOGETHER, ALONE = "2 unequal nodes and a hub", "1 node, as many rollouts"
WAYS = {"two": TOGETHER, "one": ALONE}


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
    does = "two: two nodes; one: one node (default: both)"
    parser.add_argument("--only", nargs="+", choices=WAYS, default=tuple(WAYS), metavar="WAY", help=does)
    parser.add_argument(
        "--keep", type=Path, help="keep the runs here; those that have ended are not run again"
    )


def _asked(args: argparse.Namespace) -> Report:
    say: Callable[[str], Any] = Console(stderr=True).print
    seeds = [0] if args.quick else [int(seed) for seed in args.seeds.split(",")]
    with tempfile.TemporaryDirectory() as made:
        return measure(seeds, args.quick, args.keep or Path(made), say, args.only)


if __name__ == "__main__":
    main("rl", ABOUT, _asked, options=_options)
