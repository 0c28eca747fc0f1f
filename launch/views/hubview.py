"""What a hub says of its run, as a picture: `aedit status HOST:PORT` and `aedit top HOST:PORT`."""

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

from aedit.launch.join import member_keys
from aedit.launch.views import words
from aedit.launch.views.live import LINE_EVERY_S, REFRESH_S
from aedit.proto.client import HubClient, HubRefused, HubUnreachable
from aedit.proto.hub_pb2 import StatusRequest
from aedit.types import UserError

ASK_S = 10.0
COLUMNS = (
    "node",
    "name",
    "state",
    "steps",
    "steps/s",
    "pace",
    "staleness",
    "weight",
    "waited",
    "wire",
    "up",
    "down",
    "accepted",
    "refused",
)


class HubView:
    """Asks one hub again and again."""

    def __init__(self, address: str, keys: Path | None = None, *, insecure: bool = False) -> None:
        self.address = address
        self._client = HubClient(address, member_keys(address, keys, insecure), call_timeout_s=ASK_S)

    def status(self) -> dict[str, Any]:
        """What the hub says now. Raises UserError if it does not answer."""
        try:
            found: dict[str, Any] = json.loads(self._client.status(StatusRequest()).json)
        except (HubUnreachable, HubRefused) as error:
            raise UserError(str(error)) from None
        return found

    def close(self) -> None:
        self._client.close()


def status(address: str, keys: Path | None, *, insecure: bool) -> None:
    """Print how the run of the hub at `address` stands."""
    view = HubView(address, keys, insecure=insecure)
    try:
        Console().print(hub_panel(view.status(), address))
    finally:
        view.close()


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
        while found["progress"] < 1:
            console.print(hub_line(found), markup=False, highlight=False, soft_wrap=True)
            time.sleep(LINE_EVERY_S)
            found = view.status()
        console.print(hub_line(found), markup=False, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        return
    finally:
        view.close()


def hub_panel(found: dict[str, Any], title: str) -> RenderableType:
    """Progress, one row per node that was ever here, and the versions."""
    done = Table.grid(padding=(0, 1))
    share = f"{words.percent(found['progress'])}, {words.clock(found['elapsed_s'])}"
    done.add_row(ProgressBar(total=1.0, completed=found["progress"], width=40), share)
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for i, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if 0 < i < 3 else "right")
    for node in found["nodes"]:
        table.add_row(*_cells(node))
    body: list[RenderableType] = [done, Text(), table, Text(), Text(_units(found), style="dim")]
    return Panel(Group(*body), title=f"[bold]{title}[/]", title_align="left", box=box.ROUNDED, padding=(1, 2))


def hub_line(found: dict[str, Any]) -> str:
    """The same in one plain line, for logs."""
    head = f"{words.clock(found['elapsed_s'])}  {words.percent(found['progress'])}  term {found['term']}"
    cells = (
        f"{node['node']} {node['state']} {node['steps']} steps, {node['steps_per_s']:.2f}/s"
        for node in found["nodes"]
    )
    return " | ".join([head, *cells])


def _cells(node: dict[str, Any]) -> list[str]:
    trained_s = node["busy_s"] + node["wait_s"]
    waited = node["wait_s"] / trained_s if trained_s > 0 else float("nan")
    refused = ", ".join(f"{count} {reason}" for reason, count in node["refused"].items())
    return [
        str(node["node"]),
        node["name"],
        node["state"],
        words.count(node["steps"]),
        f"{node['steps_per_s']:.2f}",
        str(node["pace_steps"]),
        str(node["staleness"]),
        words.percent(node["weight"]),
        words.percent(waited),
        words.seconds(node["wire_s"]),
        words.size(node["bytes_up"]),
        words.size(node["bytes_down"]),
        words.count(node["accepted"]),
        refused or "-",
    ]


def _units(found: dict[str, Any]) -> str:
    versions = [unit["version"] for unit in found["units"]]
    spread = f"{min(versions)} to {max(versions)}" if versions else "none yet"
    pending = sum(unit["pending"] for unit in found["units"])
    facts = [f"term {found['term']}", f"versions {spread}", f"{pending} pushes wait for their quorum"]
    if "journal_bytes" in found:
        facts.append(f"journal {words.size(found['journal_bytes'])}")
    return ", ".join(facts)
