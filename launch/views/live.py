"""State of a run on the terminal: live progress of `aedit run`, `aedit top` and `aedit status`."""

import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

from rich.console import Console
from rich.live import Live

from aedit.launch.records import Run, RunFollower, is_server_folder, read_server
from aedit.launch.views.panel import Fitted, line, panel, state
from aedit.launch.views.server_folder_view import server_panel
from aedit.launch.views.sources import open_source

REFRESH_S = 1.0
LINE_EVERY_S = 10.0
GLANCE_S = 0.2
OVER = ("done", "left", "failed", "silent")


def watch(
    run_dir: Path,
    nodes: int,
    child_alive: Callable[[], bool],
    *,
    console: Console | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the nodes until `child_alive()` is False: a panel on a terminal, else lines.

    The panel is drawn every second; a line is printed every ten seconds and at the end, unless it is already
    there. Returns within about a fifth of a second of the child's end. Missing files are no error. nodes:
    number of nodes to show, 0 for those that exist.
    """
    console = console or Console()
    follower = RunFollower(run_dir)
    starts_before = {node.index: len(node.starts) for node in follower.poll().nodes}

    def contents() -> tuple[Run, Sequence[int], Collection[int]]:
        """Return the run, the nodes to show, and those whose files are all older than this view."""
        run = follower.poll()
        starting = {n.index for n in run.nodes if len(n.starts) == starts_before.get(n.index, 0)}
        # A node of a hub gets its index late, and it may be any.
        return run, range(nodes) if nodes else run.indices, starting

    def repeat(period_s: float, show: Callable[[], object]) -> None:
        next_at = now()
        while child_alive():
            if now() >= next_at:
                show()
                next_at = now() + period_s
            sleep(GLANCE_S)

    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as screen:

            def draw() -> None:
                screen.update(Fitted(*contents()), refresh=True)

            repeat(REFRESH_S, draw)
            draw()
        return
    printed = ""

    def print_line() -> None:
        """Print the state of the run; regular lines also show that the program is alive."""
        nonlocal printed
        printed = line(*contents())
        _print(console, printed)

    repeat(LINE_EVERY_S, print_line)
    if (last := line(*contents())) != printed:
        _print(console, last)


def status_command(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> None:
    """Print progress, each node, and the hub or the last round; of a server's folder, what it has done.

    Raises UserError if there is neither at `place`.
    """
    if is_server_folder(Path(place)):
        Console().print(server_panel(read_server(Path(place))))
        return
    with open_source(place, keys, insecure=insecure) as source:
        run = source.poll()
    Console().print(panel(run, run.indices))


def top_command(place: Path | str, keys: Path | None = None, *, insecure: bool = False) -> None:
    """Show the run every second until `q` or Ctrl-C. Raises UserError if there is no run at `place`.

    Without a terminal, print one line every ten seconds until the run is over.
    """
    console = Console()
    with suppress(KeyboardInterrupt), open_source(place, keys, insecure=insecure) as source:
        if console.is_terminal and sys.stdin.isatty():
            with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as screen:
                while True:
                    run = source.poll()
                    screen.update(Fitted(run, run.indices, subtitle="q ends"), refresh=True)
                    if _quit_pressed(REFRESH_S):
                        return
        while True:
            run = source.poll()
            _print(console, line(run, run.indices))
            if _is_over(run):
                return
            time.sleep(LINE_EVERY_S)


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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
