"""A process that computes rewards: `python -m aedit.spec_rollout.rl.rewards.worker PARENT FD`.

Users' functions are imported here and nowhere else. They may print, raise, fork, hang or end the process.
"""

import asyncio
import importlib
import inspect
import json
import math
import numbers
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import wraps
from typing import IO, Any

from aedit.child import begin_child
from aedit.spec_rollout.rl.rewards.reward import BUILT_IN
from aedit.types import imported

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that every function is given besides the columns."""
BROKEN_LOOP = 70
"""Exit code of a process whose event loop has ended: what belongs to it would never go on."""


def main(fd: int) -> None:
    """Answer the pool's requests until it closes the connection.

    Functions are called one after the other in this thread, asynchronous ones beside them on one event loop.
    """
    with socket.socket(fileno=fd) as end, end.makefile("rb") as requests:
        os.set_inheritable(fd, False)
        worker = _Worker(end, _found(requests, end))
        for line in requests:
            worker.take(json.loads(line))


def _found(requests: IO[bytes], end: socket.socket) -> list[Callable[..., Any]]:
    """Import the functions that the first message names, and report to the pool whether that worked."""
    hello = json.loads(requests.readline())
    sys.path[:] = hello["path"]
    problem, rewards = "", []
    try:
        rewards = [find(spec["function"], spec["options"]) for spec in hello["functions"]]
        if hello["columns"] is not None:
            for spec, reward in zip(hello["functions"], rewards, strict=True):
                check_arguments(spec["function"], reward, hello["columns"])
    except ValueError as error:
        problem = str(error)
    except BaseException as error:  # the module of a user may raise anything
        problem = f"reward.functions cannot be imported: {_described(error)}"
    end.sendall(encode_line({"problem": problem, "awaits": [is_async(reward) for reward in rewards]}))
    return rewards


class _Worker:
    """Calls the functions, and sends an answer for each request."""

    def __init__(self, end: socket.socket, rewards: list[Callable[..., Any]]) -> None:
        self._end, self._rewards, self._loop = end, rewards, EventLoop()
        self._process, self._sending = os.getpid(), threading.Lock()

    def take(self, request: dict[str, Any]) -> None:
        """Answer a request; one for an asynchronous function later."""
        if is_async(self._rewards[request["function"]]):
            threading.Thread(target=self._answer, args=(request,), daemon=True).start()
        else:
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        answer = self._made(request)
        if os.getpid() != self._process:
            os._exit(0)  # a function has forked, and this is the copy
        with self._sending:
            try:
                self._end.sendall(encode_line(answer | {"call": request["call"]}))
            except OSError:  # the pool has ended, or a function has closed the connection
                os._exit(1)

    def _made(self, request: dict[str, Any]) -> dict[str, Any]:
        reward = self._rewards[request["function"]]
        until: float = time.monotonic() + request["limit_s"]

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        def called(request: Mapping[str, Any]) -> list[float | None]:
            return scores(reward, request, self._loop, left_s())

        try:
            return {"values": called(request)}
        except BadReturn as error:
            return {"error": str(error), "line": "", "sample": None}
        except Late:
            return {"late": True}
        except BaseException as error:  # also SystemExit and KeyboardInterrupt of the function
            line = own_line(reward, error)
            sample = culprit(called, request, error, left_s())
            return {"error": _described(error), "line": line, "sample": sample}


def encode_line(message: Any) -> bytes:
    """Return `message` as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


