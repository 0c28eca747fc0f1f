"""Live progress of `aedit run`."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from aedit.launch.records import Run, RunFollower
from aedit.launch.views.panel import Fitted, line

REFRESH_S = 1.0
LINE_EVERY_S = 10.0
GLANCE_S = 0.2


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
