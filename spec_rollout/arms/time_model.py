"""Times that are learnt: a sum of features with coefficients >= 0, corrected by the median of each place."""

import math
from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

Vector = tuple[float, ...]
Key = tuple[int, int, int, int]
"""A place: what is measured together."""
Floats = NDArray[np.float64]

WINDOW = 16
"""Newest times of a place that count."""

OUTLIER = 1.5
"""Times this far from what is usual at their place are moved here before the coefficients are fitted."""

PRIOR_WEIGHT = 0.1
"""Of each coefficient supposed at first, in measurements."""

REFIT = 64
"""Measurements after which the coefficients are fitted anew; at first after 1, 2, 4, 8, 16 and 32."""

NOISE = 0.1
"""What times of one place and equal features differ by, as a share."""

LEAST_S = 1e-9


class Times:
    """Predicts a time from features and place.

    prior: what the coefficients are supposed to be, in units of `unit_s` seconds; measurements soon outweigh
    it, and rescale it first. inner: the feature that changes within places. What it takes is told by times of
    the same place only: between places, which differ in more, and which are seen one after the other while
    it grows, it would be given what is theirs. Shapes: P places, W their window, F features.
    """

    def __init__(self, prior: Vector, unit_s: float, inner: int) -> None:
        self._prior, self._inner = np.array(prior), inner
        self._places: dict[Key, int] = {}
        self._counts: list[int] = []
        """Measurements of each place so far."""
        self._ratios: list[list[float]] = []
        """Measured over fitted, of each place's window."""
        self._medians: list[float | None] = []
        """Theirs, drawn towards 1; None if there are newer ones."""
        self._features_PWF: Floats = np.zeros((4, WINDOW, len(prior)))
        self._seconds_PW: Floats = np.zeros((4, WINDOW))
        self._newest: list[tuple[int, int, Vector, float]] = []
        """Not in the arrays yet: place, where in its window, features, seconds."""
        self._measured = 0
        self.unit_s = unit_s
        """Scale of the prior that fits what was measured."""
        self._coefficients: Vector = tuple(c * unit_s for c in prior)

    def visits(self, key: Key) -> int:
        """Measurements of this place that count, at most `WINDOW`."""
        place = self._places.get(key)
        return 0 if place is None else min(self._counts[place], WINDOW)

    def predict(self, key: Key, features: Vector) -> float:
        fitted_s = self._fitted_s(features)
        place = self._places.get(key)
        if place is None:
            return fitted_s
        median = self._medians[place]
        if median is None:
            median = self._medians[place] = _drawn(self._ratios[place])
        return fitted_s * median

    def learn(self, key: Key, features: Vector, seconds: float) -> None:
        """One measurement."""
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self._places)
            self._counts.append(0)
            self._ratios.append([])
            self._medians.append(None)
        seconds, at = max(seconds, LEAST_S), self._counts[place] % WINDOW
        self._newest.append((place, at, features, seconds))
        self._ratios[place][at : at + 1] = [seconds / self._fitted_s(features)]
        self._medians[place] = None
        self._counts[place] += 1
        self._measured += 1
        if self._measured % REFIT == 0 or self._measured in (1, 2, 4, 8, 16, 32):
            self._fit()

    def _fitted_s(self, features: Vector) -> float:
        return max(float(sum(map(mul, self._coefficients, features))), LEAST_S)

    def _fit(self) -> None:
        """Least squares of relative errors over all places; what is far from usual at its place is moved."""
        self._keep_newest()
        counts = np.minimum(self._counts, WINDOW)
        features_PWF, seconds_PW = self._features_PWF[: len(counts)], self._seconds_PW[: len(counts)]
        there_PW = np.arange(WINDOW) < counts[:, None]
        fitted_PW = np.maximum(features_PWF @ np.array(self._coefficients), LEAST_S)
        ratios_PW = np.where(there_PW, seconds_PW / fitted_PW, np.inf)
        middle_P1 = np.take_along_axis(np.sort(ratios_PW, axis=1), counts[:, None] // 2, axis=1)
        usual_PW = fitted_PW * middle_P1
        clipped_PW = np.clip(ratios_PW / middle_P1, 1 / OUTLIER, OUTLIER)
        inner = self._inner_coefficient(features_PWF[..., self._inner], clipped_PW * usual_PW, there_PW)
        relative_SF = (features_PWF / usual_PW[:, :, None])[there_PW]
        gram, moment = relative_SF.T @ relative_SF, clipped_PW[there_PW] @ relative_SF
        self.unit_s = _scale(gram, moment, self._prior)
        weight = np.maximum(np.diagonal(gram) / there_PW.sum(), self.unit_s**-2) * PRIOR_WEIGHT
        gram, moment = gram + np.diag(weight), moment + weight * self._prior * self.unit_s
        rest = np.arange(len(moment)) != self._inner
        solution = np.full(len(moment), inner)
        solution[rest] = nonnegative(gram[np.ix_(rest, rest)], (moment - gram[:, self._inner] * inner)[rest])
        self._coefficients = tuple(solution.tolist())
        ratios = (seconds_PW / np.maximum(features_PWF @ solution, LEAST_S)).tolist()
        self._ratios = [row[:count] for row, count in zip(ratios, counts.tolist(), strict=True)]
        self._medians = [None] * len(counts)

    def _inner_coefficient(self, inner_PW: Floats, seconds_PW: Floats, there_PW: NDArray[np.bool_]) -> float:
        """From how times differ from the mean of their place; the prior is as uncertain as it is large."""
        count_P1 = np.maximum(there_PW.sum(axis=1, keepdims=True), 1)
        seconds_PW, inner_PW = np.where(there_PW, seconds_PW, 0.0), np.where(there_PW, inner_PW, 0.0)
        mean_P1, middle_P1 = (x.sum(axis=1, keepdims=True) / count_P1 for x in (seconds_PW, inner_PW))
        by_seconds = np.where(there_PW, seconds_PW / mean_P1 - 1, 0.0)
        by_inner = np.where(there_PW, (inner_PW - middle_P1) / mean_P1, 0.0)
        supposed = float(self._prior[self._inner]) * self.unit_s
        weight = (NOISE / max(supposed, LEAST_S)) ** 2
        found = float((by_inner * by_seconds).sum()) + weight * supposed
        return max(found / (float((by_inner**2).sum()) + weight), 0.0)

    def _keep_newest(self) -> None:
        """Into the arrays, which grow when they must. In order: a place may have been seen more often than
        its window is long."""
        if len(self._places) > len(self._seconds_PW):
            more = ((0, len(self._places)), (0, 0))
            self._features_PWF = np.pad(self._features_PWF, (*more, (0, 0)))
            self._seconds_PW = np.pad(self._seconds_PW, more)
        for place, at, features, seconds in self._newest:
            self._features_PWF[place, at] = features
            self._seconds_PW[place, at] = seconds
        self._newest = []


def nonnegative(gram: Floats, moment: Floats) -> Floats:
    """Return the x >= 0 that minimises x'gram x / 2 - moment'x. gram: positive definite.

    With gram = L L', this is the non-negative least-squares problem |L'x - L^-1 moment|. Coordinates are
    scaled to a unit diagonal first, as features differ by many powers of ten.
    """
    scale = 1 / np.sqrt(np.diagonal(gram))
    lower = np.linalg.cholesky(gram * np.outer(scale, scale))
    x: Floats = nnls(lower.T, np.linalg.solve(lower, moment * scale))[0] * scale
    return x


def _scale(gram: Floats, moment: Floats, prior: Floats) -> float:
    """The multiple of the prior that fits best."""
    return max(float(moment @ prior), 1e-12) / max(float(prior @ gram @ prior), 1e-12)


def _drawn(ratios: Sequence[float]) -> float:
    """The median, drawn towards 1 as by two more measurements."""
    ordered = sorted(ratios)
    half = len(ordered) // 2
    median = math.sqrt(ordered[half] * ordered[~half])
    share = len(ordered) / (len(ordered) + 2)
    return math.exp(share * math.log(median))
