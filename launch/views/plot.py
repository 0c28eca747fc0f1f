"""`aedit plot RUN`: plots of a run as PNG files in its `plots` folder, or its page as one file.

A plot is drawn only if the run has data for it: a run without rounds has no norms.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cycler import cycler
from matplotlib import colormaps, style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from aedit.launch.records import KeptRollout, Run
from aedit.launch.views.page.contents import contents
from aedit.launch.views.page.html import MOST_ROLLOUTS, file_page
from aedit.launch.views.page.server import MOST_LINES
from aedit.launch.views.plots import (
    bytes_per_round,
    hub_nodes,
    hub_traffic,
    loss_by_steps,
    loss_by_time,
    norms,
    plot_effective_nodes,
    servers,
    time_per_node,
)
from aedit.launch.views.rl_plots import drafter, policy_health, reward_by_steps, reward_by_time, step_split
from aedit.launch.views.sources import open_source
from aedit.system import write_atomically
from aedit.types import UserError

PLOTS: Mapping[str, Callable[[Run], Figure | None]] = {
    "loss_by_steps.png": loss_by_steps,
    "loss_by_time.png": loss_by_time,
    "time_per_node.png": time_per_node,
    "norms.png": norms,
    "bytes_per_round.png": bytes_per_round,
    "effective_nodes.png": plot_effective_nodes,
    "hub_nodes.png": hub_nodes,
    "hub_traffic.png": hub_traffic,
    "servers.png": servers,
    "reward_by_steps.png": reward_by_steps,
    "reward_by_time.png": reward_by_time,
    "step_split.png": step_split,
    "acceptance.png": drafter,
    "policy_health.png": policy_health,
}
TAB20 = colormaps["tab20"](range(20))
STYLE = {
    # Ten dark colours, then ten light ones, so that `C<node>` distinguishes twenty nodes.
    "axes.prop_cycle": cycler(color=[*TAB20[::2], *TAB20[1::2]]),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    # Ticks show their full value, without an offset such as "+2.3e1".
    "axes.formatter.useoffset": False,
    "grid.alpha": 0.25,
    "font.size": 10,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def plot_command(
    place: Path | str, keys: Path | None = None, *, insecure: bool = False, html: bool = False
) -> list[Path]:
    """Draw the plots of the run up to now and return the files.

    Plots of a directory are written into it, those of HOST:PORT into `runs/NAME/plots` on this machine.
    Raises UserError if there are no data yet.

    html: write the page of `aedit view` as one file instead.
    """
    if html:
        with open_source(place, keys, insecure=insecure, most_lines=MOST_LINES) as source:
            return [_write_page(source.history(), source.rollouts(MOST_ROLLOUTS))]
    with open_source(place, keys, insecure=insecure) as source:
        paths = draw(source.history())
    if not paths:
        raise UserError(f"{place}: no metrics yet, nothing to plot; try again after the first steps")
    return paths


def _write_page(run: Run, rollouts: Sequence[KeptRollout]) -> Path:
    """Write the page of a run as one file and return it. Raises UserError if it cannot be written."""
    path = run.directory / "plots" / "page.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, file_page(contents(run), rollouts))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def draw(run: Run) -> list[Path]:
    """Draw the plots and return the files; [] for a run without data.

    Raises UserError if they cannot be written.
    """
    paths = []
    with style.context(["default", STYLE]):
        for name, plot in PLOTS.items():
            if (figure := plot(run)) is None:
                continue
            paths.append(run.directory / "plots" / name)
            # Without pyplot: it needs no window system and keeps no reference to the figure.
            FigureCanvasAgg(figure)
            try:
                paths[-1].parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(paths[-1], dpi=120)
            except OSError as error:
                raise UserError(f"cannot write {paths[-1]}: {error.strerror or error}") from error
    return paths
