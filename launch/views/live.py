"""The progress a person watches while `aedit run` runs."""

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from aedit.launch.rundir.reader import Run, RunFollower
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
    """Show nodes at work until `child_alive()` is False: a panel on a terminal, else lines.

    `nodes` says how many to show, 0 those that there are. The panel is drawn every second. A line is printed
    every ten, and one at the end unless it stands there already. Returns within about a fifth of a second of
    the child's end. Files that are not there yet, or never come, are no error.
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
    """What is on the screen: read anew whenever it is drawn."""

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
        """A node of a hub gets its number late, and it may be any."""
        return range(self._num_nodes) if self._num_nodes else [node.index for node in run.nodes]

    def _starting(self, run: Run) -> Collection[int]:
        """Nodes whose files are all from before we began to watch: the run is being resumed."""
        return {
            node.index for node in run.nodes if len(node.starts) == self._starts_before.get(node.index, 0)
        }


class _Lines:
    """Prints the view as lines."""

    def __init__(self, view: _View, console: Console) -> None:
        self._view, self._console = view, console
        self._last = ""

    def print(self) -> None:
        """Print how the run stands: a line every so often also says that the program lives."""
        self._last = self._view.line()
        self._console.print(self._last, markup=False, highlight=False, soft_wrap=True)

    def print_if_new(self) -> None:
        """Print how the run stands if that is not what the last line says."""
        if self._view.line() != self._last:
            self.print()


class _Pace:
    """Repeats something at a steady pace while the child lives."""

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
