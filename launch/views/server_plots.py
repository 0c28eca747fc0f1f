"""Plot of the rollout servers of a run, from its hub's records."""

from collections.abc import Callable, Sequence
from math import nan

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aedit.launch.records import HubSample, Run, ServerSample
from aedit.launch.views import words
from aedit.launch.views.axes import from_zero, whole_numbers

_FEW = 40
"""Lines up to which each point has a marker: one between two gaps would not be seen."""


def servers(run: Run) -> Figure | None:
    """Return speed and lag of each rollout server over time; None in a run without servers."""
    lines = run.hubs[0].lines if run.hubs else ()
    if not any(line.servers for line in lines):
        return None
    unit_s, unit = words.time_unit(lines[-1].t)
    figure = Figure(figsize=(8, 5))
    speed, lag = figure.subplots(2, sharex=True)
    _over_time(speed, lines, unit_s, lambda server: server.tokens_per_s)
    _over_time(lag, lines, unit_s, lambda server: server.lag)
    speed.set(title="Tokens per second of each rollout server")
    from_zero(speed, 1.0)
    lag.set(title="Policy versions behind the hub", xlabel=f"age of the run ({unit})")
    from_zero(lag, 1.0)
    whole_numbers(lag.yaxis)
    handles, names = speed.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside right upper")
    return figure


def _over_time(
    axes: Axes, lines: Sequence[HubSample], unit_s: float, value: Callable[[ServerSample], float]
) -> None:
    """Draw one curve per server, with gaps while it is absent."""
    names = sorted({server.name for line in lines for server in line.servers})
    times = [line.t / unit_s for line in lines]
    for i, name in enumerate(names):
        points = [
            next((value(one) for one in line.servers if one.name == name and one.live), nan) for line in lines
        ]
        axes.plot(times, points, f"C{i}", lw=1, marker="." if len(lines) <= _FEW else "", label=name[:24])
    axes.set_xlim(left=0)
