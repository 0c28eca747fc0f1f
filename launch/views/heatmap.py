"""Heat map of pseudo-gradient norms by node, round and unit, with marks for distrusted ones."""

from math import nan

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from aedit.launch.records import NodeRecords, Run
from aedit.launch.views.axes import whole_numbers
from aedit.launch.views.figures import units_of

MAX_NODES = 8
MAX_PANEL_INCHES = 2.4
MAX_NAMES = 12
NO_NUMBER = "0.85"
MARKS = {
    "distrusted": Line2D([], [], color="red", marker="x", linestyle="", markersize=6, markeredgewidth=1.5),
    "rolled back": Line2D(
        [], [], color="red", marker="s", linestyle="", markersize=8, markerfacecolor="none"
    ),
}


def norms(run: Run) -> Figure | None:
    """Return one panel per node.

    Rounds to the right, units downwards, norms as colours on a shared log scale.
    """
    nodes = [node for node in run.nodes if node.rounds]
    if not nodes:
        return None
    shown = nodes[:MAX_NODES]
    units = units_of(run) or tuple(str(i) for i in range(_width(shown)))
    ids = range(min(n.rounds[0].id for n in shown), max(n.rounds[-1].id for n in shown) + 1)
    grids = [_grid(node, ids, max(len(units), _width(shown))) for node in shown]
    scale = _scale(grids)
    figure = Figure(figsize=(9, 1.4 + len(shown) * min(max(1.3, 0.2 * len(units) + 0.5), MAX_PANEL_INCHES)))
    rows = figure.subplots(len(shown), sharex=True, squeeze=False)[:, 0]
    for axes, node, grid in zip(rows, shown, grids, strict=True):
        image = _image(axes, grid, ids, scale)
        _marks(axes, node)
        axes.set_title(f"node {node.index}", fontsize=10)
        _name_units(axes, units)
    rows[-1].set_xlabel("round")
    whole_numbers(rows[-1].xaxis)
    figure.colorbar(image, ax=list(rows), label="norm", pad=0.01, fraction=0.03, aspect=40)
    omitted = f" (first {MAX_NODES} of {len(nodes)} nodes)" if len(nodes) > MAX_NODES else ""
    figure.suptitle(f"Pseudo-gradient norms{omitted}", x=0.01, ha="left", fontsize=12)
    handles = [*MARKS.values(), Patch(color=NO_NUMBER)]
    figure.legend(handles, [*MARKS, "no number"], loc="outside upper right", ncols=3, fontsize=9)
    return figure


def _grid(node: NodeRecords, ids: range, num_units: int) -> NDArray[np.float64]:
    """Return norms of shape (units, rounds), NaN where there is none."""
    grid = np.full((num_units, len(ids)), nan)
    for landed in node.rounds:
        grid[: len(landed.norms), landed.id - ids.start] = landed.norms
    grid[~np.isfinite(grid)] = nan
    return grid


def _scale(grids: list[NDArray[np.float64]]) -> Normalize:
    known = np.concatenate([grid[grid > 0] for grid in grids])
    if known.size and known.min() < known.max():
        return LogNorm(known.min(), known.max())
    return Normalize(0, known.max() if known.size else 1)


def _image(axes: Axes, grid: NDArray[np.float64], ids: range, scale: Normalize) -> AxesImage:
    colours = colormaps["viridis"].with_extremes(bad=NO_NUMBER)
    extent = (ids.start - 0.5, ids.stop - 0.5, grid.shape[0] - 0.5, -0.5)
    axes.grid(visible=False)
    return axes.imshow(grid, aspect="auto", cmap=colours, norm=scale, extent=extent, interpolation="nearest")


def _marks(axes: Axes, node: NodeRecords) -> None:
    for name, cells in (
        ("distrusted", [(landed.id, unit) for landed in node.rounds for unit in landed.distrusted]),
        ("rolled back", [(landed.id, unit) for landed in node.rounds for unit in landed.rolled_back]),
    ):
        style = MARKS[name]
        axes.plot(
            [id for id, _ in cells],
            [unit for _, unit in cells],
            linestyle="",
            color="red",
            marker=style.get_marker(),
            markersize=style.get_markersize(),
            markerfacecolor=style.get_markerfacecolor(),
            markeredgewidth=1.5,
        )


def _name_units(axes: Axes, units: tuple[str, ...]) -> None:
    every = -(-len(units) // MAX_NAMES) or 1
    axes.set_yticks(range(0, len(units), every), units[::every], fontsize=8)


def _width(nodes: list[NodeRecords]) -> int:
    return max((len(landed.norms) for node in nodes for landed in node.rounds), default=0)
