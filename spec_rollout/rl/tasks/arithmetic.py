"""Sums of small numbers, for models that are trained from nothing on one machine."""

import random
from collections.abc import Mapping
from typing import Any

from aedit.types import check

MAX_LEVELS = 6


def rows(size: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `size` problems such as {"prompt": "17+85=", "answer": "102", "level": 2}.

    A number of a problem of level n has up to n digits. The same arguments give the same rows.

    Args:
        size: Number of rows.
        seed: Seed of the rows.
        options: `levels` (default 2): the rows are spread evenly over the levels 1 to this.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    unknown = ", ".join(sorted(set(options) - {"levels"}))
    check(not unknown, "prompts.options", "may have levels only", unknown)
    levels = options.get("levels", 2)
    check(levels in range(1, MAX_LEVELS + 1), "prompts.options.levels", f"must be 1 to {MAX_LEVELS}", levels)
    draw = random.Random(seed)
    return [_row(draw, 1 + index % levels) for index in range(size)]


def _row(draw: random.Random, level: int) -> dict[str, Any]:
    # randrange of CPython is the same on all machines and has not changed since 3.2.
    first, second = draw.randrange(10**level), draw.randrange(10**level)
    return {"prompt": f"{first}+{second}=", "answer": str(first + second), "level": level}
