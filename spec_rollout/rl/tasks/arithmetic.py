"""Sums of whole numbers with their working, for models that are trained from nothing on one machine."""

import random
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from aedit.types import check

MAX_DIGITS = 12
OPTIONS = ("digits", "levels", "work")


def rows(size: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `size` problems such as {"prompt": "47+85=", "answer": "7+5+0=12,4+8+1=13:132", "level": 2}.

    The answer works from the last digit to the first, with the carry as third summand, and ends with the sum:
    the reward `numeric` reads that only. The same arguments give the same rows on all machines.

    Args:
        size: Number of rows.
        seed: Seed of the rows.
        options: `digits` (default 2): most digits of a summand. `levels` (default 1): the rows are spread
            evenly over so many levels; those of level n have summands of up to n digits, and the hardest
            level is `digits`. `work` (default true): false leaves the sum alone as answer.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    unknown = ", ".join(sorted(set(options) - set(OPTIONS)))
    check(not unknown, "prompts.options", f"may be {', '.join(OPTIONS)}", unknown)
    digits, levels = options.get("digits", 2), options.get("levels", 1)
    check(digits in range(1, MAX_DIGITS + 1), "prompts.options.digits", f"must be 1 to {MAX_DIGITS}", digits)
    check(levels in range(1, digits + 1), "prompts.options.levels", "must be 1 to digits", levels)
    draw = random.Random(seed)
    easiest = digits - levels + 1
    return [_row(draw, easiest + index % levels, bool(options.get("work", True))) for index in range(size)]


def _row(draw: random.Random, level: int, work: bool) -> dict[str, Any]:
    first, second = draw.randrange(10**level), draw.randrange(10**level)
    total = first + second
    answer = f"{working(first, second)}:{total}" if work else str(total)
    return {"prompt": f"{first}+{second}=", "answer": answer, "level": level}


def working(first: int, second: int) -> str:
    """Return the sums of the digits from the last to the first: `7+5+0=12,4+8+1=13` for 47 and 85."""
    steps, carry = [], 0
    for one, other in zip_longest(reversed(str(first)), reversed(str(second)), fillvalue="0"):
        column = int(one) + int(other) + carry
        steps.append(f"{one}+{other}+{carry}={column}")
        carry = column // 10
    return ",".join(steps)
