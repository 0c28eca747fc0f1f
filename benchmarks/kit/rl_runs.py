"""Runs of reinforcement learning as a user starts them: `aedit run`, in processes of their own."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aedit.launch.records import RLMetric, Run, read_run
from aedit.launch.views import after_warm_up, newest, rl_held_out
from benchmarks.kit.processes import end, start

CONFIG = Path(__file__).parents[2] / "configs" / "tiny-rl.toml"
ENDS_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RLRun:
    """One run on this machine."""

    nodes: int
    flags: tuple[str, ...] = ()
    config: Path = CONFIG


def run_rl(wanted: RLRun, directory: Path) -> Run:
    """Run it in this directory and return its records; a run that has ended there is not run again.

    Raises RuntimeError with the end of its output if it fails, and TimeoutError if it does not end.
    """
    run_dir, ended = directory / "run", directory / "ended"
    if ended.exists():
        return read_run(run_dir)
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "output.log"
    place = (f"--dir={directory}", "--name=run")
    words = ["run", str(wanted.config), f"--local={wanted.nodes}", *place, *wanted.flags]
    with log.open("w") as out:
        process = start("aedit.launch.cli", *words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            code = process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{directory}: the run did not end within {ENDS_WITHIN_S:g} s") from None
        finally:
            _stop(process)
    if code:
        raise RuntimeError(f"{directory}: `aedit run` failed:\n{log.read_text()[-3000:]}")
    ended.touch()
    return read_run(run_dir)


def _stop(process: "subprocess.Popen[str]") -> None:
    """End the run, which ends its nodes and its hub."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            end([process])


def states(run: Run) -> list[RLMetric]:
    """Return the newest state of each node; a node without one is an error."""
    found = [newest(node) for node in run.nodes]
    known = [state for state in found if state is not None]
    if len(known) < len(found) or not found:
        raise RuntimeError(f"{run.name}: a node has written no line of metrics")
    return known


def solved(run: Run) -> tuple[float, float]:
    """Return the solved share of held-out problems after the warm-up, and at the end."""
    first, last = after_warm_up(run)[:1], rl_held_out(run)[-1:]
    if not first:
        raise RuntimeError(f"{run.name}: no evaluation after the warm-up")
    return first[0].solved, last[0].solved


def seconds(run: Run) -> float:
    """Return the duration of the run until the last line of metrics."""
    return max(node.metrics[-1].t for node in run.nodes)


def rollouts(runs: Sequence[Run]) -> float:
    """Return the rollouts of all nodes of these runs."""
    return sum(state.rollouts for run in runs for state in states(run))
