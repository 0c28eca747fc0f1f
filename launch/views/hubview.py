"""`aedit status`, `top` and `plot` of HOST:PORT: a run as its hub knows it, from any machine that may ask."""

import json
import time
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aedit.launch.config.config import RunConfig
from aedit.launch.rundir.hub_records import Hub, HubAt
from aedit.launch.rundir.reader import Run
from aedit.launch.rundir.records import BAD_LINE
from aedit.launch.views import words
from aedit.launch.views.hubtable import hub_line, hub_table
from aedit.launch.views.live import LINE_EVERY_S, REFRESH_S
from aedit.proto.wire.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.wire.hello import caller_keys
from aedit.proto.wire.hub_pb2 import StatusRequest
from aedit.types import UserError

ASK_S = 10.0
NO_LINES = 2**62
"""More lines than a hub has: it then sends none."""


class HubView:
    """Asks one hub again and again."""

    def __init__(self, address: str, keys: Path | None = None, *, insecure: bool = False) -> None:
        self.address = address
        self._client = HubClient(address, caller_keys(address, keys, insecure), call_timeout_s=ASK_S)

    def status(self) -> HubAt:
        """What the hub says now. Raises UserError if it does not answer."""
        try:
            return HubAt.of(self._ask(NO_LINES))
        except BAD_LINE as error:
            raise self._strange(error) from None

    def run(self) -> Run:
        """What the hub has said since its process began, as a run without nodes' own records."""
        said = self._ask(0)
        try:
            name = str(said["run"])
            if Path(name).name != name or name == "..":
                raise UserError(f"the run at {self.address} is called {name!r}, which is no directory name")
            hub = Hub(tuple(map(HubAt.of, said["lines"])), ())
        except BAD_LINE as error:
            raise self._strange(error) from None
        return Run(Path(RunConfig().dir) / name, {"name": name}, (), (hub,) if hub.lines else ())

    def close(self) -> None:
        self._client.close()

    def _ask(self, metrics_after: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(
                self._client.status(StatusRequest(metrics_after=metrics_after)).json
            )
        except (HubUnreachable, HubRefused) as error:
            raise UserError(str(error)) from None
        return found

    def _strange(self, error: Exception) -> UserError:
        return UserError(f"{self.address}: not understood ({error!r}); is that hub of this aedit's version?")


def status(address: str, keys: Path | None, *, insecure: bool) -> None:
    """Print how the run of the hub at `address` stands."""
    view = HubView(address, keys, insecure=insecure)
    try:
        Console().print(hub_panel(view.status(), address))
    finally:
        view.close()


def plot(address: str, keys: Path | None, *, insecure: bool) -> list[Path]:
    """Draw what the hub at `address` remembers into runs/NAME/plots here; the files."""
    from aedit.launch.views.plot import draw

    view = HubView(address, keys, insecure=insecure)
    try:
        run = view.run()
    finally:
        view.close()
    paths = draw(run)
    if not paths:
        raise UserError(f"{address} has nothing to plot yet: no node has brought anything")
    return paths


def top(address: str, keys: Path | None, *, insecure: bool) -> None:
    """Show it anew every second until Ctrl-C; without a terminal a line every ten seconds, until the run is
    over."""
    view, console = HubView(address, keys, insecure=insecure), Console()
    try:
        if console.is_terminal:
            with Live(console=console, screen=True, auto_refresh=False) as screen:
                while True:
                    screen.update(hub_panel(view.status(), address), refresh=True)
                    time.sleep(REFRESH_S)
        found = view.status()
        while found.progress < 1:
            console.print(hub_line(found), markup=False, highlight=False, soft_wrap=True)
            time.sleep(LINE_EVERY_S)
            found = view.status()
        console.print(hub_line(found), markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        return
    finally:
        view.close()


def hub_panel(now: HubAt, title: str) -> RenderableType:
    """Progress, two rows per node that was ever here, and the versions."""
    done = Table.grid(padding=(0, 1))
    share = f"{words.percent(now.progress)}, {words.clock(now.t)}"
    done.add_row(ProgressBar(total=1.0, completed=now.progress, width=40), share)
    body = Group(done, Text(), hub_table(now))
    return Panel(body, title=f"[bold]{title}[/]", title_align="left", box=box.ROUNDED, padding=(1, 2))
