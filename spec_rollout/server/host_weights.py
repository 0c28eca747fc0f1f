"""New weights of a line of an `EngineHost`: prepared in another thread, taken over between two steps."""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from aedit.spec_rollout.engine import Engine, WeightSwap

OnNewVersion = Literal["recompute", "finish"]


@dataclass(frozen=True, slots=True)
class NewWeights:
    """One version for a line. prepare: returns the weights."""

    prepare: Callable[[], Mapping[str, Tensor]]
    version: int
    on_new_version: OnNewVersion
    done: "Future[None]" = field(default_factory=Future)

    def settle(self, error: BaseException | None = None) -> None:
        """End `done`, unless it has ended."""
        with suppress(InvalidStateError):
            self.done.set_exception(error) if error is not None else self.done.set_result(None)


class LineWeights:
    """The queue of new weights of one line; a thread prepares them, one version at a time.

    There is room for one set of weights besides those in use. After `finish` the samples that have begun use
    it: the next version is prepared when they have ended.
    """

    def __init__(self, engine: Engine, changed: threading.Condition) -> None:
        """Make an empty queue.

        Args:
            engine: Of the line.
            changed: The host's lock.
        """
        self._engine, self._changed = engine, changed
        self._queue = deque[NewWeights]()
        self._swap: WeightSwap | None = None
        self._is_prepared = self._is_closed = self._is_running = False
        self.finishing: Engine | None = None
        """Ends samples that have begun with older weights. Written by the engine's thread."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the second set of weights."""
        return 0 if self._swap is None else self._swap.num_bytes

    @property
    def is_prepared(self) -> bool:
        """Return true if `take_over` is to be called before the next step."""
        return self._is_prepared

    def add(self, new: NewWeights) -> None:
        """Queue a version. The caller has the lock."""
        self._queue.append(new)
        if not self._is_running:
            self._is_running = True
            threading.Thread(target=self._prepare_all, name="weights", daemon=True).start()

    def close(self, error: BaseException) -> None:
        """End all that is queued with an error. The caller has the lock."""
        self._is_closed = True
        for new in self._queue:
            new.settle(error)
        self._changed.notify_all()

    def take_over(self) -> None:
        """Use the prepared weights from the next step on; called by the engine's thread."""
        assert self._swap is not None
        new = self._queue[0]
        error = None
        try:
            if new.on_new_version == "finish":
                self.finishing = self._swap.finish(new.version)
            else:
                self._swap.recompute(new.version)
        except ValueError as refused:
            error = refused
        self._next(new, error)

    def finished(self) -> None:
        """Take note that the samples of `finishing` have ended; called by the engine's thread."""
        with self._changed:
            self.finishing = None
            self._changed.notify_all()

    def _next(self, new: NewWeights, error: BaseException | None) -> None:
        with self._changed:
            self._queue.popleft()
            self._is_prepared = False
            self._changed.notify_all()
        new.settle(error)

    def _prepare_all(self) -> None:
        while (new := self._first()) is not None:
            try:
                self._prepare(new)
            except BaseException as error:
                self._next(new, error)
                continue
            with self._changed:
                self._is_prepared = True
                self._changed.notify_all()

    def _first(self) -> NewWeights | None:
        """Return the next version to prepare, when the second set is free; None ends the thread."""
        with self._changed:
            # The engine's thread notifies after each change, and also when it ends.
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or not self._queue
                    or not (self._is_prepared or self.finishing is not None)
                )
            )
            self._is_running = bool(self._queue) and not self._is_closed
            return self._queue[0] if self._is_running else None

    def _prepare(self, new: NewWeights) -> None:
        version = self._engine.version
        if new.version <= version:
            raise ValueError(f"version {new.version} is not above version {version}, which the engine has")
        weights = new.prepare()
        if self._swap is None:
            self._swap = WeightSwap(self._engine)
        self._swap.fill(weights)
