"""What plots do to their axes so that ticks are numbers a person would choose."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import EngFormatter, MaxNLocator


def whole_numbers(axis: Axis) -> None:
    """Put ticks on whole numbers only: half a round or half a node means nothing."""
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def from_zero(axes: Axes, at_least: float) -> None:
    """Begin the y axis at 0 and end it at the largest value, or at `at_least` if all values are small.

    Around a series of zeros matplotlib would zoom into hundredths.
    """
    axes.set_ylim(0, max(axes.get_ylim()[1], at_least))


def in_bytes(axes: Axes) -> None:
    """Label the y axis in bytes, kB and MB, from zero."""
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
