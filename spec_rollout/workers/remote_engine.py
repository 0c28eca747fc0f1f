"""A rollout worker as an engine between which samples migrate."""

from aedit.spec_rollout.migration.reallocate import EngineLoad, SampleKey
from aedit.spec_rollout.sampling.samples import Prompt
from aedit.spec_rollout.workers.dispatcher import Dispatcher

WAIT_S = 0.05


class RemoteEngine:
    """`MigratableEngine` for the worker of one index, whichever process that is."""

    def __init__(self, dispatcher: Dispatcher, index: int) -> None:
        self._dispatcher, self._index = dispatcher, index

    def load(self) -> EngineLoad | None:
        """Return the samples of the worker.

        None while it does not run, takes no samples or has not the newest policy, or no worker's speed is
        known.
        """
        workers = self._dispatcher.pool.workers
        worker = workers.get(self._index)
        # One that has just been started has no work from which to measure its speed.
        known = [each.speed for each in (worker, *workers.values()) if each is not None and each.speed]
        if worker is None or not worker.is_ready or not known or not worker.has(self._dispatcher.version):
            return None
        samples = map(self._dispatcher.samples.unfinished, worker.samples)
        running_first = sorted(samples, key=lambda sample: not sample.emitted)
        rows = worker.rows if worker.room is None else min(worker.rows, worker.room)
        return EngineLoad(tuple(running_first), rows, known[0]) if rows else None

    def remove(self, key: SampleKey) -> Prompt | None:
        """Take a sample from the worker between two of its steps; return None if it has finished meanwhile.

        It waits for the worker's answer, its death, or the end of the time for which it may be silent.

        Raises:
            RuntimeError: See `Dispatcher.look`.
        """
        dispatcher = self._dispatcher
        worker = dispatcher.pool.workers.get(self._index)
        if worker is None or key not in worker.samples:
            return None
        dispatcher.moving = key
        worker.channel.send("remove", key=key)
        while key in worker.samples:
            dispatcher.pool.wait(WAIT_S)
            dispatcher.look()
        if key in dispatcher.samples:
            return dispatcher.samples.prompt(key)
        dispatcher.moving = None
        return None

    def add(self, prompt: Prompt) -> None:
        """Give the worker a sample; if it has died meanwhile, another one gets it."""
        dispatcher = self._dispatcher
        dispatcher.moving = None
        if prompt.key not in dispatcher.samples:  # cancelled, after a worker had refused it
            return
        if self._index in dispatcher.pool.workers:
            dispatcher.give(self._index, prompt.key)
        else:
            dispatcher.place_waiting()
