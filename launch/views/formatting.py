"""Human-readable numbers, in ASCII; NaN becomes a dash."""

from collections.abc import Mapping
from math import isfinite

from rich.filesize import decimal

UNKNOWN = "-"
TIME_UNITS = ((7200.0, 3600.0, "hours"), (300.0, 60.0, "minutes"))


def clock(seconds: float) -> str:
    """Return seconds as a clock: `75` -> `1:15`, `3700` -> `1:01:40`."""
    if not isfinite(seconds):
        return UNKNOWN
    minutes, secs = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def time_unit(longest_s: float) -> tuple[float, str]:
    """Return the unit of a time axis of this length, as seconds and name."""
    return next(
        ((unit_s, name) for above_s, unit_s, name in TIME_UNITS if longest_s >= above_s), (1.0, "seconds")
    )


def count(value: float) -> str:
    """Return a count: `1234.4` -> `1,234`."""
    return f"{value:,.0f}" if isfinite(value) else UNKNOWN


def nats(value: float) -> str:
    """Return a loss: `2.34567` -> `2.346`."""
    return f"{value:.3f}" if isfinite(value) else UNKNOWN


def percent(share: float) -> str:
    """Return a percentage: `0.1234` -> `12.3 %`."""
    return f"{100 * share:.1f} %" if isfinite(share) else UNKNOWN


def times(value: float) -> str:
    """Return a factor: `1.634` -> `1.63x`."""
    return f"{value:.2f}x" if isfinite(value) else UNKNOWN


def decimals(value: float, places: int = 2) -> str:
    """Return a small number: `0.1234` -> `0.12`."""
    return f"{value:.{places}f}" if isfinite(value) else UNKNOWN


def tiny(value: float) -> str:
    """Return a number that may be very small: `0.000123` -> `1.2e-04`."""
    return f"{value:.1e}" if isfinite(value) else UNKNOWN


def shares(parts: Mapping[str, float]) -> str:
    """Return shares by name, without those below half a percent: `off 12 %, layer:4 88 %`."""
    shown = (f"{name} {100 * share:.0f} %" for name, share in parts.items() if share >= 0.005)
    return ", ".join(shown) or UNKNOWN


def durations(parts: Mapping[str, float]) -> str:
    """Return seconds by name, without those below 0.05: `hub 3.0 s, rank 1.5 s`."""
    return ", ".join(f"{name} {seconds(value)}" for name, value in parts.items() if value >= 0.05) or "none"


def seconds(value: float) -> str:
    """Return seconds: `1234.56` -> `1,234.6 s`."""
    return f"{value:,.1f} s" if isfinite(value) else UNKNOWN


def size(num_bytes: float) -> str:
    """Return a size: `1234567` -> `1.2 MB`."""
    return decimal(int(num_bytes)) if isfinite(num_bytes) else UNKNOWN


def more(number: int, noun: str) -> str:
    """Return the number of further items: `3, "node"` -> `and 3 more nodes`."""
    return f"and {number:,} more {noun if number == 1 else f'{noun}s'}"


def some(number: int, noun: str, nouns: str = "") -> str:
    """Return a number of items: `1, "node"` -> `1 node`, `3, "node"` -> `3 nodes`."""
    return f"{number:,} " + (noun if number == 1 else nouns or f"{noun}s")
