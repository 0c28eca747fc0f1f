"""Worker processes that compute the rewards of groups while other groups are still generated.

Pool and worker exchange lines of JSON over a socket that never blocks the pool.
"""

import json
import math
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from types import TracebackType
from typing import Any, Literal, Self

from aedit.child import end_group, start_module
from aedit.spec_rollout.rl.groups import Group
from aedit.spec_rollout.rl.rewards.reward import RewardFailed, RewardFault, RewardReport, RewardSpec
from aedit.spec_rollout.rl.rewards.worker import encode_line
from aedit.types import NonNegativeInt, PositiveFloat, PositiveInt, check, checked

START_LIMIT_S = 120.0
"""Longest time in which a worker imports the functions."""
MAX_STARTS = 3
"""A worker that ends so often before it has imported the functions is not started again."""
TRIES = 2
"""A call that was ended is made once more."""
AT_ONCE = 8
"""Most calls of asynchronous functions that a worker makes at a time."""
CANCEL_S = 1.0
"""Time for an asynchronous call to end after its worker has cancelled it at the limit."""
GRACE_S = 1.0
"""Time for a worker whose connection has ended to end by itself, so that its exit code can be reported."""
LOOK_S = 0.05
"""Interval in which a wait looks for workers that have ended."""
Completions = Sequence[str]
"""Texts of a group's rollouts, in their order."""
END_S = 10.0
"""Longest wait for a killed process to be gone."""
PIECE_BYTES = 1 << 16


@dataclass(slots=True, eq=False)
class _Task:
    """A group, and the values of the functions that have answered."""

    group: Group
    request: dict[str, Any]
    values: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    events: list[RewardFault] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class _Call:
    """One function for one group."""

    task: _Task
    function: int
    number: int
    tries: int = 0
    sent_s: float = 0.0
    limit_s: float = 0.0


