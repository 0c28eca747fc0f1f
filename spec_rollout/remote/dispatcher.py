"""Keeps each requested sample with a living worker until it is finished.

`place` distributes samples over workers: longest first, each to the one that will finish first.
`RemoteEngine` lets samples migrate between workers.
"""

import json
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aedit.proto.rpc import rollouts_pb2 as pb
from aedit.spec_rollout.audit import spans_of
from aedit.spec_rollout.engine import EngineSpeed
from aedit.spec_rollout.remote.moving import HISTORY_ROLLOUTS
from aedit.spec_rollout.remote.reallocate import EngineLoad, LengthDistribution, UnfinishedSample
from aedit.spec_rollout.remote.workers import WorkerConfig, WorkerHandle, WorkerPool
from aedit.spec_rollout.sampling import Prompt, Rollout, SampleKey


@dataclass(slots=True)
class RequestedSample:
    """A requested sample."""

    rollout: Rollout
    sampling: bytes
    """Its settings as text."""
    worker: int | None = None
    """Index of the worker that has it; None: it waits for one."""
    unreported: int = 0
    """Tokens that its worker has drawn and not reported yet, as far as is known."""
    passes_before: int = 0
    """Passes before it was given to its worker."""
    deaths: int = 0
    """Workers that have died, or failed, with it since its last token."""
    left: set[int] = field(default_factory=set)
    """Indices of servers that did not advance it in time: it is not given to them again."""


class Samples:
    """Unfinished samples by key, in the order of their requests."""

    def __init__(self) -> None:
        self._samples: dict[SampleKey, RequestedSample] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._samples

    def __getitem__(self, key: SampleKey) -> RequestedSample:
        return self._samples[key]

    def add(self, prompts: Iterable[tuple[Prompt, bytes]]) -> None:
        """Add samples without a worker, with their settings as text."""
        for prompt, sampling in prompts:
            self._samples[prompt.key] = RequestedSample(prompt.to_rollout(), sampling)

    def clear(self) -> None:
        """Forget all samples."""
        self._samples.clear()

    def waiting(self) -> list[SampleKey]:
        """Return the keys of samples that no worker has."""
        return [key for key, sample in self._samples.items() if sample.worker is None]

    def prompt(self, key: SampleKey) -> Prompt:
        """Return a prompt that continues the sample after its tokens so far. It shares nothing with it."""
        rollout = self._samples[key].rollout
        if not rollout.tokens:
            return rollout.prompt
        return replace(rollout.prompt, partial=rollout.to_prompt().to_rollout())

    def prompts(self) -> list[Prompt]:
        """Return prompts that continue all samples."""
        return [self.prompt(key) for key in self._samples]

    def lengths(self) -> list[int]:
        """Return the lengths of the samples that have tokens."""
        found = (len(each.rollout.tokens) + each.unreported for each in self._samples.values())
        return [length for length in found if length]

    def unfinished(self, key: SampleKey) -> UnfinishedSample:
        """Return the sample as the plan of migrations sees it."""
        sample = self._samples[key]
        return UnfinishedSample.of(sample.rollout, sample.unreported)

    def request(self, key: SampleKey, version: int) -> pb.Add:
        """Return the request that continues the sample with this policy version or a newer one."""
        sample = self._samples[key]
        prompt, text = sample.rollout.prompt, sample.rollout
        return pb.Add(
            rollout=prompt.rollout,
            sample=prompt.sample,
            group=prompt.group,
            prompt=prompt.tokens,
            sampling=sample.sampling,
            min_version=version,
            tokens=text.tokens,
            logprobs=text.logprobs,
            spans=[pb.Span(version=v, start=start, end=end) for v, start, end in spans_of(text.versions)],
        )

    def of(self, worker: int, key: SampleKey) -> RequestedSample | None:
        """Return a sample if it is the worker's; otherwise another one continues it."""
        sample = self._samples.get(key)
        return sample if sample is not None and sample.worker == worker else None

    def extend(self, worker: int, found: pb.Tokens, server: str = "") -> None:
        """Append the tokens that `worker` reports. server: name of a worker that is one."""
        sample = self.of(worker, (found.rollout, found.sample))
        if sample is None:
            return
        text, versions = sample.rollout, list(found.versions)
        text.note_server(server)
        text.tokens.extend(found.tokens)
        text.logprobs.extend(found.logprobs)
        text.versions += versions * (len(found.tokens) if len(versions) == 1 else 1)
        if found.top_logprobs:
            top = json.loads(found.top_logprobs)
            text.top_logprobs += [tuple((token, value) for token, value in place) for place in top]
        if found.passes:
            text.passes = sample.passes_before + found.passes
        sample.deaths = sample.unreported = 0

    def end(self, worker: int, found: pb.Ended) -> Rollout | None:
        """Return a sample that `worker` has finished."""
        key = found.rollout, found.sample
        sample = self.of(worker, key)
        if sample is None:
            return None
        del self._samples[key]
        sample.rollout.finish_reason = found.finish_reason  # type: ignore[assignment]
        sample.rollout.passes = sample.passes_before + found.passes
        return sample.rollout

    def note_progress(self, worker: int, progress: Iterable[tuple[int, int, int]]) -> None:
        """Note (rollout, sample, tokens) that `worker` has drawn and will report later."""
        for rollout, number, tokens in progress:
            if (sample := self.of(worker, (rollout, number))) is not None:
                sample.unreported = tokens

    def release(self, key: SampleKey) -> None:
        """Note that no worker has the sample."""
        self._samples[key].worker, self._samples[key].unreported = None, 0

    def take_back(self, keys: Sequence[SampleKey], reason: str, limit: int | None) -> None:
        """Take samples back from a worker that has died, or failed with them.

        Args:
            keys: Samples of the worker.
            reason: Of its death.
            limit: Workers that may die or fail with a sample, without a token in between. None: this one
                had not begun with them.

        Raises:
            RuntimeError: More than `limit` have.
        """
        for key in keys:
            self.release(key)
            self._samples[key].deaths += limit is not None
        worst = max((self._samples[key] for key in keys), key=lambda each: each.deaths, default=None)
        if worst is not None and limit is not None and worst.deaths > limit:
            raise RuntimeError(
                f"sample {worst.rollout.prompt.name}: {worst.deaths} rollout workers have ended or failed"
                f" with it without a further token; the last one: {reason}"
            )


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
    parts = [part for group in _groups(samples) for part in _parts(group, _largest(len(samples), rate))]

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


