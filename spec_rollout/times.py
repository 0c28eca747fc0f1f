"""Times that are learnt: a sum of features with coefficients >= 0, corrected by the median of each place."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vector = tuple[float, ...]
Key = tuple[int, int, int, int]
"""A place: what is measured together."""

WINDOW = 32
"""Newest times of a place that count."""

OUTLIER = 1.5
"""Times this far from what is usual at their place are moved here before the coefficients are fitted."""

PRIOR_WEIGHT = 0.1
"""Of each coefficient supposed at first, in measurements."""

REFIT = 64
"""Measurements after which the coefficients are fitted anew; at first after 1, 2, 4, 8, 16 and 32."""

LEAST_S = 1e-9


@dataclass(slots=True)
class Place:
    """What was measured under about the same conditions."""

    samples: deque[tuple[Vector, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Measured over fitted."""
    ratio: float = 1.0
    """Their median, drawn towards 1 while there are few."""
    sums: "Sums | None" = None
    """None if there are newer samples."""

    def add(self, features: Vector, seconds: float, fitted_s: float) -> None:
        self.samples.append((features, seconds))
        self.ratios.append(max(seconds, LEAST_S) / fitted_s)
        self.ratio = _drawn(self.ratios)
        self.sums = None

    def summed(self, coefficients: Vector) -> "Sums":
        if self.sums is None:
            self.sums = Sums.of(self.samples, coefficients)
        return self.sums

    def correct(self, sums: "Sums", coefficients: NDArray[np.float64]) -> None:
        """After a fit."""
        fitted_s = np.maximum(sums.features @ coefficients, LEAST_S)
        self.ratios = deque((sums.seconds / fitted_s).tolist(), maxlen=WINDOW)
        self.ratio = _drawn(self.ratios)


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """One place in the normal equations of the relative errors."""

    features: NDArray[np.float64]
    seconds: NDArray[np.float64]
    gram: NDArray[np.float64]
    moment: NDArray[np.float64]

    @classmethod
    def of(cls, samples: Iterable[tuple[Vector, float]], coefficients: Vector) -> "Sums":
        """coefficients: of the fit before, which says what is far from usual."""
        features = np.array([features for features, _ in samples])
        seconds = np.maximum([seconds for _, seconds in samples], LEAST_S)
        fitted_s = np.maximum(features @ np.array(coefficients), LEAST_S)
        usual_s = fitted_s * np.sort(seconds / fitted_s)[len(seconds) // 2]
        relative = features / usual_s[:, None]
        moment = relative.T @ np.clip(seconds / usual_s, 1 / OUTLIER, OUTLIER)
        return cls(features, seconds, relative.T @ relative, moment)


class Times:
    """Predicts a time from features and place.

    prior: what the coefficients are supposed to be, in units of `unit_s` seconds; measurements soon outweigh
    it, and rescale it first.
    """

    def __init__(self, prior: Vector, unit_s: float) -> None:
        self._prior = prior
        self._places: dict[Key, Place] = {}
        self._measured = 0
        self.unit_s = unit_s
        """Scale of the prior that fits what was measured."""
        self._coefficients: Vector = tuple(c * unit_s for c in prior)

    def visits(self, place: Key) -> int:
        """Measurements of this place that count, at most `WINDOW`."""
        found = self._places.get(place)
        return 0 if found is None else len(found.samples)

    def predict(self, place: Key, features: Vector) -> float:
        found = self._places.get(place)
        fitted_s = self._fitted_s(features)
        return fitted_s if found is None else fitted_s * found.ratio

    def learn(self, place: Key, features: Vector, seconds: float) -> None:
        """One measurement."""
        found = self._places.get(place)
        if found is None:
            found = self._places[place] = Place()
        found.add(features, seconds, self._fitted_s(features))
        self._measured += 1
        if self._measured % REFIT == 0 or self._measured in (1, 2, 4, 8, 16, 32):
            self._fit()

    def _fitted_s(self, features: Vector) -> float:
        return max(_dot(self._coefficients, features), LEAST_S)

    def save(self) -> dict[str, Any]:
        places = [[list(key), [list(s) for s in p.samples]] for key, p in self._places.items()]
        return {"prior": list(self._prior), "unit_s": self.unit_s, "places": places}

    @classmethod
    def load(cls, saved: Mapping[str, Any]) -> "Times":
        times = cls(tuple(saved["prior"]), saved["unit_s"])
        for key, samples in saved["places"]:
            place = times._places[tuple(key)] = Place()
            for features, seconds in samples:
                place.add(tuple(features), seconds, 1.0)
            times._measured += len(samples)
        if times._places:
            times._fit()
        return times

    def _fit(self) -> None:
        """Least squares of relative errors over all places, then each place's correction."""
        sums = [place.summed(self._coefficients) for place in self._places.values()]
        gram = np.sum([each.gram for each in sums], axis=0)
        moment = np.sum([each.moment for each in sums], axis=0)
        prior = np.array(self._prior)
        self.unit_s = _scale(gram, moment, prior)
        num_samples = sum(len(each.seconds) for each in sums)
        weight = np.maximum(np.diagonal(gram) / num_samples, self.unit_s**-2) * PRIOR_WEIGHT
        solution = nonnegative(gram + np.diag(weight), moment + weight * prior * self.unit_s)
        self._coefficients = tuple(solution.tolist())
        for place, each in zip(self._places.values(), sums, strict=True):
            place.correct(each, solution)


def nonnegative(gram: NDArray[np.float64], moment: NDArray[np.float64]) -> NDArray[np.float64]:
    """x >= 0 that minimises x'gram x / 2 - moment'x (Lawson and Hanson's active set). gram: positive
    definite."""
    scale = 1 / np.sqrt(np.diagonal(gram))
    gram, moment = gram * np.outer(scale, scale), moment * scale
    x: NDArray[np.float64] = np.zeros_like(moment)
    free = np.zeros(len(x), dtype=bool)
    for _ in range(3 * len(x)):
        gradient = np.where(free, -np.inf, moment - gram @ x)
        if gradient.max() <= 1e-10 * (1 + np.abs(moment).max()):
            break
        free[np.argmax(gradient)] = True
        x = _feasible(gram, moment, x, free)
    return x * scale


def _feasible(
    gram: NDArray[np.float64], moment: NDArray[np.float64], x: NDArray[np.float64], free: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """The best x >= 0 on the way to the best x of the free coordinates; those that reach 0 are not free any
    more."""
    while free.any():
        best = np.zeros_like(x)
        best[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
        if best[free].min() > 0:
            return best
        worse = free & (best <= 0)
        step = float(np.min(x[worse] / (x[worse] - best[worse])))
        x = np.where(free, x + step * (best - x), 0.0)
        free &= x > 1e-14
    return x


def _scale(gram: NDArray[np.float64], moment: NDArray[np.float64], prior: NDArray[np.float64]) -> float:
    """The multiple of the prior that fits best."""
    return max(float(moment @ prior), 1e-12) / max(float(prior @ gram @ prior), 1e-12)


def _drawn(ratios: Sequence[float]) -> float:
    """The median, drawn towards 1 as by two more measurements."""
    ordered = sorted(ratios)
    half = len(ordered) // 2
    median = math.sqrt(ordered[half] * ordered[~half])
    share = len(ordered) / (len(ordered) + 2)
    return math.exp(share * math.log(median))


def _dot(coefficients: Vector, features: Vector) -> float:
    return math.fsum(map(mul, coefficients, features))
