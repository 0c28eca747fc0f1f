"""Keeps each requested sample with a living worker until it is finished.

`place` distributes samples over workers: longest first, each to the one that will finish first.
`RemoteEngine` lets samples migrate between workers.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aedit import traces
from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import spans_of
from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.moving import MigratableEngine, Reallocator
from aedit.spec_rollout.remote.reallocate import EngineLoad, LengthDistribution, UnfinishedSample
from aedit.spec_rollout.remote.workers import WorkerConfig, WorkerHandle, WorkerPool
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey


@dataclass(slots=True)
class RequestedSample:
    """A requested sample."""

    rollout: Rollout
    sampling: bytes
    """Its settings as text."""
    is_given: bool = False
    """A worker has it; otherwise it waits for one."""
    unreported: int = 0
    """Tokens that its worker has drawn and not reported yet, as far as is known."""
    passes_before: int = 0
    """Passes before it was given to its worker."""
    deaths: int = 0
    """Workers that have died, or failed, with it since its last token."""
    left: set[int] = field(default_factory=set)
    """Indices of servers that did not advance it in time: it is not given to them again."""
    span: traces.TraceSpan = traces.OFF
    given: int = field(init=False)
    """Tokens that it came with."""

    def __post_init__(self) -> None:
        self.given = len(self.rollout.tokens)

    def prompt(self) -> Prompt:
        """Return a prompt that continues the sample after its tokens so far. It shares nothing with it."""
        rollout = self.rollout
        if not rollout.tokens:
            return rollout.prompt
        return replace(rollout.prompt, partial=rollout.to_prompt().to_rollout())

    def unfinished(self) -> UnfinishedSample:
        """Return the sample as the plan of migrations sees it."""
        return UnfinishedSample.of(self.rollout, self.unreported)

    def request(self, version: int) -> pb.Add:
        """Return the request that continues the sample with this policy version or a newer one."""
        prompt, text = self.rollout.prompt, self.rollout
        return pb.Add(
            rollout=prompt.rollout,
            sample=prompt.sample,
            group=prompt.group,
            prompt=prompt.tokens,
            sampling=self.sampling,
            min_version=version,
            tokens=text.tokens,
            logprobs=text.logprobs,
            spans=[pb.Span(version=v, start=start, end=end) for v, start, end in spans_of(text.versions)],
            traceparent=str(self.span.context or ""),
        )

    def extend(self, found: pb.Tokens, server: str) -> None:
        """Append the tokens that its worker reports. server: name of a worker that is one, else empty."""
        text, versions = self.rollout, list(found.versions)
        text.note_server(server)
        text.tokens.extend(found.tokens)
        text.logprobs.extend(found.logprobs)
        text.versions += versions * (len(found.tokens) if len(versions) == 1 else 1)
        if found.top_logprobs:
            top = json.loads(found.top_logprobs)
            text.top_logprobs += [tuple((token, value) for token, value in place) for place in top]
        if found.passes:
            text.passes = self.passes_before + found.passes
        self.deaths = self.unreported = 0

    def reopen(self) -> None:
        """Remove the last token if the sample may have ended with it: its worker could not say so any more.

        It is drawn again, with the same key. Else the next worker would go on after the end.
        """
        text, sampling = self.rollout, self.rollout.prompt.sampling
        if len(text.tokens) <= self.given:
            return
        is_last = text.tokens[-1] in sampling.stop_tokens or len(text.tokens) >= sampling.max_new_tokens
        if not (is_last or sampling.stop_strings):
            return
        for values in (text.tokens, text.logprobs, text.versions):
            values.pop()
        del text.top_logprobs[len(text.tokens) :]
        while text.servers and text.servers[-1][0] >= len(text.tokens):
            text.servers.pop()

    def release(self) -> None:
        """Note that no worker has the sample."""
        self.is_given, self.unreported = False, 0


SMALLEST_PART = 0.25
"""Share of an equal part below which a group is not divided further for a slow worker."""


GUESS = EngineSpeed(fixed_s=0.01, row_s=0.001, prefill_s=0.001)
"""Speed of all workers before the first measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """Work and speed of one worker."""

    tokens: float
    """Expected tokens that it has yet to draw."""
    rows: int
    """Samples that it decodes at a time."""
    speed: EngineSpeed | None
    """None: not measured yet; that of the others counts."""
    delay_s: float = 0.0
    """Seconds until it can begin."""
    room: int | None = None
    """Further samples that it takes; None: any number."""

    def token_s(self, speed: EngineSpeed) -> float:
        """Return the seconds per token of a sample with all rows in use.

        speed: Of a worker that has not been measured.
        """
        return max(1e-9, (self.speed or speed).token_s(self.rows))

    def finish_s(self, tokens: float, longest: float, speed: EngineSpeed) -> float:
        """Return when it has drawn so many tokens, of which one sample has `longest`, one after another.

        A step costs its fixed part once and the part of each row for each token: fewer tokens in as many
        steps end sooner.
        """
        speed = self.speed or speed
        steps = max(tokens / self.rows, longest)
        return self.delay_s + max(1e-9, steps * speed.fixed_s + tokens * speed.row_s)


