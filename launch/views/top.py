"""`aedit top PLACE`: follow a run in its directory or at its hub."""

import os
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

from rich.console import Console
from rich.live import Live

from aedit.launch.records import Run
from aedit.launch.views.live import LINE_EVERY_S, REFRESH_S
from aedit.launch.views.panel import Fitted, line, state
from aedit.launch.views.sources import Source, open_source

OVER = ("done", "left", "failed", "silent")


def top_command(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> None:
    """Show the run every second until `q` or Ctrl-C. Raises UserError if there is no run at `place`.

    Without a terminal, print one line every ten seconds until the run is over.
    """
    console = Console()
    with suppress(KeyboardInterrupt), open_source(place, keys, insecure=insecure) as source:
        if console.is_terminal and sys.stdin.isatty():
            _screen(source, console)
        else:
            _lines(source, console)


def _screen(source: Source, console: Console) -> None:
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            run = source.poll()
            screen.update(Fitted(run, run.indices, subtitle="q ends"), refresh=True)
            if _quit_pressed(REFRESH_S):
                return


def _lines(source: Source, console: Console) -> None:
    while True:
        run = source.poll()
        console.print(line(run, run.indices), markup=False, highlight=False, soft_wrap=True)
        if _is_over(run):
            return
        time.sleep(LINE_EVERY_S)


def _is_over(run: Run) -> bool:
    """Return whether no node will continue; without files of nodes, whether the hub has reached the end."""
    if run.nodes or not run.hubs:
        return all(state(node) in OVER for node in run.nodes)
    return all(hub.last.progress >= 1 for hub in run.hubs)


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read keys without Enter and without echo until the block ends."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_pressed(timeout_s: float) -> bool:
    """Wait up to `timeout_s` for keys; return whether `q` is among them or the input has ended."""
    ready, _, _ = select([sys.stdin], [], [], timeout_s)
    if not ready:
        return False
    # Unbuffered: `select` does not see keys that Python has read ahead.
    keys = os.read(sys.stdin.fileno(), 64)
    return not keys or b"q" in keys.lower()
