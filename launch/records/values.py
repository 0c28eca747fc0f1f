"""Values of parsed JSON lines, tolerant of what is missing or not a number."""

from collections.abc import Mapping
from math import nan
from typing import Any

from aedit.types import printable

Line = Mapping[str, Any]

BAD_LINE = (KeyError, TypeError, ValueError, OverflowError, AttributeError)
"""Exceptions of reading a line of another program."""


def text(value: object) -> str:
    """Return the value as text without control characters, which peers may have chosen; "" for null."""
    return "" if value is None else printable(str(value))


def number(value: object) -> float:
    """Return the value as a float; NaN for null, text and any other value that is not a number."""
    return float(value) if isinstance(value, int | float) else nan


def numbers(values: object) -> tuple[float, ...]:
    """Return the values of a list as floats; () if it is not a list."""
    return tuple(number(value) for value in values) if isinstance(values, list) else ()


def counts(values: object) -> dict[str, float]:
    """Return the numbers of an object by name, without those that are not numbers; {} if it is no object."""
    known = values.items() if isinstance(values, Mapping) else ()
    return {str(name): float(value) for name, value in known if isinstance(value, int | float)}