def place(
    samples: Sequence[UnfinishedSample], workers: Mapping[int, WorkerLoad], lengths: LengthDistribution
) -> list[tuple[int, UnfinishedSample]]:
    """Return the worker of each sample, in the order in which workers should get them.

    Samples of one group stay together as far as no worker gets more than its share of all: their prompt is
    computed once, and each draws drafts from the others' text. The longest expected part goes first, to the
    worker that will finish it first (Graham 1969, longest processing time first). A slow one that is free may
    take longer for a single sample than the others for all of theirs. Samples for which no worker has room
    are left out.

    Args:
        samples: Samples to place.
        workers: Load of each worker.
        lengths: Distribution of lengths.
    """
    room = {i: math.inf if each.room is None else each.room for i, each in workers.items()}
    workers = {i: each for i, each in workers.items() if room[i] > 0}
    if not workers:
        return []
    known = next((each.speed for each in workers.values() if each.speed is not None), GUESS)
    rate = {i: each.rows / each.token_s(known) for i, each in workers.items()}
    work = {i: each.tokens for i, each in workers.items()}
    # A part has at most the share of the slowest worker, which must not be tiny.
    count, slowest = len(samples), min(rate.values()) / sum(rate.values())
    largest = math.ceil(max(SMALLEST_PART * count / len(rate), count * slowest - 1e-6))
    groups: dict[tuple[int, ...], list[UnfinishedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.group,) if sample.group >= 0 else sample.key, []).append(sample)
    parts = []
    for group in groups.values():
        num_parts = math.ceil(len(group) / largest)
        parts += [group[i::num_parts] for i in range(num_parts)]

    def expected(part: Sequence[UnfinishedSample]) -> float:
        return sum(sample.expected_remaining(lengths) for sample in part)

    placed = []
    for part in sorted(parts, key=expected, reverse=True):
        more, longest = expected(part), max(sample.expected_remaining(lengths) for sample in part)
        free = [i for i in work if room[i] >= len(part)] or [i for i in work if room[i] > 0]
        if not free:
            break
        # Where rows cost no time, all would end equally soon: then the one with less work.
        chosen = min(free, key=lambda i: (workers[i].finish_s(work[i] + more, longest, known), work[i]))
        work[chosen] += more
        longest_first = sorted(part, key=lambda sample: -sample.expected_remaining(lengths))
        taken = longest_first[: int(min(room[chosen], len(part)))]
        room[chosen] -= len(taken)
        placed += [(chosen, sample) for sample in taken]
    return placed


Report = Callable[[str, Mapping[str, Any]], None]
"""Takes an event and its fields."""


class SampleFailedError(RuntimeError):
    """One sample ends each worker that has it."""

    def __init__(self, message: str, rollout: Rollout) -> None:
        super().__init__(message)
        self.rollout = rollout
        """That sample."""


