"""A rollout worker as an engine between which samples migrate."""

from aedit.spec_rollout.migration import EngineLoad, SampleKey
from aedit.spec_rollout.sampling import Prompt
from aedit.spec_rollout.workers.dispatcher import Dispatcher


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
        worker.channel.send("remove", key=key)
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
