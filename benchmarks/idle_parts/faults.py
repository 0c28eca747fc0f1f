"""Trainer that dies, hangs or publishes invalid weights repeatedly while its node takes steps."""

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import Tensor

from aedit.spec_rollout.training import DrafterTraining, IdleConfig, Publication, Restarts
from benchmarks.idle_parts.foreground import Arm, Foreground, Pair, Race
from benchmarks.idle_parts.trainees import MENDED_BY, faulty, give, policy, weights

AT_ONCE = Restarts(limit=10**6, pause_s=0.0)
GIVE_UP_S = 60.0
PAIRS_AFTER = 2
"""Steps beside the start of the next trainer."""
COUNTERS = {"disk full": "checkpoints_failed", "corrupt publish": "corrupt"}
"""Counter that grows with each fault; for faults not listed it is the number of deaths."""
LARGEST = 100.0
"""Bound far above the published values and far below the largest values of noise."""


@dataclass(frozen=True, slots=True)
class Suffered:
    """Results of the faults of one kind."""

    fault: str
    injected: int
    kept: int
    """Number of faults after which the node had a whole drafter, and a second read found it or nothing."""
    recovered: int
    """Number of faults after which the trainer published and saved again."""
    bad_drafters: int
    pairs: tuple[Pair, ...]


def suffer(fault: str, foreground: Foreground, count: int, waits_s: tuple[float, float]) -> Suffered:
    """Take steps in pairs while the trainer has `fault` and while the next trainer starts."""
    with tempfile.TemporaryDirectory() as folder:
        orders = Path(folder, "orders")
        config = IdleConfig(
            checkpoint=Path(folder, "drafter.safetensors"),
            checkpoint_every_s=0.0,
            hung_after_s=0.5,
            memory_bytes=2**30,
            restarts=AT_ONCE,
        )
        work = DrafterTraining.of(faulty(orders), drafter=weights(), policy=policy(), config=config)
        with work:
            node = Node(work, Race(foreground, waits_s))
            if not node.recovers():
                state = work.status()["state"]
                raise TimeoutError(f"after {GIVE_UP_S:g} s the trainer of the faults is still {state}")
            injected, recovered = 0, 0
            # One that is not recovered from is enough to know.
            while injected < count and recovered == injected:
                injected += 1
                recovered += node.recovers_from(fault, orders)
    return Suffered(fault, injected, node.kept, recovered, node.bad_drafters, tuple(node.pairs))


class Node:
    """Takes steps in pairs, and adopts what is published after each."""

    def __init__(self, work: DrafterTraining, race: Race) -> None:
        self._work, self._race = work, race
        self.pairs: list[Pair] = []
        self.kept, self.bad_drafters = 0, 0
        self._drafter: Publication | None = None

    def recovers_from(self, fault: str, orders: Path) -> bool:
        counter = COUNTERS.get(fault, "deaths")
        seen = self._work.status()[counter]
        give(orders, fault)
        self._steps_until(lambda: self._work.status()[counter] > seen)
        self.kept += self._has_the_last_good(fault)
        for _ in range(PAIRS_AFTER):
            self._step()
        if fault in MENDED_BY:
            give(orders, MENDED_BY[fault])
        return self.recovers()

    def recovers(self) -> bool:
        """Return whether a new drafter and a new checkpoint appear within a long wait."""
        number, saved = self._number, self._work.status()["checkpoints"]
        give_up_s = time.monotonic() + GIVE_UP_S
        with self._work.window("recovery"):
            while self._number == number or self._work.status()["checkpoints"] == saved:
                if time.monotonic() > give_up_s:
                    return False
                time.sleep(0.01)
                self._look()
        return True

    @property
    def _number(self) -> int:
        return self._drafter.number if self._drafter else 1

    def _step(self) -> None:
        self.pairs.append(self._race.pair(Arm(partial(self._work.window, "wait"))))
        self._look()

    def _look(self) -> None:
        """Take over the newest drafter, as an engine does between two of its steps."""
        found = self._work.newest(self._number)
        if found is not None:
            self._drafter = found
            self.bad_drafters += not all(map(_is_whole, found.tensors.values()))

    def _has_the_last_good(self, fault: str) -> bool:
        """Return whether a second read finds the node's drafter, or nothing that is whole."""
        found = self._work.newest(0)
        if fault == "corrupt publish":
            return found is None and self._drafter is not None
        return found is not None and found.number == self._number and _same(found, self._drafter)

    def _steps_until(self, is_so: Callable[[], bool]) -> None:
        give_up_s = time.monotonic() + GIVE_UP_S
        while not is_so() and time.monotonic() < give_up_s:
            self._step()


def _is_whole(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all()) and float(tensor.abs().max()) < LARGEST


def _same(found: Publication, held: Publication | None) -> bool:
    return held is not None and all(tensor.equal(held.tensors[n]) for n, tensor in found.tensors.items())