class Dispatcher:
    """Gives samples to workers, reads their reports, moves samples, and takes them back from dead workers."""

    def __init__(self, pool: WorkerPool, config: WorkerConfig, report: Report) -> None:
        self.pool = pool
        self.samples: dict[SampleKey, RequestedSample] = {}
        """Unfinished samples, in the order of their requests."""
        self.finished: list[Rollout] = []
        self.version = 0
        """Policy version that samples need at least."""
        self.moving: dict[SampleKey, int] = {}
        """Workers that are to continue samples, which other workers were asked to return. Until these answer,
        or have ended, the samples are theirs."""
        self.num_finished = self.num_retried = self.num_moved = 0
        self._config, self._report = config, report
        self._engines: dict[int, MigratableEngine] = {}
        self._reallocator = Reallocator(self._engines)
        self._past: list[Mapping[str, Any]] = []

    def look(self) -> None:
        """Handle what the workers have sent, dead workers, restarts, and samples that wait.

        Raises:
            RuntimeError: The workers die again and again, or one sample ends each worker that has it.
        """
        if self.pool.link is not None:
            self.pool.link.look(self.pool.workers)
        # Deaths first: what a worker sent before it died is then read before its samples are taken back.
        dead = self.pool.find_dead()
        for worker in list(self.pool.workers.values()):
            for message in worker.receive():
                self._handle(worker, message)
        for worker, reason in self.pool.bury(dead):
            self._past.append(worker.figures)
            keys, worker.samples = list(worker.samples), {}
            self._take_back(worker, keys, reason)
        self.pool.start_due()
        if self.pool.given_up:
            limit = self._config.restarts.limit
            raise RuntimeError(
                f"all rollout workers have ended more than {limit} times in a row without a finished sample; "
                f"the last one: {self.pool.last_error}"
            )
        self.place_waiting()

    def place_waiting(self) -> None:
        """Give the samples that no worker has to workers, if there are any.

        Those of a worker that is expected to have the newest policy soon wait here until it has.
        """
        waiting = defaultdict(list)
        for sample in self.samples.values():
            if not sample.is_given:
                waiting[frozenset(sample.left)].append(sample.unfinished())
        if not waiting:
            return
        growing = (len(each.rollout.tokens) + each.unreported for each in self.samples.values())
        lengths = self._reallocator.lengths(growing)
        for left, samples in waiting.items():
            workers = {index: each for index, each in self.pool.workers.items() if index not in left}
            loads = {index: self._load(worker, lengths) for index, worker in workers.items()}
            for index, placed in place(samples, loads, lengths):
                if workers[index].has(self.version):
                    self.give(workers[index], placed.key)

    def rebalance(self) -> None:
        """Move samples between workers, also those that were connected to since the last time."""
        for index in self.pool.workers:
            if index not in self._engines:
                self._engines[index] = RemoteEngine(self, index)
        self._reallocator.rebalance()

    def _load(self, worker: WorkerHandle, lengths: LengthDistribution) -> WorkerLoad:
        samples = (self.samples[key].unfinished() for key in worker.samples)
        return WorkerLoad(
            tokens=sum(sample.expected_remaining(lengths) for sample in samples),
            rows=worker.rows,
            speed=worker.speed,
            delay_s=0.0 if worker.has(self.version) else worker.ready_in_s,
            room=None if worker.room is None else worker.room - len(worker.samples),
        )

    def give(self, worker: WorkerHandle, key: SampleKey) -> None:
        """Give a sample to a worker."""
        sample = self.samples[key]
        worker.lane.send(pb.ToServer(add=sample.request(self.version)))
        worker.samples[key] = None
        sample.is_given, sample.passes_before = True, sample.rollout.passes

    def cancel(self, keys: Collection[SampleKey] | None = None) -> None:
        """Forget samples, also those that have finished and were not taken, and tell the workers.

        keys: None: all.
        """
        ended = [rollout.prompt.key for rollout in self.finished]
        chosen = {*self.samples, *ended} if keys is None else {*keys}
        for worker in self.pool.workers.values():
            worker.cancel(chosen)
        for key in chosen:
            self.samples.pop(key, None)
            self.moving.pop(key, None)
        self.finished = [rollout for rollout in self.finished if rollout.prompt.key not in chosen]

    def figures(self) -> dict[str, Any]:
        """Return the sums of the figures of all workers so far, by name."""
        sums: dict[str, Any] = {}
        arms = Counter[str]()
        for each in [*self._past, *(worker.figures for worker in self.pool.workers.values())]:
            arms.update(each.get("arms", {}))
            for name in each.keys() - {"arms"}:
                sums[name] = sums.get(name, 0) + each[name]
        return {**sums, "arms": dict(arms)}

    def _handle(self, worker: WorkerHandle, message: pb.ToTrainer) -> None:
        """Handle a message; what it says about a sample that another worker continues is ignored."""
        kind = message.WhichOneof("message")
        if kind == "figures":
            for rollout, number, tokens in worker.read_figures(message.figures):
                if (rollout, number) in worker.samples:
                    self.samples[rollout, number].unreported = tokens
            return
        if kind == "opened":
            worker.is_ready = True
            return
        found: Any = getattr(message, str(kind))
        key = found.rollout, found.sample
        if key in worker.cancelled:
            # Older than the cancellation, which `removed` confirms.
            worker.cancelled -= Counter([key] if kind == "removed" else [])
        elif key not in worker.samples:
            return
        elif kind == "tokens":
            self.samples[key].extend(found, "" if worker.is_local else worker.name)
        elif kind == "ended":
            self._end(worker, key, found)
        elif kind == "rejected" and worker.is_local:
            del worker.samples[key]
            self._take_back(worker, [key], f"{worker.name}: {found.reason}")
        elif kind == "rejected" or found.found:
            self._returned(worker, key, is_final=kind == "rejected" and found.final)

    def _end(self, worker: WorkerHandle, key: SampleKey, found: pb.Ended) -> None:
        """Take a sample that a worker has finished."""
        del worker.samples[key]
        self.moving.pop(key, None)
        sample = self.samples.pop(key)
        sample.rollout.finish_reason = found.finish_reason  # type: ignore[assignment]
        sample.rollout.passes = sample.passes_before + found.passes
        sample.span.end(worker=worker.name, tokens=len(sample.rollout.tokens), finish=found.finish_reason)
        self.finished.append(sample.rollout)
        self._reallocator.record_finished(sample.rollout)
        self.num_finished += 1
        worker.finished += 1

    def _returned(self, worker: WorkerHandle, key: SampleKey, *, is_final: bool) -> None:
        """Note that a worker has returned a sample, and give it to the one for which it was asked back.

        is_final: the worker did not advance it in time, and does not get it again.
        """
        del worker.samples[key]
        sample = self.samples[key]
        sample.release()
        if is_final:
            sample.left.add(worker.index)
        target = self.moving.pop(key, None)
        other = None if target is None else self.pool.workers.get(target)
        if other is not None and other.has(self.version) and other.index not in sample.left:
            self.give(other, key)
            self.num_moved += 1

    def _take_back(self, worker: WorkerHandle, keys: Sequence[SampleKey], reason: str) -> None:
        """Take samples back from a worker that has died or failed with them, so that others continue them.

        Raises:
            RuntimeError: More workers than `WorkerConfig.restarts` allows have done so with one of them,
                without a token in between. Those that had not begun, and servers, do not count.
        """
        counts = worker.is_ready and worker.is_local
        for key in keys:
            self.moving.pop(key, None)
            self.samples[key].release()
            self.samples[key].reopen()
            self.samples[key].deaths += counts
        self.num_retried += len(keys)
        where = {"worker": worker.index, "pid": worker.pid} if worker.is_local else {"server": worker.name}
        if worker.is_local or keys:
            self._report("rollout_retried", {**where, "samples": len(keys), "reason": reason})
        worst = max((self.samples[key] for key in keys), key=lambda each: each.deaths, default=None)
        if worst is not None and counts and worst.deaths > self._config.restarts.limit:
            raise SampleFailedError(
                f"sample {worst.rollout.prompt.name}: {worst.deaths} rollout workers have ended or failed"
                f" with it without a further token; the last one: {reason}",
                worst.rollout,
            )


