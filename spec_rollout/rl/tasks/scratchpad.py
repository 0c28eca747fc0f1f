"""Arithmetic with a scratchpad: short prompts, worked answers of very unequal length, and a checker.

Four kinds, one line each: `add 4821+937`, `mul 123*45`, `sort 52 7 93`, `eval ((3+4)*2)`. An answer works
line by line, repeats what is left to do, and ends with a line `=RESULT`. Sizes are log-normal and the work
grows with their square, so that answers are long-tailed: p99 / p50 of their length is 6 or more.

In a run: `prompts.source = "aedit.spec_rollout.rl.tasks.scratchpad:problems"` with `reward.functions =
["aedit.spec_rollout.rl.tasks.scratchpad:solved"]`.
"""

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aedit.types import check

MAX_CHARS = 1000
"""Longest prompt and answer together; a larger task is drawn again."""
SIGMA = 0.6
"""Standard deviation of the logarithm of a task's size."""
MEDIAN_SIZE = {"add": 3.0, "mul": 1.5, "sort": 5.0, "eval": 4.0}
"""Digits, digits of each factor, numbers, operators."""

_TASK = re.compile(r"add \d+\+\d+|mul \d+\*\d+|sort \d+( \d+)*|eval [\d()+*-]+")
_INNERMOST = re.compile(r"\((\d)([-+*])(\d)\)")


@dataclass(frozen=True, slots=True)
class Task:
    """One question and its worked answer; both end with a line break."""

    prompt: str
    answer: str

    @property
    def kind(self) -> str:
        """Return the first word of the prompt."""
        return self.prompt.partition(" ")[0]


def draw_task(rng: random.Random, longest: int = MAX_CHARS) -> Task:
    """Return a task of a kind and size that `rng` chooses.

    longest: characters of prompt and answer together.
    """
    while True:
        prompt = _prompt(rng.choice(tuple(MEDIAN_SIZE)), rng)
        task = Task(prompt, worked(prompt))
        if len(prompt) + len(task.answer) <= longest:
            return task


def problems(size: int, seed: int, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `size` problems: rows with a `prompt` and its worked `answer`, both ended by a line break.

    The same arguments give the same rows on all machines.

    Args:
        size: Number of rows.
        seed: Seed of the rows.
        options: `longest` (default 1000): most characters of prompt and answer together.

    Raises:
        ValueError: An option is unknown or out of range.
    """
    unknown = ", ".join(sorted(set(options) - {"longest"}))
    check(not unknown, "prompts.options", "may be longest", unknown)
    longest = options.get("longest", MAX_CHARS)
    is_possible = longest in range(64, MAX_CHARS + 1)
    check(is_possible, "prompts.options.longest", f"must be 64 to {MAX_CHARS}", longest)
    rng = random.Random(seed)
    tasks = (draw_task(rng, longest) for _ in range(size))
    return [{"prompt": task.prompt, "answer": task.answer} for task in tasks]


def solved(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return the reward of each completion, as `reward` does; for `reward.functions`."""
    return [reward(prompt, text) for prompt, text in zip(prompts, completions, strict=True)]


def draw_tasks(count: int, seed: int) -> list[Task]:
    """Return `count` tasks, the same for the same seed."""
    rng = random.Random(seed)
    return [draw_task(rng) for _ in range(count)]


def worked(prompt: str) -> str:
    """Return the correct answer to `prompt`, as a model is trained to give it.

    Raises ValueError if it is no task.
    """
    if not _TASK.fullmatch(prompt.strip()):
        raise ValueError(f"{prompt!r} is no task: write add 1+2, mul 3*4, sort 5 6 or eval (7-8)")
    kind, _, rest = prompt.strip().partition(" ")
    match kind:
        case "add":
            return _lines(_add(*rest.split("+")))
        case "mul":
            return _lines(_mul(*rest.split("*")))
        case "sort":
            return _lines(_sort(rest.split()))
    return _lines(_eval(rest))


def reward(prompt: str, text: str) -> float:
    """Return 1 if the last line of `text` is the right result, else 0; earlier lines are ignored."""
    return float(text.rstrip().rpartition("\n")[2] == worked(prompt).rstrip().rpartition("\n")[2])


# --- prompts


def _prompt(kind: str, rng: random.Random) -> str:
    match kind:
        case "add":
            return f"add {_number(_size(kind, rng), rng)}+{_number(_size(kind, rng), rng)}\n"
        case "mul":
            return f"mul {_number(_size(kind, rng), rng)}*{_number(_size(kind, rng), rng)}\n"
        case "sort":
            numbers = (str(rng.randrange(100)) for _ in range(1 + _size(kind, rng)))
            return f"sort {' '.join(numbers)}\n"
    return f"eval {_expression(_size(kind, rng), rng)}\n"


def _size(kind: str, rng: random.Random) -> int:
    return max(1, round(rng.lognormvariate(0.0, SIGMA) * MEDIAN_SIZE[kind]))


def _number(digits: int, rng: random.Random) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def _expression(operators: int, rng: random.Random) -> str:
    if operators == 0:
        return str(rng.randrange(10))
    left = rng.randrange(operators)
    sides = _expression(left, rng), _expression(operators - 1 - left, rng)
    return f"({sides[0]}{rng.choice('+-*')}{sides[1]})"


# --- work


def _lines(lines: Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _add(a: str, b: str) -> Iterator[str]:
    """Yield the digits from the right: what is left of both, one sum with its carry, the result so far."""
    total, carry = "", 0
    while a or b:
        digits = a[-1:] or "0", b[-1:] or "0"
        a, b = a[:-1], b[:-1]
        both = int(digits[0]) + int(digits[1]) + carry
        total = f"{both % 10}{total}"
        yield f"{a}+{b} {digits[0]}+{digits[1]}+{carry}={both:02d} {total}"
        carry = both // 10
    yield f"={'1' if carry else ''}{total}"


def _mul(a: str, b: str) -> Iterator[str]:
    """Yield one line of products for each digit of b from the right, each followed by an addition."""
    total = "0"
    for shift, digit in enumerate(reversed(b)):
        row, carry, products = "", 0, []
        for other in reversed(a):
            product = int(other) * int(digit) + carry
            products.append(f"{other}*{digit}+{carry}={product:02d}")
            row, carry = f"{product % 10}{row}", product // 10
        row = f"{carry or ''}{row}{'0' * shift}"
        yield f"{' '.join(products)} {row}"
        if shift:
            yield f"{total}+{row}"
        *steps, last = _add(total, row) if shift else [f"={row}"]
        yield from steps
        total = last[1:]
    yield f"={total.lstrip('0') or '0'}"


def _sort(numbers: list[str]) -> Iterator[str]:
    """Yield the smallest remaining number, and the rest in their order."""
    ordered, left = sorted(numbers, key=int), list(numbers)
    for least in ordered:
        left.remove(least)
        yield f"{least}|{' '.join(left)}"
    yield f"={' '.join(ordered)}"


def _eval(expression: str) -> Iterator[str]:
    """Yield the first innermost pair of brackets, modulo 10, and the expression without it."""
    while found := _INNERMOST.search(expression):
        a, sign, b = found.groups()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] % 10
        expression = expression[: found.start()] + str(value) + expression[found.end() :]
        yield f"{a}{sign}{b}={value} {expression}"
    yield f"={expression}"