def _largest(count: int, rate: Mapping[int, float]) -> int:
    """Return the most samples of one part: the share of the slowest worker, which must not be tiny."""
    equal = count / len(rate)
    return math.ceil(max(SMALLEST_PART * equal, count * min(rate.values()) / sum(rate.values()) - 1e-6))


def _groups(samples: Sequence[UnfinishedSample]) -> list[list[UnfinishedSample]]:
    groups: dict[tuple[int, ...], list[UnfinishedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.group,) if sample.group >= 0 else sample.key, []).append(sample)
    return list(groups.values())


def _parts(group: list[UnfinishedSample], largest: int) -> list[list[UnfinishedSample]]:
    """Return a group in equal parts of at most `largest` samples."""
    count = math.ceil(len(group) / largest)
    return [group[i::count] for i in range(count)]


Report = Callable[[str, Mapping[str, Any]], None]
"""Takes an event and its fields."""


class Dispatcher:
    """Gives samples to workers, reads their reports, and takes samples back from dead workers."""

    def __init__(self, pool: WorkerPool, samples: Samples, config: WorkerConfig, report: Report) -> None:
        self.pool, self.samples = pool, samples
        self.finished: list[Rollout] = []
        self.version = 0
        """Policy version that samples need at least."""
        self.moving: dict[SampleKey, int] = {}
        """Workers that are to continue samples, which other workers were asked to return. Until these answer,
        or have ended, the samples are theirs."""
        self.num_finished = self.num_retried = self.num_moved = 0
        self._config, self._report = config, report
        self._stopped, self._cut = deque[int](maxlen=HISTORY_ROLLOUTS), deque[int](maxlen=HISTORY_ROLLOUTS)
        self._past: list[Mapping[str, Any]] = []

    def look(self) -> None:
        """Handle what the workers have sent, dead workers, restarts, and samples that wait.

        Raises:
            RuntimeError: The workers die again and again, or one sample ends each worker that has it.
        """
        self.pool.add_servers()
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
        for key in self.samples.waiting():
            waiting[frozenset(self.samples[key].left)].append(self.samples.unfinished(key))
        if not waiting:
            return
        lengths = LengthDistribution.of(self._stopped, [*self._cut, *self.samples.lengths()])
        for left, samples in waiting.items():
            workers = {index: each for index, each in self.pool.workers.items() if index not in left}
            loads = {index: self._load(worker, lengths) for index, worker in workers.items()}
            for index, sample in place(samples, loads, lengths):
                if workers[index].has(self.version):
                    self.give(index, sample.key)

    def _load(self, worker: WorkerHandle, lengths: LengthDistribution) -> WorkerLoad:
        samples = map(self.samples.unfinished, worker.samples)
        return WorkerLoad(
            tokens=sum(sample.expected_remaining(lengths) for sample in samples),
            rows=worker.rows,
            speed=worker.speed,
            delay_s=0.0 if worker.has(self.version) else worker.ready_in_s,
            room=None if worker.room is None else worker.room - len(worker.samples),
        )

    def give(self, index: int, key: SampleKey) -> None:
        """Give a sample to a worker."""
        worker, sample = self.pool.workers[index], self.samples[key]
        worker.lane.send(pb.ToServer(add=self.samples.request(key, self.version)))
        worker.samples[key] = None
        sample.worker, sample.passes_before = index, sample.rollout.passes

    def cancel(self) -> None:
        """Forget all samples, also those that have finished and were not taken, and tell the workers."""
        for worker in self.pool.workers.values():
            worker.cancel()
        self.samples.clear()
        self.finished.clear()
        self.moving.clear()

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
        kind = message.WhichOneof("message")
        if kind == "figures":
            self.samples.note_progress(worker.index, worker.read_figures(message.figures))
            return
        if kind == "opened":
            worker.is_ready = True
            return
        found: Any = getattr(message, str(kind))
        key = found.rollout, found.sample
        if key in worker.cancelled:
            # Older than the cancellation, which `removed` confirms.
            worker.cancelled -= Counter([key] if kind == "removed" else [])
        elif kind == "tokens":
            self.samples.extend(worker.index, found, "" if worker.is_local else worker.name)
        elif kind == "ended":
            if (rollout := self.samples.end(worker.index, found)) is not None:
                del worker.samples[key]
                worker.finished += 1
                self._record(rollout)
        elif kind == "removed" and found.found:
            self._returned(worker, key)
        elif kind == "rejected" and worker.is_local:
            if worker.samples.pop(key, key) is None:
                self._take_back(worker, [key], f"{worker.name}: {found.reason}")
        elif kind == "rejected":
            self._returned(worker, key, is_final=found.final)

    def _returned(self, worker: WorkerHandle, key: SampleKey, *, is_final: bool = False) -> None:
        """Note that a worker has returned a sample, and give it to the one for which it was asked back.

        is_final: the worker did not advance it in time, and does not get it again.
        """
        if worker.samples.pop(key, key) is not None:
            return
        self.samples.release(key)
        if is_final:
            self.samples[key].left.add(worker.index)
        target = self.moving.pop(key, None)
        other = None if target is None else self.pool.workers.get(target)
        if other is not None and other.has(self.version) and other.index not in self.samples[key].left:
            self.give(other.index, key)
            self.num_moved += 1

    def _record(self, rollout: Rollout) -> None:
        self.moving.pop(rollout.prompt.key, None)
        self.finished.append(rollout)
        self.num_finished += 1
        (self._stopped if rollout.finish_reason == "stop" else self._cut).append(len(rollout.tokens))

    def _take_back(self, worker: WorkerHandle, keys: Sequence[SampleKey], reason: str) -> None:
        """Take samples back from a worker that has died or failed with them, so that others continue them."""
        for key in keys:
            self.moving.pop(key, None)
        self.num_retried += len(keys)
        where = {"worker": worker.index, "pid": worker.pid} if worker.is_local else {"server": worker.name}
        if worker.is_local or keys:
            self._report("rollout_retried", {**where, "samples": len(keys), "reason": reason})
        limit = self._config.restarts.limit if worker.is_ready and worker.is_local else None
        self.samples.take_back(keys, reason, limit)


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
        samples = map(self._dispatcher.samples.unfinished, keys)
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
        return dispatcher.samples.prompt(key)

    def add(self, prompt: Prompt) -> None:
        """Let this worker continue a sample that another one was asked for.

        Raises:
            ValueError: The worker is a server that did not advance the sample in time.
        """
        if self._index in self._dispatcher.samples[prompt.key].left:
            raise ValueError(f"sample {prompt.name}: this server did not advance it in time")
        self._dispatcher.moving[prompt.key] = self._index