class RemoteEngine:
    """`MigratableEngine` for the worker of one index, whichever process that is.

    Nothing waits for a worker: `remove` asks for the sample, `add` notes where it goes, and the dispatcher
    passes it on when the worker has returned it. If it finishes or the worker ends before, nothing moves.
    """

    def __init__(self, dispatcher: Dispatcher, index: int) -> None:
        self._dispatcher, self._index = dispatcher, index

    def load(self) -> EngineLoad | None:
        """Return the samples of the worker; those that move to it count here, those that leave it do not.

        None while it does not run, takes no samples or has not the newest policy, or no worker's speed is
        known.
        """
        workers, moving = self._dispatcher.pool.workers, self._dispatcher.moving
        worker = workers.get(self._index)
        # One that has just been started has no work from which to measure its speed.
        known = [each.speed for each in (worker, *workers.values()) if each is not None and each.speed]
        if worker is None or not worker.is_ready or not known or not worker.has(self._dispatcher.version):
            return None
        keys = [key for key in worker.samples if key not in moving]
        keys += [key for key, target in moving.items() if target == self._index]
        samples = (self._dispatcher.samples[key].unfinished() for key in keys)
        running_first = sorted(samples, key=lambda sample: not sample.emitted)
        rows = worker.rows if worker.room is None else min(worker.rows, worker.room)
        return EngineLoad(tuple(running_first), rows, known[0]) if rows else None

    def remove(self, key: SampleKey) -> Prompt | None:
        """Ask the worker for a sample, which it returns between two of its steps.

        None if it has finished, or is on its way already.
        """
        dispatcher = self._dispatcher
        worker = dispatcher.pool.workers.get(self._index)
        if worker is None or key not in worker.samples or key in dispatcher.moving:
            return None
        worker.remove(key)
        dispatcher.moving[key] = self._index  # it returns, unless `add` is called for another worker
        return dispatcher.samples[key].prompt()

    def add(self, prompt: Prompt) -> None:
        """Let this worker continue a sample that another one was asked for.

        Raises:
            ValueError: The worker is a server that did not advance the sample in time.
        """
        if self._index in self._dispatcher.samples[prompt.key].left:
            raise ValueError(f"sample {prompt.name}: this server did not advance it in time")
        self._dispatcher.moving[prompt.key] = self._index
