"""A node that trains and waits in turn, and whether a trainer in its waits makes its steps longer."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch

from aedit.launch.samples import batch
from benchmarks.small_llama import corpus, inner_step, llama
from benchmarks.table import median

SEQ_LEN, BATCH_SIZE = 128, 4
LR = 1e-6
"""So small that all steps do the same arithmetic on the same numbers."""
AA_WIDTH = 0.03
"""Two like series must agree so closely, or the machine is too busy to tell."""

Window = Callable[[], AbstractContextManager[None]]


class Foreground:
    """Real inner steps of a small Llama, on all cores."""

    def __init__(self, quick: bool) -> None:
        size, layers = (64, 1) if quick else (256, 4)
        self._model = llama(size, layers, SEQ_LEN)
        self._inner = torch.optim.AdamW(self._model.parameters(), lr=LR)
        self._train = corpus(SEQ_LEN).train
        self._steps = count()
        for _ in range(3):
            self.step()

    def step(self) -> None:
        samples = batch(self._train, np.arange(BATCH_SIZE) + BATCH_SIZE * next(self._steps))
        inner_step(self._model, self._inner, samples)


@dataclass(frozen=True, slots=True)
class Pair:
    """Seconds from the end of a wait to the end of the step after it, with a trainer in the wait and
    without; the waits are of one length."""

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
    def of(pairs: Sequence[Pair], draws: int = 1000) -> "Ratio":
        ratios, chance = [pair.ratio for pair in pairs], random.Random(0)
        drawn = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(draws))
        low, high = drawn[round(0.025 * draws)], drawn[round(0.975 * draws) - 1]
        return Ratio(median(ratios), low, high, max(ratios), len(ratios))


class Race:
    """Pairs of steps, who goes first drawn for each."""

    def __init__(self, foreground: Foreground, waits_s: tuple[float, float], seed: int = 0) -> None:
        """waits_s: the shortest and the longest wait."""
        self._foreground, self._waits_s, self._chance = foreground, waits_s, random.Random(seed)

    def pair(self, on: Window, off: Window = nullcontext, *, overlap: bool = False) -> Pair:
        """overlap: the window stays open during the step, which is what must not be done."""
        wait_s = self._chance.uniform(*self._waits_s)
        if self._chance.random() < 0.5:
            on_s = self._one(on, wait_s, overlap)
            return Pair(on_s, self._one(off, wait_s, overlap))
        off_s = self._one(off, wait_s, overlap)
        return Pair(self._one(on, wait_s, overlap), off_s)

    def _one(self, window: Window, wait_s: float, overlap: bool) -> float:
        with window() if overlap else nullcontext():
            with nullcontext() if overlap else window():
                time.sleep(wait_s)
                over_s = time.perf_counter()
            self._foreground.step()
            return time.perf_counter() - over_s
