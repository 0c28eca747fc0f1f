"""`aedit status RUN`: where a run stands, once."""

from pathlib import Path

from rich.console import Console

from aedit.launch.rundir.reader import read_run
from aedit.launch.views.panel import panel


def main(run_dir: Path) -> None:
    """Print progress, every node and the last round. Raises UserError if `run_dir` is not a run."""
    run = read_run(run_dir)
    Console().print(panel(run, [node.index for node in run.nodes]))