class RewardProcess:
    """A worker. It ends with the thread that has started it, which must last, or by `kill`."""

    def __init__(
        self,
        specs: tuple[RewardSpec, ...],
        columns: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process.

        columns: names that every problem has; None: the arguments of the functions are not checked.
        """
        self.awaits: Sequence[bool] | None = None
        """For each function whether it is asynchronous; None until it has imported all functions."""
        self.answered: set[int] = set()
        """Functions that have answered: their first call, which may load a model, is over."""
        self.started_s = clock()
        own, other = socket.socketpair()
        with other:
            # What the functions print goes to standard error: standard output may be read by a program.
            self._process = start_module(
                "aedit.spec_rollout.rl.rewards.worker",
                [str(other.fileno())],
                fds=(other.fileno(),),
                stdout=(sys.__stderr__ if _is_open(sys.__stderr__) else None) or subprocess.DEVNULL,
            )
        self.lines = JsonLines(own)
        functions = [asdict(spec) for spec in specs]
        self.lines.put({"path": sys.path, "functions": functions, "columns": columns})

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def answers(self) -> list[Any]:
        """Return what has arrived. Raises EOFError if the process has ended and nothing is left to read."""
        # Asked first, as what it has sent before its end is read below. And asked, as a process that it has
        # forked may keep the connection open.
        has_ended = self._process.poll() is not None
        self.lines.flush()
        found = self.lines.take()
        if has_ended and not found:
            raise EOFError
        return found

    def kill(self, grace_s: float = 0.0) -> str:
        """End the process and those that it has started in its group; return how it had ended before.

        Raises subprocess.TimeoutExpired if it is still there after 10 s.

        Args:
            grace_s: Time in which it may end by itself: its connection ends a moment before it does.
        """
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        code = self._process.poll()
        end_group(self._process)
        self.lines.close()
        if code is None:
            return "broke its connection"
        return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"


@checked()
class RewardPool:
    """Processes that compute rewards. Used by one thread, which must last as long as the pool.

    A call that ends its process or exceeds the time limit is made once more, by itself; then, and after an
    exception or a wrong return value, the group's rewards are None and its report says why. Nothing that a
    function does ends the caller or blocks it, unless `on_error` is "stop", or no group gets a reward.

    A worker has one event loop as long as it lasts, on which calls of asynchronous functions run together. At
    the limit such a call is cancelled; another one ends with its process.

    Args:
        specs: Functions with weights. A completion's reward is the weighted sum of those that do not return
            None for it, and None if all do.
        workers: Number of processes.
        time_limit_s: Limit of one function's call for one group.
        first_time_limit_s: Limit of the first call of a function in a process, which may load a model, if it
            is above `time_limit_s`.
        max_failed_groups: Groups in a row without any reward after which RewardFailed is raised; 0: never.
        columns: Names of the columns that all problems have. A function that requires another argument is
            refused by `check`. None: unknown.
        on_error: "stop" raises RewardFailed from `submit`, `ready` and `wait` instead of reporting.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: PositiveInt = 1,
        time_limit_s: PositiveFloat = 10.0,
        first_time_limit_s: PositiveFloat = 300.0,
        max_failed_groups: NonNegativeInt = 0,
        columns: Sequence[str] | None = None,
        on_error: Literal["skip", "stop"] = "skip",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check(len(specs) > 0, "specs", "must name at least one reward function", specs)
        names = [spec.function for spec in specs]
        check(len(set(names)) == len(names), "reward.functions", "must name each function once", names)
        self._specs, self._limit_s, self._clock = tuple(specs), time_limit_s, clock
        self._first_limit_s = max(time_limit_s, first_time_limit_s)
        self._columns, self._most_failed, self._failed_in_row = columns, max_failed_groups, 0
        self._numbers = count()
        self._stop = on_error == "stop"
        self._waiting: deque[_Call] = deque()
        self._tasks: dict[int, _Task] = {}
        self._done: list[_Task] = []
        self._failed_starts = 0
        self._running: dict[RewardProcess, dict[int, _Call]] = {}
        for _ in range(workers):
            self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pending(self) -> int:
        """Return the number of groups that were submitted and have not been returned."""
        return len(self._tasks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the ids of the worker processes."""
        return tuple(worker.pid for worker in self._running)

    def check(
        self, examples: Iterable[tuple[Group, Completions]] = (), timeout_s: float = START_LIMIT_S
    ) -> None:
        """Wait until a worker has imported all functions, and call them on examples.

        A function must give values, which may be None, for one of the examples.

        Raises ValueError if a function cannot be imported, requires an argument that it will not get, or
        gives no values for any example; and TimeoutError if the import takes longer.
        """
        until = self._clock() + timeout_s
        try:
            while not any(worker.awaits is not None for worker in self._running):
                if self._clock() > until:
                    raise TimeoutError(f"the reward functions were not imported within {timeout_s:g} s")
                self._look(min(LOOK_S, timeout_s))
            faults: dict[str, RewardFault] = {}
            until = self._clock() + self._first_limit_s
            for number, (group, text) in enumerate(examples):
                found = self._called(group, text)
                faults = {name: fault for name, fault in found.items() if name in faults or not number}
                if not faults or self._clock() > until:
                    break
        except RewardFailed as error:
            raise ValueError(str(error)) from None
        if fault := next(iter(faults.values()), None):
            raise ValueError(
                f"reward.functions: {fault.function} fails on the first prompts: {fault.what};"
                " it must return one number or None per completion"
            )

    def _called(self, group: Group, text: Completions) -> dict[str, RewardFault]:
        """Call all functions on a group; return what went wrong, by function."""
        stop, self._stop = self._stop, False
        try:
            self.submit(group, text)
            while not self._done:
                self._look(LOOK_S)
            task = self._done.pop()
            del self._tasks[group.position]
            return {fault.function: fault for fault in task.events}
        finally:
            self._stop = stop

    def submit(self, group: Group, text: Completions) -> None:
        """Start to compute the rewards of `group`, whose rollouts read `text`, and return at once.

        Raises ValueError if a group of this position is already there, the number of texts is not that of
        the rollouts, or a column of the problem is not made of what JSON has.
        """
        number = len(group.rollouts)
        check(group.position not in self._tasks, "group", "was submitted before", group.position)
        check(len(text) == number, "text", f"must have {number} completions", len(text))
        task = self._tasks[group.position] = _Task(group, _request(group, text))
        numbers = range(len(self._specs))
        self._waiting.extend(_Call(task, function, next(self._numbers)) for function in numbers)
        self._look(0)

    def ready(self) -> list[tuple[Group, RewardReport]]:
        """Return the groups that are finished, with their rewards, in the order in which they were submitted.

        Raises RewardFailed with on_error = "stop", after `max_failed_groups` groups in a row without a
        reward, and if workers can no longer be started.
        """
        self._look(0)
        done = [task for task in self._tasks.values() if task in self._done]
        self._done.clear()
        for task in done:
            del self._tasks[task.group.position]
        return [self._finished(task) for task in done]

    def wait(self, timeout_s: float) -> list[tuple[Group, RewardReport]]:
        """Return what `ready` returns, after a wait until it is not empty.

        Returns nothing after `timeout_s`, and at once if no group is pending. Raises what `ready` raises.
        """
        until = self._clock() + timeout_s
        while self._tasks and not self._done and (left := until - self._clock()) > 0:
            self._look(min(LOOK_S, left))
        return self.ready()

    def drop(self) -> None:
        """Forget the groups that were not returned. Calls under way end by themselves or at the limit."""
        self._tasks.clear()
        self._waiting.clear()
        self._done.clear()

    def close(self) -> None:
        """End all workers. Groups that are not finished are forgotten."""
        while self._running:
            worker, _ = self._running.popitem()
            worker.kill()
        self.drop()

    def _start(self) -> None:
        self._running[RewardProcess(self._specs, self._columns, self._clock)] = {}

    def _look(self, wait_s: float) -> None:
        """Read answers, end calls that take too long, replace workers that have ended, give out calls."""
        self._give_out()
        outgoing = [worker.lines for worker in self._running if worker.lines.has_outgoing]
        select.select([worker.lines for worker in self._running], outgoing, [], wait_s)
        for worker in tuple(self._running):
            self._attend(worker)
        self._give_out()

    def _attend(self, worker: RewardProcess) -> None:
        try:
            answers = worker.answers()
        except EOFError:
            return self._replace(worker, ended=True)
        except ValueError:  # not JSON: a function has written to the connection
            return self._replace(worker, ended=True)
        for answer in answers:
            self._take(worker, answer)
        now = self._clock()
        if worker.awaits is None:
            if now - worker.started_s > max(START_LIMIT_S, self._first_limit_s):
                self._replace(worker, ended=False)
        elif late := {
            number
            for number, call in self._running[worker].items()
            if now - call.sent_s > call.limit_s + CANCEL_S * worker.awaits[call.function]
        }:
            self._replace(worker, late)

    def _take(self, worker: RewardProcess, answer: dict[str, Any]) -> None:
        if worker.awaits is None:
            if answer["problem"]:
                raise RewardFailed(answer["problem"])
            worker.awaits = answer["awaits"]
            self._failed_starts = 0
            return
        call = self._running[worker].pop(answer["call"], None)
        if call is None:
            return
        if "late" not in answer:
            worker.answered.add(call.function)
        if not self._is_wanted(call):
            return
        call.task.seconds += self._clock() - call.sent_s
        if "values" in answer:
            self._settle(call, tuple(answer["values"]))
        elif "late" in answer:
            self._again(call, f"it took longer than {call.limit_s:g} s")
        else:
            self._fail(call, answer["error"], answer["line"], answer["sample"])

    def _replace(self, worker: RewardProcess, late: Set[int] = frozenset(), *, ended: bool = False) -> None:
        """End a worker, start another one, and make its calls once more, or give them up.

        late: numbers of the calls that have taken too long.
        """
        calls = self._running.pop(worker)
        how = worker.kill(GRACE_S if ended else 0)
        if worker.awaits is None:
            self._failed_starts += 1
            if self._failed_starts >= MAX_STARTS:
                how = how if ended else "takes too long"
                raise RewardFailed(f"reward.functions: a worker that imports them {how}, {MAX_STARTS} times")
        self._start()
        for number, call in reversed(calls.items()):
            if not self._is_wanted(call):
                continue
            call.task.seconds += self._clock() - call.sent_s
            if ended:
                self._again(call, f"its process {how}")
            elif number in late:
                self._again(call, f"it took longer than {call.limit_s:g} s")
            else:  # it has done nothing wrong
                call.tries -= 1
                self._waiting.appendleft(call)

    def _again(self, call: _Call, why: str) -> None:
        """Make a call once more that was ended, or give it up."""
        if call.tries < TRIES:
            self._waiting.appendleft(call)
        else:
            self._fail(call, f"{why}, {TRIES} times")

    def _is_wanted(self, call: _Call) -> bool:
        """Return false for a call whose group was forgotten."""
        return self._tasks.get(call.task.group.position) is call.task

    def _give_out(self) -> None:
        while self._waiting:
            free = [worker for worker in self._running if self._has_room(worker, self._waiting[0])]
            if not free:
                return
            worker = min(free, key=lambda each: len(self._running[each]))
            call = self._waiting.popleft()
            self._running[worker][call.number] = call
            call.tries += 1
            call.sent_s = self._clock()
            call.limit_s = self._limit_s if call.function in worker.answered else self._first_limit_s
            facts = {"function": call.function, "call": call.number, "limit_s": call.limit_s}
            worker.lines.put(call.task.request | facts)

    def _has_room(self, worker: RewardProcess, call: _Call) -> bool:
        """Return whether a worker may make this call now.

        A call runs beside asynchronous ones; one that is made once more runs alone, so that what it does is
        not blamed on another.
        """
        if worker.awaits is None:
            return False
        here = self._running[worker].values()
        beside = all(worker.awaits[each.function] and each.tries == 1 for each in here)
        return not here or (call.tries == 0 and beside and len(here) < AT_ONCE)

    def _fail(self, call: _Call, message: str, line: str = "", sample: int | None = None) -> None:
        task, spec = call.task, self._specs[call.function]
        name = str(task.group.position) if sample is None else f"{task.group.position}/{sample}"
        fault = RewardFault(function=spec.function, sample=name, line=line, message=message)
        task.events.append(fault)
        task.failed.add(call.function)
        if self._stop:
            raise RewardFailed(f'{fault}; reward.on_error = "skip" would leave its group out')
        self._settle(call, (None,) * len(task.group.rollouts))

    def _settle(self, call: _Call, values: tuple[float | None, ...]) -> None:
        call.task.values[call.function] = values
        if len(call.task.values) == len(self._specs):
            self._done.append(call.task)

    def _finished(self, task: _Task) -> tuple[Group, RewardReport]:
        rewards: tuple[float | None, ...] = (None,) * len(task.group.rollouts)
        columns = [task.values[function] for function in range(len(self._specs))]
        if not task.failed:
            weights = [spec.weight for spec in self._specs]
            rewards = tuple(weighted_sum(values, weights) for values in zip(*columns, strict=True))
        self._failed_in_row = 0 if any(reward is not None for reward in rewards) else self._failed_in_row + 1
        if self._most_failed and self._failed_in_row >= self._most_failed:
            last = task.events[-1] if task.events else "all functions returned None for all completions"
            raise RewardFailed(
                f"{self._failed_in_row} groups in a row have got no reward, the limit of"
                f" reward.max_failed_groups; the last one: {last}"
            )
        names = [spec.function for spec in self._specs]
        values = dict(zip(names, columns, strict=True))
        report = RewardReport(values=values, seconds=task.seconds, events=tuple(task.events))
        return replace(task.group, rewards=rewards, values=values), report


def weighted_sum(values: Sequence[float | None], weights: Sequence[float]) -> float | None:
    """Return the sum of weight times value over the functions that returned a number; None if none did."""
    terms = [weight * value for weight, value in zip(weights, values, strict=True) if value is not None]
    return math.fsum(terms) if terms else None


def _request(group: Group, text: Completions) -> dict[str, Any]:
    prompt: Any = group.problem.prompt
    completions: list[Any] = list(text)
    if not isinstance(prompt, str):
        prompt = [dict(message) for message in prompt]
        completions = [[{"role": "assistant", "content": one}] for one in text]
    return {
        "prompt": prompt,
        "completions": completions,
        "completion_ids": [list(rollout.tokens) for rollout in group.rollouts],
        "columns": dict(group.problem.columns),
    }


def _is_open(stream: Any) -> bool:
    try:
        os.fstat(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return False
    return True


class JsonLines:
    """One end of the connection. Nothing else is ever written there: workers print to standard error."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._end = end
        self._outgoing = bytearray()
        self._incoming = bytearray()

    def fileno(self) -> int:
        """Return the file descriptor, for `select`."""
        return self._end.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Return true while something waits to be sent."""
        return bool(self._outgoing)

    def put(self, message: Any) -> None:
        """Send `message` as far as the other side reads it now, and the rest in later calls of `flush`."""
        self._outgoing += encode_line(message)
        self.flush()

    def flush(self) -> None:
        """Send what the other side takes now. A connection that has ended is seen by `take`."""
        while self._outgoing:
            try:
                del self._outgoing[: self._end.send(self._outgoing[:PIECE_BYTES])]
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()

    def take(self) -> list[Any]:
        """Return the messages that have arrived whole.

        Raises EOFError if the other side has ended, and ValueError if it has sent something else than JSON.
        """
        ended = self._fill()
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        if ended and not lines:
            raise EOFError
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Close the connection."""
        self._end.close()

    def _fill(self) -> bool:
        """Read what is there; return true if nothing more will come."""
        while True:
            try:
                piece = self._end.recv(PIECE_BYTES)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not piece:
                return True
            self._incoming += piece
