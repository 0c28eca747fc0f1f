"""Keeps each requested sample with a living worker until it is finished."""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

from aedit.spec_rollout.migration import HISTORY_ROLLOUTS, LengthDistribution, SampleKey, encode_prompt
from aedit.spec_rollout.sampling import Rollout
from aedit.spec_rollout.workers.channel import Message
from aedit.spec_rollout.workers.config import WorkerConfig
from aedit.spec_rollout.workers.handle import WorkerHandle
from aedit.spec_rollout.workers.placement import WorkerLoad, place
from aedit.spec_rollout.workers.pool import WorkerPool
from aedit.spec_rollout.workers.samples import Samples, total

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
        self.pool.look_for_remote()
        # Deaths first: what a worker sent before it died is then read before its samples are taken back.
        dead = self.pool.find_dead()
        for worker in list(self.pool.workers.values()):
            for message in worker.receive():
                self._handle(worker, message)
        for worker, reason in self.pool.bury(dead):
            self._take_back(worker, reason)
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
            delay_s=worker.delay_s(self.version),
            room=None if worker.room is None else worker.room - len(worker.samples),
        )

    def give(self, index: int, key: SampleKey) -> None:
        """Give a sample to a worker."""
        worker = self.pool.workers[index]
        text = encode_prompt(self.samples.prompt(key)).decode()
        worker.channel.send("add", prompt=text, version=self.version)
        worker.samples[key] = None
        self.samples[key].worker = index

    def cancel(self) -> None:
        """Forget all samples, also those that have finished and were not taken, and tell the workers."""
        for worker in self.pool.workers.values():
            worker.cancel()
        self.samples.clear()
        self.finished.clear()
        self.moving.clear()

    def take_finished(self) -> list[Rollout]:
        """Return the samples that have finished since the last call."""
        finished, self.finished = self.finished, []
        return finished

    def figures(self) -> Mapping[str, object]:
        """Return the sums of the figures of all workers so far."""
        return total([*self._past, *(worker.figures for worker in self.pool.workers.values())])

    def _handle(self, worker: WorkerHandle, message: Message) -> None:
        kind = message["kind"]
        if kind == "ready":
            worker.is_ready = True
        elif kind == "error":
            worker.error = message["message"]
        elif kind == "removed":
            key = tuple(message["key"])
            if worker.confirm_cancel(key):
                return
            if message["found"] and worker.samples.pop(key, key) is None:
                self.samples.release(key)
                if message.get("stalled"):
                    self.samples[key].left.add(worker.index)
                self._pass_on(key)
        elif kind == "report":
            worker.read_figures(message)
            self.samples.note_progress(worker.index, message.get("progress", ()))
            server = "" if worker.is_local else worker.name
            for rollout in self.samples.extend(worker.index, message, worker.cancelled, server):
                del worker.samples[rollout.prompt.key]
                worker.finished += 1
                self._record(rollout)

    def _pass_on(self, key: SampleKey) -> None:
        """Give a sample that was returned to the worker for which it was asked back, if that can begin."""
        target = self.moving.pop(key, None)
        worker = None if target is None else self.pool.workers.get(target)
        if worker is not None and worker.has(self.version) and worker.index not in self.samples[key].left:
            self.give(worker.index, key)
            self.num_moved += 1

    def _record(self, rollout: Rollout) -> None:
        self.moving.pop(rollout.prompt.key, None)
        self.finished.append(rollout)
        self.num_finished += 1
        (self._stopped if rollout.finish_reason == "stop" else self._cut).append(len(rollout.tokens))

    def _take_back(self, worker: WorkerHandle, reason: str) -> None:
        """Take the samples of a dead worker back, so that others continue them."""
        self._past.append(worker.figures)
        keys, worker.samples = list(worker.samples), {}
        for key in keys:
            self.moving.pop(key, None)
        self.num_retried += len(keys)
        fields = {"samples": len(keys), "reason": reason}
        where = {"worker": worker.index, "pid": worker.pid} if worker.is_local else {"server": worker.name}
        if worker.is_local or keys:
            self._report("rollout_retried", {**where, **fields})
        limit = self._config.restarts.limit if worker.is_ready and worker.is_local else None
        self.samples.take_back(keys, reason, limit)
