"""Human-readable numbers and tables, in ASCII; NaN becomes a dash."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import isfinite

from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

UNKNOWN = "-"
_TIME_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    *,
    left: Collection[str] = (),
    wraps: Collection[str] = (),
    cut: bool = False,
    gap: int = 1,
) -> Table:
    """Return a table without lines, in which cells have no markup, as others may have chosen them.

    Args:
        columns: Names of the columns.
        rows: Cells.
        left: Columns of text, aligned to the left.
        wraps: Columns that a narrow terminal may fold; numbers are never cut.
        cut: Cut cells instead of folding them.
        gap: Spaces between columns.
    """
    made = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(
            name, justify="left" if name in left else "right", overflow="fold", no_wrap=name not in wraps
        )
    for row in rows:
        cells = [cell if isinstance(cell, Text) else Text(cell) for cell in row]
        for cell in cells if cut else ():
            cell.no_wrap, cell.overflow = True, "ellipsis"
        made.add_row(*cells)
    return made


def _or_dash(value: float, pattern: str) -> str:
    return pattern.format(value) if isfinite(value) else UNKNOWN


def clock(seconds: float) -> str:
    """Return seconds as a clock: `75` -> `1:15`, `3700` -> `1:01:40`."""
    if not isfinite(seconds):
        return UNKNOWN
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of a time axis of this length, as seconds and name."""
    fitting = ((unit_s, name) for above_s, unit_s, name in _TIME_UNITS if longest_s >= above_s)
    return next(fitting, (1.0, "seconds"))


def count(value: float) -> str:
    """Return a count: `1234.4` -> `1,234`."""
    return _or_dash(value, "{:,.0f}")


def nats(value: float) -> str:
    """Return a loss: `2.34567` -> `2.346`."""
    return _or_dash(value, "{:.3f}")


def percent(share: float) -> str:
    """Return a percentage: `0.1234` -> `12.3 %`."""
    return _or_dash(100 * share, "{:.1f} %")


def times(value: float) -> str:
    """Return a factor: `1.634` -> `1.63x`."""
    return _or_dash(value, "{:.2f}x")


def decimals(value: float, places: int = 2) -> str:
    """Return a small number: `0.1234` -> `0.12`."""
    return _or_dash(value, f"{{:.{places}f}}")


def tiny(value: float) -> str:
    """Return a number that may be very small: `0.000123` -> `1.2e-04`."""
    return _or_dash(value, "{:.1e}")


def seconds(value: float) -> str:
    """Return seconds: `1234.56` -> `1,234.6 s`."""
    return _or_dash(value, "{:,.1f} s")


def size(num_bytes: float) -> str:
    """Return a size: `1234567` -> `1.2 MB`."""
    return decimal(int(num_bytes)) if isfinite(num_bytes) else UNKNOWN


def shares(parts: Mapping[str, float]) -> str:
    """Return shares by name, without those below half a percent: `off 12 %, layer:4 88 %`."""
    shown = (f"{name} {100 * share:.0f} %" for name, share in parts.items() if share >= 0.005)
    return ", ".join(shown) or UNKNOWN


def durations(parts: Mapping[str, float]) -> str:
    """Return seconds by name, without those below 0.05: `hub 3.0 s, rank 1.5 s`."""
    return ", ".join(f"{name} {seconds(value)}" for name, value in parts.items() if value >= 0.05) or "none"


def reasons(refused: Mapping[str, int]) -> str:
    """Return counts as `12 stale, 1 norm`, the most frequent first."""
    ordered = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {reason}" for reason, count in ordered)


def spread(versions: Sequence[int]) -> str:
    """Return `3 to 5` for different versions, one number if all are equal."""
    if not versions:
        return "none yet"
    low, high = min(versions), max(versions)
    return str(low) if low == high else f"{low} to {high}"


def more(number: int, noun: str) -> str:
    """Return the number of further items: `3, "node"` -> `and 3 more nodes`."""
    return f"and {number:,} more {noun if number == 1 else f'{noun}s'}"


def some(number: int, noun: str, nouns: str = "") -> str:
    """Return a number of items: `1, "node"` -> `1 node`, `3, "node"` -> `3 nodes`."""
    return f"{number:,} " + (noun if number == 1 else nouns or f"{noun}s")
