"""Measure rollouts through vLLM in our engine beside vLLM's own `LLM.generate` on the same work.

    python -m benchmarks.vllm_engine [--python PYTHON] [--pairs 9] [--quick]

Both run in one process and thread, in pairs whose order alternates; compared is processor time. Needs an
interpreter with vLLM: `make vllm` builds `.venv-vllm`.
"""

import argparse
import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.kit.statistics import Interval, percent
from benchmarks.kit.tables import Bar, Report, main

ABOUT = "Rollouts through vLLM in our engine beside LLM.generate: processor time, and the plug-in's share."
ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
PROGRAM = ROOT / "benchmarks" / "programs" / "vllm_race.py"
WANTED_COST, WANTED_SHARE = 1.05, 0.02
LIMIT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Settings of one race."""

    vocabulary: int
    hidden: int
    layers: int
    dtype: str = "float32"
    rows: int = 16
    new: int = 24
    pairs: int = 9


RACES = (
    Race(vocabulary=8192, hidden=512, layers=6),
    Race(vocabulary=50_257, hidden=768, layers=12),
    Race(vocabulary=8192, hidden=512, layers=6, dtype="bfloat16"),
)
QUICK = (Race(vocabulary=512, hidden=128, layers=2, rows=4, new=6, pairs=2),)


@dataclass(frozen=True, slots=True)
class Found:
    """Figures of one race."""

    race: Race
    parameters: int
    cost: Interval
    """Of the time of `LLM.generate`."""
    share: Interval
    """Plug-in, of our time."""
    texts: int
    forks: int
    """Texts that differ from the own engine's."""
    mean_gap: float
    """Difference of log-probabilities to those of the own engine, up to the forks."""
    worst_gap: float


def run(race: Race, python: Path) -> Found:
    """Run one race.

    Raises:
        RuntimeError: The interpreter could not.
    """
    command = [str(python), str(PROGRAM), json.dumps(asdict(race))]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{python}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    pairs = found.pop("pairs")
    cost = Interval.of([pair["ours"] / pair["theirs"] for pair in pairs])
    share = Interval.of([pair["plug_in"] / pair["ours"] for pair in pairs])
    return Found(race=race, cost=cost, share=share, **found)


def report(found: list[Found]) -> Report:
    """Return the table."""
    bars: list[Bar] = []
    for one in found:
        if one.race.dtype == "float32":
            name = f"{one.parameters / 1e6:.0f} M"
            cost = f"{name}: {one.cost} times LLM.generate, bar {WANTED_COST:g}"
            share = f"{name}: plug-in {percent(one.share.middle)} of the time, bar {percent(WANTED_SHARE, 0)}"
            bars += [Bar(cost, one.cost.middle <= WANTED_COST), Bar(share, one.share.middle <= WANTED_SHARE)]
            bars.append(Bar(f"{name}: {one.forks} of {one.texts} texts differ, bar 0", not one.forks))
    return Report(
        name="vllm_engine",
        method=(
            "Rollouts through vLLM in our engine, coupled, beside LLM.generate at temperature 1: CPU time"
            " in pairs, one thread.",
            "Texts and log-probabilities beside the own engine's, in the same dtype.",
        ),
        columns=(
            "parameters",
            "vocabulary",
            "dtype",
            "ours / generate",
            "plug-in",
            "forks",
            "mean gap",
            "worst",
        ),
        rows=tuple(
            (
                f"{one.parameters / 1e6:.1f} M",
                str(one.race.vocabulary),
                one.race.dtype,
                str(one.cost),
                percent(one.share.middle),
                f"{one.forks} of {one.texts}",
                f"{one.mean_gap:.1e}",
                f"{one.worst_gap:.1e}",
            )
            for one in found
        ),
        bars=tuple(bars),
        figures={"races": [asdict(one) for one in found]},
    )


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--python", type=Path, default=PYTHON, help="interpreter with vLLM")
    parser.add_argument("--pairs", type=int, default=9, help="of each race")


def _asked(args: argparse.Namespace) -> Report | str:
    if not args.python.exists():
        return f"skipped, as {args.python} is missing: `make vllm` builds it"
    races = QUICK if args.quick else RACES
    asked = [asdict(race) | {"pairs": min(args.pairs, race.pairs)} for race in races]
    return report([run(Race(**fields), args.python) for fields in asked])


if __name__ == "__main__":
    main("vllm_engine", ABOUT, _asked, options=_options)