def _described(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


class BadReturn(ValueError):
    """A reward function returned something else than one number or None per completion."""


class Late(Exception):
    """An asynchronous call took longer than its limit and was cancelled."""


class EventLoop:
    """An event loop in a thread, which lasts as long as the process, for all asynchronous calls.

    A lock, semaphore or HTTP client of a module works only in the loop that has used it first.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()

    def result(self, value: Awaitable[Any], limit_s: float | None = None) -> Any:
        """Return what `value` gives, or raise what it raises. Called by any thread but the loop's own.

        Raises Late if it takes longer than `limit_s`; it is cancelled then, and has ended.
        """
        outcome, error = asyncio.run_coroutine_threadsafe(_outcome(value, limit_s), self._running()).result()
        if error is not None:
            raise error
        return outcome

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._run, args=(self._loop,), name="rewards", daemon=True).start()
            return self._loop

    @staticmethod
    def _run(loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        while True:
            try:
                loop.run_forever()  # returns if a function stops it
            except (SystemExit, KeyboardInterrupt):
                continue  # of a task that a function has started; whatever awaits the task gets it too
            except BaseException:
                traceback.print_exc()
                os._exit(BROKEN_LOOP)


async def _outcome(value: Awaitable[Any], limit_s: float | None) -> tuple[Any, BaseException | None]:
    """Return what `value` gives, and what it raises: raised here, SystemExit would stop the loop."""
    process = os.getpid()
    try:
        async with asyncio.timeout(limit_s) as limit:
            found, error = await value, None
    except BaseException as raised:
        found, error = None, Late() if limit.expired() and isinstance(raised, TimeoutError) else raised
    if os.getpid() != process:
        os._exit(0)  # a function has forked, and this is the copy
    return found, error


def find(function: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a built-in function with its options set, or the function that an import path names.

    Raises ValueError if there is none, it cannot be called, or it has no such option.
    """
    if function not in BUILT_IN:
        found: Callable[..., Any] = imported(function, "reward.functions")
        return found
    found = getattr(importlib.import_module("aedit.spec_rollout.rl.rewards.built_in"), f"{function}_reward")
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


def is_async(reward: Callable[..., Any]) -> bool:
    """Return whether calling `reward` gives a coroutine."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)


def check_arguments(function: str, reward: Callable[..., Any], columns: Sequence[str]) -> None:
    """Raise ValueError if `reward` requires an argument that is neither given nor one of these columns."""
    given = {*GIVEN, *columns}
    for name, parameter in _parameters(reward).items():
        is_required = parameter.default is parameter.empty
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or not is_required:
            continue
        if parameter.kind == parameter.POSITIONAL_ONLY:
            raise ValueError(f"reward {function} takes {name} by position only; remove the '/'")
        if name not in given:
            known = ", ".join(sorted(set(columns) - set(GIVEN))) or "none"
            raise ValueError(
                f"reward {function} requires the argument {name!r}, expected {', '.join(GIVEN)} or a column"
                f" that all prompts have: {known}; give it a default value, or add the column"
            )


def scores(
    reward: Callable[..., Any],
    request: Mapping[str, Any],
    loop: EventLoop | None = None,
    limit_s: float | None = None,
) -> list[float | None]:
    """Return the function's values for the completions of `request`, which the pool has sent.

    loop: where an asynchronous call runs, for at most `limit_s`. Raises BadReturn for other values than
    numbers and None, Late, and whatever the function raises.
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
        returned = (loop or EventLoop()).result(returned, limit_s)
    return values_of(returned, count)


def values_of(returned: Any, count: int) -> list[float | None]:
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


def culprit(
    alone: Callable[[Mapping[str, Any]], object],
    request: Mapping[str, Any],
    error: BaseException,
    left_s: float,
) -> int | None:
    """Return the first completion for which the function raises an error of the same type when alone.

    None if there is none, as for a function that fails for the group as a whole, or if that takes too long.

    Args:
        alone: Makes the call for a request.
        request: The call that has failed.
        error: What it has raised.
        left_s: Time for all further calls, in seconds.
    """
    if len(request["completions"]) == 1:
        return 0
    until, longest = time.monotonic() + left_s, 0.0
    for place, (text, ids) in enumerate(zip(request["completions"], request["completion_ids"], strict=True)):
        began = time.monotonic()
        if began + longest > until:
            return None
        try:
            alone({**request, "completions": [text], "completion_ids": [ids]})
        except BaseException as raised:
            if type(raised) is type(error):
                return place
        longest = max(longest, time.monotonic() - began)
    return None


def own_line(reward: Callable[..., Any], error: BaseException) -> str:
    """Return `file:number` of the innermost frame in the function's own file, or of the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    code = getattr(inspect.unwrap(reward), "__code__", None)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"


def _parameters(reward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(reward).parameters
    except (TypeError, ValueError):  # written in C: it has no signature to read
        return {"columns": inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)}


def _accepted(reward: Callable[..., Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = _parameters(reward)
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


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


if __name__ == "__main__":
    main(int(begin_child(sys.argv[1:])[0]))
