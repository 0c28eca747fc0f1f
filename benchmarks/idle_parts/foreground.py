"""Node that trains and waits in turn, to measure whether a trainer in its waits makes its steps longer."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from aedit.launch.data import batch
from benchmarks.kit.small_llama import corpus, inner_step, llama
from benchmarks.kit.statistics import Interval

SEQ_LEN, BATCH_SIZE = 128, 4
THREADS = 2
LR = 1e-6
"""So small that all steps do the same arithmetic on the same numbers."""
WARM_UP_STEPS = 5

Window = Callable[[], AbstractContextManager[None]]


class Foreground:
    """Real inner steps of a small Llama, on two threads."""

    def __init__(self, quick: bool) -> None:
        size, layers = (64, 1) if quick else (256, 4)
        self._model = llama(size, layers, SEQ_LEN)
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=LR)
        self._train = corpus(SEQ_LEN).train
        for number in range(WARM_UP_STEPS):
            self.step(number)

    def step(self, number: int) -> None:
        """Take a step on the samples of this number."""
        first = BATCH_SIZE * number
        samples = batch(self._train, np.arange(first, first + BATCH_SIZE) % len(self._train))
        inner_step(self._model, self._inner, samples)


@dataclass(frozen=True, slots=True)
class Arm:
    """Use of a wait."""

    window: Window = nullcontext
    goes_on: bool = False
    """The window stays open during the step, which is what must not be done."""


OFF = Arm()


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds from the end of a wait to the end of the next step, with and without a trainer in the wait.

    The waits are of one length and the steps on the same samples.
    """

    on_s: float
    off_s: float

    @property
    def ratio(self) -> float:
        return self.on_s / self.off_s


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the pairs' ratios, with its 95 % interval by bootstrap."""

    middle: float
    low: float
    high: float
    worst: float
    """The largest of single pairs."""
    num_pairs: int

    @staticmethod
    def of(pairs: Sequence[Pair]) -> "Ratio":
        ratios = [pair.ratio for pair in pairs]
        found = Interval.of(ratios, draws=2000)
        return Ratio(found.middle, found.low, found.high, max(ratios), len(ratios))


class Stepping(Protocol):
    """A node that takes steps."""

    def step(self, number: int) -> None:
        """Take the step of this number, which is the same work each time."""


class Race:
    """Waits and steps of several arms in turn, in a random order per turn."""

    def __init__(self, foreground: Stepping, waits_s: tuple[float, float], seed: int = 0) -> None:
        """Set up the race; waits_s: the shortest and the longest wait."""
        self._foreground, self._waits_s, self._chance = foreground, waits_s, random.Random(seed)
        self._number = 0

    def turn(self, arms: Mapping[str, Arm]) -> dict[str, float]:
        """Return the seconds of each arm, for one wait and one step that are the same for all."""
        wait_s, names = self._chance.uniform(*self._waits_s), list(arms)
        self._chance.shuffle(names)
        self._number += 1
        return {name: self._one(arms[name], wait_s) for name in names}

    def pair(self, on: Arm) -> Pair:
        seconds = self.turn({"on": on, "off": OFF})
        return Pair(seconds["on"], seconds["off"])

    def _one(self, arm: Arm, wait_s: float) -> float:
        with arm.window() if arm.goes_on else nullcontext():
            with nullcontext() if arm.goes_on else arm.window():
                time.sleep(wait_s)
                over_s = time.perf_counter()
            self._foreground.step(self._number)
            return time.perf_counter() - over_s
