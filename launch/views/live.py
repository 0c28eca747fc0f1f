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

from rich.console import Console, RenderableType
from rich.live import Live

from aedit.launch.records import Run, RunFollower, is_server_folder, read_server
from aedit.launch.views.panel import Fitted, line, panel, state
from aedit.launch.views.server_folder_view import server_panel
from aedit.launch.views.sources import Source, open_source

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
    view = _View(run_dir, nodes)
    pace = _Pace(child_alive, now, sleep)
    if console.is_terminal:
        with Live(view, console=console, auto_refresh=False) as screen:
            pace.each(REFRESH_S, screen.refresh)
            screen.refresh()
    else:
        lines = _Lines(view, console)
        pace.each(LINE_EVERY_S, lines.print)
        lines.print_if_new()


class _View:
    """Contents of the screen, read again for each drawing."""

    def __init__(self, run_dir: Path, num_nodes: int) -> None:
        self._follower = RunFollower(run_dir)
        self._num_nodes = num_nodes
        self._starts_before = {node.index: len(node.starts) for node in self._follower.poll().nodes}

    def __rich__(self) -> RenderableType:
        run = self._follower.poll()
        return Fitted(run, self._shown(run), self._starting(run))

    def line(self) -> str:
        run = self._follower.poll()
        return line(run, self._shown(run), self._starting(run))

    def _shown(self, run: Run) -> Sequence[int]:
        """Return the indices to show; a node of a hub gets its index late, and it may be any."""
        return range(self._num_nodes) if self._num_nodes else [node.index for node in run.nodes]

    def _starting(self, run: Run) -> Collection[int]:
        """Return the nodes whose files are all older than this view, in a run that is resumed."""
        return {
            node.index for node in run.nodes if len(node.starts) == self._starts_before.get(node.index, 0)
        }


class _Lines:
    """Printer of the view as lines."""

    def __init__(self, view: _View, console: Console) -> None:
        self._view, self._console = view, console
        self._last = ""

    def print(self) -> None:
        """Print the state of the run; regular lines also show that the program is alive."""
        self._last = self._view.line()
        self._console.print(self._last, markup=False, highlight=False, soft_wrap=True)

    def print_if_new(self) -> None:
        """Print the state of the run if the last line differs."""
        if self._view.line() != self._last:
            self.print()


class _Pace:
    """Repeats an action at fixed intervals while the child runs."""

    def __init__(
        self, alive: Callable[[], bool], now: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._alive, self._now, self._sleep = alive, now, sleep

    def each(self, period_s: float, show: Callable[[], object]) -> None:
        next_at = self._now()
        while self._alive():
            if self._now() >= next_at:
                show()
                next_at = self._now() + period_s
            self._sleep(GLANCE_S)


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
