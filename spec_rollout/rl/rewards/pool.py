"""Worker processes that compute the rewards of groups while other groups are still generated."""

import math
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

from aedit.spec_rollout.rl.groups import Group
from aedit.spec_rollout.rl.rewards.reward import RewardFailed, RewardFault, RewardReport, RewardSpec
from aedit.spec_rollout.rl.rewards.worker_process import WorkerProcess
from aedit.types import check

START_LIMIT_S = 120.0
"""Longest time in which a worker imports the functions."""
MAX_STARTS = 3
"""A worker that ends so often before it has imported the functions is not started again."""
TRIES = 2
"""A call that was ended is made once more."""
GRACE_S = 1.0
"""Time for a worker whose connection has ended to end by itself, so that its exit code can be told."""
LOOK_S = 0.05
"""Interval in which a wait looks for workers that have ended."""

Completions = Sequence[str]
"""Texts of a group's rollouts, in their order."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A group whose rewards are being computed."""

    position: int


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
    tries: int = 0


class RewardPool:
    """Processes that compute rewards. Used by one thread, which must last as long as the pool.

    A call that ends its process or exceeds the time limit is made once more in a new one; then, and after an
    exception or a wrong return value, the group's rewards are None and its report says why. Nothing that a
    function does ends the caller or blocks it, unless `on_error` is "stop".

    Args:
        specs: Functions with weights. A completion's reward is the weighted sum of those that do not return
            None for it, and None if all do.
        workers: Number of processes.
        time_limit_s: Limit of one function's call for one group.
        on_error: "stop" raises RewardFailed from `submit`, `ready` and `wait` instead of reporting.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        specs: Sequence[RewardSpec],
        *,
        workers: int = 1,
        time_limit_s: float = 10.0,
        on_error: Literal["skip", "stop"] = "skip",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check(len(specs) > 0, "specs", "must name at least one reward function", specs)
        names = [spec.function for spec in specs]
        check(len(set(names)) == len(names), "reward.functions", "must name each function once", names)
        check(workers >= 1, "workers", "must be at least 1", workers)
        check(time_limit_s > 0, "time_limit_s", "must be above 0", time_limit_s)
        self._specs, self._limit_s, self._clock = tuple(specs), time_limit_s, clock
        self._stop = on_error == "stop"
        self._waiting: deque[_Call] = deque()
        self._tasks: dict[int, _Task] = {}
        self._done: list[_Task] = []
        self._failed_starts = 0
        self._running: dict[WorkerProcess, _Call | None] = {}
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

    def check(self, timeout_s: float = START_LIMIT_S) -> None:
        """Wait until a worker has imported all functions.

        Raises ValueError if they cannot be imported, and TimeoutError if that takes longer.
        """
        until = self._clock() + timeout_s
        while not any(worker.is_ready for worker in self._running):
            if self._clock() > until:
                raise TimeoutError(f"the reward functions were not imported within {timeout_s:g} s")
            self._look(min(LOOK_S, timeout_s))

    def submit(self, group: Group, text: Completions) -> Ticket:
        """Start to compute the rewards of `group`, whose rollouts read `text`, and return at once.

        Raises ValueError if a group of this position is already there, the number of texts is not that of
        the rollouts, or a column of the problem is not made of what JSON has.
        """
        number = len(group.rollouts)
        check(group.position not in self._tasks, "group", "was submitted before", group.position)
        check(len(text) == number, "text", f"must have {number} completions", len(text))
        task = self._tasks[group.position] = _Task(group, _request(group, text))
        self._waiting.extend(_Call(task, function) for function in range(len(self._specs)))
        self._look(0)
        return Ticket(group.position)

    def ready(self) -> list[tuple[Group, RewardReport]]:
        """Return the groups that are finished, with their rewards, in the order in which they were submitted.

        Raises RewardFailed with on_error = "stop", and ValueError if the functions cannot be imported.
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
        self._running[WorkerProcess(self._specs, self._clock)] = None

    def _look(self, wait_s: float) -> None:
        """Read answers, end calls that take too long, replace workers that have ended, give out calls."""
        self._give_out()
        outgoing = [worker.lines for worker in self._running if worker.lines.has_outgoing]
        select.select([worker.lines for worker in self._running], outgoing, [], wait_s)
        for worker in tuple(self._running):
            self._attend(worker)
        self._give_out()

    def _attend(self, worker: WorkerProcess) -> None:
        try:
            answers = worker.answers()
        except EOFError:
            return self._replace(worker, ended=True)
        except ValueError:  # not JSON: a function has written to the connection
            return self._replace(worker, ended=True)
        for answer in answers:
            self._take(worker, answer)
        limit_s = self._limit_s if worker.is_ready else START_LIMIT_S
        if (self._running[worker] or not worker.is_ready) and worker.busy_s() > limit_s:
            self._replace(worker, ended=False)

    def _take(self, worker: WorkerProcess, answer: dict[str, Any]) -> None:
        if not worker.is_ready:
            if answer["problem"]:
                raise ValueError(answer["problem"])
            worker.is_ready = True
            self._failed_starts = 0
            return
        call, self._running[worker] = self._running[worker], None
        if call is not None and self._is_wanted(call):
            call.task.seconds += answer["seconds"]
            if "values" in answer:
                self._settle(call, tuple(answer["values"]))
            else:
                self._fail(call, answer["error"], answer["line"], answer["sample"])

    def _replace(self, worker: WorkerProcess, *, ended: bool) -> None:
        """End a worker, start another one, and make its call once more, or give it up."""
        call, was_ready = self._running.pop(worker), worker.is_ready
        busy_s, how = worker.busy_s(), worker.kill(GRACE_S if ended else 0)
        if not was_ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_STARTS:
                raise ValueError(f"reward.functions: a worker that imports them {how}, {MAX_STARTS} times")
        self._start()
        if call is None or not self._is_wanted(call):
            return
        call.task.seconds += busy_s
        if call.tries < TRIES:
            self._waiting.appendleft(call)
        elif ended:
            self._fail(call, f"its process {how}, {TRIES} times")
        else:
            self._fail(call, f"it took longer than {self._limit_s:g} s, {TRIES} times")

    def _is_wanted(self, call: _Call) -> bool:
        """Return false for a call whose group was forgotten."""
        return self._tasks.get(call.task.group.position) is call.task

    def _give_out(self) -> None:
        for worker, call in self._running.items():
            if call is None and worker.is_ready and self._waiting:
                call = self._running[worker] = self._waiting.popleft()
                call.tries += 1
                worker.send(call.task.request | {"function": call.function})

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
        names = [spec.function for spec in self._specs]
        report = RewardReport(
            values=dict(zip(names, columns, strict=True)), seconds=task.seconds, events=tuple(task.events)
        )
        return replace(task.group, rewards=rewards), report


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
