"""`aedit top RUN`: a run as it goes, from any terminal that can see its directory."""

import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from aedit.launch.rundir.reader import Run, RunFollower, require_run
from aedit.launch.views.live import LINE_EVERY_S, REFRESH_S
from aedit.launch.views.panel import line, panel, state

OVER = ("done", "left", "failed", "silent")


def main(run_dir: Path) -> None:
    """Show the run anew every second until `q` or Ctrl-C. Raises UserError if `run_dir` is not a run.

    Without a terminal: one plain line every ten seconds, until every node is done, has failed or went silent.
    """
    require_run(run_dir)
    follower = RunFollower(run_dir)
    console = Console()
    try:
        if console.is_terminal and sys.stdin.isatty():
            _screen(follower, console)
        else:
            _lines(follower, console)
    except KeyboardInterrupt:
        return


def _screen(follower: RunFollower, console: Console) -> None:
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            run = follower.poll()
            screen.update(Group(panel(run, _indices(run)), Text("  q ends", style="dim")), refresh=True)
            if _quit_pressed(REFRESH_S):
                return


def _lines(follower: RunFollower, console: Console) -> None:
    while True:
        run = follower.poll()
        console.print(line(run, _indices(run)), markup=False, highlight=False, soft_wrap=True)
        if all(state(node) in OVER for node in run.nodes):
            return
        time.sleep(LINE_EVERY_S)


def _indices(run: Run) -> list[int]:
    return [node.index for node in run.nodes]


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys arrive without Enter and without being shown."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_pressed(timeout_s: float) -> bool:
    """Wait up to `timeout_s` for keys; True if `q` is among them and at the end of the input."""
    ready, _, _ = select([sys.stdin], [], [], timeout_s)
    if not ready:
        return False
    # Past Python's buffer: what it had read ahead, `select` would not see.
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower()
