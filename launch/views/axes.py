"""Format the axes of plots, so that ticks are round numbers."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, MaxNLocator


def whole_numbers(axis: Axis) -> None:
    """Put ticks at whole numbers only, for counts such as rounds and nodes."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def from_zero(axes: Axes, at_least: float) -> None:
    """Set the y axis from 0 to the largest value, or to `at_least` if all values are smaller.

    By default matplotlib zooms in on a constant series.
    """
    axes.set_ylim(0, max(axes.get_ylim()[1], at_least))


def in_bytes(axes: Axes) -> None:
    """Label the y axis in bytes, kB and MB, starting at zero."""
    from_zero(axes, 1000)
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))


def stacked_bars(axes: Axes, names: Sequence[str], parts: Mapping[str, tuple[str, Sequence[float]]]) -> None:
    """Draw one horizontal bar per name, from the top down.

    Args:
        axes: What to draw on.
        names: Labels of the bars.
        parts: For each part of a bar its colour and one length per name, from left to right.
    """
    begun = [0.0] * len(names)
    for label, (colour, lengths) in parts.items():
        axes.barh(range(len(names)), lengths, left=begun, color=colour, height=0.7, label=label)
        begun = [b + length for b, length in zip(begun, lengths, strict=True)]
    axes.set_xlim(0, max([*begun, 0.0]) * 1.02 or 1.0)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
