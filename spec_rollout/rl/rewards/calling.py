"""Call one reward function in a worker: find it, give it what it accepts, check what it returns."""

import asyncio
import importlib
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from functools import wraps
from typing import Any

from aedit.types import imported

BUILT_IN_MODULES = {
    **dict.fromkeys(("exact", "numeric", "regex", "format"), "aedit.spec_rollout.rl.rewards.built_in"),
    **dict.fromkeys(("gym", "math"), "aedit.spec_rollout.rl.rewards.extras"),
}


class BadReturn(ValueError):
    """A reward function returned something else than one number or None per completion."""


def find(function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a built-in function with its options set, or the function that an import path names.

    Raises ValueError if there is none, it cannot be called, or it has no such option.
    """
    if function not in BUILT_IN_MODULES:
        found: Callable[..., Any] = imported(function, "reward.functions")
        return found
    found = getattr(importlib.import_module(BUILT_IN_MODULES[function]), f"{function}_reward")
    known = [p.name for p in inspect.signature(found).parameters.values() if p.kind == p.KEYWORD_ONLY]
    for option in options:
        if option not in known:
            names = ", ".join(f"{function}.{name}" for name in known if name != "answer_key") or "none"
            raise ValueError(f"reward.options has no option {function}.{option}; {function} has: {names}")
    return _with_options(found, options, known)


def _with_options(
    function: Callable[..., Any], options: Mapping[str, Any], known: Sequence[str]
) -> Callable[..., Any]:
    """Return `function` with these options. A column that has the name of an option does not replace it."""

    @wraps(function)
    def with_options(completions: list[Any], **columns: Any) -> Any:
        others = {name: column for name, column in columns.items() if name not in known}
        return function(completions, **others, **options)

    return with_options


def scores(reward: Callable[..., Any], request: Mapping[str, Any]) -> list[float | None]:
    """Return the function's values for the completions of `request`, which the pool has sent.

    Raises BadReturn for other values than numbers and None, and whatever the function raises.
    """
    count = len(request["completions"])
    columns = {name: [value] * count for name, value in request["columns"].items()}
    given = columns | {
        "prompts": [request["prompt"]] * count,
        "completions": request["completions"],
        "completion_ids": request["completion_ids"],
    }
    returned = reward(**_accepted(reward, given))
    if inspect.isawaitable(returned):
        returned = asyncio.run(_awaited(returned))
    return checked(returned, count)


def checked(returned: Any, count: int) -> list[float | None]:
    """Return `returned` as plain numbers, or raise BadReturn: it must have `count` numbers or None."""
    expected = f"expected a list of {count}, one number or None per completion"
    if isinstance(returned, str | bytes | Mapping | Set) or not hasattr(returned, "__len__"):
        raise BadReturn(f"returned {_short(returned)}, {expected}")
    if len(returned) != count:
        raise BadReturn(f"returned {len(returned)} values, {expected}")
    values = []
    for place, value in enumerate(returned):
        number = _number(value)
        if value is not None and (number is None or not math.isfinite(number)):
            raise BadReturn(f"returned {_short(value)} as value {place}, expected a finite number or None")
        values.append(number)
    return values


def culprit(reward: Callable[..., Any], request: Mapping[str, Any], error: BaseException) -> int | None:
    """Return the first completion for which the function raises an error of the same type when alone.

    None if there is none, as for a function that fails for the group as a whole.
    """
    if len(request["completions"]) == 1:
        return 0
    for place, (text, ids) in enumerate(zip(request["completions"], request["completion_ids"], strict=True)):
        try:
            scores(reward, {**request, "completions": [text], "completion_ids": [ids]})
        except BaseException as alone:
            if type(alone) is type(error):
                return place
    return None


def own_line(reward: Callable[..., Any], error: BaseException) -> str:
    """Return `file:number` of the innermost frame in the function's own file, or of the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(reward), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _accepted(reward: Callable[..., Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        parameters = inspect.signature(reward).parameters.values()
    except (TypeError, ValueError):  # written in C: it has no signature to read
        return given
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return given
    return {name: value for name, value in given.items() if name in {p.name for p in parameters}}


async def _awaited(value: Any) -> Any:
    return await value


def _number(value: Any) -> float | None:
    """Return a number of any library, such as a NumPy scalar or a tensor of one element, as a float."""
    item = getattr(value, "item", None)
    number = item() if callable(item) and getattr(value, "shape", None) in ((), (1,)) else value
    try:
        return float(number) if isinstance(number, numbers.Real) else None
    except OverflowError:
        return math.inf


def _short(value: Sequence[Any] | Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
